"""Drop-in for `CommDebugMode` of `torch.distributed.tensor.debug`: change only the import line.

Same names, arguments, results and texts as in torch 2.13, and the names of older versions. The
hooks of a watch count the collectives, in eager code and in compiled graphs; nothing is registered
on modules. Where the original is wrong, the form of the answer is the same and the answer is right:
a collective counts for the module that it serves (an FSDP unit for its own prefetch), in backward
for the module whose node runs; a module may be called twice; `torch.compile` works as without it.

Like the original, it counts the collectives of the thread that entered it, and those of the threads
of the autograd engine that work for it.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from _thread import get_ident
from collections import defaultdict
from pathlib import Path
from typing import Any, Self

import torch

from torchwhere.api import comms
from torchwhere.blackbox.file_format import MODULE_SHIFT, RECORD
from torchwhere.core.place import Pass
from torchwhere.drop_in import comm_tables, functional_kernels
from torchwhere.drop_in.comm_modules import GLOBAL, CommModeModuleTracker
from torchwhere.drop_in.comm_tables import trivial_ops as trivial_ops
from torchwhere.drop_in.counted_ops import (
    C10D_PACKETS,
    COUNTED_AS,
    NATIVE_TO_PY_MAPPING,
    DispatchedCollective,
)
from torchwhere.drop_in.counted_ops import c10d_collective_ops as c10d_collective_ops
from torchwhere.drop_in.counted_ops import c10d_ops as c10d_ops
from torchwhere.drop_in.counted_ops import funcol_autograd as funcol_autograd
from torchwhere.drop_in.counted_ops import funcol_native as funcol_native
from torchwhere.drop_in.counted_ops import funcol_py as funcol_py
from torchwhere.drop_in.op_log import OpLog, Sharded
from torchwhere.hooks import _torch
from torchwhere.hooks.threads import NATIVE, pass_of
from torchwhere.model.module_names import owner
from torchwhere.recorder.session import Session

__all__ = ["CommDebugMode"]

NOISE_LEVELS = {
    0: "collectives of each module",
    1: "plus operations on DTensors",
    2: "plus all other operations except trivial ones",
    3: "plus trivial operations",
}
_MODULE, _BENEFICIARY = 7, 12  # positions in an unpacked record
_ANSI = re.compile(r"\x1B\[[0-?]*[ -/]*[@-~]")
_IN_BACKWARD = (Pass.BACKWARD, Pass.RECOMPUTE)


class CommDebugMode:
    """Counts the collectives of a block of code, for each module.

    Args:
        noise_level: The highest noise level that you will ask for afterwards. Levels above 0 list
            every operation while it runs; with 0, operations cost nothing extra.

    Example:
        >>> comm_mode = CommDebugMode()
        >>> with comm_mode:
        ...     model(x).sum().backward()
        >>> print(comm_mode.generate_comm_debug_tracing_table(noise_level=0))
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
        self._dispatched = DispatchedCollective(self._count_unreported)
        self._names: dict[int, tuple[int, str]] = {}
        # the module that a collective counts for, by the ids of issuer and beneficiary
        self._served: dict[tuple[int, int], str] = {}
        self._operations: tuple[int, comm_tables.Operations] = (0, {})

    # -- the block ---------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Reset all counts and begin to count."""
        self._reset()
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
        """Return the dispatch mode. At level 0 it is needed only inside another mode, which may
        answer collectives itself."""
        modes = _torch.private("dispatch_modes")
        if not self._noise_level and (modes is None or modes() == 0):
            return None
        return OpLog(session.recorder.locator, self._dispatched, lists=self._noise_level > 0)

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
        # builds the lists now: after the watch the names of modules are gone
        self.comm_module_operation_counts  # noqa: B018
        self.advanced_module_tracker.end()
        self._session = None
        try:
            comms.leave(session)
        finally:
            # Both wait until other threads issue no collective: after the watch it is one wait.
            functional_kernels.remove_unused()

    def _reset(self) -> None:
        self.comm_counts.clear()
        self.comm_module_counts.clear()
        self.comm_module_counts[GLOBAL] = _no_counts()
        self._names, self._operations = {}, (0, {})
        self._served.clear()
        if self._ops is not None:
            self._ops.ops.clear()

    # -- reports of the hooks ----------------------------------------------------------------------

    @_torch.unseen
    def _tap(self, number: int, call: Any) -> None:
        packet, session = C10D_PACKETS.get(call.op.raw), self._session
        if (
            packet is not None
            and session is not None
            and not functional_kernels.is_inside()
            and self._is_own()
        ):
            record = RECORD.unpack_from(session.recorder.box.copy_of(number))
            self._report(packet, record[_MODULE], record[_BENEFICIARY])

    @_torch.unseen
    def _functional(self, name: str) -> None:
        if self._session is not None and self._is_own():
            self._report(COUNTED_AS[name], self.advanced_module_tracker.module_here(), 0)

    def _count_unreported(self, packet: Any) -> None:
        if self._session is not None:
            self._count(packet, self.advanced_module_tracker.module_here(), 0)

    def _report(self, packet: Any, module: int, beneficiary: int) -> None:
        """Count what a kernel reports. If the dispatch mode sees the collective too, only the first
        report counts."""
        dispatched = self._dispatched
        if dispatched.packet is not None:
            if dispatched.is_reported:
                return
            packet, dispatched.is_reported = dispatched.packet, True
        self._count(packet, module, beneficiary)

    def _is_own(self) -> bool:
        """Whether the collectives of this thread count: it entered the mode, or belongs to the
        autograd engine, whose threads Python did not start."""
        if get_ident() == self._thread or self._session is None:
            return True
        return self._session.recorder.locator.threads.here().name.startswith(NATIVE)

    def _count(self, packet: Any, module: int, beneficiary: int) -> None:
        self.comm_counts[packet] += 1
        tracker = self.advanced_module_tracker
        name = self._served.get((module, beneficiary))
        if name is None:
            name = self._served[module, beneficiary] = self._served_module(module, beneficiary)
        key = "backward" if tracker.is_bw else "forward"
        for fqn in {GLOBAL, name, *tracker.module_parents_dict[name]}:
            if fqn not in self.comm_module_counts:
                self.comm_module_counts[fqn] = _no_counts()
            self.comm_module_counts[fqn][key][packet] += 1

    def _served_module(self, module: int, beneficiary: int) -> str:
        """Return the module that a collective counts for: the FSDP unit or the owner of the bucket
        that it serves; otherwise the module that issued it."""
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

    # -- results -----------------------------------------------------------------------------------

    def get_total_counts(self) -> int:
        """Return the number of collectives of all kinds."""
        return sum(self.comm_counts.values())

    def get_comm_counts(self) -> dict[Any, int]:
        """Return how often each collective was issued. Functional collectives have their legacy
        names, `c10d_functional.*`.

        Example:
            >>> comm_mode.get_comm_counts()[torch.ops.c10d_functional.all_reduce]
        """
        return self.comm_counts

    def get_comm_module_counts(self) -> comm_tables.Counts:
        """Return the counts of each module, submodules included, for forward and backward."""
        return self.comm_module_counts

    def get_parameter_info(self) -> dict[str, dict[str, Any]]:
        """Return the parameters of each module, by the module's name."""
        return self.advanced_module_tracker.module_parameters_dict

    def get_sharding_info(self) -> dict[str, Any]:
        """Return the placements of each DTensor parameter, by the parameter's name."""
        return self.advanced_module_tracker.sharding_dict

    def print_paramater_info(self) -> None:
        """Print the parameters of each module. The name is misspelled as in the original."""
        self.advanced_module_tracker.print_paramater_info()

    def print_sharding_info(self) -> None:
        """Print the placements of each DTensor parameter."""
        self.advanced_module_tracker.print_sharding_info()

    @property
    def comm_module_operation_counts(self) -> comm_tables.Operations:
        """The operations of each module, in order. They are put together on access."""
        ops = self._ops.ops if self._ops is not None else []
        count, operations = self._operations
        if self._session is not None and count != len(ops):
            operations = {}
            for at in range(0, len(ops), 3):
                module = self._text(ops[at + 1] >> MODULE_SHIFT)
                name = GLOBAL if module is None else self.advanced_module_tracker.listed(module)
                entry = operations.setdefault(name, {"operations_list": []})
                entry["operations_list"].append(_operation(*ops[at : at + 3]))
            self._operations = len(ops), operations
        return operations

    # -- tables and files --------------------------------------------------------------------------

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """Return a table of the modules in the order they ran, with their collectives and
        operations.

        Args:
            noise_level: 0 lists collectives; 1 also operations on DTensors; 2 all operations except
                trivial ones; 3 all operations.
        """
        return comm_tables.table(self._results(noise_level), noise_level)

    def log_comm_debug_tracing_table_to_file(
        self, file_name: str | os.PathLike[str] = "comm_mode_log.txt", noise_level: int = 3
    ) -> None:
        """Write the table of `generate_comm_debug_tracing_table` to a file, without colours."""
        text = _ANSI.sub("", self.generate_comm_debug_tracing_table(noise_level))
        with open(file_name, "w") as file:  # as the original, also for bytes and descriptors
            file.write(text)

    def generate_json_dump(
        self, file_name: str | os.PathLike[str] = "comm_mode_log.json", noise_level: int = 3
    ) -> None:
        """Write the tree of modules as JSON, for torch's viewer in a browser."""
        tree = comm_tables.json_tree(self._results(noise_level), noise_level)
        with open(file_name, "w") as file:
            json.dump(tree, file, indent=4)

    def generate_module_tracing_table(self) -> str:
        """Return the table of torch 2.4: only collectives, forward and backward together."""
        return comm_tables.older_table(self._results(0))

    def log_module_tracing_table_to_file(self) -> None:
        """Write the table of `generate_module_tracing_table` to `output.txt`, without colours."""
        Path("output.txt").write_text(_ANSI.sub("", self.generate_module_tracing_table()))

    def _results(self, noise_level: int) -> comm_tables.ModeResults:
        _check_noise_level(noise_level)
        if noise_level and not self._noise_level:
            raise ValueError(
                f"noise_level={noise_level}: no operations were listed, because this is a"
                " CommDebugMode(noise_level=0). Ask for noise_level=0, or create it without that"
                " argument."
            )
        return comm_tables.ModeResults(
            self.advanced_module_tracker, self.comm_module_counts, self.comm_module_operation_counts
        )

    def __repr__(self) -> str:
        return f"CommDebugMode(get_total_counts()={self.get_total_counts()})"


def _no_counts() -> dict[str, dict[Any, int]]:
    return {"forward": defaultdict(int), "backward": defaultdict(int)}


def _check_noise_level(noise_level: object) -> None:
    if noise_level not in NOISE_LEVELS:
        levels = ", ".join(f"{level} ({content})" for level, content in NOISE_LEVELS.items())
        raise ValueError(f"noise_level={noise_level!r}: expected one of {levels}")


def _operation(op: Any, word: int, sharded: Sharded | None) -> dict[str, Any]:
    pass_ = pass_of(word)
    if sharded is None:
        sharded = Sharded([], [], None)
    return {
        "name": op,
        "input_shape": sharded.shapes,
        "input_sharding": sharded.placements,
        "device_mesh": "" if sharded.mesh is None else str(sharded.mesh),
        "is_bw": pass_ in _IN_BACKWARD,
        "is_activation_checkpointing": pass_ == Pass.RECOMPUTE,
    }


def _common_owner(params: list[str]) -> str:
    """Return the innermost module that contains all of the parameters."""
    paths = [owner(str(param)).split(".") for param in params]
    shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in shared)


def __getattr__(name: str) -> Any:
    """Return torch's own `visualize_sharding`, which `torch.distributed.tensor.debug` also has."""
    if name == "visualize_sharding":
        from torch.distributed.tensor.debug import visualize_sharding

        return visualize_sharding
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
