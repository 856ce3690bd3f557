"""Names of modules and parameters: as in the user's own `state_dict`, whatever wraps the model.

A wrapper (DDP, FSDP1, `torch.compile`, activation checkpointing, DeepSpeed's engine ...) is transparent: it has the name of
what it wraps, and leaves nothing in the names below it. A tied module or parameter has all its names; the first is the one
shown. Modules and parameters are held weakly.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

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
_MOST_ALIASES = 8  # a module shared more often than this is not walked into again: names stay linear in modules


def wrapped(module: nn.Module) -> nn.Module | None:
    """The module inside a wrapper; None if `module` is not one."""
    for cls in type(module).__mro__:
        attribute = _WRAPPERS.get(f"{cls.__module__}.{cls.__qualname__}")
        if attribute is not None:
            inner = module._modules.get(attribute)
            # Lightning's Fabric wraps a wrapper: the strategy's DDP inside its own module.
            return inner if isinstance(inner, nn.Module) else None
    return None


def walk(root: nn.Module, *, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module below and with `root`, every alias, with wrappers' prefixes removed. Iterative: any depth."""
    seen: dict[int, int] = {}
    pending: list[tuple[str, nn.Module]] = [(prefix, root)]
    while pending:
        name, module = pending.pop()
        yield name, module
        seen[id(module)] = seen.get(id(module), 0) + 1
        if seen[id(module)] > _MOST_ALIASES:
            continue
        inner = wrapped(module)
        children = [(f"{name}.{key}" if name else key, child) for key, child in module._modules.items()]
        pending += [(name, c) if c is inner else (n, c) for n, c in reversed(children) if c is not None]


@dataclass(slots=True, eq=False)
class NameTable:
    """The names of everything below the roots it was given. `modules` and `params` map an object's id to its names."""

    modules: dict[int, list[str]] = field(default_factory=dict)
    params: dict[int, list[str]] = field(default_factory=dict)
    _alive: dict[int, weakref.ref[object]] = field(default_factory=dict)
    _roots: list[tuple[str, weakref.ref[nn.Module]]] = field(default_factory=list)
    _strangers: set[int] = field(default_factory=set)

    def add_root(self, root: nn.Module, *, prefix: str = "") -> None:
        self._roots.append((prefix, weakref.ref(root)))
        self._scan(root, prefix)

    def _scan(self, root: nn.Module, prefix: str) -> None:
        for name, module in walk(root, prefix=prefix):
            self._remember(self.modules, module, name)
            for key, param in module._parameters.items():
                if param is not None:
                    self._remember(self.params, param, f"{name}.{key}" if name else key)

    def _remember(self, table: dict[int, list[str]], thing: object, name: str) -> None:
        key = id(thing)
        names = table.get(key)
        if names is None:
            table[key] = [name]
            # An id is only good while its object lives: a new object may get the same one.
            self._alive[key] = weakref.ref(thing, self._forgetter(key))
        elif name not in names:
            names.append(name)

    def _forgetter(self, key: int) -> Callable[[object], None]:
        return lambda _dead: self._forget(key)

    def _forget(self, key: int) -> None:
        self.modules.pop(key, None)
        self.params.pop(key, None)
        self._alive.pop(key, None)
        self._strangers.discard(key)

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
        for prefix, ref in self._roots:
            root = ref()
            if root is not None:
                self._scan(root, prefix)
        if id(thing) not in table:
            self._strangers.add(id(thing))
            self._alive.setdefault(id(thing), weakref.ref(thing, self._forgetter(id(thing))))
        return table.get(id(thing), [])


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
