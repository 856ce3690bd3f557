"""Finds how far the clock of each host is off and how fast it drifts, from calls of its ranks.

`aligned` takes the arrivals of all ranks and gives `Clocks`, which convert the wall-clock time of a
rank to that of the reference: the host of the lowest rank. Ranks of one host share a clock, unless
their calls show that they do not. The difference of two clocks is a straight line: offset and
drift.

1. `pairwise.py` compares two clocks. Starting at the reference, each clock is compared with one
   that is already known, by the best evidence there is.
2. `joint_fit.py` improves these lines by fitting all clocks at once.
3. `bounds.py` says how far off they can still be.

Hosts that have no call in common with the reference, not even over other hosts, keep their own wall
clock and are marked as `unmatched`.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np

from torchwhere.core.arrays import Times
from torchwhere.core.grouping import grouped
from torchwhere.diagnose.clocks.arrivals import Arrivals, CallTimes, ClockStream
from torchwhere.diagnose.clocks.bounds import uncertainties
from torchwhere.diagnose.clocks.call_table import ClockCalls, call_table
from torchwhere.diagnose.clocks.joint_fit import fit, streams_that_do_not_wait
from torchwhere.diagnose.clocks.line import Line, TimeOrTimes
from torchwhere.diagnose.clocks.pairwise import Fit, Quality, compare, shares_a_clock

# Wall-clock offsets of one boot of a host, measured at different moments, differ by less than this.
_SAME_CLOCK_NS = 1_000_000_000
_FAR_NS = float(1 << 61)  # no clock is further ahead; a larger offset comes from damaged data
_KEPT_NS = 100_000.0  # a clock that is off by less is not corrected
_ROUNDS = 3  # of leaving out streams that do not wait
_MOST_CALLS = 2048  # kept of each stream and rank
_MOST_KEPT = 1 << 22  # kept of all streams and ranks together
_FEWEST_CALLS = 128


class Evidence(StrEnum):
    """What a clock was aligned by."""

    REFERENCE = "reference"
    COMPLETIONS = "completions"  # calls that no rank leaves before all have arrived
    MESSAGES = "messages"  # no recv ends before its send began
    # calls that do not wait: a host that is always late looks like a clock that is ahead
    ISSUES = "issues"
    WALL_CLOCK = "wall clock"  # no call contradicts it
    UNMATCHED = "unmatched"  # no call in common with the reference


_EVIDENCE = {
    Quality.TIGHT: Evidence.COMPLETIONS,
    Quality.MESSAGES: Evidence.MESSAGES,
    Quality.LOOSE: Evidence.ISSUES,
}


@dataclass(frozen=True, slots=True)
class Clock:
    """One clock, compared with the reference."""

    host: str
    ranks: tuple[int, ...]
    evidence: Evidence
    line: Line = field(default_factory=Line)  # how far it is ahead
    calls: int = 0  # that were compared
    scatter_ns: float | None = None  # nine of ten calls are closer to the pairwise line than this
    # It cannot be further off than this, whatever the ranks did. None if nothing bounds it.
    uncertainty_ns: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "host": self.host,
            "ranks": list(self.ranks),
            "evidence": str(self.evidence),
            "offset_ns": round(self.line.offset_ns),
            "drift_ppm": round(self.line.slope * 1e6, 3),
            "calls": self.calls,
            "scatter_ns": None if self.scatter_ns is None else round(self.scatter_ns),
            "uncertainty_ns": None if self.uncertainty_ns is None else round(self.uncertainty_ns),
        }


@dataclass(frozen=True, slots=True)
class Clocks:
    """All clocks of a job, and the clock of each rank."""

    clocks: tuple[Clock, ...] = ()
    # index of the clock, and what to add to the rank's wall-clock time to get that of the clock
    _by_rank: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    def of(self, rank: int) -> Clock | None:
        return self.clocks[self._by_rank[rank][0]] if rank in self._by_rank else None

    def offset_ns(self, rank: int, t_ns: TimeOrTimes) -> TimeOrTimes:
        """Returns how far the wall clock of a rank is ahead of the reference when it shows `t_ns`.

        0 for an unknown rank.
        """
        index, shift_ns = self._by_rank.get(rank, (-1, 0))
        if index < 0:
            return t_ns * 0
        ahead = np.clip(self.clocks[index].line.at(t_ns + shift_ns), -_FAR_NS, _FAR_NS)
        if isinstance(t_ns, int):
            return int(ahead) - shift_ns
        rounded: Times = np.rint(ahead).astype(np.int64) - shift_ns
        return rounded

    def aligned_ns(self, rank: int, t_ns: TimeOrTimes) -> TimeOrTimes:
        """Converts a wall-clock time of a rank to the reference clock."""
        return t_ns - self.offset_ns(rank, t_ns)

    def to_dict(self) -> list[dict[str, Any]]:
        return [clock.to_dict() for clock in self.clocks]


def aligned(all_arrivals: Iterable[Arrivals]) -> Clocks:
    """Aligns the clocks of a job. It reads the arrivals once and keeps only some calls of each."""
    few_calls: list[Arrivals] = []
    for arrivals in all_arrivals:
        few_calls.append(thinned(arrivals, ranks=len(few_calls) + 1))
    return Aligner(few_calls).clocks() if few_calls else Clocks()


def thinned(arrivals: Arrivals, *, ranks: int) -> Arrivals:
    """Keeps as many calls as are needed to compare the clocks of so many ranks."""
    most = max(_FEWEST_CALLS, min(_MOST_CALLS, _MOST_KEPT // ranks))
    streams = {stream: calls.thinned(most) for stream, calls in arrivals.streams.items()}
    return replace(arrivals, streams=streams)


# A clock that can be compared next: quality (at best), number of clocks to the reference, its
# index, and the index of the known clock.
_Candidate = tuple[int, int, int, int]


class Aligner:
    """Aligns all clocks of a job."""

    def __init__(self, arrivals: Iterable[Arrivals]) -> None:
        ranks = sorted(arrivals, key=lambda arrivals: arrivals.rank)
        steps = [arrivals.step_ns for arrivals in ranks if arrivals.step_ns is not None]
        self._step_ns = float(np.median(steps)) if steps else None
        shared = sorted(self._shared(ranks), key=lambda sharing: sharing[0].rank)
        self._ranks = shared  # the ranks of each clock; the clock of the lowest rank first
        self._calls = [ClockCalls(sharing) for sharing in shared]
        self._clocks: dict[int, Clock] = {}
        self._qualities: dict[int, Quality] = {}
        # the first clock of the component: clocks that are connected by calls that wait
        self._component: dict[int, int] = {}
        self._clocks_of = grouped(
            (stream, index) for index, calls in enumerate(self._calls) for stream in calls.streams
        )

    def _shared(self, ranks: list[Arrivals]) -> Iterator[list[Arrivals]]:
        """Yields the ranks of each clock, the lowest first."""
        boots: defaultdict[str, list[list[Arrivals]]] = defaultdict(list)
        for arrivals in ranks:
            of_host = boots[arrivals.host or f"rank {arrivals.rank}"]
            for boot in of_host:
                if abs(boot[0].offset_ns - arrivals.offset_ns) <= _SAME_CLOCK_NS:
                    boot.append(arrivals)
                    break
            else:
                of_host.append([arrivals])
        for sharing in (boot for of_host in boots.values() for boot in of_host):
            first = ClockCalls(sharing[:1])
            together = [sharing[0]]
            for arrivals in sharing[1:]:
                other = ClockCalls([sharing[0], arrivals], only=1)
                if shares_a_clock(first, other, self._step_ns):
                    together.append(arrivals)
                else:
                    yield [arrivals]
            yield together

    def clocks(self) -> Clocks:
        for index in range(len(self._calls)):
            if index not in self._clocks:
                evidence = Evidence.UNMATCHED if self._clocks else Evidence.REFERENCE
                self._add(index, evidence, Line(), Fit(), component=index)
                self._reach_from(index)
        components = grouped((first, index) for index, first in self._component.items())
        for first, members in components.items():
            if len(members) > 1:
                self._refine(first, members)
        by_rank = {
            arrivals.rank: (index, sharing[0].offset_ns - arrivals.offset_ns)
            for index, sharing in enumerate(self._ranks)
            for arrivals in sharing
        }
        return Clocks(tuple(self._clocks[index] for index in range(len(self._calls))), by_rank)

    # -- pair by pair ------------------------------------------------------------------------------

    def _add(self, index: int, evidence: Evidence, line: Line, fit: Fit, *, component: int) -> None:
        sharing = self._ranks[index]
        ranks = tuple(arrivals.rank for arrivals in sharing)
        self._clocks[index] = Clock(
            sharing[0].host, ranks, evidence, line, fit.calls, fit.scatter_ns
        )
        self._component[index] = component
        self._qualities[index] = fit.quality

    def _reach_from(self, start: int) -> None:
        """Compares all clocks that can be reached from one.

        Clocks with the best evidence come first (Dijkstra), then those with the fewest clocks in
        between.
        """
        seen: set[ClockStream] = set()
        queue: list[_Candidate] = []
        fits: dict[tuple[int, int], Fit | None] = {}
        self._enqueue(start, 0, seen, queue)
        while queue:
            quality, hops, index, over = heapq.heappop(queue)
            if index in self._clocks:
                continue
            if (over, index) not in fits:
                fits[over, index] = compare(self._calls[over], self._calls[index], self._step_ns)
            fit = fits[over, index]
            if fit is None:
                continue
            if fit.quality > quality:  # worse than expected: there may be a better pair
                heapq.heappush(queue, (fit.quality, hops, index, over))
                continue
            known = self._clocks[over]
            component = index if fit.quality is Quality.LOOSE else self._component[over]
            evidence = Evidence.UNMATCHED
            if known.evidence is not Evidence.UNMATCHED:
                evidence = _EVIDENCE[fit.quality] if fit.line != Line() else Evidence.WALL_CLOCK
            self._add(index, evidence, known.line.after(fit.line), fit, component=component)
            self._enqueue(index, hops, seen, queue)

    def _enqueue(
        self, index: int, hops: int, seen: set[ClockStream], queue: list[_Candidate]
    ) -> None:
        """Adds all clocks that have a stream in common with a clock.

        The clocks of a stream are compared with the first of them that is known.
        """
        for stream, calls in self._calls[index].streams.items():
            if stream not in seen:
                seen.add(stream)
                for other in self._clocks_of[stream]:
                    if other not in self._clocks:
                        best = _best_quality(stream, calls)
                        heapq.heappush(queue, (best, hops + 1, other, index))

    # -- all at once -------------------------------------------------------------------------------

    def _refine(self, first: int, members: list[int]) -> None:
        """Fits the clocks of a component at once. The line of the first one stays."""
        calls = {index: self._calls[index] for index in members}
        lines = {index: self._clocks[index].line for index in members}
        table = call_table(calls, lines)
        slopes = {index: line.slope for index, line in lines.items()}
        # If collectives connect all clocks, they decide which messages wait.
        others = [index for index in members if index != first]
        is_tight = all(self._qualities[index] is Quality.TIGHT for index in others)
        used = table.collectives() if is_tight else table
        corrections = fit(used, first, slopes)
        for _ in range(_ROUNDS):
            waiting = table.without(streams_that_do_not_wait(table, corrections))
            if len(waiting) == len(used):
                break
            used, corrections = waiting, fit(waiting, first, slopes)
        for index, correction in corrections.items():
            if index != first:
                lines[index] = correction.line(table.zero_ns).after(lines[index])
        table = call_table(calls, lines)
        table = table.without(np.setdiff1d(table.stream, used.stream))
        uncertainty = uncertainties(table, first)
        for index in others:
            self._clocks[index] = self._refined(index, lines[index], uncertainty.get(index))

    def _refined(self, index: int, line: Line, uncertainty_ns: float | None) -> Clock:
        """Returns a clock with a better line, or its wall clock if that is hardly off."""
        clock = self._clocks[index]
        if clock.evidence is Evidence.UNMATCHED:
            return replace(clock, line=line, uncertainty_ns=uncertainty_ns)
        farthest = max((abs(line.at(edge)) for edge in self._calls[index].span_ns()), default=0.0)
        if farthest > _KEPT_NS:
            evidence = _EVIDENCE[self._qualities[index]]
            return replace(clock, evidence=evidence, line=line, uncertainty_ns=uncertainty_ns)
        if uncertainty_ns is not None:
            uncertainty_ns += farthest
        return replace(
            clock, evidence=Evidence.WALL_CLOCK, line=Line(), uncertainty_ns=uncertainty_ns
        )


def _best_quality(stream: ClockStream, calls: CallTimes) -> int:
    """Returns how good the evidence of a stream is at best."""
    if stream.is_message:
        return Quality.MESSAGES
    return Quality.TIGHT if calls.waits.any() else Quality.LOOSE
