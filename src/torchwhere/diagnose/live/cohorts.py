"""Ranks that do the same, put together: a screen has fifty lines, a job ten thousand ranks.

Ranks that move are together when they are in the same state and step: where exactly each was seen
is chance. Ranks that stand still are together when they stand in the same place after the same
collective.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torchwhere.diagnose.live.ranks import RankNow

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class LiveCohort:
    """Ranks that do the same."""

    key: Key
    ranks: tuple[RankNow, ...]  # at least one

    @property
    def lead(self) -> RankNow:
        """Who stands for all: of those that stand still, the one that has stood longest."""
        return max(self.ranks, key=lambda rank: rank.age_s)

    @property
    def is_moving(self) -> bool:
        return not self.ranks[0].is_trouble and len(self.ranks) > 1


def cohorts(ranks: Iterable[RankNow]) -> list[LiveCohort]:
    """In the order in which each was first met."""
    found: dict[Key, list[RankNow]] = {}
    for rank in ranks:
        found.setdefault(_key(rank), []).append(rank)
    return [LiveCohort(key, tuple(members)) for key, members in found.items()]


def single(rank: RankNow) -> LiveCohort:
    return LiveCohort(("rank", rank.rank), (rank,))


def _key(rank: RankNow) -> Key:
    if not rank.is_trouble:
        return rank.state, rank.step
    place, issued = rank.place, rank.issued
    where = place.pass_, place.module, place.line
    last = (issued.op, rank.group, issued.number) if issued is not None else None
    return rank.state, rank.is_blamed, rank.is_stalled, rank.step, where, last, rank.detail
