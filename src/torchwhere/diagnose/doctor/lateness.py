"""Measures how much time the others lose because of each rank: its delay at the collectives of its
group, round by round.

Takes a window by one clock, gives `Lost`. A round is a step or, if no steps are counted, one
collective. A delay is relative to the median of the group (of two ranks, to the other one), and
counts once: a rank that was late at a call that does not block (asynchronous, or on a device), and
is as late at the next, has lost nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.stream_calls import CallWindow
from torchwhere.diagnose.clocks.clocks import Evidence
from torchwhere.diagnose.clocks.host_clocks import HostClocks
from torchwhere.diagnose.doctor.late_issue import LateIssue, late_issue

FEWEST_ROUNDS = 8
_MOST_TIMES = 1 << 21  # that are compared at once: 16 MB


@dataclass(frozen=True, slots=True)
class Lost:
    """Lost time, one row per rank."""

    labels: npt.NDArray[np.int64]  # of each round, its step; or its number in the group
    has_steps: bool
    rounds: npt.NDArray[np.float64]  # ns, one column a round
    # ns, when the first rank came to each round; one more, for the end of the last
    starts: npt.NDArray[np.float64]
    calls: npt.NDArray[np.float64]  # ns, one column a collective of the group
    columns: npt.NDArray[np.int64]  # of these, in the window
    begins: npt.NDArray[np.int64]  # of each round, among these; one more, for the end of the last
    # if the delays are those of the devices: which part the CPUs cause
    late_issue: LateIssue | None

    def since(self, first: int) -> npt.NDArray[np.float64]:
        """`rounds`, as far as it counts if the job is judged from round `first` on."""
        if self.late_issue is None:
            return self.rounds
        return self.rounds * self.late_issue.factors(int(self.begins[first]))[:, None]

    def with_late_cpus(self) -> Lost:
        """The same, but each delay counts in full that is due to a CPU."""
        issue = self.late_issue
        if issue is None:
            return self
        return replace(self, late_issue=replace(issue, extra=issue.by_cpu))

    def is_on_device(self, row: int, first: int) -> bool:
        """Whether the device of a rank is late from round `first` on, rather than its CPU."""
        issue = self.late_issue
        return issue is not None and issue.is_on_device(row, int(self.begins[first]))

    def latest(self, row: int, chosen: npt.NDArray[np.int64]) -> list[int]:
        """The column of the window where a rank lost the most, for each chosen round."""
        spans = [(int(self.begins[i]), int(self.begins[i + 1])) for i in chosen.tolist()]
        return [
            int(self.columns[low + int(self.calls[row, low:high].argmax())]) for low, high in spans
        ]


def lost(window: CallWindow, *, waits: bool) -> Lost | None:
    """The lost time in the last rounds. `waits`: whether a call that is not asynchronous blocks
    until it is done."""
    delays = _device_delays(window)
    last = window.end - window.first if delays is None else delays.shape[1]
    cut = max(0, last - max(_MOST_TIMES // len(window.ranks), 2 * FEWEST_ROUNDS))
    steps = window.steps[0][cut:last]
    has_steps = bool(
        steps[0] != steps[-1] and (np.diff(steps) >= 0).all() and window.has_steps[cut:last].all()
    )
    labels = steps if has_steps else np.arange(window.first + cut, window.first + last)
    begins = np.flatnonzero(np.diff(labels, prepend=labels[0] - 1))
    if len(begins) < FEWEST_ROUNDS + 2:
        return None
    # The first round may be cut off, and includes setup and compilation. The last one may not be
    # complete.
    low, high = int(begins[1]), int(begins[-1])
    begins = begins[1:] - low
    issued = times = _times(window, cut + low, cut + high + 1)
    if delays is not None:
        times = issued + delays[:, cut + low : cut + high + 1]
        waits = True  # on a device, a call on the current stream blocks what comes after it
    calls = _lost(
        times,
        is_new=np.isin(np.arange(high - low), begins),
        is_held=_is_held(window, cut + low, cut + high, waits),
    )
    rounds = np.add.reduceat(calls, begins[:-1], axis=1)
    columns = np.arange(cut + low, cut + high)
    return Lost(
        labels[low:high][begins[:-1]],
        has_steps,
        rounds,
        times.min(axis=0)[begins],
        calls,
        columns,
        begins,
        late_issue(calls, issued=issued, reached=times, sites=window.usuals[columns])
        if delays is not None
        else None,
    )


def _lost(
    times: npt.NDArray[np.float64], *, is_new: npt.NDArray[np.bool_], is_held: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    """Delay of each rank at each call against the median, less an earlier delay at a call that
    did not block."""
    middle = times[::-1] if len(times) == 2 else np.median(times, axis=0)
    late = (times - middle)[:, :-1]
    # If a call blocks, no rank reaches the next one before all have reached it.
    has_waited = times[:, 1:-1].min(axis=0) >= times[:, :-2].max(axis=0)
    goes_on = ~(has_waited & (is_held[:-1] | is_new[1:]))
    late[:, 1:] -= np.where(goes_on, late[:, :-1].clip(min=0), 0)
    return late.clip(min=0)


def _is_held(window: CallWindow, low: int, high: int, waits: bool) -> npt.NDArray[np.bool_]:
    if not waits:
        return np.zeros(high - low, np.bool_)
    return ~window.calls[0].are_async(window.first + low, window.first + high)


def _device_delays(window: CallWindow) -> npt.NDArray[np.float64] | None:
    """How long after the CPU each device came to the calls, up to the last one that all have
    reached; None if it is not known of all before that."""
    if not window.calls[0].has_device_delays:
        return None
    delays = np.stack([calls.device_delays_ns(window.first, window.end) for calls in window.calls])
    reached = np.flatnonzero((delays >= 0).all(axis=0))
    if not len(reached) or int(reached[-1]) + 1 != len(reached):
        return None
    return delays[:, : len(reached)].astype(np.float64)


def _times(window: CallWindow, low: int, high: int) -> npt.NDArray[np.float64]:
    """Times of some calls, relative to the first: a float cannot hold the ns since 1970."""
    times = np.stack(
        [calls.times_ns(window.first + low, window.first + high) for calls in window.calls]
    )
    relative: npt.NDArray[np.float64] = (times - times[0, 0]).astype(np.float64)
    return relative


# -- one clock for several hosts -------------------------------------------------------------------
# Takes the numbers that ranks have in common and the clocks of a run (`diagnose/clocks/clocks.py`
# aligns them by common collectives). Gives the same numbers with times by the clock of one host,
# and for each rank how far off these may be. Ranks known from snapshots are already corrected, by
# the messages between their monitors.


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
        known = [doubt for doubt in others if doubt is not None]
        if own is None or 2 * len(known) <= len(others):
            return None
        return own + float(np.median(known))

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


# -- waits for a CPU -------------------------------------------------------------------------------
# Ranks write CPU delays with their heartbeats (`recorder/heartbeat.py`): the main thread was ready
# to run, but another one had the CPU. On a host with more threads than cores, the scheduler delays
# one rank and then another, some for many steps in a row: no rank is at fault. If one rank waits
# and its neighbours do not, something else runs on its cores.

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
    shares = [_share(job_calls, window, at, columns) for at in beside]
    known = [share for share in shares if share is not None]
    return CpuContention(own, float(np.median(known)) if known else 0.0)


def _host(job_calls: JobCalls, rank: int) -> object:
    return job_calls.by_rank[rank].box_summary.meta.get("host")


def _share(
    job_calls: JobCalls, window: CallWindow, row: int, columns: tuple[int, int]
) -> float | None:
    """Interpolated linearly between heartbeats, one per second. Outside of them the last value
    is used."""
    box, calls = job_calls.by_rank[window.ranks[row]].box, window.calls[row]
    delays = box.cpu_delays() if box is not None else []
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
