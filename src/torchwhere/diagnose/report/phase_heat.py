"""The phases section of a report: the table over all ranks, and the time of each rank in a phase.

Takes the phase sums of the boxes, gives `PhaseHeat`. `diagnose/phases.py` defines phases and their
times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchwhere.core.rank_text import ranks_text
from torchwhere.diagnose.phases import PhaseRow, Phases, table
from torchwhere.diagnose.report.digest import DigestedBox
from torchwhere.diagnose.report.steps import buckets, rounded, worst
from torchwhere.diagnose.report.texts import cut, milliseconds

_MOST_PHASES = 64


@dataclass(frozen=True, slots=True)
class PhaseHeat:
    """The table, and for each phase the totals of the ranks."""

    phases: Phases
    ranks: tuple[str, ...]
    # for each phase, the largest total of each entry in `ranks`
    ms: tuple[tuple[float | None, ...], ...]

    def to_dict(self) -> dict[str, Any]:
        rows = self.phases.rows[:_MOST_PHASES]
        return {
            "rows": [_row(row) for row in rows],
            "heat": {
                "phases": [_name(row) for row in rows],
                "ranks": list(self.ranks),
                "ms": [list(totals) for totals in self.ms],
            },
        }


def phase_heat(boxes: Mapping[int, DigestedBox]) -> PhaseHeat:
    """The phases of all ranks that recorded any."""
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
    return PhaseHeat(phases, labels, tuple(ms))


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
