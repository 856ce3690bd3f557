"""The current state of a run: its ranks, the missing ones, and totals over all of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torchwhere.blackbox.issued import Issued
from torchwhere.core.grouping import grouped
from torchwhere.core.results import plain_fields
from torchwhere.diagnose.doctor.verdict import State
from torchwhere.diagnose.live.open_call import first_open
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
    def waits_in(self) -> list[Issued]:
        """The collectives that the waiting ranks wait in, each one once."""
        by_rank = {rank.rank: rank for rank in self.ranks}
        calls: dict[tuple[object, ...], Issued] = {}
        for rank in self.waiting:
            call = rank.arrived
            # thousands of ranks may share one tuple of thousands
            if call is None or (key := (call.stream, call.number, id(rank.waits_for))) in calls:
                continue
            awaited = [by_rank[other] for other in rank.waits_for if other in by_rank]
            calls[key] = first_open(rank, call, awaited)
        return list({(call.stream, call.number): call for call in calls.values()}.values())

    @property
    def steps_per_s(self) -> float | None:
        """The median over the ranks."""
        speeds = [rank.steps_per_s for rank in self.ranks if rank.steps_per_s is not None]
        return statistics.median(speeds) if speeds else None

    @property
    def is_over(self) -> bool:
        """Whether all ranks have ended."""
        return bool(self.ranks) and not self.unread and all(_has_ended(rank) for rank in self.ranks)

    @property
    def ended_unfinished(self) -> bool:
        """Whether no process is left, and no rank has finished."""
        return self.is_over and all(rank.state is State.DEAD for rank in self.ranks)

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
            **plain_fields(self, "folder", "t_ns", "world_size", "missing"),
            "steps_per_s": None if speed is None else round(speed, 4),
            "stalled": [rank.rank for rank in self.ranks if rank.is_stalled],
            "culprits": [rank.rank for rank in self.culprits],
            **plain_fields(self, "is_over", "unread", "caveats", "problem", "ranks"),
        }


def is_culprit(rank: RankNow) -> bool:
    """Whether the rank seems to cause the trouble: a rank that waits for another one does not."""
    if rank.is_blamed or rank.state is State.STOPPED:
        return True
    return (rank.is_stalled or rank.state is State.DEAD) and not rank.waits_for


def _has_ended(rank: RankNow) -> bool:
    return rank.state in (State.DEAD, State.FINISHED)


# -- ranks in the same state -----------------------------------------------------------------------
# A screen has fifty lines, a job ten thousand ranks. Ranks that progress are grouped by state and
# step, since their exact place is chance. Stalled ranks are grouped by place and last collective.

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class LiveCohort:
    """Ranks in the same state."""

    key: Key
    ranks: tuple[RankNow, ...]  # at least one

    @property
    def lead(self) -> RankNow:
        """The rank that represents the cohort: the one that has been still longest."""
        return max(self.ranks, key=lambda rank: rank.age_s)

    @property
    def is_moving(self) -> bool:
        return not self.ranks[0].is_trouble and len(self.ranks) > 1


def cohorts(ranks: Iterable[RankNow]) -> list[LiveCohort]:
    """The cohorts in the order of their first ranks."""
    by_key = grouped((_key(rank), rank) for rank in ranks)
    return [LiveCohort(key, tuple(members)) for key, members in by_key.items()]


def single(rank: RankNow) -> LiveCohort:
    return LiveCohort(("rank", rank.rank), (rank,))


def _key(rank: RankNow) -> Key:
    if not rank.is_trouble:
        return rank.state, rank.step
    place, issued = rank.place, rank.issued
    where = place.pass_, place.module, place.full_line
    last = (issued.op, rank.group, issued.number) if issued is not None else None
    return rank.state, rank.is_blamed, rank.is_stalled, rank.step, where, last, rank.detail
