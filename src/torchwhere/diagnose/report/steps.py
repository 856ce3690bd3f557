"""The steps of a report: how long each step took, rank by rank; neighbours share a row where there
are many.

Takes the summaries of the boxes and a hearing, gives `Steps`. A step that all ranks wait through
together takes as long on each of them: who holds the others back is found by when ranks come to
their collectives (`doctor/pace.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchwhere.diagnose.calls.rank_calls import JobCalls
from torchwhere.diagnose.doctor.stragglers import straggler
from torchwhere.diagnose.doctor.verdict import Verdict, VerdictKind
from torchwhere.diagnose.report.digest import MOST_STEPS, Summary
from torchwhere.diagnose.report.texts import milliseconds, ranks_text

MOST_ROWS = 256
_MOST_STRAGGLERS = 32
_SLOW = 1.15  # times the usual step
_SLOW_NS = 2_000_000
_SHARE = 0.9  # of its steps: on a crowded machine anyone is slow, now and then
_FEWEST_STEPS = 8


class TimeBucket(NamedTuple):
    """Ranks that share a row: one, or neighbours where there are too many."""

    ranks: tuple[int, ...]

    @property
    def text(self) -> str:
        return ranks_text(self.ranks)


def buckets(ranks: Sequence[int]) -> list[TimeBucket]:
    size = max(1, math.ceil(len(ranks) / MOST_ROWS))
    return [TimeBucket(tuple(ranks[at : at + size])) for at in range(0, len(ranks), size)]


@dataclass(frozen=True, slots=True)
class StepRow:
    """What each step took, on a rank or on the slowest of several."""

    ranks: str
    rank: int  # the slowest of them
    count: int
    ms: tuple[float | None, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"ranks": self.ranks, "rank": self.rank, "count": self.count, "ms": list(self.ms)}


@dataclass(frozen=True, slots=True)
class Steps:
    """The last steps."""

    steps: tuple[int, ...]
    rows: tuple[StepRow, ...]
    median_ms: tuple[float | None, ...]
    stragglers: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "steps": list(self.steps),
            "rows": [row.to_dict() for row in self.rows],
            "median_ms": list(self.median_ms),
            "stragglers": list(self.stragglers),
        }


def steps(job_calls: JobCalls, summaries: Mapping[int, Summary], verdict: Verdict) -> Steps:
    """The last steps of all ranks that have any."""
    ranks = [rank for rank, summary in summaries.items() if len(summary.steps)]
    late_ranks = _late(job_calls, verdict)
    if not ranks:
        return Steps((), (), (), tuple(late_ranks))
    numbers = np.unique(np.concatenate([summaries[rank].steps for rank in ranks]))[-MOST_STEPS:]
    ranks = [rank for rank in ranks if summaries[rank].steps[-1] >= numbers[0]]
    took = np.full((len(ranks), len(numbers)), np.nan)
    for row, rank in zip(took, ranks, strict=True):
        summary = summaries[rank]
        kept = summary.steps >= numbers[0]
        row[np.searchsorted(numbers, summary.steps[kept])] = summary.took_ns[kept]
    at = {rank: row for row, rank in enumerate(ranks)}
    return Steps(
        steps=tuple(numbers.tolist()),
        rows=tuple(
            _row(bucket, took[[at[rank] for rank in bucket.ranks]]) for bucket in buckets(ranks)
        ),
        median_ms=tuple(rounded(np.nanmedian(took, axis=0))),
        stragglers=tuple(dict.fromkeys([*late_ranks, *_slow(ranks, took)])),
    )


def _late(job_calls: JobCalls, verdict: Verdict) -> list[int]:
    """Who comes late to collectives, again and again. A calm verdict has looked for that
    already."""
    if verdict.kind in (VerdictKind.STRAGGLER, VerdictKind.HEALTHY):
        return list(verdict.culprits)
    found = straggler(job_calls)
    return list(found.ranks) if found is not None else []


def _row(bucket: TimeBucket, took: npt.NDArray[np.float64]) -> StepRow:
    slowest = bucket.ranks[int(np.nansum(took, axis=1).argmax())]
    return StepRow(bucket.text, slowest, len(bucket.ranks), tuple(rounded(worst(took))))


def worst(columns: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The largest of each column; not a number where there is none."""
    found: npt.NDArray[np.float64] = np.where(np.isnan(columns), -np.inf, columns).max(axis=0)
    return np.where(np.isinf(found), np.nan, found)


def rounded(ns: npt.NDArray[np.float64]) -> Iterator[float | None]:
    return (None if math.isnan(one) else milliseconds(one) for one in ns.tolist())


def _slow(ranks: Sequence[int], took: npt.NDArray[np.float64]) -> list[int]:
    """Ranks whose steps take longer than those of the others, again and again: there nobody waits
    for them."""
    usual = np.nanmedian(took, axis=0)
    is_slow = (took > _SLOW * usual) & (took > usual + _SLOW_NS)
    count = (~np.isnan(took)).sum(axis=1)
    slow = np.flatnonzero((count >= _FEWEST_STEPS) & (is_slow.sum(axis=1) >= _SHARE * count))
    worst_first = np.argsort(
        -np.nansum(np.where(is_slow, took - usual, 0), axis=1)[slow], kind="stable"
    )
    return [ranks[row] for row in slow[worst_first][:_MOST_STRAGGLERS].tolist()]
