"""`CommDebugMode` of `torch.distributed.tensor.debug`, on torchwhere's engine: change the import
line, the rest stays.

Same names, arguments, results and texts as in torch 2.13, and the names of older versions.
Collectives are counted by the engine, in eager code and in compiled graphs, with nothing registered
on modules. Where the original is wrong the form is kept and the answer is right: a collective is
charged to the module it serves (an FSDP unit for its own prefetch), in backward to the module whose
node runs; a module may be called twice; compiling goes on as ever.

Like the original it counts what the thread that entered it does, and the threads of the autograd
engine for it.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import threading
from _thread import get_ident
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.distributed._functional_collectives  # defines the c10d_functional ops
import torch.distributed.tensor  # defines the ops of _dtensor

from torchwhere.api import comms
from torchwhere.blackbox.file_format import MODULE_SHIFT, RECORD
from torchwhere.core.place import Pass
from torchwhere.drop_in import comm_tables, functional_kernels
from torchwhere.drop_in.comm_modules import GLOBAL, CommModeModuleTracker
from torchwhere.drop_in.comm_tables import trivial_ops as trivial_ops
from torchwhere.drop_in.op_log import OpLog, Sharded
from torchwhere.hooks import _torch
from torchwhere.hooks.compilation import being_compiled
from torchwhere.hooks.threads import NATIVE, pass_of
from torchwhere.model.module_names import owner
from torchwhere.recorder.session import Session

__all__ = ["CommDebugMode"]

funcol_native = torch.ops._c10d_functional
funcol_py = torch.ops.c10d_functional
funcol_autograd = torch.ops._c10d_functional_autograd
c10d_ops = torch.ops.c10d


def _functional_packet(namespace: str, op: str) -> Any:
    """The op under which a functional collective is counted. Compiled graphs call it in place, or
    into a given tensor."""
    if namespace == "_dtensor":
        return getattr(torch.ops._dtensor, op)
    return getattr(funcol_py, op.removesuffix("_out").removesuffix("_"))


_FUNCTIONAL = (
    *(
        "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced",
        "all_reduce",
        "all_reduce_coalesced",
    ),
    *("all_to_all_single", "broadcast", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"),
)
_C10D = (
    *(
        "_allgather_base_",
        "_reduce_scatter_base_",
        "allgather_",
        "allgather_coalesced_",
        "allgather_into_tensor_coalesced_",
    ),
    *(
        "allreduce_",
        "allreduce_coalesced_",
        "alltoall_",
        "alltoall_base_",
        "broadcast_",
        "gather_",
        "scatter_",
        "reduce_",
    ),
    *("reduce_scatter_", "reduce_scatter_tensor_coalesced_"),
)
NATIVE_TO_PY_MAPPING = {
    getattr(funcol_native, name): getattr(funcol_py, name) for name in _FUNCTIONAL
} | {funcol_autograd.all_to_all_single: funcol_py.all_to_all_single}
c10d_collective_ops = {getattr(c10d_ops, name) for name in _C10D}
_PACKETS = {name: getattr(c10d_ops, name) for name in _C10D}
# By the name of an op: the op under which a call of it counts.
_COUNTED_AS = (
    {f"c10d::{name}": packet for name, packet in _PACKETS.items()}
    | {f"c10d_functional::{name}": getattr(funcol_py, name) for name in _FUNCTIONAL}
    | {
        f"{namespace}::{op}": _functional_packet(namespace, op)
        for namespace, ops in functional_kernels.OPS.items()
        for op in ops
    }
    | {"_c10d_functional_autograd::all_to_all_single": funcol_py.all_to_all_single}
)

NOISE_LEVELS = {
    0: "the collectives of each module",
    1: "and the operations on DTensors",
    2: "and all operations but the trivial ones",
    3: "all operations",
}
_MODULE, _AIM = 7, 12  # within an unpacked record
_ANSI = re.compile(r"\x1B\[[0-?]*[ -/]*[@-~]")
_IN_BACKWARD = (Pass.BACKWARD, Pass.RECOMPUTE)


class _Seen(threading.local):
    """The collective that the dispatch mode sees on this thread, if it is in one.

    Below it a kernel reports the same collective, but not if a dispatch mode or a tensor subclass
    answers it above the `BackendSelect` key, as `LocalTensorMode` does. The latter may also run it
    once for each rank that it simulates. So a collective that is seen counts once, with the first
    report, or, if there was none, when it is done.
    """

    def __init__(self, on_unreported: Callable[[Any], None]) -> None:
        self._on_unreported = on_unreported
        self.packet: Any = None
        self.is_reported = False

    def begin(self, func: Any) -> None:
        self.packet, self.is_reported = _COUNTED_AS.get(func.name()), False

    def end(self, *, is_done: bool) -> None:
        packet, self.packet = self.packet, None
        if packet is not None and is_done and not self.is_reported and being_compiled() is None:
            self._on_unreported(packet)


class CommDebugMode:
    """Counts the collectives within its context, for each module.

        comm_mode = CommDebugMode()
        with comm_mode:
            model(x).sum().backward()
        print(comm_mode.generate_comm_debug_tracing_table(noise_level=0))

    `noise_level` is the highest that will be asked for afterwards, by default all: for levels above
    0 every operation has to be listed while it runs. 0 spares that, and the operations cost
    nothing.
    """

    def __init__(self, *, noise_level: int = 3) -> None:
        _check_noise_level(noise_level)
        self.comm_counts: dict[Any, int] = defaultdict(int)
        self.comm_module_counts: comm_tables.Counts = {}
        self.comm_registry = {
            *NATIVE_TO_PY_MAPPING,
            *NATIVE_TO_PY_MAPPING.values(),
            torch.ops._dtensor.shard_dim_alltoall,
        }
        self.advanced_module_tracker = CommModeModuleTracker()
        self._noise_level = noise_level
        self._depth = 0
        self._session: Session | None = None
        self._ops: OpLog | None = None
        self._thread = 0
        self._seen = _Seen(self._unreported)
        self._names: dict[int, tuple[int, str]] = {}
        self._charged: dict[tuple[int, int], str] = {}
        self._operations: tuple[int, comm_tables.Operations] = (0, {})

    # -- the block ---------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Begin to count, from nothing."""
        self._forget()
        self._depth += 1
        if self._depth > 1:
            return self
        session = self._session = comms.join(None)
        try:
            self._thread = get_ident()
            self._ops = self._make_ops(session)
            self.advanced_module_tracker.begin(session, self._ops)
            comms.listen(session, self._tap)
            functional_kernels.listen(self._functional)
            if self._ops is not None:
                self._ops.__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            self._depth = 0
            self._leave(session)
            raise
        return self

    def _make_ops(self, session: Session) -> OpLog | None:
        """The dispatch mode. At level 0 it is needed only inside another mode, which may answer
        collectives."""
        modes = _torch.private("dispatch_modes")
        if not self._noise_level and (modes is None or modes() == 0):
            return None
        return OpLog(
            session.recorder.locator, lists=self._noise_level > 0, on_collective=self._seen
        )

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        session = self._session
        if self._depth or session is None:
            return
        if self._ops is not None:
            self._ops.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._leave(session)

    def _leave(self, session: Session) -> None:
        functional_kernels.stop_listening(self._functional)
        comms.stop_listening(session, self._tap)
        self.comm_module_operation_counts  # noqa: B018 - names are known now, and not for long
        self.advanced_module_tracker.end()
        self._session = None
        try:
            comms.leave(session)
        finally:
            # after the watch: both wait for other threads to be quiet, and now it is one wait
            functional_kernels.remove_unused()

    def _forget(self) -> None:
        self.comm_counts.clear()
        self.comm_module_counts.clear()
        self.comm_module_counts[GLOBAL] = _no_counts()
        self._names, self._operations = {}, (0, {})
        self._charged.clear()
        if self._ops is not None:
            self._ops.ops.clear()

    # -- what the engine tells ---------------------------------------------------------------------

    @_torch.unseen
    def _tap(self, number: int, call: Any) -> None:
        packet, session = _PACKETS.get(call.op.raw), self._session
        if (
            packet is not None
            and session is not None
            and not functional_kernels.is_inside()
            and self._is_own()
        ):
            record = RECORD.unpack_from(session.recorder.box.copy_of(number))
            self._report(packet, record[_MODULE], record[_AIM])

    @_torch.unseen
    def _functional(self, name: str) -> None:
        session = self._session
        if session is not None and self._is_own():
            locator = session.recorder.locator
            self._report(_COUNTED_AS[name], locator.spot(locator.threads.here()).module, 0)

    def _unreported(self, packet: Any) -> None:
        session = self._session
        if session is not None:
            locator = session.recorder.locator
            self._count(packet, locator.spot(locator.threads.here()).module, 0)

    def _report(self, packet: Any, module: int, beneficiary: int) -> None:
        """Count what a kernel reports; of a collective that the dispatch mode sees, only the first
        report."""
        seen = self._seen
        if seen.packet is not None:
            if seen.is_reported:
                return
            packet, seen.is_reported = seen.packet, True
        self._count(packet, module, beneficiary)

    def _is_own(self) -> bool:
        """Whether this thread's collectives count: ours, or one of the autograd engine's, which
        Python did not make."""
        session = self._session
        if get_ident() == self._thread or session is None:
            return True
        return session.recorder.locator.threads.here().name.startswith(NATIVE)

    def _count(self, packet: Any, module: int, beneficiary: int) -> None:
        self.comm_counts[packet] += 1
        tracker = self.advanced_module_tracker
        name = self._charged.get((module, beneficiary))
        if name is None:
            name = self._charged[module, beneficiary] = self._charge(module, beneficiary)
        key = "backward" if tracker.is_bw else "forward"
        for one in {GLOBAL, name, *tracker.module_parents_dict[name]}:
            if one not in self.comm_module_counts:
                self.comm_module_counts[one] = _no_counts()
            self.comm_module_counts[one][key][packet] += 1

    def _charge(self, module: int, beneficiary: int) -> str:
        """The module that a collective is for: the FSDP unit, or the owner of the bucket; else the
        one that issued it."""
        tracker = self.advanced_module_tracker
        served = json.loads(self._text(beneficiary) or "null")
        if isinstance(served, list) and served:
            return tracker.nearest(_common_owner(served))
        issuer = self._text(module) if served is None else served
        return GLOBAL if issuer is None else tracker.listed(issuer)

    def _text(self, entry: int) -> str | None:
        if entry and entry not in self._names and self._session is not None:
            self._names = self._session.recorder.box.names()
        return self._names[entry][1] if entry in self._names else None

    # -- what was found ----------------------------------------------------------------------------

    def get_total_counts(self) -> int:
        return sum(self.comm_counts.values())

    def get_comm_counts(self) -> dict[Any, int]:
        """How often each collective was issued. Functional ones have their legacy name,
        `c10d_functional`."""
        return self.comm_counts

    def get_comm_module_counts(self) -> comm_tables.Counts:
        """The same for each module and those below it, in forward and backward."""
        return self.comm_module_counts

    def get_parameter_info(self) -> dict[str, dict[str, Any]]:
        return self.advanced_module_tracker.module_parameters_dict

    def get_sharding_info(self) -> dict[str, Any]:
        return self.advanced_module_tracker.sharding_dict

    def print_paramater_info(self) -> None:
        self.advanced_module_tracker.print_paramater_info()

    def print_sharding_info(self) -> None:
        self.advanced_module_tracker.print_sharding_info()

    @property
    def comm_module_operation_counts(self) -> comm_tables.Operations:
        """The operations of each module, in order. Put together when somebody asks."""
        ops = self._ops.ops if self._ops is not None else []
        count, found = self._operations
        if self._session is not None and count != len(ops):
            found = {}
            for at in range(0, len(ops), 3):
                module = self._text(ops[at + 1] >> MODULE_SHIFT)
                name = GLOBAL if module is None else self.advanced_module_tracker.listed(module)
                listed = found.setdefault(name, {"operations_list": []})["operations_list"]
                listed.append(_operation(*ops[at : at + 3]))
            self._operations = len(ops), found
        return found

    # -- as text and as files ----------------------------------------------------------------------

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """The modules in the order they ran, with what each caused; the higher the level, the
        more."""
        return comm_tables.table(self._found(noise_level), noise_level)

    def log_comm_debug_tracing_table_to_file(
        self, file_name: str | os.PathLike[str] = "comm_mode_log.txt", noise_level: int = 3
    ) -> None:
        """The same into a file, without colours."""
        text = _ANSI.sub("", self.generate_comm_debug_tracing_table(noise_level))
        with open(file_name, "w") as file:
            file.write(text)

    def generate_json_dump(
        self, file_name: str | os.PathLike[str] = "comm_mode_log.json", noise_level: int = 3
    ) -> None:
        """The tree of modules, for torch's view in a browser."""
        tree = comm_tables.json_tree(self._found(noise_level), noise_level)
        with open(file_name, "w") as file:
            json.dump(tree, file, indent=4)

    def generate_module_tracing_table(self) -> str:
        """The table of older versions: collectives alone, forward and backward together."""
        return comm_tables.older_table(self._found(0))

    def log_module_tracing_table_to_file(self) -> None:
        """The same into `output.txt`, without colours."""
        with open("output.txt", "w") as file:
            file.write(_ANSI.sub("", self.generate_module_tracing_table()))

    def _found(self, noise_level: int) -> comm_tables.Found:
        _check_noise_level(noise_level)
        if noise_level and not self._noise_level:
            raise ValueError(
                f"noise_level={noise_level}: operations were not listed, because this is a"
                " CommDebugMode(noise_level=0). Ask for noise_level=0, or make it without that"
                " argument."
            )
        return comm_tables.Found(
            self.advanced_module_tracker, self.comm_module_counts, self.comm_module_operation_counts
        )

    def __repr__(self) -> str:
        return f"CommDebugMode(get_total_counts()={self.get_total_counts()})"


def _no_counts() -> dict[str, dict[Any, int]]:
    return {"forward": defaultdict(int), "backward": defaultdict(int)}


def _check_noise_level(noise_level: object) -> None:
    if noise_level not in NOISE_LEVELS:
        levels = ", ".join(f"{level} ({what})" for level, what in NOISE_LEVELS.items())
        raise ValueError(f"noise_level={noise_level!r}: there are {levels}")


def _operation(op: Any, word: int, sharded: Sharded | None) -> dict[str, Any]:
    pass_ = pass_of(word)
    return {
        "name": op,
        "input_shape": [] if sharded is None else sharded.shapes,
        "input_sharding": [] if sharded is None else sharded.placements,
        "device_mesh": "" if sharded is None or sharded.mesh is None else str(sharded.mesh),
        "is_bw": pass_ in _IN_BACKWARD,
        "is_activation_checkpointing": pass_ == Pass.RECOMPUTE,
    }


def _common_owner(params: list[str]) -> str:
    """The innermost module that holds all of some parameters."""
    paths = [owner(str(param)).split(".") for param in params]
    shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in shared)


def __getattr__(name: str) -> Any:
    """`visualize_sharding`, which stands beside it in `torch.distributed.tensor.debug`, is torch's
    own."""
    if name == "visualize_sharding":
        from torch.distributed.tensor.debug import visualize_sharding

        return visualize_sharding
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
