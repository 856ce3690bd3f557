"""Converts the calls of ranks on several hosts to one clock, with an error bound.

Takes the numbers that ranks have in common and the clocks of a run (`diagnose/clocks/clocks.py`
aligns them by common collectives). Gives the same numbers with times by the clock of one host, and
for each rank how far off these may be. Ranks known from snapshots are already corrected, by the
messages between their monitors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.windows import CallWindow
from torchwhere.diagnose.clocks.clocks import Evidence
from torchwhere.diagnose.clocks.host_clocks import HostClocks

_MESSAGE_DELAY_NS = 1_000_000.0  # longest delay of a message on a local network
_LEAST_NS = 500_000.0  # by which hosts may differ in how soon they continue after a call
_SCATTERS = 3  # one scatter covers nine of ten calls
_WELL_ABOVE = 2  # times the doubt


@dataclass(frozen=True, slots=True)
class Trust:
    """Host and clock error of each rank of a window; None if the error is unknown."""

    hosts: tuple[str, ...]
    doubts_ns: tuple[float | None, ...]

    def doubt_ns(self, row: int) -> float | None:
        """Clock error between a rank and the median of ranks on other hosts."""
        if len(set(self.hosts)) < 2:
            return 0.0
        own, host = self.doubts_ns[row], self.hosts[row]
        others = [
            doubt for doubt, other in zip(self.doubts_ns, self.hosts, strict=True) if other != host
        ]
        known_doubts = [doubt for doubt in others if doubt is not None]
        return (
            own + float(np.median(known_doubts))
            if own is not None and 2 * len(known_doubts) > len(others)
            else None
        )

    def is_beyond_doubt(
        self, row: int, late_ns: npt.NDArray[np.float64], *, least_ns: float
    ) -> bool:
        """Whether one rank is certainly late: against ranks of its host, or by much more than
        the clock error."""
        mates = [
            other
            for other, host in enumerate(self.hosts)
            if host == self.hosts[row] and other != row
        ]
        if mates and late_ns[row] - late_ns[mates].max() >= least_ns:
            return True
        doubt_ns = self.doubt_ns(row)
        return doubt_ns is not None and bool(late_ns[row] >= _WELL_ABOVE * doubt_ns)


def by_one_clock(
    job_calls: JobCalls, window: CallWindow, align_clocks: Callable[[], HostClocks]
) -> tuple[CallWindow, Trust]:
    """Moves the times of a window to one clock. Returns also how far each rank can be off."""
    metas = [job_calls.by_rank[rank].box_summary.meta for rank in window.ranks]
    hosts = tuple(str(meta.get("source_host") or meta.get("host") or "") for meta in metas)
    if len(set(hosts)) < 2:
        return window, Trust(hosts, (0.0,) * len(hosts))
    clocks = align_clocks()
    doubts = [
        _MESSAGE_DELAY_NS if "source_host" in meta else _doubt_ns(clocks, host)
        for meta, host in zip(metas, hosts, strict=True)
    ]
    ends = [int(calls.times_ns(window.end - 1, window.end)[0]) for calls in window.calls]
    shifts = [
        end - clocks.aligned_ns(rank, end) for rank, end in zip(window.ranks, ends, strict=True)
    ]
    calls = tuple(own.set_back(shift) for own, shift in zip(window.calls, shifts, strict=True))
    return replace(window, calls=calls), Trust(hosts, tuple(doubts))


def _doubt_ns(clocks: HostClocks, host: str) -> float | None:
    clock = clocks.of_host(host)
    if clock is None or clock.evidence is Evidence.UNMATCHED:
        return None
    if clock.evidence is Evidence.REFERENCE:
        return 0.0
    # Not `uncertainty_ns`: this strict bound is as wide as a rank is late. Assume that ranks
    # continue soon after a call.
    is_bound = clock.uncertainty_ns is not None  # by calls that wait
    return _LEAST_NS + _SCATTERS * (clock.scatter_ns or 0.0) if is_bound else None
