"""Measures whether a rank is late because it waits for a CPU: its main thread was ready to run, but
another one had the CPU.

Takes the CPU delays that ranks write with their heartbeats (`recorder/heartbeat.py`), gives shares
of time. On a host with more threads than cores, the scheduler delays one rank and then another,
some for many steps in a row: no rank is at fault. If one rank waits and its neighbours do not,
something else runs on its cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.stream_calls import CallWindow

_ASKED = 16  # neighbours
_EXPLAINS = 0.5  # of the time that is lost
_ALIKE = 0.5  # as much as the late one


class CpuContention(NamedTuple):
    """Shares of time waiting for a CPU: a late rank, and the median of the ranks on its host."""

    own: float
    neighbours: float

    def explains(self, share: float) -> bool:
        """Whether it may explain this share of lost time."""
        return self.own >= _EXPLAINS * share

    @property
    def is_host_wide(self) -> bool:
        return self.neighbours >= _ALIKE * self.own


def cpu_contention(
    job_calls: JobCalls,
    window: CallWindow,
    row: int,
    *,
    columns: tuple[int, int],
    late: Sequence[int],
) -> CpuContention | None:
    """The contention of a late rank between two columns; None if heartbeat or kernel do not
    provide it."""
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
    return job_calls.by_rank[rank].box_summary.meta.get("host")


def _share(
    job_calls: JobCalls, window: CallWindow, row: int, columns: tuple[int, int]
) -> float | None:
    """Interpolated linearly between heartbeats, one per second. Outside of them the last value
    is used."""
    rank_calls, calls = job_calls.by_rank[window.ranks[row]], window.calls[row]
    delays = rank_calls.box.cpu_delays() if rank_calls.box is not None else []
    if len(delays) < 2:
        return None
    times, waits = (np.array(column, dtype=np.float64) for column in zip(*delays, strict=True))
    asked = [
        float(calls.times_ns(window.first + column, window.first + column + 1)[0])
        for column in columns
    ]
    begin, end = np.clip(asked, times[0], times[-1])
    if begin >= end:
        begin, end = times[-2:]
    low, high = np.interp((begin, end), times, np.cumsum(waits))
    return min(1.0, float(high - low) / float(end - begin)) if end > begin else None
