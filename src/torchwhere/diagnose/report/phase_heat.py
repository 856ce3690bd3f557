"""The phases of a report: the table over all ranks, and which ranks took how long in each.

Takes the sums of phases of the boxes, gives `PhaseHeat`. What a phase is, and what its times mean:
`diagnose/phases.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchwhere.diagnose.phases import PhaseRow, Phases, table
from torchwhere.diagnose.report.digest import Summary
from torchwhere.diagnose.report.steps import buckets, rounded, worst
from torchwhere.diagnose.report.texts import cut, milliseconds

_MOST_PHASES = 64


@dataclass(frozen=True, slots=True)
class PhaseHeat:
    """The table, and of each phase the totals of the ranks."""

    phases: Phases
    ranks: tuple[str, ...]
    # of each phase: one for each text in `ranks`, the worst of them
    ms: tuple[tuple[float | None, ...], ...]

    def to_dict(self) -> dict[str, Any]:
        rows = self.phases.rows[:_MOST_PHASES]
        return {
            "rows": [_row(row) for row in rows],
            "heat": {
                "phases": [_name(row) for row in rows],
                "ranks": list(self.ranks),
                "ms": [list(one) for one in self.ms],
            },
        }


def phase_heat(summaries: Mapping[int, Summary]) -> PhaseHeat:
    """The phases of all ranks that have any."""
    found = table(
        {
            rank: (summary.phases, summary.until_ns)
            for rank, summary in summaries.items()
            if summary.phases
        }
    )
    shared = buckets(found.ranks)
    ms = []
    for row in found.rows[:_MOST_PHASES]:
        totals = np.array(
            [row.by_rank[rank].total_ns if rank in row.by_rank else np.nan for rank in found.ranks],
            np.float64,
        )
        size = len(shared[0].ranks)
        padded = np.append(totals, np.full(-len(totals) % size, np.nan)).reshape(-1, size)
        ms.append(tuple(rounded(worst(padded.T))))
    return PhaseHeat(found, tuple(bucket.text for bucket in shared) if ms else (), tuple(ms))


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
