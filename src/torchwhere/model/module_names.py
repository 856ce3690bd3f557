"""Names of modules, parameters and buffers, as in the `state_dict` of the unwrapped model.

`NameTable` holds the names for a watch and for the public functions; it refers to modules weakly.
A tied module or parameter has several names, in the order of a depth-first walk; the first one is
shown. A root is named in one of two ways:

- `add_root` names everything below it at once, about 7 us a module.
- `begin_root` names only the root, and each `continue_walks` names a limited number of modules: the
  first call of a module must not wait for the names of 10,000 others. A method that needs all
  names, such as `param_names`, finishes the walk.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from torchwhere.core.worker_pool import gc_paused
from torchwhere.model.fsdp_states import managed, unit_classes
from torchwhere.model.module_walk import ModuleWalk, child_name, walk
from torchwhere.model.tensors import TensorNames, WeakSlot

_FEW_ROOTS = 64
_MOST_UNKNOWN = 4096  # tensors without a known name whose requests are counted
_MOST_AT_ONCE = 64  # modules that a first call names: about 0.2 ms


class _ModuleRef(weakref.ref[object]):
    """A weak reference to a module, with the ids of the tensors that the module had at the last
    scan.

    A subclass takes half the time of a closure for each module.
    """

    __slots__ = ("key", "root", "tensors")
    key: int
    root: _Root | None  # the root that gave the module its names
    tensors: list[int]


@dataclass(slots=True, eq=False)
class _Root:
    """A model, and how far its modules and tensors are named."""

    ref: weakref.ref[nn.Module]
    prefix: str
    walk: ModuleWalk | None = None  # the walk over its modules, until it is over
    is_scanned: bool = False  # whether its tensors have names too
    is_dropped: bool = False  # whether the names that it gave are out of date


@dataclass(slots=True, eq=False)
class NameTable:
    """The names of all modules and parameters below some roots; of buffers only if `buffers` is
    set.

    The key of a module is its id. A weak reference removes the entry when the module is freed.
    The table has no references to tensors (see `tensors.py`).
    """

    modules: dict[int, list[str]] = field(default_factory=dict)
    params: TensorNames = field(default_factory=lambda: TensorNames("_parameters"))
    buffers: TensorNames | None = None
    # called with a module whose provisional name differs from its name
    on_renamed: Callable[[nn.Module], None] = lambda _module: None
    _alive: dict[int, _ModuleRef] = field(default_factory=dict)
    _roots: dict[int, _Root] = field(default_factory=dict)  # by the id of the module
    _has_dropped: bool = False  # whether names of a dropped root may be left
    _most_roots: int = _FEW_ROOTS  # if there are so many roots, dead ones are removed
    _unfinished: deque[_Root] = field(default_factory=deque)  # roots with a walk that is not over
    _provisional: dict[int, str] = field(default_factory=dict)  # by the id of the module
    _foreign: set[int] = field(default_factory=set)  # ids of modules in no root
    # by the id of a tensor without a known name: how often its name was requested
    _unknown: dict[int, int] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)  # of the walks
    _on_death: Callable[[weakref.ref[object]], None] = field(init=False)

    def __post_init__(self) -> None:
        # One bound method for all: one for each of 300,000 modules takes time and memory.
        self._on_death = self._forget

    # -- roots -------------------------------------------------------------------------------------

    def add_root(self, root: nn.Module, *, prefix: str = "") -> None:
        """Name everything below a root now."""
        if self._unfinished:  # if two roots contain a module, the name below the older one is first
            self.complete()
        self._scan(self._new_root(root, prefix))

    def begin_root(self, root: nn.Module, *, prefix: str = "") -> None:
        """Name a root now, and the modules below it when `continue_walks` is called."""
        with self._lock:
            new = self._new_root(root, prefix)
            self._add(root, prefix, new)
            self._walk_again(new)

    def _new_root(self, module: nn.Module, prefix: str) -> _Root:
        if len(self._roots) >= self._most_roots:
            self._remove_dead_roots()
            self._most_roots = 2 * len(self._roots) + _FEW_ROOTS
        root = self._roots[id(module)] = _Root(weakref.ref(module), prefix)
        return root

    def _remove_dead_roots(self) -> None:
        self._roots = {key: root for key, root in self._roots.items() if root.ref() is not None}

    def drop_root(self, module: nn.Module) -> None:
        """Forget the names of a root and of everything below it: it is part of a larger model.

        This takes the same time for a root of any size. The names are out of date from now on, and
        the next walk that reaches a module replaces them.
        """
        with self._lock:
            root = self._roots.pop(id(module))
            root.walk, root.is_dropped = None, True
            self._has_dropped = True

    def prefix_of(self, module: nn.Module) -> str | None:
        """The prefix of the names of a root; None if the module is not a root."""
        root = self._roots.get(id(module))
        return root.prefix if root is not None and root.ref() is module else None

    def roots(self) -> list[tuple[str, nn.Module]]:
        """The roots that are alive, each with the prefix of its names."""
        alive = ((root.prefix, root.ref()) for root in list(self._roots.values()))
        return [(prefix, module) for prefix, module in alive if module is not None]

    # -- in parts ----------------------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """Whether all walks are over. Then a module without a name was in no root when they ran."""
        return not self._unfinished

    def begin_refresh(self) -> None:
        """Start to walk over all roots again, for modules that were added to them."""
        with self._lock:
            self._remove_dead_roots()
            for root in self._roots.values():
                if root.walk is None:
                    self._walk_again(root)

    def _walk_again(self, root: _Root) -> None:
        module = root.ref()
        if module is not None:
            root.walk = ModuleWalk(module, prefix=root.prefix)
            self._unfinished.append(root)

    def continue_walks(self) -> None:
        """Name a limited number of further modules, the oldest root first."""
        left = _MOST_AT_ONCE
        with self._lock, gc_paused():
            while self._unfinished and left > 0:
                root = self._unfinished[0]
                if root.walk is not None and root.ref() is not None:
                    for name, module in root.walk.next(left):
                        self._add(module, name, root)
                        left -= 1
                if root.walk is None or root.ref() is None or root.walk.is_over:
                    root.walk = None
                    self._unfinished.popleft()
            if not self._unfinished:
                self._provisional.clear()

    def set_provisional(self, module: nn.Module, name: str) -> None:
        """Store the name that a module has until a walk finds its name."""
        if self._unfinished:
            self._ref_of(module)
            self._provisional[id(module)] = name

    def complete(self) -> None:
        """Finish all walks, and name the tensors of all roots."""
        roots = list(self._roots.values())
        if self._unfinished or self._has_dropped or not all(root.is_scanned for root in roots):
            with self._lock:
                for root in list(self._roots.values()):
                    if root.walk is not None or not root.is_scanned:
                        self._scan(root)
                self._end_walks()

    # -- all at once -------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Name modules and tensors that were added or replaced below the roots."""
        self._remove_dead_roots()
        for root in list(self._roots.values()):
            self._scan(root)
        self._end_walks()

    def _end_walks(self) -> None:
        """Every module has its names: forget the provisional ones and those of dropped roots."""
        self._unfinished.clear()
        self._provisional.clear()
        if self._has_dropped:
            for key, ref in list(self._alive.items()):
                if _is_out_of_date(ref):
                    self.modules.pop(key, None)
                    self._forget_tensors(ref)
            self._has_dropped = False

    def _scan(self, root: _Root) -> None:
        module = root.ref()
        root.walk, root.is_scanned = None, True
        if module is None:
            return
        add, name_tensors, classes, units = self._add, self._name_tensors, unit_classes(), []
        has_buffers = self.buffers is not None
        with gc_paused():
            for name, part in walk(module, prefix=root.prefix):
                ref = add(part, name, root)
                if part._parameters or (has_buffers and part._buffers) or ref.tensors:
                    name_tensors(part, ref, f"{name}." if name else "")
                if classes and isinstance(part, classes):
                    units.append(part)
            for unit in units:
                self._name_managed(unit)

    def _add(self, module: nn.Module, name: str, root: _Root) -> _ModuleRef:
        key = id(module)
        if self._provisional and self._provisional.pop(key, name) != name:
            self.on_renamed(module)
        names, ref = self.modules.get(key), self._ref_of(module)
        if names is not None and self._has_dropped and _is_out_of_date(ref):
            self._forget_tensors(ref)
            names = None
        if names is None:
            self.modules[key], ref.root = [name], root
        elif name not in names:
            names.append(name)
        return ref

    def _ref_of(self, module: nn.Module) -> _ModuleRef:
        """The weak reference to a module: its id is valid only while it lives."""
        ref = self._alive.get(id(module))
        if ref is None:
            ref = self._alive[id(module)] = _ModuleRef(module, self._on_death)
            ref.key, ref.root, ref.tensors = id(module), None, []
        return ref

    def _name_tensors(self, module: nn.Module, ref: _ModuleRef, start: str) -> None:
        """Name the tensors that a module has now."""
        now = self.params.add_all(ref, module, start)
        if self.buffers is not None:
            now += self.buffers.add_all(ref, module, start)
        if ref.tensors and ref.tensors != now:
            missing = set(ref.tensors).difference(now)
            now += [key for key in missing if self.params.is_managed(key)]
            self._remove_tensors(ref, missing.difference(now))
        ref.tensors = now

    def _name_managed(self, unit: nn.Module) -> None:
        """Name the tensors of an FSDP unit that are in no module now: FSDP replaces the tensors of
        its modules."""
        for param, owners in managed(unit):
            holders = [
                (self._alive.get(id(module)), key, self.modules.get(id(module), ()))
                for module, key in owners
            ]
            named: list[tuple[str, WeakSlot]] = [
                (child_name(name, key), (ref, key))
                for ref, key, names in holders
                if ref is not None
                for name in names
            ]
            ids = self.params.add_managed(param, named) if named else []
            for ref, _, _ in holders:
                if ref is not None:
                    ref.tensors += [key for key in ids if key not in ref.tensors]

    def _remove_tensors(self, ref: _ModuleRef, tensors: Iterable[int]) -> None:
        for key in tensors:
            self.params.remove_slots(key, ref)
            if self.buffers is not None:
                self.buffers.remove_slots(key, ref)

    def _forget_tensors(self, ref: _ModuleRef) -> None:
        self._remove_tensors(ref, ref.tensors)
        ref.tensors = []

    def _forget(self, dead: weakref.ref[object]) -> None:
        key = dead.key  # type: ignore[attr-defined]
        if self._alive.get(key) is dead:
            ref = self._alive.pop(key)
            self.modules.pop(key, None)
            self._foreign.discard(key)
            self._provisional.pop(key, None)
            self._remove_tensors(ref, ref.tensors)

    # -- look-up -----------------------------------------------------------------------------------

    def names_so_far(self, module: nn.Module) -> list[str]:
        """The names of a module that the walks have found until now."""
        names = self.modules.get(id(module))
        if names is None or (self._has_dropped and _is_out_of_date(self._alive[id(module)])):
            return []
        return names

    def known_names(self, module: nn.Module) -> list[str]:
        """All names of a module in a root. Does not search for modules that were added later."""
        names = self.names_so_far(module)
        if not names and self._unfinished:
            self.complete()
            names = self.names_so_far(module)
        return names

    def module_names(self, module: nn.Module) -> list[str]:
        """All names of a module. Searches the roots for an unknown module once: it may have been
        added later."""
        names = self.known_names(module)
        if not names and id(module) not in self._foreign:
            self.refresh()
            names = self.names_so_far(module)
            if not names:
                self._foreign.add(id(module))
                self._ref_of(module)
        return names

    def known_param_names(self, param: torch.Tensor) -> list[str]:
        """All names of a parameter in a root. Does not search for parameters that were added
        later."""
        names = self.params.of(param)
        if not names or self._has_dropped:
            self.complete()
            names = self.params.of(param)
        return names

    def param_names(self, param: torch.Tensor) -> list[str]:
        """All names of a parameter. Searches the roots for an unknown parameter at some of the
        requests: it may have been added later."""
        return self.known_param_names(param) or self._search_again(param)

    def _search_again(self, tensor: torch.Tensor) -> list[str]:
        """Scan the models for a tensor at the 1st, 8th, 64th ... request for its name.

        This table has no reference to the tensor, so it cannot notice that the tensor was freed and
        another one has its id. The next scan finds the other one, whatever causes the scan.
        """
        requests = self._unknown[id(tensor)] = self._unknown.get(id(tensor), 0) + 1
        if requests.bit_count() > 1 or requests.bit_length() % 3 != 1:
            return []
        self.refresh()
        names = self.params.of(tensor)
        if names or len(self._unknown) > _MOST_UNKNOWN:
            self._unknown.clear()
        return names

    def forget_roots(self) -> None:
        """Forget the roots and keep the names. No search finds further modules after this."""
        self._roots.clear()
        self._unfinished.clear()

    def clear(self) -> None:
        """Forget everything."""
        for table in (
            self.modules,
            self.params,
            self._alive,
            self._roots,
            self._unfinished,
            self._provisional,
            self._foreign,
            self._unknown,
            self.buffers,
        ):
            if table is not None:
                table.clear()


def _is_out_of_date(ref: _ModuleRef) -> bool:
    return ref.root is not None and ref.root.is_dropped


def owner(param: str) -> str:
    """The name of the module that holds a parameter."""
    return param.rpartition(".")[0]
