"""Replaces functions of torch and of other libraries by wrappers, and restores them.

At the end of a watch another library may have wrapped a wrapper of ours. Then our wrapper stays and
does nothing. If the other library later restores the function that it found, that function is our
wrapper: the next watch wraps the original inside it, and restores that original at its end.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from inspect import getattr_static
from typing import Any

_inside: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def retire(wrapper: Any, original: Any) -> None:
    """Remember the original of a wrapper that stays, if the wrapper can be such a key."""
    with contextlib.suppress(TypeError):
        _inside[wrapper] = original


def unwrap(function: Any) -> Any:
    """The original inside a leftover wrapper; any other function as it is. An object that cannot
    be a key of a weak dictionary is not a wrapper of ours."""
    with contextlib.suppress(TypeError):
        while (inside := _inside.get(function)) is not None:
            function = inside
    return function


class Patches:
    """The functions that one hook has replaced."""

    def __init__(self) -> None:
        self._all: list[tuple[Any, str, Any, Any]] = []  # owner, name, original, wrapper

    def replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        """Replace a function of a module or class by the wrapper that `wrap` makes of it. One
        function that several modules have gets one wrapper."""
        original = unwrap(getattr_static(owner, name))
        same = [wrapper for _, _, other, wrapper in self._all if other is original]
        wrapper = same[0] if same else wrap(original)
        self._all.append((owner, name, original, wrapper))
        setattr(owner, name, wrapper)

    def restore(self) -> None:
        """Restore the originals. A wrapper that another library has wrapped stays."""
        while self._all:
            owner, name, original, wrapper = self._all.pop()
            if vars(owner).get(name) is wrapper:
                setattr(owner, name, original)
            else:
                retire(wrapper, original)
