"""Reads the Python stack at the moment of a collective: the user's line, the compiled graph, and what the collective is for.

FSDP launches a collective from deep inside itself, and the frames in between hold the very object whose parameters move:
no hook and no patch is needed to know it. One pass over the frames, innermost first, up to the user's own code.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType, TracebackType
from typing import Any

from torch import nn

from torchwhere.sense import _torch

_USER, _LIBRARY, _TORCH = 1, 2, 3
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH_HOME = os.path.dirname(os.path.dirname(os.path.abspath(nn.__file__))) + os.sep
_LIBRARIES = tuple(
    {
        os.path.abspath(folder) + os.sep
        for folder in (*site.getsitepackages(), site.getusersitepackages(), *map(sysconfig.get_path, ("stdlib", "purelib")))
    }
)
_kinds: dict[str, int] = {}


def _kind(filename: str) -> int:
    """Whose code a file is. Asked once per file."""
    kind = _LIBRARY
    if filename.startswith((_HERE, _TORCH_HOME, "<eval_with_key>", "<frozen")) or "torchinductor_" in filename:
        kind = _TORCH
    elif not filename.startswith(_LIBRARIES) and f"{os.sep}site-packages{os.sep}" not in filename:
        kind = _USER
    _kinds[filename] = kind
    return kind


# What a frame of torch can tell about the beneficiary: the name of its function, and where in its locals it is held.
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
_finders: dict[str, _Finder | None] = {}


def _finder(qualname: str) -> _Finder | None:
    found = next((finder for start, finder in _UNIT_FRAMES if qualname.startswith(start)), None)
    _finders[qualname] = found
    return found


@dataclass(slots=True)
class Stack:
    """What one look at the stack found."""

    file: str | None = None
    line: int = 0
    graph: str | None = None
    unit: nn.Module | None = None
    api: str | None = None  # the function of torch.distributed that the user, or torch, called
    variables: dict[str, Any] | None = None  # of the innermost frame that takes a DDP `bucket` or ZeRO `params`


def read(frame: FrameType | None) -> Stack:
    """Walk from `frame` outwards to the first frame of the user's own code."""
    found = Stack()
    library: FrameType | None = None
    dynamo = _torch.is_dynamo_loaded()
    while frame is not None:
        code = frame.f_code
        kind = _kinds.get(code.co_filename) or _kind(code.co_filename)
        if kind == _TORCH:
            _read_torch_frame(found, frame, code)
        else:
            if dynamo and found.graph is None:
                found.graph = _graph(code)
            if found.variables is None and _takes_params(code):
                found.variables = frame.f_locals
            if kind == _USER:
                found.file, found.line = code.co_filename, frame.f_lineno
                return found
            library = library or frame
        frame = frame.f_back
    if library is not None:
        found.file, found.line = library.f_code.co_filename, library.f_lineno
    return found


def _read_torch_frame(found: Stack, frame: FrameType, code: CodeType) -> None:
    qualname = code.co_qualname
    if found.unit is None:
        finder = _finders[qualname] if qualname in _finders else _finder(qualname)
        if finder is not None:
            found.unit = finder(frame.f_locals)
    if code.co_filename.endswith("distributed_c10d.py") and "." not in qualname:
        found.api = qualname
    if found.variables is None and "bucket" in code.co_varnames[: code.co_argcount]:
        found.variables = frame.f_locals


def _takes_params(code: CodeType) -> bool:
    arguments = code.co_varnames[: code.co_argcount]
    return "bucket" in arguments or "params" in arguments


# -- compiled graphs -------------------------------------------------------------------------------------------------------

_graphs: dict[int, tuple[CodeType, str | None]] = {}


def _graph(code: CodeType) -> str | None:
    """The id (`0/0`) of the compiled graph whose code this is; None for ordinary code. Kept per code object."""
    known = _graphs.get(id(code))
    if known is None:
        known = _graphs[id(code)] = code, _compiled_as(code)
    return known[1]


def _compiled_as(code: CodeType) -> str | None:
    originals, entries = _torch.private("original_code"), _torch.private("cache_entries")
    if originals is None or entries is None or code not in originals:
        return None
    for entry in entries(originals[code]):
        if entry.code is code:
            return str(getattr(entry, "compile_id", "?"))
    return "?"


def forget_graphs() -> None:
    _graphs.clear()


# -- lines -----------------------------------------------------------------------------------------------------------------


def shortened(file: str, line: int, *, folder: str) -> str:
    """`file:line`, relative to `folder` where it is below it."""
    if file.startswith(folder + os.sep):
        file = file[len(folder) + 1 :]
    return f"{file}:{line}"


def deepest_user_line(traceback: TracebackType | None) -> tuple[str, int] | None:
    """Where an exception came from in the user's own code: the innermost such line of its traceback."""
    found = None
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if (_kinds.get(filename) or _kind(filename)) == _USER:
            found = filename, traceback.tb_lineno
        traceback = traceback.tb_next
    return found


def caller(depth: int = 1) -> FrameType | None:
    """The frame `depth` above the caller's, or None where there is no Python below (a thread made in C)."""
    try:
        return sys._getframe(depth + 1)
    except ValueError:
        return None
