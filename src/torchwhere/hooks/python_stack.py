"""Reads the Python stack at the moment of a collective: the user's line, the compiled graph, and
what the collective is for.

FSDP launches a collective from deep inside itself, and the frames in between hold the very object
whose parameters move: no hook and no patch is needed to know it. One pass over the frames,
innermost first, up to the user's own code.
"""

from __future__ import annotations

import os
import re
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

from torch import nn

from torchwhere.hooks import _torch

_USER, _LIBRARY, _TORCH = 1, 2, 3
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
_kinds: dict[str, int] = {}


def current_folder() -> str:
    """Where this process works; nowhere, if somebody has deleted that folder: no reason to fail."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def _kind(filename: str) -> int:
    """Whose code a file is. Asked once per file."""
    kind = _LIBRARY
    if (
        filename.startswith((_HERE, _TORCH_HOME, "<eval_with_key>", "<frozen"))
        or "torchinductor_" in filename
    ):
        kind = _TORCH
    elif not filename.startswith(_LIBRARIES) and f"{os.sep}site-packages{os.sep}" not in filename:
        kind = _USER
    _kinds[filename] = kind
    return kind


def is_users(filename: str) -> bool:
    """Whether a file is the user's own: not of torch, torchwhere or an installed package."""
    return (_kinds.get(filename) or _kind(filename)) == _USER


# What a frame of torch can tell about the beneficiary: the name of its function, and where in its
# locals it is held.
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
    """What there is to know about the frames of one code object. Found once."""

    code: CodeType  # kept, so that its id stays its own
    kind: int
    finder: _Finder | None = None
    api: str | None = None
    takes_params: bool = False
    graph: str | None = None
    is_join: bool = False

    @property
    def is_dull(self) -> bool:
        return (
            self.kind == _TORCH
            and self.finder is None
            and not (self.api or self.takes_params or self.is_join)
        )


_facts: dict[int, _Facts | None] = {}  # by id of the code; None for a frame that tells nothing
_MOST_FACTS = 1 << 16
_JOIN_HOOKS = ("main_hook", "post_hook")  # what `Join` calls, of a class of the user's


def _look_at(code: CodeType) -> _Facts | None:
    kind = _kinds.get(code.co_filename) or _kind(code.co_filename)
    qualname, arguments = code.co_qualname, code.co_varnames[: code.co_argcount]
    facts = _Facts(code, kind, takes_params="bucket" in arguments)
    if kind == _TORCH:
        is_api = code.co_filename.endswith("distributed_c10d.py") and "." not in qualname
        finder = next(
            (finder for start, finder in _UNIT_FRAMES if qualname.startswith(start)), None
        )
        facts = facts._replace(
            finder=finder, api=qualname if is_api else None, is_join=_is_join(code)
        )
    else:
        facts = facts._replace(
            takes_params="bucket" in arguments or "params" in arguments, graph=_compiled_as(code)
        )
    if len(_facts) >= _MOST_FACTS:
        forget()
    _facts[id(code)] = None if facts.is_dull else facts
    _kept.append(code)
    return _facts[id(code)]


_kept: list[CodeType] = []


def forget() -> None:
    """Let go of all code objects."""
    _facts.clear()
    _kept.clear()


@dataclass(slots=True)
class Stack:
    """What one look at the stack found."""

    file: str | None = None
    line: int = 0
    graph: str | None = None
    unit: nn.Module | None = None
    api: str | None = None  # the function of torch.distributed that the user, or torch, called
    is_shadow: bool = False  # `Join` issues what the other ranks do: this one is out of input
    # of the innermost frame that takes a DDP `bucket` or ZeRO `params`
    variables: dict[str, Any] | None = None


def read(frame: FrameType | None) -> Stack:
    """Walk from `frame` outwards to the first frame of the user's own code. About 0.2 us a
    frame."""
    found = Stack()
    library: FrameType | None = None
    while frame is not None:
        code = frame.f_code
        key = id(code)
        facts = _facts[key] if key in _facts else _look_at(code)
        if facts is not None:
            _take(found, facts, frame)
            if facts.kind == _USER:
                found.file, found.line = code.co_filename, frame.f_lineno
                if _is_in_join(frame):
                    found.is_shadow = True
                return found
            if facts.kind == _LIBRARY and library is None:
                library = frame
        frame = frame.f_back
    if library is not None:
        found.file, found.line = library.f_code.co_filename, library.f_lineno
    return found


def way_out(frame: FrameType | None) -> list[FrameType] | None:
    """The frames that `read` passes on its way, up to the one of the user's own code; None if it
    finds more than that line."""
    way = []
    while frame is not None:
        key = id(frame.f_code)
        facts = _facts[key] if key in _facts else _look_at(frame.f_code)
        way.append(frame)
        if facts is not None and facts.graph is not None:
            return None
        if facts is not None and facts.kind == _USER:
            return way
        frame = frame.f_back
    return None


def _is_join(code: CodeType) -> bool:
    return code.co_name == "__exit__" and code.co_filename.endswith(f"algorithms{os.sep}join.py")


def _is_in_join(frame: FrameType) -> bool:
    """Whether this is a hook that `Join` called, or what such a hook called. No further out: each
    frame costs 0.2 us."""
    if frame.f_code.co_name not in _JOIN_HOOKS:
        caller = frame.f_back
        if caller is None or caller.f_code.co_name not in _JOIN_HOOKS:
            return False
        frame = caller
    return frame.f_back is not None and _is_join(frame.f_back.f_code)


def _take(found: Stack, facts: _Facts, frame: FrameType) -> None:
    if facts.api is not None:
        found.api = facts.api
    if facts.is_join:
        found.is_shadow = True
    if facts.finder is not None and found.unit is None:
        found.unit = facts.finder(frame.f_locals)
    if facts.takes_params and found.variables is None:
        found.variables = frame.f_locals
    if facts.graph is not None and found.graph is None:
        found.graph = facts.graph


def graph_around(frame: FrameType | None) -> str | None:
    """The compiled graph that called this frame, although code of the user's runs in between: an op
    of theirs, say.

    Not one that has merely called a function it could not compile: the code of the graph itself
    must be on the way.
    """
    is_in_graph = False
    while frame is not None:
        code = frame.f_code
        is_in_graph = (
            is_in_graph
            or code.co_filename.startswith("<eval_with_key>")
            or "torchinductor_" in code.co_filename
        )
        facts = _facts[id(code)] if id(code) in _facts else _look_at(code)
        if is_in_graph and facts is not None and facts.graph is not None:
            return facts.graph
        frame = frame.f_back
    return None


def _compiled_as(code: CodeType) -> str | None:
    """The id (`0/0`) of the compiled graph whose code this is; None for ordinary code."""
    originals, entries = _torch.private("original_code"), _torch.private("cache_entries")
    if originals is None or entries is None or code not in originals:
        return None
    for entry in entries(originals[code]):
        if entry.code is code:
            return str(getattr(entry, "compile_id", "?"))
    return "?"


# -- lines -----------------------------------------------------------------------------------------


def shortened(file: str, line: int, *, folder: str) -> str:
    """`file:line`, relative to `folder` where it is below it."""
    if folder and file.startswith(folder + os.sep):
        file = file[len(folder) + 1 :]
    return f"{file}:{line}"


def deepest_user_line(traceback: TracebackType | None) -> tuple[str, int] | None:
    """Where an exception came from in the user's own code: the innermost such line of its
    traceback."""
    found = None
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if (_kinds.get(filename) or _kind(filename)) == _USER:
            found = filename, traceback.tb_lineno
        traceback = traceback.tb_next
    return found


_FRAME = re.compile(r'File "(.+)", line (\d+), in ')


def user_line_of(texts: Iterable[str]) -> tuple[str, int] | None:
    """The innermost line of the user's own code in a traceback that was formatted to texts, one or
    more for a frame."""
    found = None
    for match in (match for text in texts for match in _FRAME.finditer(text)):
        if is_users(match[1]):
            found = match[1], int(match[2])
    return found


def caller(depth: int = 1) -> FrameType | None:
    """The frame `depth` above the caller's, or None where there is no Python below (a thread made
    in C)."""
    try:
        return sys._getframe(depth + 1)
    except ValueError:
        return None
