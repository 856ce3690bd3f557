"""Ranks that do the same are a cohort: how cohorts come apart, and what is told about it.

`Cohorts` begins with all ranks together and is told, in the order of the program, what each rank
has at one place. Where ranks that were together have different things, they part. What no rank can
be blamed for is left open: a rank that has nothing to say at a place stays with the most.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchwhere.core.events import Event
from torchwhere.core.rank_text import ranks_text
from torchwhere.core.results import Shown

_MOST_RUNS = 8  # of ranks in one text
MOST_PARTINGS = 20  # told of; those after them are counted


@dataclass(frozen=True, slots=True)
class ComparedItem:
    """One line of a log, or one event. `number` is that of the line in its file, or of the record
    in its box."""

    number: int
    text: str
    event: Event | None = None

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"number": self.number, "text": self.text}
        return found | ({"event": self.event.to_dict()} if self.event is not None else {})


@dataclass(frozen=True, slots=True, repr=False)
class Version(Shown):
    """What some ranks have where they part; none: nothing, or no more. `after` is what comes next
    on the first of them."""

    ranks: tuple[int, ...]
    entry: ComparedItem | None
    after: tuple[ComparedItem, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "ranks": list(self.ranks),
            "entry": self.entry.to_dict() if self.entry is not None else None,
            "after": [entry.to_dict() for entry in self.after],
        }


@dataclass(frozen=True, slots=True, repr=False)
class Divergence(Shown):
    """A place where ranks that did the same until then go apart. `kind` says how:

    `flow`: they do, or say, different things; `value`: they say the same about different values;
    `group`: in one collective they differ in what must be equal there (shape, dtype, operation).
    """

    kind: str
    step: int | None
    before: tuple[ComparedItem, ...]  # the last that was the same
    versions: tuple[Version, ...]  # most ranks first
    remarks: tuple[str, ...] = ()

    @property
    def minority(self) -> Version:
        """The smaller cohort: who to look at first."""
        return self.versions[-1]

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "step": self.step,
            "before": [entry.to_dict() for entry in self.before],
            "versions": [version.to_dict() for version in self.versions],
            "remarks": list(self.remarks),
        }


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Shown):
    """What the logs, or the events, of some ranks have in common, and where they part, first place
    first."""

    ranks: tuple[int, ...]
    compared: int  # lines or events that were looked at, of all ranks
    cohorts: tuple[tuple[int, ...], ...]  # ranks that are the same all the way, largest first
    divergences: tuple[Divergence, ...] = ()
    # of events: the first and the last step that were compared
    steps: tuple[int, int] | None = None
    remarks: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "ranks": list(self.ranks),
            "compared": self.compared,
            "steps": list(self.steps) if self.steps is not None else None,
            "cohorts": [list(cohort) for cohort in self.cohorts],
            "partings": [divergence.to_dict() for divergence in self.divergences],
            "remarks": list(self.remarks),
        }


class Cohorts:
    """Ranks, in cohorts that only ever come apart."""

    def __init__(self, apart: Iterable[Iterable[int]]) -> None:
        self._of: dict[int, int] = {}
        self._ranks: list[list[int]] = []
        for ranks in apart:
            self._add(list(ranks))

    def _add(self, ranks: list[int]) -> None:
        for rank in ranks:
            self._of[rank] = len(self._ranks)
        self._ranks.append(ranks)

    @property
    def all(self) -> tuple[tuple[int, ...], ...]:
        """The cohorts, the largest first, then by rank."""
        return in_order(tuple(sorted(ranks)) for ranks in self._ranks)

    @property
    def can_part(self) -> bool:
        """Whether some ranks are still together."""
        return len(self._ranks) < len(self._of)

    def part(self, found: Mapping[int, Hashable]) -> list[list[list[int]]]:
        """Ranks have `found` at one place: who parts from whom. For each cohort that comes apart,
        those who have the same.

        Ranks that are not in `found` stay with the most of their cohort.
        """
        divergences = []
        for cohort in sorted({self._of[rank] for rank in found}):
            versions: dict[Hashable, list[int]] = {}
            for rank in self._ranks[cohort]:
                if rank in found:
                    versions.setdefault(found[rank], []).append(rank)
            if len(versions) > 1:
                most, *others = sorted(versions.values(), key=lambda ranks: (-len(ranks), ranks))
                divergences.append([most, *others])
                leaving = {rank for ranks in others for rank in ranks}
                self._ranks[cohort] = [rank for rank in self._ranks[cohort] if rank not in leaving]
                for ranks in others:
                    self._add(ranks)
        return divergences


def in_order(cohorts: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """The largest first, then by rank."""
    return tuple(sorted(cohorts, key=lambda ranks: (-len(ranks), ranks)))


def ranks_named(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`: runs folded."""
    return f"rank{'s' * (len(ranks) != 1)} {ranks_text(ranks, most=_MOST_RUNS)}"
