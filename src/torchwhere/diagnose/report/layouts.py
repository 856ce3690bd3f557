"""The layout section of a report: one tree for each cohort of ranks with equal layouts, as text.

Takes boxes, gives `LayoutTexts`. Reading a layout takes milliseconds: of thousands of ranks, a few
hundred are compared, and the section says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.run import BoxRun
from torchwhere.core.rank_text import ranks_text
from torchwhere.core.results import Shown
from torchwhere.diagnose.layout.layouts import LayoutCohort, Layouts, layouts
from torchwhere.diagnose.report.facts import (
    CohortDiffers,
    ComparedLayouts,
    DiffersByDesign,
    LayoutsEqual,
    MoreLayouts,
    UnusualShard,
)
from torchwhere.diagnose.report.texts import cut

_MOST_COHORTS = 8
_MOST_LINES = 400
_MOST_LINES_OF_OTHERS = 120  # of each cohort after the first two
_MOST_DIFFERENCES = 3  # of a cohort
_MOST_FACTS = 40


@dataclass(frozen=True, slots=True)
class LayoutTexts:
    """A tree for each cohort, and how the cohorts differ."""

    cohorts: tuple[tuple[str, tuple[str, ...]], ...]  # ranks, lines
    facts: tuple[Shown, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "cohorts": [{"ranks": ranks, "lines": list(lines)} for ranks, lines in self.cohorts],
            "difference": [cut(fact) for fact in self.facts],
        }


def layout_texts(boxes: Mapping[int, Box], *, of: int) -> LayoutTexts:
    """The layouts in some of the `of` boxes of a run."""
    compared = layouts(BoxRun(Path(), dict(boxes)))
    if not compared.cohorts:
        return LayoutTexts((), ())
    facts: list[Shown] = [] if len(boxes) == of else [ComparedLayouts(len(boxes), of)]
    facts += _facts(compared)
    more = len(compared.cohorts) - _MOST_COHORTS
    if more > 0:
        facts.append(MoreLayouts(more))
    cohorts = tuple(
        (
            cut(ranks_text(cohort.ranks)),
            _lines(cohort, _MOST_LINES if at < 2 else _MOST_LINES_OF_OTHERS),
        )
        for at, cohort in enumerate(compared.cohorts[:_MOST_COHORTS])
    )
    return LayoutTexts(cohorts, tuple(facts[:_MOST_FACTS]))


def _lines(cohort: LayoutCohort, most: int) -> tuple[str, ...]:
    lines = str(cohort.layout).splitlines()
    more = [f"and {len(lines) - most} more lines"] if len(lines) > most else []
    return (*map(cut, lines[:most]), *more)


def _facts(compared: Layouts) -> Iterator[Shown]:
    """How the ranks compare: differences first, then differences by design."""
    count = sum(len(cohort.ranks) for cohort in compared.cohorts)
    if count > 1 and compared.is_alike and not compared.shard_facts:
        yield LayoutsEqual()
    for cohort in compared.cohorts:
        for difference in cohort.differences[:_MOST_DIFFERENCES]:
            yield CohortDiffers(tuple(cohort.ranks), difference)
    yield from compared.group_facts
    yield from map(UnusualShard, compared.shard_facts)
    yield from map(DiffersByDesign, compared.by_design)
    yield from compared.data_facts
