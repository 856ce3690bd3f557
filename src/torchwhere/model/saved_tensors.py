"""What an autograd node has saved for its backward, and whether it still has it. Unpacks nothing:
that could run a forward.

A backward without `retain_graph` frees what each node saved once the node has run. Nodes and edges
stay. A node that saves no tensor (an addition) looks the same before and after: of a graph made of
such nodes alone it cannot be told.
"""

from __future__ import annotations

import weakref
from typing import Any

# a custom function has its own class
_names: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


def _saved_names(node: Any) -> tuple[str, ...]:
    kind = type(node)
    found = _names.get(kind)
    if found is None:
        found = _names[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
    return found


def holds_saved(node: Any) -> bool:
    """Whether a node has a tensor that it saved."""
    try:
        return any(_is_filled(getattr(node, name)) for name in _saved_names(node))
    except RuntimeError:  # freed: the node has run
        return False


def is_freed(node: Any) -> bool:
    """Whether a node saved tensors and has them no longer."""
    names = _saved_names(node)
    if not names or holds_saved(node):
        return False
    try:
        # nothing is there: never saved, or freed, and only then it is an error to ask
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
