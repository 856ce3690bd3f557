"""Gives functions that describe live objects access to the names and places of the running watch.

A session sets them when it begins and removes them when it ends. So this package need not import
the packages that watch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchwhere.core.place import Place
from torchwhere.model.module_names import NameTable


@dataclass(frozen=True, slots=True)
class Watched:
    """The names of a watch, and a function that returns the place of an autograd node: the module
    call that made it."""

    names: NameTable
    place_of_node: Callable[[Any], Place]


_running: Watched | None = None


def running() -> Watched | None:
    """The data of the running watch; None without a watch."""
    return _running


def begin(watched: Watched) -> None:
    """Publish the data of a watch."""
    global _running
    _running = watched


def end() -> None:
    """Remove the data of the watch."""
    global _running
    _running = None
