"""The phases of a framework: parts of its training loop, and methods of its objects.

A framework reports the start and the end of a part in different callbacks, and leaves out some
ends, for example after an error. At most one part is open: beginning a part ends the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchwhere.api.annotate import phase


class LoopPhases:
    """Begins and ends the phases of a training loop, one at a time."""

    def __init__(self) -> None:
        self._open: phase | None = None
        self._name = ""

    def begin(self, name: str) -> None:
        """Begin a phase, and end the one before. Does nothing if this phase is open."""
        if name != self._name:
            self.end()
            self._open, self._name = phase(name), name
            self._open.__enter__()

    def end(self) -> None:
        """End the phase that is open, if any."""
        if self._open is not None:
            self._open.__exit__()
        self._open, self._name = None, ""


def wrap_method(owner: Any, method: str, name: str) -> Callable[[], None]:
    """Put a method of one object into a phase. Returns a function that restores the object."""
    before = vars(owner).get(method)
    wrapper = phase(name)(getattr(owner, method))
    setattr(owner, method, wrapper)

    def restore() -> None:
        if vars(owner).get(method) is not wrapper:  # the program has replaced it
            return
        if before is None:
            delattr(owner, method)
        else:
            setattr(owner, method, before)

    return restore
