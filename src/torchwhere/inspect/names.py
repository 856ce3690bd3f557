"""Names of modules, parameters and buffers: as in the user's own `state_dict`, whatever wraps the model.

A wrapper (DDP, FSDP1, `torch.compile`, activation checkpointing, DeepSpeed's engine ...) is transparent: it has the name of
what it wraps, and leaves nothing in the names below it. A tied module or parameter has all its names; the first is the one
shown. Everything is held weakly. `NameTable` is what the engine asks; `Names` in `naming.py` is what people hold.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from torchwhere.collector import nothing_collected

# The class (by name, so that nothing is imported for this) and the attribute that holds the wrapped module.
_WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "_fsdp_wrapped_module",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": "_checkpoint_wrapped_module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "deepspeed.runtime.engine.DeepSpeedEngine": "module",
    "lightning.fabric.wrappers._FabricModule": "_forward_module",
    "pytorch_lightning.overrides.base._LightningModuleWrapperBase": "module",
}
WRAPPER_PARTS = frozenset(_WRAPPERS.values())  # what wrappers leave in the names torch itself gives
_MOST_ALIASES = 8  # a module shared more often than this is not walked into again: names stay linear in modules


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
    """Every module below and with `root`, every alias, with wrappers' prefixes removed. Iterative: any depth."""
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
                pending.append((name if key == through else f"{name}.{key}" if name else key, child))


class _Ref(weakref.ref[object]):
    """A weak reference that knows what it stands for. Made in C: a closure for each took twice the time."""

    __slots__ = ("key",)
    key: int


@dataclass(slots=True, eq=False)
class NameTable:
    """The names of everything below the roots it was given, from an object's id. Buffers only where `buffers` is a dict."""

    modules: dict[int, list[str]] = field(default_factory=dict)
    params: dict[int, list[str]] = field(default_factory=dict)
    buffers: dict[int, list[str]] | None = None
    _alive: dict[int, _Ref] = field(default_factory=dict)
    _roots: list[tuple[str, weakref.ref[nn.Module]]] = field(default_factory=list)
    _strangers: set[int] = field(default_factory=set)
    _on_death: Callable[[weakref.ref[object]], None] = field(init=False)

    def __post_init__(self) -> None:
        self._on_death = self._forget  # one for all: a bound method for each of 300,000 things takes time and memory

    def add_root(self, root: nn.Module, *, prefix: str = "") -> None:
        self._roots.append((prefix, weakref.ref(root)))
        self._scan(root, prefix)

    def drop_root(self, root: nn.Module) -> None:
        """Take the names of a root and all below it back: it has turned out to be part of a bigger one."""
        self._roots = [(prefix, ref) for prefix, ref in self._roots if ref() is not root]
        for _, module in walk(root):
            self.modules.pop(id(module), None)
            for thing in (*module._parameters.values(), *module._buffers.values()):
                for table in (self.params, self.buffers or {}):
                    table.pop(id(thing), None)

    def roots(self) -> list[tuple[str, nn.Module]]:
        """The roots that are alive, each with the prefix of its names."""
        return [(prefix, root) for prefix, ref in self._roots if (root := ref()) is not None]

    def _scan(self, root: nn.Module, prefix: str) -> None:
        remember, modules, params, buffers = self.remember, self.modules, self.params, self.buffers
        with nothing_collected():
            for name, module in walk(root, prefix=prefix):
                remember(modules, module, name)
                if module._parameters:
                    start = f"{name}." if name else ""
                    for key, param in module._parameters.items():
                        if param is not None:
                            remember(params, param, start + key)
                if buffers is not None and module._buffers:
                    start = f"{name}." if name else ""
                    for key, buffer in module._buffers.items():
                        if buffer is not None:
                            remember(buffers, buffer, start + key)

    def remember(self, table: dict[int, list[str]], thing: object, name: str) -> None:
        key = id(thing)
        names = table.get(key)
        if names is None:
            table[key] = [name]
            # An id is only good while its object lives: a new object may get the same one.
            ref = self._alive[key] = _Ref(thing, self._on_death)
            ref.key = key
        elif name not in names:
            names.append(name)

    def _forget(self, dead: weakref.ref[object]) -> None:
        key = dead.key  # type: ignore[attr-defined]
        if self._alive.get(key) is dead:
            del self._alive[key]
            self.modules.pop(key, None)
            self.params.pop(key, None)
            self._strangers.discard(key)
            if self.buffers is not None:
                self.buffers.pop(key, None)

    def module_names(self, module: nn.Module) -> list[str]:
        """All names of a module. One that is not known may have been added since: look again, once."""
        names = self.modules.get(id(module))
        return names if names is not None else self._look_again(self.modules, module)

    def param_names(self, param: torch.Tensor) -> list[str]:
        """All names of a parameter."""
        names = self.params.get(id(param))
        return names if names is not None else self._look_again(self.params, param)

    def _look_again(self, table: dict[int, list[str]], thing: object) -> list[str]:
        if id(thing) in self._strangers:
            return []
        self.refresh()
        if id(thing) not in table:
            self._strangers.add(id(thing))
            if id(thing) not in self._alive:
                ref = self._alive[id(thing)] = _Ref(thing, self._on_death)
                ref.key = id(thing)
        return table.get(id(thing), [])

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
        for table in (self.modules, self.params, self._alive, self._roots, self._strangers, self.buffers or {}):
            table.clear()


def owner(param: str) -> str:
    """The module that holds a parameter, by name."""
    return param.rpartition(".")[0]


def topmost(module: nn.Module, *, most: int = 32) -> nn.Module:
    """The outermost module that contains `module`: its root, although it was called on its own.

    Follows who holds it (a parent's `_modules` dict, held by the parent's `__dict__`). Looks at every object the garbage
    collector knows: done once for a module called outside any other, never again for it.
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
                parent = next((o for o in gc.get_referrers(owner_dict) if isinstance(o, nn.Module)), None)
                if parent is not None and parent is not module:
                    return parent
            elif isinstance(owner_dict, nn.Module) and owner_dict is not module and owner_dict._modules is holder:
                return owner_dict
    return None
