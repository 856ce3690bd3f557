"""The collective ops that `CommDebugMode` counts, and the op under which each of them counts.

A functional collective counts under its legacy name (`c10d_functional`), as in the original.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._functional_collectives  # defines the c10d_functional ops
import torch.distributed.tensor  # defines the ops of _dtensor

from torchwhere.drop_in import functional_kernels
from torchwhere.hooks.compilation import being_compiled

funcol_native = torch.ops._c10d_functional
funcol_py = torch.ops.c10d_functional
funcol_autograd = torch.ops._c10d_functional_autograd
c10d_ops = torch.ops.c10d

_FUNCTIONAL = (
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all_single",
    "broadcast",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
)
_C10D = (
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allgather_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "allreduce_",
    "allreduce_coalesced_",
    "alltoall_",
    "alltoall_base_",
    "broadcast_",
    "gather_",
    "scatter_",
    "reduce_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
)


def _functional_packet(namespace: str, op: str) -> Any:
    """Return the op under which a functional collective counts. Compiled graphs call variants of
    it: in place (`_`), or into a given tensor (`_out`)."""
    if namespace == "_dtensor":
        return getattr(torch.ops._dtensor, op)
    return getattr(funcol_py, op.removesuffix("_out").removesuffix("_"))


NATIVE_TO_PY_MAPPING = {
    getattr(funcol_native, name): getattr(funcol_py, name) for name in _FUNCTIONAL
} | {funcol_autograd.all_to_all_single: funcol_py.all_to_all_single}
C10D_PACKETS = {name: getattr(c10d_ops, name) for name in _C10D}
c10d_collective_ops = set(C10D_PACKETS.values())
# By the full name of an op: the op under which a call of it counts.
COUNTED_AS = (
    {f"c10d::{name}": packet for name, packet in C10D_PACKETS.items()}
    | {f"c10d_functional::{name}": getattr(funcol_py, name) for name in _FUNCTIONAL}
    | {
        f"{namespace}::{op}": _functional_packet(namespace, op)
        for namespace, ops in functional_kernels.OPS.items()
        for op in ops
    }
    | {"_c10d_functional_autograd::all_to_all_single": funcol_py.all_to_all_single}
)


# -- the collective that a dispatch mode sees ------------------------------------------------------
# A kernel on the `BackendSelect` key reports the same collective, unless a dispatch mode or a
# tensor subclass answers it above that key, as `LocalTensorMode` does. `LocalTensorMode` may also
# run the collective once for each rank that it simulates. So a collective that the mode sees counts
# once: with the first report, or, without a report, when it is done.


class DispatchedCollective(threading.local):
    """The collective that the dispatch mode runs on this thread; `packet` is None outside one."""

    def __init__(self, on_unreported: Callable[[Any], None]) -> None:
        self._on_unreported = on_unreported
        self.packet: Any = None
        self.is_reported = False

    def begin(self, func: Any) -> None:
        """Remember that `func` is about to run."""
        self.packet, self.is_reported = COUNTED_AS.get(func.name()), False

    def end(self, *, is_done: bool) -> None:
        """Count the collective if no kernel reported it. `is_done` is false if it raised."""
        packet, self.packet = self.packet, None
        if packet is not None and is_done and not self.is_reported and being_compiled() is None:
            self._on_unreported(packet)
