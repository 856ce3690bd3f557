"""Walks over the modules of a model, with the name of each.

`walk` lists all modules. `ModuleWalk` does the same in parts: it stops after a number of modules
and continues later, and keeps no module alive in between. `name_below` searches for one module and
visits a limited number of others.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import compress, islice, repeat
from operator import is_, length_hint

from torch import nn

from torchwhere.model.wrappers import wrapped_key

# The children of a shared module are visited under at most so many of its names: the number of
# names stays linear in the number of modules.
_MOST_ALIASES = 8
# The limits of `name_below`: together less than 0.5 ms.
_MOST_COMPARED = 6_000  # modules
_MOST_OPENED = 1_000  # modules whose children are compared


@dataclass(slots=True, eq=False)
class _Level:
    """A module whose children are being visited."""

    module: weakref.ref[nn.Module]
    name: str
    wrapped: str | None  # the key of the child that has the same name
    keys: Iterator[str]  # of the children to visit next
    taken: int = 0  # the number of keys taken so far
    is_last: bool = False  # whether these are all keys

    @property
    def is_over(self) -> bool:
        return self.is_last and not length_hint(self.keys)

    def take_keys(self, children: Mapping[str, object], most: int) -> None:
        """Take the keys of the next children, once the children before them are visited. Listing
        the keys of 10,000 children at once takes 0.5 ms."""
        if not length_hint(self.keys):
            keys = list(islice(children, self.taken, min(self.taken + most, sys.maxsize)))
            self.keys = iter(keys)
            self.taken += len(keys)
            self.is_last = self.taken >= len(children)


class ModuleWalk:
    """Visits the modules of a model, depth first, in several parts, without recursion.

    It visits a module once for each of its names. If the model changes between two parts, the walk
    finds the changes that it has not passed yet.
    """

    __slots__ = ("_levels", "_start", "_visits", "_wrapped_keys")

    def __init__(self, root: nn.Module, *, prefix: str = "") -> None:
        self._start: tuple[str, weakref.ref[nn.Module]] | None = (prefix, weakref.ref(root))
        self._levels: list[_Level] = []
        self._visits: dict[int, int] = {}  # by the id of a module that has children
        self._wrapped_keys: dict[type, str | None] = {}

    @property
    def is_over(self) -> bool:
        """Whether every module was visited, or the root was freed."""
        while self._levels and self._levels[-1].is_over:
            self._levels.pop()
        return self._start is None and not self._levels

    def next(self, most: int) -> Iterator[tuple[str, nn.Module]]:
        """Visit at most this many further modules. Exhaust the iterator before the next part."""
        if self._start is not None:
            (name, ref), self._start = self._start, None
            root = ref()
            if root is None:
                return
            most -= 1
            yield name, root
            self._descend(root, name)
        while most > 0 and not self.is_over:
            level = self._levels[-1]
            module = level.module()
            if module is None:
                self._levels.pop()
                continue
            start = f"{level.name}." if level.name else ""
            children = children_of(module)
            level.take_keys(children, most)
            for key in islice(level.keys, most):
                child = children.get(key)
                if child is not None:
                    most -= 1
                    name = level.name if key == level.wrapped else start + key
                    yield name, child
                    if child._modules and self._descend(child, name):
                        break

    def _descend(self, module: nn.Module, name: str) -> bool:
        """Visit the children of a module next, unless it has too many names already."""
        visits = self._visits[id(module)] = self._visits.get(id(module), 0) + 1
        if visits > _MOST_ALIASES:
            return False
        cls = type(module)
        if cls not in self._wrapped_keys:
            self._wrapped_keys[cls] = wrapped_key(cls)
        self._levels.append(_Level(weakref.ref(module), name, self._wrapped_keys[cls], iter(())))
        return True


def walk(root: nn.Module, *, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """All modules of a model, with each of their names. The names contain no parts of wrappers."""
    return ModuleWalk(root, prefix=prefix).next(sys.maxsize)


def name_below(outer: nn.Module, inner: nn.Module) -> str | None:
    """The shortest name of a module relative to one that contains it.

    Searches level by level. Returns None if the module is not found, or not within the limits.
    """
    pending = deque([("", outer)])
    visited: set[int] = set()
    compared = opened = 0
    while pending and compared < _MOST_COMPARED:
        name, module = pending.popleft()
        if id(module) in visited:
            continue
        visited.add(id(module))
        children = children_of(module)
        wrapped = wrapped_key(type(module))
        key = _key_of(inner, children, _MOST_COMPARED - compared)
        if key is not None:
            return name if key == wrapped else child_name(name, key)
        compared += len(children)
        looked_into = list(islice(children.items(), _MOST_OPENED - opened))
        opened += len(looked_into)
        pending.extend(
            (name if key == wrapped else child_name(name, key), child)
            for key, child in looked_into
            if child is not None and child._modules
        )
    return None


def _key_of(inner: nn.Module, children: Mapping[str, object], most: int) -> str | None:
    """The key of a module among the first children of another module. Takes 15 to 80 ns a child."""
    is_inner = map(is_, children.values(), repeat(inner, most))
    return next(compress(children, is_inner), None)


def check_module(value: object, argument: str, *, or_none: bool = False, advice: str = "") -> None:
    """Raise a `TypeError` if a value is not a module. `argument` names it: `comms(model)`."""
    if not isinstance(value, nn.Module) and not (or_none and value is None):
        expected = "torch.nn.Module or None" if or_none else "torch.nn.Module"
        raise TypeError(f"{argument}: expected a {expected}, got {type(value).__name__}{advice}")


def child_name(module: str, key: str) -> str:
    """The name of a child or tensor of a module, from the module's name and the key."""
    return f"{module}.{key}" if module else key


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The children of a module by key. A ScriptModule has no dictionary of them."""
    children = module._modules
    return children if isinstance(children, dict) else dict(children.items())
