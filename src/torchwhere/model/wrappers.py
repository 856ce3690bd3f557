"""Recognizes modules that wrap another module: DDP, FSDP1, `torch.compile`, activation
checkpointing, DeepSpeed's engine, Lightning.

A wrapper has the name of the module inside it. Classes are compared by name, so that no library is
imported.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

# The name of a wrapper's class: its package, and the attribute that holds the wrapped module. The
# module of the class is not compared: releases move classes, and some of the modules are private.
_WRAPPERS = {
    "DistributedDataParallel": ("torch", "module"),
    "DataParallel": ("torch", "module"),
    "FullyShardedDataParallel": ("torch", "_fsdp_wrapped_module"),
    "ActivationWrapper": ("torch", "_checkpoint_wrapped_module"),
    "OptimizedModule": ("torch", "_orig_mod"),
    "DeepSpeedEngine": ("deepspeed", "module"),
    "_FabricModule": ("lightning", "_forward_module"),
    "_LightningModuleWrapperBase": ("pytorch_lightning", "module"),
}
# The names that `named_parameters()` returns contain these parts.
WRAPPER_PARTS = frozenset(attribute for _, attribute in _WRAPPERS.values())


def wrapped_key(cls: type) -> str | None:
    """The attribute that holds the wrapped module; None if the class is not a wrapper."""
    for base in cls.__mro__:
        package, attribute = _WRAPPERS.get(base.__qualname__, (None, None))
        if package is not None and str(base.__module__).partition(".")[0] == package:
            return attribute
    return None


def wrapped(module: nn.Module) -> nn.Module | None:
    """The module inside a wrapper; None if `module` is not a wrapper."""
    attribute = wrapped_key(type(module))
    # Lightning's Fabric wraps a wrapper: the strategy's DDP inside its own module.
    inner = module._modules.get(attribute) if attribute is not None else None
    return inner if isinstance(inner, nn.Module) else None


def inwards(module: nn.Module) -> Iterator[nn.Module]:
    """A module, and the modules that it wraps, from the outside to the inside."""
    inner: nn.Module | None = module
    while inner is not None:
        yield inner
        inner = wrapped(inner)


def innermost(module: nn.Module) -> nn.Module:
    """The user's own module, inside all wrappers."""
    while (inner := wrapped(module)) is not None:
        module = inner
    return module


def loaded_class(module: str, name: str) -> Any:
    """A class, if the job has imported its module. Otherwise an empty tuple, which `isinstance`
    takes for a class without objects."""
    return getattr(sys.modules.get(module), name, ())


def enclosed(function: Any) -> Iterator[Any]:
    """The values of the closure of a function, without those that are not set yet."""
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):
            yield cell.cell_contents


def live_objects(cls: type) -> Iterator[Any]:
    """The objects of a class that are alive, without those of subclasses. Each of them refers to
    its class."""
    return (thing for thing in gc.get_referrers(cls) if isinstance(thing, cls))


# -- the outermost module --------------------------------------------------------------------------
# The search visits every object that the garbage collector tracks. It is slow, so no hook uses it.


_MOST_LEVELS = 32


def topmost(module: nn.Module) -> nn.Module:
    """The outermost module that contains `module`, at most 32 levels above it."""
    for _ in range(_MOST_LEVELS):
        parent = _parent(module)
        if parent is None:
            return module
        module = parent
    return module


def _parent(module: nn.Module) -> nn.Module | None:
    """A module that has `module` as a child: its `_modules` dictionary refers to the child, and its
    `__dict__` refers to that dictionary."""
    for children in gc.get_referrers(module):
        if type(children) is not dict:
            continue
        for holder in gc.get_referrers(children):
            parent = _owner(holder, children)
            if parent is not None and parent is not module:
                return parent
    return None


def _owner(holder: object, children: object) -> nn.Module | None:
    """The module that owns a `_modules` dictionary. A module without a `__dict__` object refers to
    the dictionary itself."""
    if isinstance(holder, nn.Module):
        return holder if holder._modules is children else None
    if type(holder) is not dict or holder.get("_modules") is not children:
        return None
    return next((o for o in gc.get_referrers(holder) if isinstance(o, nn.Module)), None)
