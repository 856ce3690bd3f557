"""Finds the model that contains a called module, in the variables of the calling frames.

A module has no reference to its parent, and Python's garbage collector finds the parent only by a
search through all objects of the process. But code that calls `model.encoder(x)` has `model` in a
variable, in an attribute of an object (`self.model`), or in a global of its file. The search visits
a limited number of values and modules, however many objects the process has.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice, repeat
from operator import is_
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from torchwhere.hooks import python_stack

_MOST_FRAMES = 32
# The limits for one call:
_MOST_VALUES = 400  # variables and attributes
_MOST_INSIDE = 64  # values in one container or object
_MOST_MODULES = 400  # modules that are visited
_MOST_COMPARED = 6_000  # modules that are compared, which takes 15 to 80 ns each
_HOLDS_NO_MODULE = frozenset(
    {str, bytes, int, float, bool, type(None), type, CodeType, FrameType, FunctionType, ModuleType}
)
_CONTAINERS = (list, tuple, set, frozenset, deque)
_READS_LOCALS = frozenset({"locals", "vars", "eval", "exec"})
_LONG_CODE = 1 << 13  # bytes; longer code is not searched for a call of `locals()`
_KEEPS_SNAPSHOT = sys.version_info < (3, 13)  # whether a frame keeps the dictionary of `f_locals`
_OWN_REFERENCES = 3  # to that dictionary: of the frame, of a variable, and of an argument


def enclosing(module: nn.Module, frame: FrameType | None) -> nn.Module:
    """The outermost module that contains `module`, among the variables of a frame and of its
    callers; otherwise `module`."""
    candidates = {id(candidate): candidate for candidate in _modules(_values(frame))}
    return _Search(candidates.values()).outermost_around(module)


class _Search:
    """Searches for a module inside other modules, and visits a limited number of them."""

    def __init__(self, candidates: Iterable[nn.Module]) -> None:
        self._candidates = list(candidates)
        self._left = _MOST_MODULES
        self._compares_left = _MOST_COMPARED

    def outermost_around(self, module: nn.Module) -> nn.Module:
        passed = {id(module)}
        while (outer := self._next_around(module, passed)) is not None:
            passed.add(id(outer))
            module = outer
        return module

    def _next_around(self, module: nn.Module, passed: set[int]) -> nn.Module | None:
        """A module that contains `module` and is not inside it: modules may contain each other."""
        others = [candidate for candidate in self._candidates if id(candidate) not in passed]
        outer = self._holder(module, others)
        is_outside = outer is not None and self._holder(outer, [module]) is None
        return outer if is_outside else None

    def _holder(self, inner: nn.Module, outers: list[nn.Module]) -> nn.Module | None:
        """The first of `outers` that contains `inner`. Searches all of them level by level: a part
        that is called alone is rarely deep."""
        pending = deque((outer, outer) for outer in outers)
        visited: set[int] = set()
        while pending and self._left > 0:
            module, outer = pending.popleft()
            if id(module) in visited:
                continue
            visited.add(id(module))
            children = module.__dict__.get("_modules") or {}
            if any(map(is_, children.values(), repeat(inner, self._compares_left))):
                return outer
            self._compares_left = max(0, self._compares_left - len(children))
            opened = list(islice(children.values(), self._left))
            self._left -= 1 + len(opened)
            pending += [
                (child, outer)
                for child in opened
                if child is not None and child.__dict__.get("_modules")
            ]
        return None


# -- variables of frames ---------------------------------------------------------------------------


def _modules(values: Iterable[Any]) -> Iterator[nn.Module]:
    """The modules among some values and one level inside them: in containers and in the attributes
    of objects."""
    left = _MOST_VALUES
    for value in values:
        left -= 1
        kind = type(value)
        if kind in _HOLDS_NO_MODULE:
            continue
        if issubclass(kind, nn.Module):  # not `isinstance`: that may run code of the value's class
            yield value
            continue
        parts = _parts(value)
        left -= len(parts)
        yield from (part for part in parts if issubclass(type(part), nn.Module))
        if left <= 0:
            return


def _parts(value: Any) -> list[Any]:
    if type(value) in _CONTAINERS:
        return list(islice(value, _MOST_INSIDE))
    if issubclass(type(value), (type, torch.Tensor)):
        return []
    try:
        inside = value if type(value) is dict else object.__getattribute__(value, "__dict__")
    except AttributeError:
        return []
    return list(islice(inside.values(), _MOST_INSIDE)) if type(inside) is dict else []


def _values(start: FrameType | None) -> Iterator[Any]:
    """The variables of a frame and of its callers, innermost first, and the globals of the user's
    files."""
    visited: set[int] = set()  # ids of globals
    for frame in islice(python_stack.outwards(start), _MOST_FRAMES):
        yield from _variables(frame)
        if id(frame.f_globals) not in visited and python_stack.is_users(frame.f_code.co_filename):
            visited.add(id(frame.f_globals))
            yield from list(islice(frame.f_globals.values(), _MOST_VALUES))


def _variables(frame: FrameType) -> list[Any]:
    """The values of the variables of a running function.

    Before Python 3.13 a frame keeps the dictionary that `f_locals` returns, with all values, until
    the frame ends. So this function removes the values again, and no object lives longer.
    `locals()` returns the same dictionary, so this function skips frames whose code calls it. It
    also skips a traced frame: a debugger writes the dictionary back to the variables.
    """
    code = frame.f_code
    if (
        not code.co_flags & inspect.CO_OPTIMIZED
        or frame.f_trace is not None
        or (_KEEPS_SNAPSHOT and _reads_locals(code))
    ):
        return []
    variables = frame.f_locals
    values = list(variables.values())
    if _KEEPS_SNAPSHOT and sys.gettrace() is None and sys.getrefcount(variables) == _OWN_REFERENCES:
        for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
            variables.pop(name, None)
    return values


def _reads_locals(code: CodeType) -> bool:
    """Whether a function may call `locals` or a similar function, and keep the dictionary. A method
    with such a name does not count."""
    if _READS_LOCALS.isdisjoint(code.co_names):
        return False
    if len(code.co_code) > _LONG_CODE:
        return True
    loaded = (
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    )
    return not _READS_LOCALS.isdisjoint(loaded)
