"""The layout of a report: how the model lies over the ranks, as text, one tree for all that are
laid out alike.

Takes boxes, gives `LayoutTexts`. Reading a layout takes milliseconds, so of thousands of ranks a
few hundred are compared, and that is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.run import BoxRun
from torchwhere.diagnose.layout.layouts import LayoutCohort, Layouts, layouts
from torchwhere.diagnose.layout.shard_check import ranks_phrase
from torchwhere.diagnose.report.texts import cut, ranks_text

_MOST_COHORTS = 8
_MOST_LINES = 400
_MOST_LINES_OF_OTHERS = 120  # of each cohort after the first two
_MOST_SENTENCES = 40


@dataclass(frozen=True, slots=True)
class LayoutTexts:
    """Texts: a tree for each cohort, and in what the cohorts differ."""

    cohorts: tuple[tuple[str, tuple[str, ...]], ...]  # ranks, lines
    difference: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "cohorts": [{"ranks": ranks, "lines": list(lines)} for ranks, lines in self.cohorts],
            "difference": list(self.difference),
        }


def layout_texts(boxes: Mapping[int, Box], *, of: int) -> LayoutTexts:
    """The layouts in some boxes, of `of` that there are."""
    found = layouts(BoxRun(Path(), dict(boxes)))
    if not found.cohorts:
        return LayoutTexts((), ())
    shown = found.cohorts[:_MOST_COHORTS]
    said = [] if len(boxes) == of else [f"compared on {len(boxes)} of {of} ranks"]
    said += _sentences(found)
    if len(found.cohorts) > len(shown):
        said.append(
            f"{len(found.cohorts) - len(shown)} further groups of ranks that are laid out otherwise"
            " are not shown"
        )
    rooms = [_MOST_LINES if at < 2 else _MOST_LINES_OF_OTHERS for at in range(len(shown))]
    cohorts = tuple(
        (ranks_text(cohort.ranks), _lines(cohort, room))
        for cohort, room in zip(shown, rooms, strict=True)
    )
    return LayoutTexts(cohorts, tuple(map(cut, said[:_MOST_SENTENCES])))


def _lines(cohort: LayoutCohort, room: int) -> tuple[str, ...]:
    lines = str(cohort.layout).splitlines()
    more = len(lines) - room
    kept = [cut(line) for line in lines[:room]]
    return (*kept, f"and {more} more lines") if more > 0 else tuple(kept)


def _sentences(found: Layouts) -> list[str]:
    """How the ranks compare: what differs first, then what differs as it must."""
    said = [
        f"{ranks_phrase(cohort.ranks)}: {difference}"
        for cohort in found.cohorts
        for difference in cohort.differences[:3]
    ]
    said += [*found.disagreements, *(f"unusual: {text}" for text in found.remarks)]
    if not said and sum(len(cohort.ranks) for cohort in found.cohorts) > 1:
        said.append("all ranks are laid out alike")
    said += [f"differs as it must: {text}" for text in found.expected]
    if found.changed:
        said.append(
            f"the layout of {ranks_phrase(found.changed)} changed after the first step; this is the"
            " last one"
        )
    if found.missing:
        said.append(f"no layout of {ranks_phrase(found.missing)}")
    return said
