"""Whether a rank is late for want of a CPU: its main thread was ready to run, and another one had
the CPU.

Takes what the hearts of ranks wrote beside their last beats (`recorder/heartbeat.py`), gives shares
of time. On a host that runs more than it has cores for, the scheduler lets now one and now another
rank wait, some of them for many steps in a row: that is nobody's fault. Where one waits and its
neighbours do not, something else is on the cores that it may use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torchwhere.diagnose.calls.rank_calls import JobCalls
from torchwhere.diagnose.doctor.mismatch import CallWindow

_ASKED = 16  # neighbours
_EXPLAINS = 0.5  # of the time that is lost
_ALIKE = 0.5  # as much as the late one


class CpuContention(NamedTuple):
    """Shares of the time for which a late rank, and the middle one of those beside it on its host,
    waited for a CPU."""

    own: float
    neighbours: float

    def explains(self, share: float) -> bool:
        """Whether so much of the time may have been lost by it."""
        return self.own >= _EXPLAINS * share

    @property
    def is_everybodys(self) -> bool:
        return self.neighbours >= _ALIKE * self.own


def cpu_contention(
    job_calls: JobCalls,
    window: CallWindow,
    row: int,
    *,
    columns: tuple[int, int],
    late: Sequence[int],
) -> CpuContention | None:
    """Of a late rank, from one number of the window to another. None where its heart, or the
    kernel, does not tell."""
    own = _share(job_calls, window, row, columns)
    if own is None:
        return None
    host = _host(job_calls, window.ranks[row])
    beside = [
        at
        for at, rank in enumerate(window.ranks)
        if at not in late and _host(job_calls, rank) == host
    ][:_ASKED]
    shares = [
        share for at in beside if (share := _share(job_calls, window, at, columns)) is not None
    ]
    return CpuContention(own, float(np.median(shares)) if shares else 0.0)


def _host(job_calls: JobCalls, rank: int) -> object:
    return job_calls.by_rank[rank].label.meta.get("host")


def _share(
    job_calls: JobCalls, window: CallWindow, row: int, columns: tuple[int, int]
) -> float | None:
    """By straight lines between beats, of which there is one a second. What they do not reach is
    taken to be like the last."""
    rank_calls, calls = job_calls.by_rank[window.ranks[row]], window.calls[row]
    beats = rank_calls.box.cpu_delays() if rank_calls.box is not None else []
    if len(beats) < 2:
        return None
    times, waits = (np.array(each, dtype=np.float64) for each in zip(*beats, strict=True))
    asked = [
        float(calls.times_ns(window.first + column, window.first + column + 1)[0])
        for column in columns
    ]
    begin, end = np.clip(asked, times[0], times[-1])
    if begin >= end:
        begin, end = times[-2:]
    low, high = np.interp((begin, end), times, np.cumsum(waits))
    return min(1.0, float(high - low) / float(end - begin)) if end > begin else None
