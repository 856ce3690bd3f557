"""The layouts of many ranks side by side: which are laid out alike, where the others part, and what
differs because it must.

Takes a run, gives `Layouts`. Ranks are put into cohorts by everything that should be the same on
all of them. Local shapes and bytes, the ranks in the groups and the pipeline stage differ from rank
to rank by design: these are said and not counted as differences. Linear in the number of ranks:
each layout is read once and only one of each cohort is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torchwhere.blackbox.run import BoxRun
from torchwhere.blackbox.stored_layouts import layouts_in
from torchwhere.core.model_layout import Layout
from torchwhere.core.results import Shown, Tabular
from torchwhere.diagnose.layout.divergence import CanonicalKey, LayoutDifference, differences
from torchwhere.diagnose.layout.shard_check import GroupMembership, ShardCheck, ranks_phrase

_MOST_DIFFERENCES = 20  # of a cohort; the first is what matters, the others mostly follow from it


@dataclass(slots=True, repr=False)
class LayoutCohort(Shown):
    """Ranks that are laid out alike. `layout` is as the first of them sees it."""

    ranks: list[int]
    layout: Layout
    stages: tuple[int, ...] = ()  # of a pipeline
    # from the largest cohort with the same stages
    differences: list[LayoutDifference] = field(default_factory=list)
    has_more: bool = False  # differences than are listed

    def to_dict(self) -> dict[str, Any]:
        return {
            "ranks": self.ranks,
            "stages": list(self.stages),
            "differences": [difference.to_dict() for difference in self.differences],
            "has_more": self.has_more,
            "layout": self.layout.to_dict(),
        }


@dataclass(slots=True, repr=False)
class Layouts(Shown, Tabular):
    """How the ranks of a run are laid out."""

    cohorts: list[LayoutCohort]  # for each pipeline stage the largest first
    expected: list[str]  # what differs from rank to rank because it must, in words
    disagreements: list[str]  # about who is in which group
    remarks: list[str]  # parts of parameters that are not what their placements give
    missing: list[int]  # ranks without a layout
    changed: list[int]  # ranks whose layout changed after the first step; the last one is taken

    @property
    def is_alike(self) -> bool:
        return not self.disagreements and not any(cohort.differences for cohort in self.cohorts)

    def as_rows(self) -> list[dict[str, Any]]:
        """The parameters of every cohort, one a row, as its first rank has them."""
        return [
            {"cohort": at} | row
            for at, cohort in enumerate(self.cohorts)
            for row in cohort.layout.as_rows()
        ]

    def to_dict(self) -> dict[str, Any]:
        return {
            "is_alike": self.is_alike,
            "expected": self.expected,
            "disagreements": self.disagreements,
            "remarks": self.remarks,
            "missing": self.missing,
            "changed": self.changed,
            "cohorts": [cohort.to_dict() for cohort in self.cohorts],
        }


def layouts(run: BoxRun, *, ranks: set[int] | None = None) -> Layouts:
    """Compare the layouts in a run's boxes, of all ranks or of some."""
    missing, changed = [], []

    def found() -> Iterator[Layout]:
        for rank, box in run.in_order():
            if ranks is not None and rank not in ranks:
                continue
            layout, count = _last(layouts_in(box), rank)
            if layout is None:
                missing.append(rank)
                continue
            if count > 1:
                changed.append(rank)
            yield layout

    compared = compare(found())
    compared.missing, compared.changed = missing, changed
    return compared


def _last(packed: list[dict[str, Any]], rank: int) -> tuple[Layout | None, int]:
    for data in reversed(packed):
        try:
            return Layout.from_dict(data | {"rank": rank}), len(packed)
        except ValueError:  # of a newer writer, which calls things otherwise
            continue
    return None, len(packed)


def compare(found: Iterable[Layout]) -> Layouts:
    """Compare the layouts of ranks, each given once."""
    canon, meetings = CanonicalKey(), GroupMembership()
    cohorts: dict[Any, LayoutCohort] = {}
    cuts: dict[Any, ShardCheck] = {}
    for layout in found:
        key = canon.key(layout)
        cohort = cohorts.setdefault(key, LayoutCohort([], layout, _stages(layout)))
        cohort.ranks.append(layout.rank)
        cuts.setdefault(key, ShardCheck()).add(layout)
        meetings.add(layout)
    ordered = sorted(
        cohorts.values(), key=lambda cohort: (cohort.stages, -len(cohort.ranks), cohort.ranks)
    )
    for _, same in itertools.groupby(ordered, key=lambda cohort: cohort.stages):
        first, *others = same
        for cohort in others:
            parts = list(
                itertools.islice(
                    differences(cohort.layout, first.layout, canon), _MOST_DIFFERENCES + 1
                )
            )
            cohort.differences, cohort.has_more = (
                parts[:_MOST_DIFFERENCES],
                len(parts) > _MOST_DIFFERENCES,
            )
    expected = [
        *_pipeline(ordered),
        *meetings.expected(),
        *(said for cut in cuts.values() for said in cut.expected()),
    ]
    remarks = [said for cut in cuts.values() for said in cut.remarks()]
    return Layouts(ordered, expected, list(meetings.disagreements()), remarks, [], [])


def _stages(layout: Layout) -> tuple[int, ...]:
    units = [
        unit for root in layout.roots for unit in root.node.units if unit.kind == "pipeline stage"
    ]
    return tuple(
        stage for unit in units if isinstance(stage := dict(unit.settings).get("stage"), int)
    )


def _pipeline(cohorts: list[LayoutCohort]) -> Iterator[str]:
    by_stage: dict[tuple[int, ...], list[int]] = {}
    for cohort in cohorts:
        by_stage.setdefault(cohort.stages, []).extend(cohort.ranks)
    if len(by_stage) > 1:
        each = [
            f"{_stage_text(stages)} on {ranks_phrase(ranks)}"
            for stages, ranks in sorted(by_stage.items())
        ]
        yield f"pipeline stages have modules of their own: {'; '.join(each)}"


def _stage_text(stages: tuple[int, ...]) -> str:
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}" if stages else "no stage"
