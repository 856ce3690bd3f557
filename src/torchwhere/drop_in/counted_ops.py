"""The collective ops that `CommDebugMode` counts, and the op under which each of them counts.

A functional collective counts under its legacy name (`c10d_functional`), as in the original.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives  # defines the c10d_functional ops
import torch.distributed.tensor  # defines the ops of _dtensor

from torchwhere.drop_in import functional_kernels

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
