"""Finds the outermost module that contains a module, from the objects that refer to it.

The search visits every object that the garbage collector tracks. It is slow, so no hook uses it.
"""

from __future__ import annotations

import gc

from torch import nn


def topmost(module: nn.Module, *, most: int = 32) -> nn.Module:
    """The outermost module that contains `module`, at most `most` levels above it."""
    for _ in range(most):
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
