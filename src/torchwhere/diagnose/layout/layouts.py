"""Compares the layouts of many ranks: cohorts with equal layouts, and how the others differ.

Takes a run, gives `Layouts`. Ranks of a cohort are equal in everything that should be equal on all
ranks. Local shapes and bytes, the ranks in the groups and the pipeline stage differ by design:
they are facts, not differences. Linear in the number of ranks: each layout is read once, and only
one of each cohort stays in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torchwhere.blackbox.run import BoxRun
from torchwhere.blackbox.stored_layouts import layouts_in
from torchwhere.core.grouping import grouped
from torchwhere.core.model_layout import Layout
from torchwhere.core.results import Fact, Shown, Tabular, plain_fields
from torchwhere.diagnose.layout.divergence import CanonicalKey, differences
from torchwhere.diagnose.layout.facts import (
    LayoutDifference,
    LayoutsChanged,
    NoLayouts,
    StageModules,
)
from torchwhere.diagnose.layout.shard_check import GroupMembership, ShardCheck

_MOST_DIFFERENCES = 20  # of a cohort; most differences follow from the first


@dataclass(slots=True, repr=False)
class LayoutCohort(Shown):
    """Ranks with equal layouts. `layout` is that of the first of them."""

    ranks: list[int]
    layout: Layout
    stages: tuple[int, ...] = ()  # of a pipeline
    # to the largest cohort with the same stages
    differences: list[LayoutDifference] = field(default_factory=list)
    has_more: bool = False  # not all differences are listed

    def to_dict(self) -> dict[str, Any]:
        return plain_fields(self, "ranks", "stages", "differences", "has_more", "layout")


@dataclass(slots=True, repr=False)
class Layouts(Shown, Tabular):
    """The layouts of all ranks of a run, compared.

    Attributes:
        cohorts: Ranks with equal layouts, by pipeline stage, the largest cohort first.
        by_design: Differences that the parallelism implies.
        group_facts: Ranks that disagree about the members of a group.
        shard_facts: Shards that differ from their placements.
        missing: Ranks without a layout.
        changed: Ranks whose layout changed after the first step; the last layout counts.

    Example:
        layouts = torchwhere.read_run("run/").layout()
        print("all ranks are alike" if layouts.is_alike else layouts)
    """

    cohorts: list[LayoutCohort]
    by_design: list[Fact]
    group_facts: list[Fact]
    shard_facts: list[Fact]
    missing: list[int] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)

    @property
    def expected(self) -> list[str]:
        """Differences by design, as sentences."""
        return list(map(str, self.by_design))

    @property
    def disagreements(self) -> list[str]:
        """Disagreements about the members of a group, as sentences."""
        return list(map(str, self.group_facts))

    @property
    def remarks(self) -> list[str]:
        """Shards that differ from their placements, as sentences."""
        return list(map(str, self.shard_facts))

    @property
    def data_facts(self) -> list[Fact]:
        """Facts about the compared data: ranks whose layout changed, and ranks without one."""
        changed = [LayoutsChanged(tuple(self.changed))] if self.changed else []
        return [*changed, *([NoLayouts(tuple(self.missing))] if self.missing else [])]

    @property
    def is_alike(self) -> bool:
        """Whether the layouts differ only by design."""
        return not self.group_facts and not any(cohort.differences for cohort in self.cohorts)

    def as_rows(self) -> list[dict[str, Any]]:
        """Return one row for each parameter of each cohort, with the values of its first rank."""
        return [
            {"cohort": at} | row
            for at, cohort in enumerate(self.cohorts)
            for row in cohort.layout.as_rows()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as values for JSON."""
        sentences = ("expected", "disagreements", "remarks")
        return plain_fields(self, "is_alike", *sentences, "missing", "changed", "cohorts")


def layouts(run: BoxRun, *, ranks: set[int] | None = None) -> Layouts:
    """Compare the layouts in the boxes of all ranks, or of `ranks`."""
    missing, changed = [], []

    def last_layouts() -> Iterator[Layout]:
        for rank, box in run.in_order(ranks):
            stored = layouts_in(box)
            layout = _last(stored, rank)
            if layout is None:
                missing.append(rank)
                continue
            if len(stored) > 1:
                changed.append(rank)
            yield layout

    compared = compare(last_layouts())
    compared.missing, compared.changed = missing, changed
    return compared


def _last(stored: list[dict[str, Any]], rank: int) -> Layout | None:
    for data in reversed(stored):
        try:
            return Layout.from_dict(data | {"rank": rank})
        except ValueError:  # a newer torchwhere wrote it, with other keys
            continue
    return None


def compare(of_ranks: Iterable[Layout]) -> Layouts:
    """Compare the layouts of ranks, one layout for each rank."""
    canon, membership = CanonicalKey(), GroupMembership()
    cohorts: dict[Any, LayoutCohort] = {}
    shards: dict[Any, ShardCheck] = {}
    for layout in of_ranks:
        key = canon.key(layout)
        cohort = cohorts.setdefault(key, LayoutCohort([], layout, _stages(layout)))
        cohort.ranks.append(layout.rank)
        shards.setdefault(key, ShardCheck()).add(layout)
        membership.add(layout)
    ordered = sorted(
        cohorts.values(), key=lambda cohort: (cohort.stages, -len(cohort.ranks), cohort.ranks)
    )
    for _, same_stages in itertools.groupby(ordered, key=lambda cohort: cohort.stages):
        largest, *others = same_stages
        for cohort in others:
            all_differences = differences(cohort.layout, largest.layout, canon)
            listed = list(itertools.islice(all_differences, _MOST_DIFFERENCES + 1))
            cohort.differences = listed[:_MOST_DIFFERENCES]
            cohort.has_more = len(listed) > _MOST_DIFFERENCES
    by_design = [*_pipeline(ordered), *membership.expected()]
    for check in shards.values():
        by_design += check.expected()
    shard_facts = [fact for check in shards.values() for fact in check.wrong()]
    return Layouts(ordered, by_design, list(membership.disagreements()), shard_facts)


def _stages(layout: Layout) -> tuple[int, ...]:
    units = [
        unit for root in layout.roots for unit in root.node.units if unit.kind == "pipeline stage"
    ]
    numbers = [dict(unit.settings).get("stage") for unit in units]
    return tuple(number for number in numbers if isinstance(number, int))


def _pipeline(cohorts: list[LayoutCohort]) -> list[Fact]:
    by_stage = grouped((cohort.stages, rank) for cohort in cohorts for rank in cohort.ranks)
    if len(by_stage) < 2:
        return []
    return [StageModules(tuple((s, tuple(ranks)) for s, ranks in sorted(by_stage.items())))]
