"""Where a rank is, from its stack alone: in a collective, waiting for its device, or elsewhere.

Takes what was seen of a process that torchwhere does not watch. A Python function of
`torch.distributed` on the stack shows a collective. A wait in C++ directly below the user's line or
below a backward shows only in native frames; without them the position is unclear.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torchwhere.diagnose.doctor.stacks import StackFrame, frames, stack_lines
from torchwhere.processes.observation import RankObservation, ThreadStack

_COLLECTIVES = frozenset(
    {
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_gather_single",
        "all_gather_tensor",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "batch_isend_irecv",
        "broadcast",
        "broadcast_object_list",
        "gather",
        "gather_object",
        "irecv",
        "isend",
        "monitored_barrier",
        "permute_tensor",
        "recv",
        "recv_object_list",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
        "scatter",
        "scatter_object_list",
        "send",
        "send_object_list",
        "wait_tensor",
    }
)
MESSAGE = "a send or recv"  # which the rank issued before, and now waits for
STORE = "a wait for the store"
# Waits for one other rank, not for all ranks of a group.
WAITS_FOR_ONE = frozenset(
    {
        "batch_isend_irecv",
        "irecv",
        "isend",
        "recv",
        "recv_object_list",
        "send",
        "send_object_list",
        MESSAGE,
        STORE,
    }
)
GROUP_CREATION = frozenset(
    {
        "init_process_group",
        "new_group",
        "new_subgroups",
        "new_subgroups_by_enumeration",
        "shrink_group",
        "split_group",
    }
)
_DISTRIBUTED = "/torch/distributed/"
_PACKAGES = re.compile(r"/(?:site|dist)-packages/")
_TORCH = re.compile(r"/(?:site|dist)-packages/torch/")
_BACKWARD = "_engine_run_backward"
UNNAMED = "a collective"
_IN_BACKWARD = "a collective of the backward"
# Functions of torch that wait in C++ for a collective or for the device.
_NATIVE_WAITS = frozenset({_BACKWARD, "wait", "synchronize", "__call__"})
_NATIVE_WAIT = re.compile(r"c10d::|gloo::|\bnccl[A-Z]")
_NATIVE_MESSAGE = re.compile(r"::(Send|Recv)Work::")
_NATIVE_STORE = re.compile(r"^c10d::\w*Store::")
_NATIVE_GROUP = re.compile(r"^c10d::(ProcessGroup|Work|Reducer)|^gloo::|^nccl[A-Z]")
_NATIVE_DEVICE = re.compile(
    r"(cuda|hip|cu)(Stream|Event|Device|Ctx)Synchronize|(cuda|hip)Memcpy|\bcuMemcpy"
)
# Work that takes long in a healthy job too: saving, compiling, importing.
_LONG_WORK = re.compile(
    r"/torch/(serialization\.py|distributed/checkpoint/|_dynamo/convert_frame\.py|_inductor/compile_fx"
    r"\.py)|/safetensors/|<frozen importlib"
)
_WORKING_SHARE = 0.01  # of the time of the looks; a wait that polls uses less
_WAITS_FOR_THREAD = re.compile(r"/threading\.py:|/queue\.py:|/concurrent/futures/")


class PositionKind(StrEnum):
    """What a rank does, by its stack."""

    COLLECTIVE = "collective"
    DEVICE = "device"  # waits for its device
    ELSEWHERE = "elsewhere"
    UNCLEAR = "unclear"  # blocked in native code of which nothing is known
    UNKNOWN = "unknown"  # no stack
    STOPPED = "stopped"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class StackPosition:
    """Where one rank is."""

    kind: PositionKind
    op: str | None = None  # the collective, or the function that creates a group
    line: str | None = None  # the innermost line of the user's code
    library_line: str | None = None  # `transformers/trainer.py:2322 in training_step`
    forward_line: str | None = None  # `model.py:31 in Block.forward`
    thread: str | None = None  # the thread that is in the collective, if it is not the main thread
    is_still: bool = False  # it did not run, or did not get on, during the looks
    is_long_work: bool = False  # it runs, and saves, compiles or imports
    is_working: bool = False  # its stack changed, or it used a CPU

    @property
    def is_waiting(self) -> bool:
        """Whether it waited in the same collective during all looks."""
        return self.kind is PositionKind.COLLECTIVE and self.is_still

    def to_dict(self) -> dict[str, Any]:
        return {
            "position": str(self.kind),
            "op": self.op,
            "line": self.line,
            "library_line": self.library_line,
            "forward_line": self.forward_line,
            "thread": self.thread,
            "is_still": self.is_still,
        }


def position_of(observation: RankObservation) -> StackPosition:
    """Where a rank is, by its last stack, and whether it was there all the time."""
    if not observation.is_alive:
        return StackPosition(PositionKind.GONE)
    main = observation.main
    if main is None:
        kind = PositionKind.STOPPED if observation.status.is_stopped else PositionKind.UNKNOWN
        return StackPosition(kind)
    op, thread = collective_in(main), main
    kind = _kind(main, op)
    if kind is PositionKind.ELSEWHERE and _has_called(main, _WAITS_FOR_THREAD):
        for other in observation.others:
            if (other_op := collective_in(other)) is not None:
                kind, op, thread = PositionKind.COLLECTIVE, other_op, other
    if observation.status.is_stopped:
        kind = PositionKind.STOPPED
    return StackPosition(
        kind,
        op,
        line=stack_lines(main.stack, folder=observation.folder)["line"],
        library_line=_library_line(main),
        forward_line=_forward_line(main, observation.folder),
        thread=thread.name if thread is not main else None,
        is_still=_is_still(thread, kind, op),
        is_long_work=main.has_run and _has_called(main, _LONG_WORK),
        is_working=_is_working(main, observation.seconds),
    )


def _kind(main: ThreadStack, op: str | None) -> PositionKind:
    if op is not None:
        return PositionKind.COLLECTIVE
    if any(map(_NATIVE_DEVICE.search, main.native)) or _synchronizes(main):
        return PositionKind.DEVICE
    may_wait = not main.has_run or main.is_same
    if may_wait and not main.has_native and _may_wait_in_native(main):
        return PositionKind.UNCLEAR
    return PositionKind.ELSEWHERE


def collective_in(thread: ThreadStack) -> str | None:
    """The collective that a thread is in, as the user called it; None if it is in none."""
    own = _inside(thread)
    for frame in reversed(own):  # the outermost is what the user called
        if _DISTRIBUTED in frame.where and _name(frame) in _COLLECTIVES | GROUP_CREATION:
            return _name(frame)
    if not any(map(_NATIVE_WAIT.search, thread.native)):
        return None
    if any(map(_NATIVE_MESSAGE.search, thread.native)):
        return MESSAGE
    # A group asks the store too, for example before its first collective.
    has_group = any(map(_NATIVE_GROUP.search, thread.native))
    if any(map(_NATIVE_STORE.search, thread.native)) and not has_group:
        return STORE
    is_backward = any(_name(frame) == _BACKWARD for frame in own)
    return _IN_BACKWARD if is_backward else UNNAMED


def _is_still(thread: ThreadStack, kind: PositionKind, op: str | None) -> bool:
    """Whether a thread got nowhere. The creation of a group polls a store, and a wait for a device
    spins: there the stack decides."""
    if op in GROUP_CREATION or op == STORE or kind is PositionKind.DEVICE:
        return thread.is_same
    return not thread.has_run


def _is_working(main: ThreadStack, seconds: float) -> bool:
    """Whether a thread did more than wake up now and then, as a thread that waits for data does."""
    return main.has_run and (not main.is_same or main.run_s > _WORKING_SHARE * seconds)


def _synchronizes(main: ThreadStack) -> bool:
    """Whether the innermost Python frame is `torch.cuda.synchronize` or one of its kind."""
    return any(
        "/torch/cuda/" in frame.where and _name(frame) == "synchronize"
        for frame in _inside(main)[:1]
    )


def _may_wait_in_native(main: ThreadStack) -> bool:
    """Whether the innermost Python frame may wait in C++: the user's line, or one of torch."""
    own = _inside(main)
    if not own:
        return True
    is_torch = _TORCH.search(own[0].where) is not None
    return is_torch and (_name(own[0]) in _NATIVE_WAITS or _DISTRIBUTED in own[0].where)


def _has_called(main: ThreadStack, pattern: re.Pattern[str]) -> bool:
    """Whether the user's line has called something in such a file."""
    return any(pattern.search(frame.where) for frame in _inside(main))


# -- frames ----------------------------------------------------------------------------------------


def _inside(thread: ThreadStack) -> list[StackFrame]:
    """The frames inside the innermost user frame: what the user's line has called."""
    return list(itertools.takewhile(lambda frame: not frame.is_users, frames(thread.stack)))


def _name(frame: StackFrame) -> str:
    """The name of a function without its class: since Python 3.11, py-spy gives both."""
    return frame.function.rpartition(".")[2]


def _library_line(thread: ThreadStack) -> str | None:
    """The innermost frame of a library inside the user's line: of a framework, else of torch."""
    own = [frame for frame in _inside(thread) if _PACKAGES.search(frame.where)]
    frameworks = [frame for frame in own if not _TORCH.search(frame.where)]
    frame = next(iter(frameworks or own), None)
    if frame is None:
        return None
    return f"{_PACKAGES.split(frame.where)[-1]} in {frame.function}"


def _forward_line(thread: ThreadStack, folder: str) -> str | None:
    """The innermost line in a `forward`, apart from torch's own modules. The class of the module is
    known since Python 3.11, its name is not."""
    for frame in frames(thread.stack):
        if _name(frame) == "forward" and not _TORCH.search(frame.where):
            line = _PACKAGES.split(frame.where)[-1].removeprefix(f"{folder}/")
            return f"{line} in {frame.function}"
    return None
