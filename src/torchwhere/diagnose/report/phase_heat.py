"""The phases section of a report: the table over all ranks, the time of each rank in a phase, and
the parts of a step on each rank.

Takes the phase sums of the boxes, gives `PhaseHeat`. `diagnose/phases.py` defines phases and their
times, `diagnose/step_parts.py` the parts. The parts need all boxes again, because the wait of one
rank depends on all others. So a run with more than `MOST_RANKS` ranks has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchwhere.blackbox.run import RunSummary, read_again
from torchwhere.core.rank_text import ranks_text
from torchwhere.core.results import Fact, plain_fields
from torchwhere.diagnose.clocks.host_clocks import HostClocks
from torchwhere.diagnose.phases import PhaseRow, Phases, table
from torchwhere.diagnose.report.digest import DigestedBox
from torchwhere.diagnose.report.facts import NoStepParts
from torchwhere.diagnose.report.steps import buckets, rounded, worst
from torchwhere.diagnose.report.texts import cut, milliseconds
from torchwhere.diagnose.step_parts import PART_NAMES, JobStepParts, step_parts_of

MOST_RANKS = 256
_MOST_PHASES = 64


@dataclass(frozen=True, slots=True)
class PhaseHeat:
    """The table, and for each phase the totals of the ranks."""

    phases: Phases
    ranks: tuple[str, ...]
    # for each phase, the largest total of each entry in `ranks`
    ms: tuple[tuple[float | None, ...], ...]
    parts: JobStepParts | None = None

    def to_dict(self) -> dict[str, Any]:
        rows = self.phases.rows[:_MOST_PHASES]
        return {
            "rows": [_row(row) for row in rows],
            "heat": {
                "phases": [_name(row) for row in rows],
                **plain_fields(self, "ranks", "ms"),
            },
            "parts": _parts_json(self.parts) if self.parts is not None else [],
        }


def _parts_json(parts: JobStepParts) -> list[dict[str, Any]]:
    """The mean step of each rank, in ms."""
    return [
        {
            "rank": rank,
            "steps": len(own),
            "step": milliseconds(own.mean_ns()),
            **{name: milliseconds(own.mean_ns(name)) for name in PART_NAMES},
        }
        for rank, own in parts.by_rank.items()
    ]


def job_step_parts(
    run: RunSummary[Any], boxes: Mapping[int, DigestedBox], clocks: HostClocks
) -> tuple[JobStepParts | None, list[Fact]]:
    """The parts of the steps, or why the report does not have them."""
    if not any(box.has_parts for box in boxes.values()):
        return None, []
    if len(run.boxes) > MOST_RANKS:
        return None, [NoStepParts(len(run.boxes), MOST_RANKS)]
    return step_parts_of(lambda: read_again(run, sorted(run.boxes)), clocks=clocks), []


def phase_heat(boxes: Mapping[int, DigestedBox], parts: JobStepParts | None = None) -> PhaseHeat:
    """The phases of all ranks that recorded any, and the parts of their steps."""
    phases = table({rank: (box.phases, box.until_ns) for rank, box in boxes.items() if box.phases})
    shared = buckets(phases.ranks)
    ms = []
    for row in phases.rows[:_MOST_PHASES]:
        totals = np.array(
            [row.by_rank[r].total_ns if r in row.by_rank else np.nan for r in phases.ranks],
            np.float64,
        )
        size = len(shared[0])
        padded = np.append(totals, np.full(-len(totals) % size, np.nan)).reshape(-1, size)
        ms.append(tuple(rounded(worst(padded.T))))
    labels = tuple(cut(ranks_text(ranks)) for ranks in shared) if ms else ()
    return PhaseHeat(phases, labels, tuple(ms), parts)


def _name(row: PhaseRow) -> str:
    return cut("/".join(row.path)) + ("" if row.is_main else " (other threads)")


def _row(row: PhaseRow) -> dict[str, Any]:
    times, slowest, fastest = row.all, row.slowest, row.fastest
    return {
        "name": _name(row),
        "depth": len(row.path) - 1,
        "count": times.count,
        "total_ms": milliseconds(times.total_ns),
        "self_ms": milliseconds(times.self_ns),
        "mean_ms": milliseconds(times.mean_ns),
        "max_ms": milliseconds(times.max_ns),
        "share": round(times.share, 4) if times.share is not None else None,
        "running": times.running,
        "ranks": len(row.by_rank),
        "min_rank_ms": milliseconds(row.by_rank[fastest].total_ns),
        "max_rank_ms": milliseconds(row.by_rank[slowest].total_ns),
        "slowest_rank": slowest,
    }
