"""What was seen of a rank's process from outside: is it there, does it run, where is its Python stack.

Boxes say what a rank did; they cannot say that it is gone. Whoever looked at the processes, just now or while the job ran, says
so here. `processes.py` looks; this file only holds what was found, and knows how to keep it in a file.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

STOPPED = frozenset("Tt")


@dataclass(frozen=True, slots=True)
class Sighting:
    """One process. `alive` is None where nobody could look: another host, another user."""

    alive: bool | None = None
    state: str | None = None  # as /proc says: R running, S sleeping, D in the kernel, T stopped, Z ended
    ended: str | None = None  # how it ended, where that is known
    stack: tuple[str, ...] = ()  # `file:line in function`, innermost first, of the main thread
    alive_ns: int | None = None  # wall clock of the last look that found it alive

    @property
    def is_stopped(self) -> bool:
        return self.alive is True and self.state in STOPPED

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Sighting:
        """Of whatever a file holds: what has not the right form is left out."""
        alive, state, ended, stack = (value.get(name) for name in ("alive", "state", "ended", "stack"))
        alive_ns = value.get("alive_ns")
        return cls(
            alive=alive if isinstance(alive, bool) else None,
            state=state if isinstance(state, str) else None,
            ended=ended if isinstance(ended, str) else None,
            stack=tuple(line for line in stack if isinstance(line, str)) if isinstance(stack, list) else (),
            alive_ns=alive_ns if isinstance(alive_ns, int) else None,
        )
