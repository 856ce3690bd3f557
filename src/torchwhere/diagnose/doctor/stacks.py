"""Reads a Python stack: the user's line, whether it is inside a collective, what blocks it.

Takes the frames of a rank's main thread as texts, innermost first. The frames inside the innermost
user frame show what the rank does; frames outside of it have called the user's code and wait for
it. A stack does not show a wait in native code directly below the user's line, such as
`work.wait()`: the answer is then None (unknown).
"""

from __future__ import annotations

import itertools
import re
from enum import StrEnum
from typing import Any, NamedTuple

from torchwhere.core.events import Event
from torchwhere.core.framework_path import framework_path
from torchwhere.diagnose.calls.rank_calls import RankCalls
from torchwhere.processes.status import ProcessStatus

_NOT_THE_USERS = re.compile(
    r"/(site|dist)-packages/|/lib/python|<frozen|<eval_with_key>|torchinductor_"
    r"|/src/torchwhere/(?!src/|examples/|tests/|bench/)|/bin/torchwhere:"
)
_DISTRIBUTED = "/torch/distributed/"
_IMPORT = re.compile(r"<frozen importlib|/importlib/")
_LOADING = "/torch/utils/data/"
# Frames that are on the stack while a graph is compiled. Code that runs a compiled graph
# (`eval_frame.py`, `_inductor/output_code.py`), or that only disables dynamo, uses other files.
_COMPILING = re.compile(
    r"/torch/_dynamo/(convert_frame|symbolic_convert|output_graph|bytecode_\w+)\.py|/torch/_dynamo/variables/"
    r"|/torch/_inductor/(compile_fx|graph|scheduler|lowering|codecache|async_compile|select_algorithm)\.py"
    r"|/torch/_inductor/(codegen|fx_passes)/"
)
_RUNS_COMPILED = frozenset({"run", "wrapper"})  # of those files, what calls the finished code
# Frames that are on the stack while a checkpoint is written or read: torch, safetensors, and the
# usual names of such functions in trainers and scripts. `torch.utils.checkpoint` is not among them.
_SAVING = re.compile(
    r"/torch/serialization\.py:\d+ in _?(legacy_)?save$"
    r"|/torch/distributed/checkpoint/state_dict_saver\.py"
    r"|/safetensors/\w+\.py:\d+ in (save|serialize)"
    r"| in (\w*_)?save_(checkpoint|ckpt|model|snapshot|state|pretrained|weights|sharded)\w*$"
)
_LOADING_CHECKPOINT = re.compile(
    r"/torch/serialization\.py:\d+ in _?(legacy_)?load$"
    r"|/torch/distributed/checkpoint/state_dict_loader\.py"
    r"|/safetensors/\w+\.py:\d+ in (load|deserialize)"
    r"| in (\w*_)?load_(checkpoint|ckpt|model|snapshot|pretrained|weights|sharded)\w*$"
    r"| in from_pretrained$"
)
_EVALUATION = re.compile(
    r"/evaluation_loop\.py| in (\w*_)?(eval|evaluate|evaluation|validate|validation)(_\w*)?$"
)
_TORCH = re.compile(r"/torch/|/torchwhere/")  # has functions with such names that check arguments
# Functions that wait in C++ for a collective that C++ issued, or that was issued earlier.
_WAITS = frozenset({"_engine_run_backward", "wait_tensor", "trigger_wait", "wait", "synchronize"})
_MAKES_GROUPS = frozenset(
    {
        "init_process_group",
        "new_group",
        "split_group",
        "new_subgroups",
        "new_subgroups_by_enumeration",
    }
)
_ENDS_GROUPS = "destroy_process_group"
# waits until a file is deleted, even if the process that wrote it has exited
_BATON = "/torch/utils/file_baton.py"


class Activity(StrEnum):
    """What a rank does while others wait for it."""

    HOLDING_GIL = "holding the GIL"
    DATA_LOADING = "data loading"
    IMPORT = "import"
    SAVING = "saving"
    LOADING_CHECKPOINT = "loading a checkpoint"
    COMPILATION = "compilation"
    EVALUATION = "evaluation"
    BUILD = "build"
    BUILD_LOCK = "build lock"  # another process builds, or a killed one has left its lock
    FILE_LOCK = "file lock"
    PROCESS = "process"
    POOL = "pool"
    SUBPROCESS = "subprocess"
    QUEUE = "queue"
    THREAD = "thread"
    SOCKET = "socket"
    GROUP_CREATION = "group creation"
    GROUP_END = "group end"
    COLLECTIVE = "collective"
    DEVICE = "device"  # waits for its own device
    DISTRIBUTED = "distributed"  # in torch.distributed, outside any recorded collective
    RUNNING = "running"
    SLEEPING = "sleeping"


WAITS_FOR_WORKERS = frozenset(
    {
        Activity.DATA_LOADING,
        Activity.COMPILATION,
        Activity.PROCESS,
        Activity.POOL,
        Activity.QUEUE,
    }
)


class Hold(NamedTuple):
    """What blocks a rank. `function` is the collective or the function that it is in, if known."""

    activity: Activity
    function: str = ""


# What a library function called by the user waits for, by a part of its file name.
_HOLDS = (
    ("/torch/utils/cpp_extension.py", Activity.BUILD),
    ("/filelock/", Activity.FILE_LOCK),
    ("/multiprocessing/", Activity.PROCESS),
    ("/concurrent/futures/", Activity.POOL),
    ("/subprocess.py", Activity.SUBPROCESS),
    ("/queue.py", Activity.QUEUE),
    ("/threading.py", Activity.THREAD),
    ("/socket.py", Activity.SOCKET),
    ("/ssl.py", Activity.SOCKET),
)


class StackFrame(NamedTuple):
    """One line of a stack."""

    where: str  # file:line
    function: str

    @property
    def is_users(self) -> bool:
        return bool(self.where) and _NOT_THE_USERS.search(self.where) is None

    @property
    def is_import(self) -> bool:
        return _IMPORT.search(self.where) is not None


def frames(stack: tuple[str, ...]) -> list[StackFrame]:
    """The frames of a stack, innermost first."""
    parsed = []
    for entry in stack:
        where, separator, function = entry.rpartition(" in ")
        parsed.append(StackFrame(where, function) if separator else StackFrame(entry, ""))
    return parsed


def user_line(stack: tuple[str, ...]) -> str | None:
    """The innermost line of a stack that is the user's own code."""
    return next((frame.where for frame in frames(stack) if frame.is_users), None)


def stack_lines(stack: tuple[str, ...], *, folder: object) -> dict[str, Any]:
    """The fields `line` and `framework_line` of a `Place`, from a stack. Both are None without a
    line of the user. The line is relative to `folder`, the working folder of the rank."""
    line = user_line(stack)
    if line is None:
        return {"line": None, "framework_line": None}
    inside = ((framework_path(frame.where), frame.function) for frame in _inside(stack))
    framework_lines = (f"{where} {function}" for where, function in inside if where is not None)
    return {
        "line": line.removeprefix(f"{folder}/"),
        "framework_line": next(framework_lines, None),
    }


def is_in_collective(call: Event | None, status: ProcessStatus) -> bool | None:
    """Whether a stack is inside the rank's last collective; None if unknown or there is no
    stack."""
    if not status.stack:
        return None
    own = _inside(status.stack)
    if call is None or _is_importing(own):
        return False
    if _is_inside(call, own) or _waits_outside(call, own, status.stack):
        return True
    # a rank waits for its device wherever it needs the result, and spins there
    if call.fields.get("backend") != "gloo":
        return True if status.state == "R" else None
    is_seen = call.place.thread in (None, "MainThread")
    may_wait_later = call.fields.get("async") or call.fields.get("api") is None
    return None if not is_seen or (may_wait_later and not _is_of_distributed(own)) else False


def holding(rank_calls: RankCalls, status: ProcessStatus) -> Hold | None:
    """What blocks a rank that others wait for, by its stack, its process and its last events."""
    if status.holds_gil and status.state in ("S", "D"):
        return Hold(Activity.HOLDING_GIL)
    activity = _called(status.stack)
    hold = Hold(activity) if activity is not None else _in_distributed(rank_calls, status)
    if hold is not None:
        return hold
    if rank_calls.is_compiling:
        return Hold(Activity.COMPILATION)
    if is_evaluating(status.stack):
        return Hold(Activity.EVALUATION)
    if status.stack and status.state == "R":
        return Hold(Activity.RUNNING)
    if status.stack and status.state in ("S", "D"):
        return Hold(Activity.SLEEPING)
    return None


def long_work(stack: tuple[str, ...]) -> Activity | None:
    """The work on a stack that takes long in a healthy job too: saving or loading a checkpoint, or
    compiling; None if there is none."""
    if any(_SAVING.search(frame) for frame in stack):
        return Activity.SAVING
    if any(_LOADING_CHECKPOINT.search(frame) for frame in stack):
        return Activity.LOADING_CHECKPOINT
    is_compiling = any(
        _COMPILING.search(frame.where) and frame.function not in _RUNS_COMPILED
        for frame in frames(stack)
        if frame.function != "<module>"
    )
    return Activity.COMPILATION if is_compiling else None


def is_importing(stack: tuple[str, ...]) -> bool:
    """Whether a module is being imported, also one of the user's."""
    return _is_importing(frames(stack))


def is_evaluating(stack: tuple[str, ...]) -> bool:
    """Whether a function of the script or of a trainer evaluates the model, by its name."""
    return any(_EVALUATION.search(frame) and not _TORCH.search(frame) for frame in stack)


# -- frames ----------------------------------------------------------------------------------------


def _inside(stack: tuple[str, ...]) -> list[StackFrame]:
    """The frames inside the innermost user frame: what the user's line has called."""
    return list(itertools.takewhile(lambda frame: not frame.is_users, frames(stack)))


def _is_importing(own: list[StackFrame]) -> bool:
    return any(frame.is_import for frame in own)


def _is_of_distributed(own: list[StackFrame]) -> bool:
    return any(_DISTRIBUTED in frame.where for frame in own)


def _is_inside(call: Event, own: list[StackFrame]) -> bool:
    """Whether the function that issued a collective has not returned."""
    api = call.fields.get("api")
    return any(frame.function == api and _DISTRIBUTED in frame.where for frame in own)


def _waits_outside(call: Event, own: list[StackFrame], stack: tuple[str, ...]) -> bool:
    """Whether torch or the call's own line waits for a collective that is async or that C++
    issued."""
    is_async, is_of_python = call.fields.get("async"), call.fields.get("api") is not None
    if is_of_python and not is_async:
        return False
    if not own:
        return bool(
            is_of_python and call.place.line and (user_line(stack) or "").endswith(call.place.line)
        )
    is_making = any(frame.function in _MAKES_GROUPS for frame in own)
    # ops are called through _ops.py
    first = next((frame for frame in own if "/torch/_ops.py" not in frame.where), own[0])
    return not is_making and (first.function in _WAITS or _DISTRIBUTED in first.where)


# -- what blocks a rank ----------------------------------------------------------------------------


def _called(stack: tuple[str, ...]) -> Activity | None:
    """Work or a wait that takes time by itself, called by the user's code or calling it."""
    every = [frame for frame in frames(stack) if frame.function != "<module>"]
    if any(_LOADING in frame.where for frame in every):
        return Activity.DATA_LOADING
    own = _inside(stack)
    if _is_importing(own):
        return Activity.IMPORT
    work = long_work(stack)
    if work is not None:
        return work
    if any(_BATON in frame.where for frame in own):
        return Activity.BUILD_LOCK
    for frame in reversed(own):  # the outermost is what the user called
        for part, activity in _HOLDS:
            if part in frame.where:
                return activity
    return None


def _in_distributed(rank_calls: RankCalls, status: ProcessStatus) -> Hold | None:
    own = _inside(status.stack)
    group_creation = [
        frame.function
        for frame in own
        if frame.function in _MAKES_GROUPS and _DISTRIBUTED in frame.where
    ]
    if group_creation:
        return Hold(Activity.GROUP_CREATION, group_creation[-1])
    if any(frame.function == _ENDS_GROUPS and _DISTRIBUTED in frame.where for frame in own):
        return Hold(Activity.GROUP_END, _ENDS_GROUPS)
    call = rank_calls.last_collective if rank_calls.in_collective_since_ns is not None else None
    is_gloo = call is not None and call.fields.get("backend") == "gloo"
    if call is not None and ((is_gloo and is_in_collective(call, status)) or _is_inside(call, own)):
        return Hold(Activity.COLLECTIVE, str(call.fields.get("op")))
    return Hold(Activity.DISTRIBUTED) if _is_of_distributed(own) else None
