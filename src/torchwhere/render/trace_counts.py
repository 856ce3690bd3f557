"""Counts the events of a trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class TraceCounts:
    """Counts what was written."""

    slices: int = 0
    instants: int = 0
    flows: int = 0
    counters: int = 0
    unfinished: int = 0
    ranks: list[int] = field(default_factory=list)
    has_modules: bool = False

    @property
    def events(self) -> int:
        return self.slices + self.instants + self.flows + self.counters

    def to_dict(self) -> dict[str, Any]:
        names = ("events", "slices", "instants", "flows", "counters", "unfinished")
        return {name: getattr(self, name) for name in names} | {"ranks": self.ranks}
