"""The steps section of a report: the time of each step on each rank. With many ranks, neighbours
share a row.

Takes the digested boxes and the calls, gives `Steps`. A step in which all ranks wait for each other
takes equally long on all of them: a straggler is found by its arrival at collectives
(`doctor/stragglers.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchwhere.core.arrays import Floats, Ints
from torchwhere.core.rank_text import ranks_text
from torchwhere.core.results import plain_fields
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.clocks.host_clocks import HostClocks
from torchwhere.diagnose.doctor.stragglers import straggler
from torchwhere.diagnose.doctor.verdict import NO_FAULT, Verdict, VerdictKind
from torchwhere.diagnose.report.digest import MOST_STEPS, DigestedBox
from torchwhere.diagnose.report.texts import cut, milliseconds

MOST_ROWS = 256
_MOST_STRAGGLERS = 32
_SLOW = 1.15  # times the usual step
_SLOW_NS = 2_000_000
_SHARE = 0.9  # of its steps: on an overloaded machine any rank is slow now and then
_FEWEST_STEPS = 8


def buckets(ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """The ranks of each row: one rank, or neighbours if there are too many."""
    size = max(1, math.ceil(len(ranks) / MOST_ROWS))
    return [tuple(ranks[at : at + size]) for at in range(0, len(ranks), size)]


@dataclass(frozen=True, slots=True)
class StepRow:
    """The time of each step on one rank, or on the slowest of several."""

    ranks: str
    rank: int  # the slowest
    count: int
    ms: tuple[float | None, ...]

    def to_dict(self) -> dict[str, Any]:
        return plain_fields(self)


@dataclass(frozen=True, slots=True)
class Steps:
    """The last steps."""

    steps: tuple[int, ...]
    rows: tuple[StepRow, ...]
    median_ms: tuple[float | None, ...]
    stragglers: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        return plain_fields(self)


def steps(
    job_calls: JobCalls, boxes: Mapping[int, DigestedBox], verdict: Verdict, clocks: HostClocks
) -> Steps:
    """The last steps of all ranks that completed any."""
    ranks = [rank for rank, box in boxes.items() if len(box.steps)]
    late_ranks = _late(job_calls, verdict, clocks)
    if not ranks:
        return Steps((), (), (), tuple(late_ranks))
    numbers = np.unique(np.concatenate([boxes[rank].steps for rank in ranks]))[-MOST_STEPS:]
    ranks = [rank for rank in ranks if boxes[rank].steps[-1] >= numbers[0]]
    took = np.stack([by_step(numbers, boxes[rank].steps, boxes[rank].took_ns) for rank in ranks])
    at = {rank: row for row, rank in enumerate(ranks)}
    return Steps(
        steps=tuple(numbers.tolist()),
        rows=tuple(_row(shared, took[[at[rank] for rank in shared]]) for shared in buckets(ranks)),
        median_ms=tuple(rounded(np.nanmedian(took, axis=0))),
        stragglers=tuple(dict.fromkeys([*late_ranks, *_slow(ranks, took)])),
    )


def by_step(numbers: Ints, steps: Ints, took_ns: Ints) -> Floats:
    """The times of a rank in the steps `numbers`; NaN for a step that the rank does not have."""
    row = np.full(len(numbers), np.nan)
    is_shown = steps >= numbers[0]
    row[np.searchsorted(numbers, steps[is_shown])] = took_ns[is_shown]
    return row


def _late(job_calls: JobCalls, verdict: Verdict, clocks: HostClocks) -> list[int]:
    """Ranks that repeatedly arrive late at collectives. A verdict without a hang has searched for
    them already."""
    if verdict.kind in NO_FAULT | {VerdictKind.STRAGGLER}:
        return list(verdict.culprits)
    late = straggler(job_calls, align_clocks=lambda: clocks)
    return list(late.ranks) if late is not None else []


def _row(ranks: tuple[int, ...], took: Floats) -> StepRow:
    slowest = ranks[int(np.nansum(took, axis=1).argmax())]
    return StepRow(cut(ranks_text(ranks)), slowest, len(ranks), tuple(rounded(worst(took))))


def worst(columns: Floats) -> Floats:
    """The largest value of each column; NaN for a column without one."""
    largest: Floats = np.where(np.isnan(columns), -np.inf, columns).max(axis=0)
    return np.where(np.isinf(largest), np.nan, largest)


def rounded(ns: Floats) -> Iterator[float | None]:
    return (None if math.isnan(value) else milliseconds(value) for value in ns.tolist())


def _slow(ranks: Sequence[int], took: Floats) -> list[int]:
    """Ranks whose steps repeatedly take longer than those of the others: the others do not wait
    for them."""
    usual = np.nanmedian(took, axis=0)
    is_slow = (took > _SLOW * usual) & (took > usual + _SLOW_NS)
    count = (~np.isnan(took)).sum(axis=1)
    slow = np.flatnonzero((count >= _FEWEST_STEPS) & (is_slow.sum(axis=1) >= _SHARE * count))
    worst_first = np.argsort(
        -np.nansum(np.where(is_slow, took - usual, 0), axis=1)[slow], kind="stable"
    )
    return [ranks[row] for row in slow[worst_first][:_MOST_STRAGGLERS].tolist()]
