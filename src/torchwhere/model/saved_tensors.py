"""Checks whether an autograd node still has the tensors that it saved for backward. Unpacks no
saved tensor: that could run a forward.

A backward without `retain_graph` frees the saved tensors of each node after the node has run. Nodes
and edges stay. A node that saves no tensor, for example an addition, is the same before and after.
So nothing shows whether a graph of only such nodes was freed.
"""

from __future__ import annotations

import weakref
from typing import Any

# by the class of a node; weak, because each custom function has a class of its own
_names: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


def _saved_names(node: Any) -> tuple[str, ...]:
    cls = type(node)
    names = _names.get(cls)
    if names is None:
        names = _names[cls] = tuple(name for name in dir(cls) if name.startswith("_raw_saved_"))
    return names


def holds_saved(node: Any) -> bool:
    """Whether a node still has a saved tensor."""
    try:
        return any(_is_filled(getattr(node, name)) for name in _saved_names(node))
    except RuntimeError:  # freed: the node has run
        return False


def is_freed(node: Any) -> bool:
    """Whether a node saved tensors that are freed now."""
    names = _saved_names(node)
    if not names or holds_saved(node):
        return False
    try:
        # Nothing is saved now. Only if it was freed, reading it raises an error.
        for name in names:
            getattr(node, name)
            getattr(node, name.replace("_raw", "", 1), None)
    except RuntimeError:
        return True
    return False


def _is_filled(saved: Any) -> bool:
    if isinstance(saved, (tuple, list)):
        return any(map(_is_filled, saved))
    return getattr(saved, "data", None) is not None
