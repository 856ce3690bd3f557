"""Measures the pace of a job: steps per second, or collectives per second."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.rank_calls import RankCalls

_CALLS = 50  # newest calls that give the pace of a job without steps


@dataclass(frozen=True, slots=True)
class Pace:
    """Steps per second and the last step; collectives per second if no steps are counted."""

    steps_per_s: float | None
    last_step: int | None
    collectives_per_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def pace_of(job_calls: JobCalls) -> Pace:
    """The pace of a job, the median over its ranks."""
    summaries = [rank_calls.rank_summary for rank_calls in job_calls.by_rank.values()]
    rates = [summary.steps_per_s for summary in summaries if summary.steps_per_s is not None]
    steps = [summary.last_step for summary in summaries if summary.last_step is not None]
    last = max(steps, default=None)
    if rates:
        return Pace(float(np.median(rates)), last)
    some = list(job_calls.by_rank.values())[:_CALLS]
    calls = [rate for rate in map(_calls_per_s, some) if rate is not None]
    return Pace(None, last, float(np.median(calls)) if calls else None)


def _calls_per_s(rank_calls: RankCalls) -> float | None:
    """Recent collectives per second."""
    times = [calls.times_ns()[-_CALLS:] for calls in rank_calls.calls.values()]
    latest = np.sort(np.concatenate(times))[-_CALLS:] if times else np.empty(0, np.int64)
    lasted = int(latest[-1] - latest[0]) if len(latest) > 1 else 0
    return (len(latest) - 1) * 1e9 / lasted if lasted > 0 else None
