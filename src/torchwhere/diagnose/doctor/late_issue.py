"""Splits the delay of a device into its own part and that of the CPU, which issued the calls late.

If a job is bound by its CPUs, all other devices wait for the rank with the slowest CPU at each
call, although that CPU is hardly slower than theirs. So a delay by the CPU counts only as far as
the CPU took longer than others to issue the same calls. Its time is compared for each pair of
consecutive call sites: a CPU that has come far ahead may wait for its device at another site.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LateIssue:
    """Delays of devices because the CPU issued late. One row per rank, one column per call, ns."""

    delays: Times  # what the device lost
    by_cpu: Times  # the part of it that is due to the CPU
    extra: Times  # how much longer than others the CPU took to issue the call after the one before
    sites: npt.NDArray[np.int64]  # equal for calls with equal call sites before and at the call

    def factors(self, first: int) -> Times:
        """For each rank, which part of its delay from a call on counts.

        For a rank without a delay there, all calls count.
        """
        starts = np.where(self.delays[:, first:].any(axis=1), first, 0).tolist()
        return np.array([self._factor(row, start) for row, start in enumerate(starts)])

    def is_on_device(self, row: int, first: int) -> bool:
        """Whether a delay from a call on is due to the device rather than the CPU."""
        return self._own(row, first) > self._counted(row, first)

    def _factor(self, row: int, first: int) -> float:
        delay = float(self.delays[row, first:].sum())
        return (self._own(row, first) + self._counted(row, first)) / delay if delay else 1.0

    def _own(self, row: int, first: int) -> float:
        """What the device lost by itself."""
        return float((self.delays[row, first:] - self.by_cpu[row, first:]).sum())

    def _counted(self, row: int, first: int) -> float:
        """What it lost by the CPU, as far as the CPU was slower than others, and not only once: all
        devices may wait for a CPU that has paused long ago. So its longest delay counts only as
        much as the second longest."""
        extra = self.extra[row, first:]
        if len(extra) > 1:
            extra = np.minimum(extra, np.partition(extra, -2)[-2])
        sums = np.bincount(self.sites[first:], weights=extra)
        return min(float(self.by_cpu[row, first:].sum()), float(sums.clip(min=0).sum()))


def late_issue(
    delays: Times, *, issued: Times, reached: Times, sites: npt.NDArray[np.int64]
) -> LateIssue:
    """Compares when CPUs issued calls, and when devices reached them.

    Args:
        delays: What each device lost at each call.
        issued: When each CPU issued the calls; may have more columns.
        reached: When each device reached them.
        sites: The call site of each call.
    """
    count = delays.shape[1]
    usual = reached[::-1] if len(reached) == 2 else np.median(reached, axis=0)
    by_cpu = np.minimum(delays, (issued - usual)[:, :count].clip(min=0))
    intervals = np.diff(issued[:, :count], axis=1, prepend=issued[:, :1])
    others = intervals[::-1] if len(intervals) == 2 else np.median(intervals, axis=0)
    before = np.concatenate([sites[:1], sites[: count - 1]])
    pairs = np.unique(np.stack([before, sites[:count]]), axis=1, return_inverse=True)[1]
    return LateIssue(delays, by_cpu, intervals - others, pairs.reshape(-1))
