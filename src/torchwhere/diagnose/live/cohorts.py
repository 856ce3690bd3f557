"""Groups ranks in the same state: a screen has fifty lines, a job ten thousand ranks.

Ranks that progress are grouped by state and step, since their exact place is chance. Stalled ranks
are grouped by place and last collective.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torchwhere.core.grouping import grouped
from torchwhere.diagnose.live.ranks import RankNow

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
    where = place.pass_, place.module, place.line
    last = (issued.op, rank.group, issued.number) if issued is not None else None
    return rank.state, rank.is_blamed, rank.is_stalled, rank.step, where, last, rank.detail
