"""What the running watch knows about live objects, for those who describe them.

The session puts it here when it begins and takes it back when it ends; nothing in `inspect/`
imports anything above it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchwhere.core.place import Place
from torchwhere.model.module_names import NameTable


@dataclass(frozen=True, slots=True)
class Watched:
    """The names the watch has given, and the place it knows for an autograd node: the module call
    that made it."""

    names: NameTable
    place_of_node: Callable[[Any], Place]


_running: Watched | None = None


def running() -> Watched | None:
    """What the running watch knows; None while nobody watches."""
    return _running


def begin(watched: Watched) -> None:
    global _running
    _running = watched


def end() -> None:
    global _running
    _running = None
