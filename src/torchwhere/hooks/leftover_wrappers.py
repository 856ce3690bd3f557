"""Wrappers of ours that could not be taken off at the end of a watch: somebody else had wrapped
them by then.

They do nothing from then on. When that somebody puts back what they found, it is such a wrapper;
the next watch looks through it, and what it takes back at its own end is what was there before us.
"""

from __future__ import annotations

import weakref
from typing import Any

_inside: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def retire(wrapper: Any, original: Any) -> None:
    """Remember what is inside a wrapper that stays."""
    _inside[wrapper] = original


def unwrap(function: Any) -> Any:
    """A function, or what is inside it if it is a wrapper that was left."""
    while (inside := _inside.get(function)) is not None:
        function = inside
    return function
