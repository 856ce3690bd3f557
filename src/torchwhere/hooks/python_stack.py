"""Reads the Python stack: the user's line, the compiled graph, and what a collective is for.

FSDP launches a collective from its own functions, whose frames hold the object whose parameters the
collective moves: no hook or patch is needed to find it. One pass over the frames, innermost first,
up to the user's own code.
"""

from __future__ import annotations

import os
import re
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntFlag
from functools import cache
from traceback import walk_tb
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

from torch import nn

from torchwhere.core.framework_path import framework_path
from torchwhere.core.place import stored_line
from torchwhere.hooks import _torch

_USER, _LIBRARY, _TORCH, _FRAMEWORK = 1, 2, 3, 4
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH_HOME = os.path.dirname(os.path.dirname(os.path.abspath(nn.__file__))) + os.sep
_LIBRARIES = tuple(
    {
        os.path.abspath(folder) + os.sep
        for folder in (
            *site.getsitepackages(),
            site.getusersitepackages(),
            *map(sysconfig.get_path, ("stdlib", "purelib")),
        )
    }
)
_CONSOLE_SCRIPT = f"{os.sep}torchwhere"  # bin/torchwhere, which runs the user's script


def current_folder() -> str:
    """The working folder of this process; empty if it was deleted."""
    try:
        return os.getcwd()
    except OSError:
        return ""


@cache
def _kind(filename: str) -> int:
    """Whether a file belongs to the user, to torch, to a framework or to another library."""
    if (
        filename.startswith((_HERE, _TORCH_HOME, "<eval_with_key>", "<frozen"))
        or filename.endswith(_CONSOLE_SCRIPT)
        or "torchinductor_" in filename
    ):
        return _TORCH
    if framework_path(filename) is not None:
        return _FRAMEWORK
    if filename.startswith(_LIBRARIES) or f"{os.sep}site-packages{os.sep}" in filename:
        return _LIBRARY
    return _USER


def is_users(filename: str) -> bool:
    """Whether a file is the user's own: not part of torch, torchwhere or an installed package."""
    return _kind(filename) == _USER


def is_torchs(filename: str) -> bool:
    """Whether a file is part of torch or torchwhere, or was made by torch."""
    return _kind(filename) == _TORCH


# Finds the module whose parameters a collective moves in the variables of a frame of torch.
_Finder = Callable[[dict[str, Any]], nn.Module | None]


def _fsdp2_unit(variables: dict[str, Any]) -> nn.Module | None:
    modules = getattr(variables.get("self"), "modules", None)
    return modules[0] if modules else None


def _fsdp1_unit(variables: dict[str, Any]) -> nn.Module | None:
    handle = variables.get("handle", variables.get("self"))
    unit = getattr(handle, "_fully_sharded_module", None)
    return unit if isinstance(unit, nn.Module) else None


_UNIT_FRAMES: tuple[tuple[str, _Finder], ...] = (
    ("FSDPParamGroup.", _fsdp2_unit),
    ("FlatParamHandle.", _fsdp1_unit),
    ("_reduce_grad", _fsdp1_unit),
    ("_unshard", _fsdp1_unit),
    ("_prefetch_handle", _fsdp1_unit),
)


class _Facts(NamedTuple):
    """Facts about the frames of one code object. Cached."""

    kind: int
    finder: _Finder | None = None
    api: str | None = None
    takes_params: bool = False
    graph: str | None = None
    is_join: bool = False


_NOTHING = _Facts(_TORCH)
_facts: dict[int, _Facts | None] = {}  # by id of the code; None if there is no fact
_MOST_FACTS = 1 << 16
_JOIN_HOOKS = ("main_hook", "post_hook")  # methods that `Join` calls, of a class of the user


def _facts_of(code: CodeType) -> _Facts | None:
    kind, qualname = _kind(code.co_filename), code.co_qualname
    arguments = code.co_varnames[: code.co_argcount]
    if kind == _TORCH:
        is_api = code.co_filename.endswith("distributed_c10d.py") and "." not in qualname
        facts = _Facts(
            kind,
            finder=next((find for start, find in _UNIT_FRAMES if qualname.startswith(start)), None),
            api=qualname if is_api else None,
            takes_params="bucket" in arguments,
            is_join=_is_join(code),
        )
    else:
        takes_params = "bucket" in arguments or "params" in arguments
        facts = _Facts(kind, takes_params=takes_params, graph=_compiled_as(code))
    if len(_facts) >= _MOST_FACTS:
        forget()
    _facts[id(code)] = None if facts == _NOTHING else facts
    _codes.append(code)
    return _facts[id(code)]


_codes: list[CodeType] = []  # referenced, so that their ids stay unique


def forget() -> None:
    """Release all code objects."""
    _facts.clear()
    _codes.clear()


FrameworkFrame = tuple[str, int, str]  # file, line, function


@dataclass(slots=True)
class Stack:
    """The facts of one stack."""

    file: str | None = None
    line: int = 0
    framework: FrameworkFrame | None = None  # the innermost one that the user's line has called
    graph: str | None = None
    unit: nn.Module | None = None
    api: str | None = None  # the function of torch.distributed that the user, or torch, called
    is_shadow: bool = False  # `Join` repeats the collectives of other ranks: no input is left here
    # of the innermost frame that has a DDP `bucket` or ZeRO `params` as argument
    variables: dict[str, Any] | None = None

    def stored_line(self, *, folder: str) -> str | None:
        """The user's line and the framework's line, as a box stores them; None without a line."""
        if self.file is None:
            return None
        line, framework_line = shortened(self.file, self.line, folder=folder), None
        if self.framework is not None:
            file, number, function = self.framework
            framework_line = f"{framework_path(file)}:{number} {function}"
        return stored_line(line, framework_line)


def read(frame: FrameType | None) -> Stack:
    """Walk from `frame` outwards to the first frame of the user's own code. About 0.2 us a
    frame."""
    stack = Stack()
    library: FrameType | None = None
    framework: FrameType | None = None
    while frame is not None:
        code = frame.f_code
        key = id(code)
        facts = _facts[key] if key in _facts else _facts_of(code)
        if facts is not None:
            _add(stack, facts, frame)
            if facts.kind == _USER:
                stack.file, stack.line = code.co_filename, frame.f_lineno
                if framework is not None:
                    stack.framework = _framework_frame(framework.f_code, framework.f_lineno)
                if _is_in_join(frame):
                    stack.is_shadow = True
                return stack
            if facts.kind != _TORCH:
                library = library or frame
                if framework is None and facts.kind == _FRAMEWORK:
                    framework = frame
        frame = frame.f_back
    if library is not None:
        stack.file, stack.line = library.f_code.co_filename, library.f_lineno
    return stack


def _framework_frame(code: CodeType, line: int) -> FrameworkFrame:
    return code.co_filename, line, code.co_name


def is_framework(code: CodeType) -> bool:
    """Whether code belongs to a framework, see `framework_path`."""
    return _kind(code.co_filename) == _FRAMEWORK


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def frames_to_user(start: FrameType | None) -> list[FrameType] | None:
    """The frames that `read` passes, including the one of the user's own code; None if it finds a
    compiled graph, or no such frame."""
    frames = []
    for frame in outwards(start):
        key = id(frame.f_code)
        facts = _facts[key] if key in _facts else _facts_of(frame.f_code)
        frames.append(frame)
        if facts is not None and facts.graph is not None:
            return None
        if facts is not None and facts.kind == _USER:
            return frames
    return None


class FrameRole(IntFlag):
    """What a frame of some code means for the native extension, which compares the frames of two
    calls. The same numbers are in `native/call_key.h`."""

    ENDS_WAY = 1  # the frames around it do not matter
    HOLDS_UNIT = 2  # its variable `self` is an object of FSDP
    HOLDS_HANDLE = 4  # its variable `handle` is
    IS_JOIN_HOOK = 8  # `Join` may have called it


UNKNOWN_ROLE = -1  # only `read` can tell what the frame means


def frame_role(code: CodeType) -> int:
    """Return the role of frames of a code object."""
    facts = _facts[id(code)] if id(code) in _facts else _facts_of(code)
    if facts is not None and (facts.takes_params or facts.is_join):
        return UNKNOWN_ROLE
    role = FrameRole(0)
    if code.co_name in _JOIN_HOOKS:
        role |= FrameRole.IS_JOIN_HOOK
    if facts is not None and facts.kind == _USER:
        role |= FrameRole.ENDS_WAY
    if facts is not None and facts.finder is not None:
        has_handle = facts.finder is _fsdp1_unit and "handle" in code.co_varnames
        role |= FrameRole.HOLDS_HANDLE if has_handle else FrameRole.HOLDS_UNIT
    return int(role)


def _is_join(code: CodeType) -> bool:
    return code.co_name == "__exit__" and code.co_filename.endswith(f"algorithms{os.sep}join.py")


def _is_in_join(frame: FrameType) -> bool:
    """Whether this is a hook that `Join` called, or a function that such a hook called. Looks no
    further: each frame costs 0.2 us."""
    if frame.f_code.co_name not in _JOIN_HOOKS:
        caller = frame.f_back
        if caller is None or caller.f_code.co_name not in _JOIN_HOOKS:
            return False
        frame = caller
    return frame.f_back is not None and _is_join(frame.f_back.f_code)


def _add(stack: Stack, facts: _Facts, frame: FrameType) -> None:
    if facts.api is not None:
        stack.api = facts.api
    if facts.is_join:
        stack.is_shadow = True
    if facts.finder is not None and stack.unit is None:
        stack.unit = facts.finder(frame.f_locals)
    if facts.takes_params and stack.variables is None:
        stack.variables = frame.f_locals
    if facts.graph is not None and stack.graph is None:
        stack.graph = facts.graph


def graph_around(start: FrameType | None) -> str | None:
    """The compiled graph that called this frame, also through code of the user, such as a custom
    op.

    A graph that only called a function that dynamo could not compile does not count: the code of
    the graph itself must be on the stack.
    """
    is_in_graph = False
    for frame in outwards(start):
        code = frame.f_code
        is_in_graph = (
            is_in_graph
            or code.co_filename.startswith("<eval_with_key>")
            or "torchinductor_" in code.co_filename
        )
        facts = _facts[id(code)] if id(code) in _facts else _facts_of(code)
        if is_in_graph and facts is not None and facts.graph is not None:
            return facts.graph
    return None


def _compiled_as(code: CodeType) -> str | None:
    """The id (`0/0`) of the compiled graph that has this code; None for other code."""
    originals, entries = _torch.private("original_code"), _torch.private("cache_entries")
    if originals is None or entries is None or code not in originals:
        return None
    for entry in entries(originals[code]):
        if entry.code is code:
            return str(getattr(entry, "compile_id", "?"))
    return "?"


# -- lines -----------------------------------------------------------------------------------------


def shortened(file: str, line: int, *, folder: str) -> str:
    """`file:line`, relative to `folder` if the file is below it."""
    if folder and file.startswith(folder + os.sep):
        file = file[len(folder) + 1 :]
    return f"{file}:{line}"


def read_traceback(traceback: TracebackType | None) -> Stack:
    """The innermost line of the user's own code in a traceback, and the innermost frame of a
    framework that it has called."""
    stack = Stack()
    for frame, line in walk_tb(traceback):
        code = frame.f_code
        if is_users(code.co_filename):
            stack = Stack(code.co_filename, line)
        elif is_framework(code):
            stack.framework = _framework_frame(code, line)
    return stack


_FRAME = re.compile(r'File "(.+)", line (\d+), in ')


def user_line_of(texts: Iterable[str]) -> tuple[str, int] | None:
    """The innermost line of the user's own code in a formatted traceback: one or more texts for
    each frame."""
    line = None
    for text in texts:
        for match in _FRAME.finditer(text):
            if is_users(match[1]):
                line = match[1], int(match[2])
    return line


def caller(depth: int = 1) -> FrameType | None:
    """The frame `depth` above the caller's; None if the stack ends before (a thread created in
    C)."""
    try:
        return sys._getframe(depth + 1)
    except ValueError:
        return None
