"""The current state of a run: its ranks, the missing ones, and totals over all of them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from torchwhere.diagnose.doctor.verdict import State
from torchwhere.diagnose.live.ranks import RankNow


@dataclass(frozen=True, slots=True)
class RunNow:
    """The result of one poll of a run's folder."""

    folder: str
    t_ns: int  # wall clock of the poll
    ranks: tuple[RankNow, ...] = ()
    world_size: int = 0
    missing: tuple[int, ...] = ()
    caveats: tuple[str, ...] = ()  # boxes that cannot be read
    unread: int = 0  # boxes that were not polled yet
    problem: str | None = None  # why the poll found no run: none yet, or the folder was deleted

    @property
    def culprits(self) -> list[RankNow]:
        """Ranks that others wait for, that stalled by themselves, that died or were stopped."""
        return [rank for rank in self.ranks if is_culprit(rank)]

    @property
    def waiting(self) -> list[RankNow]:
        return [rank for rank in self.ranks if rank.waits_for]

    @property
    def steps_per_s(self) -> float | None:
        """The median over the ranks."""
        speeds = [rank.steps_per_s for rank in self.ranks if rank.steps_per_s is not None]
        return statistics.median(speeds) if speeds else None

    @property
    def is_over(self) -> bool:
        """Whether no rank runs any more."""
        return bool(self.ranks) and not self.unread and all(_has_ended(rank) for rank in self.ranks)

    @property
    def troubled(self) -> tuple[tuple[int, str], ...]:
        """Ranks in trouble with their states: ask the doctor again when this changes."""
        return tuple(
            (rank.rank, str(rank.state))
            for rank in self.ranks
            if rank.is_trouble or _has_ended(rank)
        )

    def to_dict(self) -> dict[str, Any]:
        speed = self.steps_per_s
        return {
            "folder": self.folder,
            "t_ns": self.t_ns,
            "world_size": self.world_size,
            "missing": list(self.missing),
            "steps_per_s": None if speed is None else round(speed, 4),
            "stalled": [rank.rank for rank in self.ranks if rank.is_stalled],
            "culprits": [rank.rank for rank in self.culprits],
            "is_over": self.is_over,
            "unread": self.unread,
            "caveats": list(self.caveats),
            "problem": self.problem,
            "ranks": [rank.to_dict() for rank in self.ranks],
        }


def is_culprit(rank: RankNow) -> bool:
    """Whether the rank seems to cause the trouble: a rank that waits for another one does not."""
    if rank.is_blamed or rank.state is State.STOPPED:
        return True
    return (rank.is_stalled or rank.state is State.DEAD) and not rank.waits_for


def _has_ended(rank: RankNow) -> bool:
    return rank.state in (State.DEAD, State.FINISHED)
