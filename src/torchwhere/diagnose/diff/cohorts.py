"""The results of a comparison, and `Cohorts`, which splits ranks where they diverge.

`Cohorts` starts with all ranks together. The caller passes, in program order, the item of each
rank at one position. Ranks of a cohort with different items are split. A rank without an item at
that position stays with the majority of its cohort, since its item is unknown.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from torchwhere.core.events import Event
from torchwhere.core.grouping import grouped
from torchwhere.core.results import Fact, Shown, plain, plain_fields
from torchwhere.diagnose.diff.sequences import NumberedCalls

MOST_DIVERGENCES = 20  # listed; a comparison counts the others


@dataclass(frozen=True, slots=True)
class ComparedItem:
    """One line of a log, or one event. `number` is that of the line in its file, or of the record
    in its box."""

    number: int
    text: str
    event: Event | None = None

    def to_dict(self) -> dict[str, Any]:
        names = ("number", "text") if self.event is None else ("number", "text", "event")
        return plain_fields(self, *names)


@dataclass(frozen=True, slots=True, repr=False)
class Version(Shown):
    """The item of some ranks where they diverge, None if they have none there. `after` holds the
    next items of the first of them."""

    ranks: tuple[int, ...]
    entry: ComparedItem | None
    after: tuple[ComparedItem, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return plain_fields(self)


@dataclass(frozen=True, slots=True, repr=False)
class Divergence(Shown):
    """A position where ranks that were equal until then differ. `kind` is the sort of difference:

    `flow`: different events or lines; `value`: equal lines or notes with different numbers in
    them; `group`: one collective with different shapes, dtypes or operations.
    """

    kind: str
    step: int | None
    before: tuple[ComparedItem, ...]  # the last equal items
    versions: tuple[Version, ...]  # most ranks first
    facts: tuple[Fact, ...] = ()

    @property
    def minority(self) -> Version:
        """The version of the smallest cohort: look at it first."""
        return self.versions[-1]

    @property
    def remarks(self) -> tuple[str, ...]:
        """The facts as sentences."""
        return tuple(map(str, self.facts))

    def to_dict(self) -> dict[str, Any]:
        return plain_fields(self, "kind", "step", "before", "versions", "remarks")


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Shown):
    """The cohorts of equal ranks in their logs or events, and their divergences in program
    order."""

    ranks: tuple[int, ...]
    compared: int  # lines or events of all ranks
    cohorts: tuple[tuple[int, ...], ...]  # ranks that are equal throughout, largest first
    divergences: tuple[Divergence, ...] = ()
    # of events: the first and the last compared step
    steps: tuple[int, int] | None = None
    facts: tuple[Fact, ...] = ()

    @property
    def remarks(self) -> tuple[str, ...]:
        """The facts as sentences."""
        return tuple(map(str, self.facts))

    def to_dict(self) -> dict[str, Any]:
        return {
            **plain_fields(self, "ranks", "compared", "steps", "cohorts"),
            "partings": plain(self.divergences),
            "remarks": list(self.remarks),
        }


class Cohorts:
    """Cohorts of ranks. A cohort can be split and never merged."""

    def __init__(self, cohorts: Iterable[Iterable[int]]) -> None:
        self._cohort_of: dict[int, int] = {}
        self._ranks: list[list[int]] = []
        for ranks in cohorts:
            self._add(list(ranks))

    def _add(self, ranks: list[int]) -> None:
        for rank in ranks:
            self._cohort_of[rank] = len(self._ranks)
        self._ranks.append(ranks)

    @property
    def all(self) -> tuple[tuple[int, ...], ...]:
        """The cohorts, the largest first, then by rank."""
        return in_order(tuple(sorted(ranks)) for ranks in self._ranks)

    @property
    def can_split(self) -> bool:
        """Whether some cohort has several ranks."""
        return len(self._ranks) < len(self._cohort_of)

    def split(self, items: Mapping[int, Hashable]) -> list[list[list[int]]]:
        """Split cohorts whose ranks have different items at one position.

        Ranks that are not in `items` stay with the majority of their cohort.

        Returns:
            For each cohort that was split, the ranks of each item, the majority first.
        """
        splits = []
        for cohort in sorted({self._cohort_of[rank] for rank in items}):
            versions = _by_item(self._ranks[cohort], items)
            if len(versions) > 1:
                most, *others = sorted(versions, key=lambda ranks: (-len(ranks), ranks))
                splits.append([most, *others])
                leaving = {rank for other in others for rank in other}
                self._ranks[cohort] = [rank for rank in self._ranks[cohort] if rank not in leaving]
                for other in others:
                    self._add(other)
        return splits

    def differing(self, items: Mapping[int, Hashable]) -> list[list[int]]:
        """The ranks of each item in the first cohort whose ranks have different items; splits
        nothing."""
        by_cohort = (_by_item(cohort, items) for cohort in self.all)
        return next((versions for versions in by_cohort if len(versions) > 1), [])


def _by_item(ranks: Iterable[int], items: Mapping[int, Hashable]) -> list[list[int]]:
    return list(grouped((items[rank], rank) for rank in ranks if rank in items).values())


def in_order(cohorts: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """The largest first, then by rank."""
    return tuple(sorted(cohorts, key=lambda ranks: (-len(ranks), ranks)))


# -- calls by number -------------------------------------------------------------------------------
# Takes the numbered calls of each rank of a group, or the messages of a pair, gives the first
# number at which their shapes, dtypes or operations differ although they must be equal.


class ComparedCall(NamedTuple):
    """The call of one rank in a collective, or in a message."""

    record: int
    step: int
    agreed: int  # the id of what all ranks must agree on


def first_mismatch(calls: Mapping[int, NumberedCalls]) -> dict[int, ComparedCall] | None:
    """The calls, by rank, of the first number at which the ranks do not agree."""
    if len(calls) < 2:
        return None
    first, *others = calls.values()
    if all(
        np.array_equal(other.numbers, first.numbers) and np.array_equal(other.agreed, first.agreed)
        for other in others
    ):
        return None
    numbers = np.concatenate([of_rank.numbers for of_rank in calls.values()])
    agreed = np.concatenate([of_rank.agreed for of_rank in calls.values()])
    order = np.argsort(numbers, kind="stable")
    numbers, agreed = numbers[order], agreed[order]
    starts = np.flatnonzero(np.append(True, numbers[1:] != numbers[:-1]))
    wrong = np.flatnonzero(
        np.minimum.reduceat(agreed, starts) != np.maximum.reduceat(agreed, starts)
    )
    if not len(wrong):
        return None
    number = int(numbers[starts[wrong[0]]])
    return {
        rank: ComparedCall(
            int(of_rank.records[at]), int(of_rank.steps[at]), int(of_rank.agreed[at])
        )
        for rank, of_rank in calls.items()
        for at in np.flatnonzero(of_rank.numbers == number)[:1]
    }
