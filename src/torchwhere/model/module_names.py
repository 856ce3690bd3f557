"""Names of modules, parameters and buffers, as in the user's own `state_dict`, whatever wraps the
model.

`NameTable` holds the names for a watch and for the public functions; it refers to modules weakly.
A tied module or parameter has several names, in the order of a depth-first walk; the first one is
shown. A root is named in one of two ways:

- `add_root` names everything below it at once, about 7 us a module.
- `begin_root` names the root alone, and each `go_on` a limited number of modules: the first call of
  a module must not wait for the names of 10,000 others. A method that needs all names, such as
  `param_names`, finishes the walk.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from torchwhere.core.gc_pause import gc_paused
from torchwhere.model.fsdp_states import managed, unit_classes
from torchwhere.model.module_walk import ModuleWalk, below, walk
from torchwhere.model.tensors import TensorNames, WeakSlot

_FEW_ROOTS = 64
_MOST_UNKNOWN = 4096  # tensors that are in no known model and are remembered
_MOST_AT_ONCE = 64  # modules that a first call names: about 0.2 ms


class _ModuleRef(weakref.ref[object]):
    """A weak reference to a module, with the ids of the tensors that the module had at the last
    scan.

    A subclass takes half the time of a closure for each module.
    """

    __slots__ = ("key", "tensors")
    key: int
    tensors: list[int]


@dataclass(slots=True, eq=False)
class _Root:
    """A model, and how much of it is named."""

    ref: weakref.ref[nn.Module]
    prefix: str
    walk: ModuleWalk | None = None  # over its modules, while it is not over
    is_scanned: bool = False  # its tensors have names too


@dataclass(slots=True, eq=False)
class NameTable:
    """The names of everything below some roots. Buffers only with `buffers`.

    A module is found by its id, and a weak reference removes the entry when the module is gone.
    Tensors get no reference (see `tensors.py`).
    """

    modules: dict[int, list[str]] = field(default_factory=dict)
    params: TensorNames = field(default_factory=lambda: TensorNames("_parameters"))
    buffers: TensorNames | None = None
    # called with a module that had a provisional name and has another name now
    on_renamed: Callable[[nn.Module], None] = lambda _module: None
    _alive: dict[int, _ModuleRef] = field(default_factory=dict)
    _roots: list[_Root] = field(default_factory=list)
    _most_roots: int = _FEW_ROOTS  # with so many roots, those that are gone are removed
    _unfinished: deque[_Root] = field(default_factory=deque)  # roots whose walk is not over
    _provisional: dict[int, str] = field(default_factory=dict)  # by the id of the module
    _foreign: set[int] = field(default_factory=set)  # ids of modules that are in no root
    # by the id of a tensor: how often its name was asked for without success
    _unknown: dict[int, int] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)  # of the walks
    _on_death: Callable[[weakref.ref[object]], None] = field(init=False)

    def __post_init__(self) -> None:
        # one for all: a bound method for each of 300,000 modules takes time and memory
        self._on_death = self._forget

    # -- roots -------------------------------------------------------------------------------------

    def add_root(self, root: nn.Module, *, prefix: str = "") -> None:
        """Name everything below a root now."""
        if self._unfinished:  # the older root comes first in the names of a module that both have
            self.complete()
        self._scan(self._new_root(root, prefix))

    def begin_root(self, root: nn.Module, *, prefix: str = "") -> None:
        """Name a root now, and the modules below it when `go_on` is called."""
        with self._lock:
            self._remember(root, prefix)
            self._walk_again(self._new_root(root, prefix))

    def _new_root(self, module: nn.Module, prefix: str) -> _Root:
        if len(self._roots) >= self._most_roots:
            self._remove_dead_roots()
            self._most_roots = 2 * len(self._roots) + _FEW_ROOTS
        root = _Root(weakref.ref(module), prefix)
        self._roots.append(root)
        return root

    def _remove_dead_roots(self) -> None:
        self._roots = [root for root in self._roots if root.ref() is not None]

    def drop_root(self, module: nn.Module) -> None:
        """Forget the names of a root and of everything below it: it is part of a bigger model."""
        with self._lock:
            for root in self._roots:
                if root.ref() is module:
                    root.walk = None
            self._roots = [root for root in self._roots if root.ref() is not module]
        for _, part in walk(module):
            self.modules.pop(id(part), None)
            for tensor in (*part._parameters.values(), *part._buffers.values()):
                self.params.drop(tensor)
                if self.buffers is not None:
                    self.buffers.drop(tensor)

    def roots(self) -> list[tuple[str, nn.Module]]:
        """The roots that are alive, each with the prefix of its names."""
        alive = ((root.prefix, root.ref()) for root in self._roots)
        return [(prefix, module) for prefix, module in alive if module is not None]

    # -- in parts ----------------------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """Whether no walk is under way: a module without a name is in no root, as far as known."""
        return not self._unfinished

    def begin_refresh(self) -> None:
        """Start to walk over all roots again, for modules that came to them since."""
        with self._lock:
            self._remove_dead_roots()
            for root in self._roots:
                if root.walk is None:
                    self._walk_again(root)

    def _walk_again(self, root: _Root) -> None:
        module = root.ref()
        if module is not None:
            root.walk = ModuleWalk(module, prefix=root.prefix)
            self._unfinished.append(root)

    def go_on(self) -> None:
        """Name a limited number of further modules, the oldest root first."""
        left = _MOST_AT_ONCE
        with self._lock, gc_paused():
            while self._unfinished and left > 0:
                root = self._unfinished[0]
                if root.walk is not None and root.ref() is not None:
                    for name, module in root.walk.next(left):
                        self._remember(module, name)
                        left -= 1
                if root.walk is None or root.ref() is None or root.walk.is_over:
                    root.walk = None
                    self._unfinished.popleft()
            if not self._unfinished:
                self._provisional.clear()

    def set_provisional(self, module: nn.Module, name: str) -> None:
        """Note the name that a module has until a walk finds its name."""
        if self._unfinished:
            self._alive.get(id(module)) or self._refer(module)
            self._provisional[id(module)] = name

    def complete(self) -> None:
        """Finish all walks, and name the tensors of all roots."""
        if self._unfinished or not all(root.is_scanned for root in self._roots):
            with self._lock:
                for root in list(self._roots):
                    if root.walk is not None or not root.is_scanned:
                        self._scan(root)
                self._unfinished.clear()
                self._provisional.clear()

    # -- all at once -------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Name what was added or replaced below the roots."""
        self._remove_dead_roots()
        for root in list(self._roots):
            self._scan(root)
        self._unfinished.clear()
        self._provisional.clear()

    def _scan(self, root: _Root) -> None:
        module = root.ref()
        root.walk, root.is_scanned = None, True
        if module is None:
            return
        remember, note, classes, units = self._remember, self._note, unit_classes(), []
        has_buffers = self.buffers is not None
        with gc_paused():
            for name, part in walk(module, prefix=root.prefix):
                ref = remember(part, name)
                if part._parameters or (has_buffers and part._buffers) or ref.tensors:
                    note(part, ref, f"{name}." if name else "")
                if classes and isinstance(part, classes):
                    units.append(part)
            for unit in units:
                self._note_managed(unit)

    def _remember(self, module: nn.Module, name: str) -> _ModuleRef:
        key = id(module)
        if self._provisional and self._provisional.pop(key, name) != name:
            self.on_renamed(module)
        names = self.modules.get(key)
        if names is None:
            self.modules[key] = [name]
            return self._alive.get(key) or self._refer(module)
        if name not in names:
            names.append(name)
        return self._alive[key]

    def _refer(self, module: nn.Module) -> _ModuleRef:
        """An id is only valid while its module lives: a new module may get the same id."""
        ref = self._alive[id(module)] = _ModuleRef(module, self._on_death)
        ref.key, ref.tensors = id(module), []
        return ref

    def _note(self, module: nn.Module, ref: _ModuleRef, start: str) -> None:
        """Name the tensors that a module has now."""
        now: list[int] = []
        for key, tensor in module._parameters.items():
            if tensor is not None:
                self.params.add(tensor, start + key, (ref, key))
                now.append(id(tensor))
        if self.buffers is not None:
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    self.buffers.add(buffer, start + key, (ref, key))
                    now.append(id(buffer))
        if ref.tensors and ref.tensors != now:
            before = set(ref.tensors).difference(now)
            now += [key for key in before if self.params.is_managed(key)]
            self._leave(ref, before.difference(now))
        ref.tensors = now

    def _note_managed(self, unit: nn.Module) -> None:
        """Name the tensors of an FSDP unit that no module holds now: FSDP exchanges the tensors of
        its modules."""
        for param, owners in managed(unit):
            holders = [
                (self._alive.get(id(module)), key, self.modules.get(id(module), ()))
                for module, key in owners
            ]
            named: list[tuple[str, WeakSlot]] = [
                (below(name, key), (ref, key))
                for ref, key, names in holders
                if ref is not None
                for name in names
            ]
            ids = self.params.add_managed(param, named) if named else []
            for ref, _, _ in holders:
                if ref is not None:
                    ref.tensors += [key for key in ids if key not in ref.tensors]

    def _leave(self, ref: _ModuleRef, tensors: Iterable[int]) -> None:
        for key in tensors:
            self.params.leave(key, ref)
            if self.buffers is not None:
                self.buffers.leave(key, ref)

    def _forget(self, dead: weakref.ref[object]) -> None:
        key = dead.key  # type: ignore[attr-defined]
        if self._alive.get(key) is dead:
            ref = self._alive.pop(key)
            self.modules.pop(key, None)
            self._foreign.discard(key)
            self._provisional.pop(key, None)
            self._leave(ref, ref.tensors)

    # -- asking ------------------------------------------------------------------------------------

    def known_names(self, module: nn.Module) -> list[str]:
        """All names of a module in a root. Does not look for modules that were added since."""
        if self._unfinished and id(module) not in self.modules:
            self.complete()
        return self.modules.get(id(module)) or []

    def module_names(self, module: nn.Module) -> list[str]:
        """All names of a module. Looks for an unknown module once: it may have been added since."""
        names = self.known_names(module)
        if not names and id(module) not in self._foreign:
            self.refresh()
            names = self.modules.get(id(module)) or []
            if not names:
                self._foreign.add(id(module))
                self._alive.get(id(module)) or self._refer(module)
        return names

    def known_param_names(self, param: torch.Tensor) -> list[str]:
        """All names of a parameter in a root. Does not look for parameters that were added
        since."""
        names = self.params.of(param)
        if not names:
            self.complete()
            names = self.params.of(param)
        return names

    def param_names(self, param: torch.Tensor) -> list[str]:
        """All names of a parameter. Looks for an unknown one now and then: it may have been added
        since."""
        return self.known_param_names(param) or self._look_again(param)

    def _look_again(self, tensor: torch.Tensor) -> list[str]:
        """Scan the models for a tensor when it is asked for the 1st, 8th, 64th ... time.

        Nothing may refer to the tensor, so nothing tells that it is gone and that another tensor
        has its id. The next scan finds that one, whatever causes the scan.
        """
        asked = self._unknown[id(tensor)] = self._unknown.get(id(tensor), 0) + 1
        if asked.bit_count() > 1 or asked.bit_length() % 3 != 1:
            return []
        self.refresh()
        names = self.params.of(tensor)
        if names or len(self._unknown) > _MOST_UNKNOWN:
            self._unknown.clear()
        return names

    def look_no_further(self) -> None:
        """Forget the roots, and keep the names."""
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


def owner(param: str) -> str:
    """The name of the module that holds a parameter."""
    return param.rpartition(".")[0]
