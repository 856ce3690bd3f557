"""Remembers wrappers that could not be removed at the end of a watch because another library had
wrapped them.

Such a wrapper does nothing. If the other library later restores the function that it found, that
function is such a wrapper: the next watch wraps the original inside it, and restores that original
at its end.
"""

from __future__ import annotations

import weakref
from typing import Any

_inside: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def retire(wrapper: Any, original: Any) -> None:
    """Remember the original of a wrapper that stays."""
    _inside[wrapper] = original


def unwrap(function: Any) -> Any:
    """The original inside a leftover wrapper; any other function as it is."""
    while (inside := _inside.get(function)) is not None:
        function = inside
    return function
