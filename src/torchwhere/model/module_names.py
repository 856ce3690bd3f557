"""Names of modules, parameters and buffers: as in the user's own `state_dict`, whatever wraps the
model.

A wrapper (DDP, FSDP1, `torch.compile`, activation checkpointing, DeepSpeed's engine ...) is
transparent: it has the name of what it wraps, and leaves nothing in the names below it. A tied
module or parameter has all its names; the first is the one shown. Everything is held weakly.
`NameTable` is what the engine asks; `Names` in `naming.py` is what people hold.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from torchwhere.core.gc_pause import gc_paused
from torchwhere.model.fsdp_states import managed, unit_classes
from torchwhere.model.tensors import Slot, TensorNames

# The class (by name, so that nothing is imported for this) and the attribute that holds the wrapped
# module.
_WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "_fsdp_wrapped_module"
    ),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": (
        "_checkpoint_wrapped_module"
    ),
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "deepspeed.runtime.engine.DeepSpeedEngine": "module",
    "lightning.fabric.wrappers._FabricModule": "_forward_module",
    "pytorch_lightning.overrides.base._LightningModuleWrapperBase": "module",
}
WRAPPER_PARTS = frozenset(_WRAPPERS.values())  # what wrappers leave in the names torch itself gives
# a module shared more often than this is not walked into again: names stay linear in modules
_MOST_ALIASES = 8
_FEW_ROOTS = 64
_MOST_UNKNOWN = 4096  # tensors of no known model that are remembered


def _wrapped_as(cls: type) -> str | None:
    """The attribute under which modules of this class hold the one they wrap."""
    for base in cls.__mro__:
        attribute = _WRAPPERS.get(f"{base.__module__}.{base.__qualname__}")
        if attribute is not None:
            return attribute
    return None


def wrapped(module: nn.Module) -> nn.Module | None:
    """The module inside a wrapper; None if `module` is not one."""
    attribute = _wrapped_as(type(module))
    # Lightning's Fabric wraps a wrapper: the strategy's DDP inside its own module.
    inner = module._modules.get(attribute) if attribute is not None else None
    return inner if isinstance(inner, nn.Module) else None


def innermost(module: nn.Module) -> nn.Module:
    """The user's own module, inside all wrappers."""
    while (inner := wrapped(module)) is not None:
        module = inner
    return module


def walk(root: nn.Module, *, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module below and with `root`, every alias, with wrappers' prefixes removed. Iterative:
    any depth."""
    seen: dict[int, int] = {}
    wrapped_as: dict[type, str | None] = {}
    pending: list[tuple[str, nn.Module]] = [(prefix, root)]
    while pending:
        name, module = pending.pop()
        yield name, module
        times = seen[id(module)] = seen.get(id(module), 0) + 1
        children = module._modules
        if not children or times > _MOST_ALIASES:
            continue
        cls = type(module)
        if cls not in wrapped_as:
            wrapped_as[cls] = _wrapped_as(cls)
        through = wrapped_as[cls]
        for key, child in reversed(children.items()):
            if child is not None:
                pending.append(
                    (name if key == through else f"{name}.{key}" if name else key, child)
                )


class _Ref(weakref.ref[object]):
    """A weak reference to a module, with the ids of the tensors that the module had at the last
    walk.

    A subclass, and no closure for each module: that took twice the time.
    """

    __slots__ = ("key", "tensors")
    key: int
    tensors: list[int]


@dataclass(slots=True, eq=False)
class NameTable:
    """The names of everything below the roots it was given. Buffers only where `buffers` is given.

    Modules are found by id, and a weak reference tells when one is gone. Tensors get no reference
    (see `tensors.py`).
    """

    modules: dict[int, list[str]] = field(default_factory=dict)
    params: TensorNames = field(default_factory=lambda: TensorNames("_parameters"))
    buffers: TensorNames | None = None
    _alive: dict[int, _Ref] = field(default_factory=dict)
    _roots: list[tuple[str, weakref.ref[nn.Module]]] = field(default_factory=list)
    _most_roots: int = _FEW_ROOTS  # as soon as there are so many, those that are gone are taken out
    _strangers: set[int] = field(default_factory=set)
    # by the id of a tensor: how often it was asked for in vain
    _unknown: dict[int, int] = field(default_factory=dict)
    _on_death: Callable[[weakref.ref[object]], None] = field(init=False)

    def __post_init__(self) -> None:
        # one for all: a bound method for each of 300,000 modules takes time and memory
        self._on_death = self._forget

    def add_root(self, root: nn.Module, *, prefix: str = "") -> None:
        if len(self._roots) >= self._most_roots:
            self._roots = [(known, ref) for known, ref in self._roots if ref() is not None]
            self._most_roots = 2 * len(self._roots) + _FEW_ROOTS
        self._roots.append((prefix, weakref.ref(root)))
        self._scan(root, prefix)

    def drop_root(self, root: nn.Module) -> None:
        """Take the names of a root and all below it back: it has turned out to be part of a bigger
        one."""
        self._roots = [(prefix, ref) for prefix, ref in self._roots if ref() is not root]
        for _, module in walk(root):
            self.modules.pop(id(module), None)
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                self.params.drop(tensor)
                if self.buffers is not None:
                    self.buffers.drop(tensor)

    def roots(self) -> list[tuple[str, nn.Module]]:
        """The roots that are alive, each with the prefix of its names."""
        return [(prefix, root) for prefix, ref in self._roots if (root := ref()) is not None]

    # -- walking -----------------------------------------------------------------------------------

    def _scan(self, root: nn.Module, prefix: str) -> None:
        remember, note, classes, units = self._remember, self._note, unit_classes(), []
        has_buffers = self.buffers is not None
        with gc_paused():
            for name, module in walk(root, prefix=prefix):
                ref = remember(module, name)
                if module._parameters or (has_buffers and module._buffers) or ref.tensors:
                    note(module, ref, f"{name}." if name else "")
                if classes and isinstance(module, classes):
                    units.append(module)
            for unit in units:
                self._note_managed(unit)

    def _remember(self, module: nn.Module, name: str) -> _Ref:
        key = id(module)
        names = self.modules.get(key)
        if names is None:
            self.modules[key] = [name]
            return self._alive.get(key) or self._refer(module)
        if name not in names:
            names.append(name)
        return self._alive[key]

    def _refer(self, module: nn.Module) -> _Ref:
        """An id is only good while its module lives: a new one may get the same."""
        ref = self._alive[id(module)] = _Ref(module, self._on_death)
        ref.key, ref.tensors = id(module), []
        return ref

    def _note(self, module: nn.Module, ref: _Ref, start: str) -> None:
        """Take in the tensors that a module has now."""
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
        """FSDP has tensors that are in a module at some times only: take in those that are in none
        now."""
        for param, owners in managed(unit):
            known = [
                (self._alive.get(id(module)), key, self.modules.get(id(module), ()))
                for module, key in owners
            ]
            named: list[tuple[str, Slot]] = [
                (f"{name}.{key}" if name else key, (ref, key))
                for ref, key, names in known
                if ref is not None
                for name in names
            ]
            ids = self.params.add_managed(param, named) if named else []
            for ref, _, _ in known:
                if ref is not None:
                    ref.tensors += [key for key in ids if key not in ref.tensors]

    def _leave(self, ref: _Ref, tensors: Iterable[int]) -> None:
        for key in tensors:
            self.params.leave(key, ref)
            if self.buffers is not None:
                self.buffers.leave(key, ref)

    def _forget(self, dead: weakref.ref[object]) -> None:
        key = dead.key  # type: ignore[attr-defined]
        if self._alive.get(key) is dead:
            ref = self._alive.pop(key)
            self.modules.pop(key, None)
            self._strangers.discard(key)
            self._leave(ref, ref.tensors)

    # -- asking ------------------------------------------------------------------------------------

    def module_names(self, module: nn.Module) -> list[str]:
        """All names of a module. One that is not known may have been added since: look again,
        once."""
        names = self.modules.get(id(module))
        if names is None and id(module) not in self._strangers:
            self.refresh()
            names = self.modules.get(id(module))
            if names is None:
                self._strangers.add(id(module))
                self._alive.get(id(module)) or self._refer(module)
        return names or []

    def param_names(self, param: torch.Tensor) -> list[str]:
        """All names of a parameter. One that is not known may have been added since: look again,
        now and then."""
        return self.params.of(param) or self._look_again(param)

    def _look_again(self, tensor: torch.Tensor) -> list[str]:
        """Walk the models for a tensor when it is asked for the 1st, 8th, 64th ... time.

        Nothing may refer to the tensor, so nothing tells that it is gone and that another one has
        its id. That one is found by the next walk, whatever causes it.
        """
        asked = self._unknown[id(tensor)] = self._unknown.get(id(tensor), 0) + 1
        if asked.bit_count() > 1 or asked.bit_length() % 3 != 1:
            return []
        self.refresh()
        found = self.params.of(tensor)
        if found or len(self._unknown) > _MOST_UNKNOWN:
            self._unknown.clear()
        return found

    def refresh(self) -> None:
        """Take in what has been added or replaced below the roots."""
        self._roots = [(prefix, ref) for prefix, ref in self._roots if ref() is not None]
        for prefix, ref in self._roots:
            root = ref()
            if root is not None:
                self._scan(root, prefix)

    def look_no_further(self) -> None:
        """What is known now is all there is: the roots are not asked again."""
        self._roots.clear()

    def clear(self) -> None:
        """Forget everything."""
        for table in (
            self.modules,
            self.params,
            self._alive,
            self._roots,
            self._strangers,
            self._unknown,
            self.buffers,
        ):
            if table is not None:
                table.clear()


def owner(param: str) -> str:
    """The module that holds a parameter, by name."""
    return param.rpartition(".")[0]


def topmost(module: nn.Module, *, most: int = 32) -> nn.Module:
    """The outermost module that contains `module`: its root, although it was called on its own.

    Follows who holds it (a parent's `_modules` dict, held by the parent's `__dict__`). Looks at
    every object the garbage collector knows: done once for a module called outside any other, never
    again for it.
    """
    for _ in range(most):
        parent = _parent(module)
        if parent is None:
            return module
        module = parent
    return module


def _parent(module: nn.Module) -> nn.Module | None:
    for holder in gc.get_referrers(module):
        if type(holder) is not dict:
            continue
        for owner_dict in gc.get_referrers(holder):
            if type(owner_dict) is dict and owner_dict.get("_modules") is holder:
                parent = next(
                    (o for o in gc.get_referrers(owner_dict) if isinstance(o, nn.Module)), None
                )
                if parent is not None and parent is not module:
                    return parent
            elif (
                isinstance(owner_dict, nn.Module)
                and owner_dict is not module
                and owner_dict._modules is holder
            ):
                return owner_dict
    return None
