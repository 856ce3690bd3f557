"""Whose clock is off, by how much, and how fast it drifts: the clocks of hosts, aligned by what
their ranks did together.

Takes the arrivals of all ranks, gives `Clocks`, which turns the wall-clock time of a rank into that
of a reference: the host of the lowest rank. Ranks of one host share a clock, unless what they did
together shows that they do not. Clocks are straight lines against each other, an offset and a
drift. `pairing.py` compares two of them; here they are put together: from the reference on, each
clock is compared with one that is known already, over the best evidence that there is.
`consensus.py` makes these lines better, by all clocks at once, and `strips.py` says how far off
they can be for all that.

Hosts that have no call in common with the reference, nor with one that has, keep their own wall
clock, and are said to.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, overload

import numpy as np

from torchwhere.diagnose.clocks.arrivals import Arrivals, CallTimes, ClockStream, Times
from torchwhere.diagnose.clocks.bounds import clock_bounds
from torchwhere.diagnose.clocks.call_table import Correction, rows_of
from torchwhere.diagnose.clocks.joint_fit import agreed, broken
from torchwhere.diagnose.clocks.pairwise import Fit, Line, Quality, Series, compare, shares_a_clock

# wall-clock offsets of one boot of a host, measured at different moments, are this close
_SAME_CLOCK_NS = 1_000_000_000
_FAR_NS = float(1 << 61)  # further no clock is ahead: what says so is damaged
_KEPT_NS = 100_000.0  # a clock that is off by less is left alone
_ROUNDS = 3  # of leaving out what contradicts the rest
_MOST_CALLS = 2048  # of a stream, that are kept of each rank
_MOST_KEPT = 1 << 22  # of all streams and ranks together
_FEWEST_CALLS = 128


class Evidence(StrEnum):
    """What a clock was aligned by."""

    REFERENCE = "reference"
    COMPLETIONS = "completions"  # calls that nobody leaves before all have come
    MESSAGES = "messages"  # no recv ends before its send began
    # calls that do not wait: a host that is always late looks like a clock that is ahead
    ISSUES = "issues"
    WALL_CLOCK = "wall clock"  # nothing speaks against it
    UNMATCHED = "unmatched"  # no call in common with the reference


@dataclass(frozen=True, slots=True)
class Clock:
    """One clock, against the reference."""

    host: str
    ranks: tuple[int, ...]
    evidence: Evidence
    line: Line = field(default_factory=Line)  # how far it is ahead
    calls: int = 0  # compared
    scatter_ns: float | None = None  # of single calls around the line; nine of ten are closer
    # it cannot be further off than this, whatever ranks did; None if nothing bounds it
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
    """All clocks of a job, and which rank goes by which."""

    clocks: tuple[Clock, ...] = ()
    _by_rank: Mapping[int, tuple[int, int]] = field(
        default_factory=dict
    )  # index of the clock, and own wall time to the clock's

    def of(self, rank: int) -> Clock | None:
        return self.clocks[self._by_rank[rank][0]] if rank in self._by_rank else None

    @overload
    def offset_ns(self, rank: int, t_ns: int) -> int: ...
    @overload
    def offset_ns(self, rank: int, t_ns: Times) -> Times: ...
    def offset_ns(self, rank: int, t_ns: int | Times) -> int | Times:
        """How far the wall clock of a rank is ahead of the reference, when it shows `t_ns`. 0 for a
        rank that is not known."""
        index, shift_ns = self._by_rank.get(rank, (-1, 0))
        if index < 0:
            return 0 if isinstance(t_ns, int) else np.zeros_like(t_ns)
        line = self.clocks[index].line
        if isinstance(t_ns, int):
            return int(np.clip(line.at(t_ns + shift_ns), -_FAR_NS, _FAR_NS)) - shift_ns
        ahead: Times = (
            np.rint(np.clip(line.at(t_ns + shift_ns), -_FAR_NS, _FAR_NS)).astype(np.int64)
            - shift_ns
        )
        return ahead

    @overload
    def aligned_ns(self, rank: int, t_ns: int) -> int: ...
    @overload
    def aligned_ns(self, rank: int, t_ns: Times) -> Times: ...
    def aligned_ns(self, rank: int, t_ns: int | Times) -> int | Times:
        """A wall-clock time of a rank, by the reference."""
        return t_ns - self.offset_ns(rank, t_ns)  # type: ignore[arg-type, operator, no-any-return]

    def to_dict(self) -> list[dict[str, Any]]:
        return [clock.to_dict() for clock in self.clocks]


def aligned(all_arrivals: Iterable[Arrivals]) -> Clocks:
    """The clocks of a job. What is given is gone through once, and little of it is kept."""
    kept: list[Arrivals] = []
    for found in all_arrivals:
        kept.append(thinned(found, ranks=len(kept) + 1))
    return Aligner(kept).clocks() if kept else Clocks()


def thinned(found: Arrivals, *, ranks: int) -> Arrivals:
    """What is enough to compare clocks by, for so many ranks."""
    most = max(_FEWEST_CALLS, min(_MOST_CALLS, _MOST_KEPT // ranks))
    streams = {stream: calls.thinned(most) for stream, calls in found.streams.items()}
    return Arrivals(found.rank, found.host, found.offset_ns, streams, found.step_ns, found.unsure)


class Aligner:
    """Puts clocks together."""

    def __init__(self, arrivals: Iterable[Arrivals]) -> None:
        ranks = sorted(arrivals, key=lambda each: each.rank)
        steps = [each.step_ns for each in ranks if each.step_ns is not None]
        self._step_ns = float(np.median(steps)) if steps else None
        self._sharing = list(self._shared(ranks))
        self._series = [Series(sharing) for sharing in self._sharing]
        # the first of those that a clock is connected with by calls that wait
        self._circles: dict[int, int] = {}
        self._qualities: dict[int, Quality] = {}
        self._meeting: defaultdict[ClockStream, list[int]] = defaultdict(list)
        for index, series in enumerate(self._series):
            for stream in series.streams:
                self._meeting[stream].append(index)

    def _shared(self, ranks: list[Arrivals]) -> Iterator[list[Arrivals]]:
        """The ranks of each clock, the lowest first."""
        by_host: defaultdict[str, list[list[Arrivals]]] = defaultdict(list)
        for each in ranks:
            boots = by_host[each.host or f"rank {each.rank}"]
            same = (
                boot for boot in boots if abs(boot[0].offset_ns - each.offset_ns) <= _SAME_CLOCK_NS
            )
            boot = next(same, None)
            if boot is None:
                boots.append([each])
            else:
                boot.append(each)
        apart = []
        for sharing in (boot for boots in by_host.values() for boot in boots):
            first = Series(sharing[:1])
            own = [
                each
                for each in sharing[1:]
                if not shares_a_clock(first, Series([sharing[0], each], only=1), self._step_ns)
            ]
            apart += [[each] for each in own]
            yield [each for each in sharing if each not in own]
        yield from apart

    def clocks(self) -> Clocks:
        order = sorted(range(len(self._series)), key=lambda index: self._sharing[index][0].rank)
        found: dict[int, Clock] = {}
        self._circles.clear()
        for index in order:
            if index not in found:
                evidence = Evidence.UNMATCHED if found else Evidence.REFERENCE
                found[index] = self._clock(index, evidence, Line(), Fit())
                self._circles[index] = index
                self._grow(index, found)
        self._refine(found)
        by_rank = {
            each.rank: (place, sharing[0].offset_ns - each.offset_ns)
            for place, index in enumerate(order)
            for sharing in [self._sharing[index]]
            for each in sharing
        }
        return Clocks(tuple(found[index] for index in order), by_rank)

    def _clock(self, index: int, evidence: Evidence, line: Line, fit: Fit) -> Clock:
        sharing = self._sharing[index]
        return Clock(
            sharing[0].host,
            tuple(each.rank for each in sharing),
            evidence,
            line,
            fit.calls,
            fit.scatter_ns,
        )

    def _grow(self, start: int, found: dict[int, Clock]) -> None:
        """From one clock on to all that can be reached. The best evidence first, then the fewest
        clocks in between."""
        told: set[ClockStream] = set()
        waiting: list[tuple[int, int, int, int, Fit | None]] = []
        self._reach(start, 0, found, told, waiting)
        while waiting:
            quality, hops, index, over, fit = heapq.heappop(waiting)
            if index in found:
                continue
            if fit is None:
                fit = compare(self._series[over], self._series[index], self._step_ns)
                if fit is None:
                    continue
                if fit.quality > quality:  # not as good as it looked: perhaps there is another way
                    heapq.heappush(waiting, (fit.quality, hops, index, over, fit))
                    continue
            is_known = found[over].evidence is not Evidence.UNMATCHED
            evidence = (
                Evidence.UNMATCHED
                if not is_known
                else _EVIDENCE[fit.quality]
                if fit.line != Line()
                else _KEPT
            )
            found[index] = self._clock(index, evidence, found[over].line.after(fit.line), fit)
            self._circles[index] = index if fit.quality is Quality.LOOSE else self._circles[over]
            self._qualities[index] = fit.quality
            self._reach(index, hops, found, told, waiting)

    def _refine(self, found: dict[int, Clock]) -> None:
        """Within each circle, by all of its clocks at once."""
        circles: defaultdict[int, list[int]] = defaultdict(list)
        for index, first in self._circles.items():
            circles[first].append(index)
        for first, members in circles.items():
            if len(members) > 1:
                series = {index: self._series[index] for index in members}
                lines = {index: found[index].line for index in members}
                by_calls = all(
                    self._qualities[index] is Quality.TIGHT for index in members if index != first
                )
                lines, doubts = _refined(series, lines, first, by_calls=by_calls)
                for index in members:
                    if index != first:
                        found[index] = self._judged(
                            index, found[index], lines[index], doubts[index]
                        )

    def _judged(self, index: int, clock: Clock, line: Line, doubt_ns: float | None) -> Clock:
        """A clock with a better line; with none if what it would correct is less than can be
        known."""
        if clock.evidence is Evidence.UNMATCHED:
            return replace(clock, line=line, uncertainty_ns=doubt_ns)
        farthest = max((abs(line.at(edge)) for edge in self._series[index].span_ns()), default=0.0)
        if farthest <= _KEPT_NS:
            wider = None if doubt_ns is None else doubt_ns + farthest
            return replace(clock, evidence=Evidence.WALL_CLOCK, line=Line(), uncertainty_ns=wider)
        return replace(
            clock, evidence=_EVIDENCE[self._qualities[index]], line=line, uncertainty_ns=doubt_ns
        )

    def _reach(
        self,
        index: int,
        hops: int,
        found: Mapping[int, Clock],
        told: set[ClockStream],
        waiting: list[tuple[int, int, int, int, Fit | None]],
    ) -> None:
        """All that have a call in common with a clock. A group is compared with the first of it
        that is known."""
        for stream, calls in self._series[index].streams.items():
            if stream not in told:
                told.add(stream)
                for other in self._meeting[stream]:
                    if other not in found:
                        heapq.heappush(
                            waiting, (_looks(stream, calls), hops + 1, other, index, None)
                        )


def _refined(
    series: Mapping[int, Series], lines: dict[int, Line], first: int, *, by_calls: bool
) -> tuple[dict[int, Line], dict[int, float | None]]:
    """Better lines for clocks, the first of which goes right; and how far off each can be at most.
    `by_calls`: collectives connect all of them, so that they can say which messages to believe."""
    rows, slopes = rows_of(series, lines), {index: line.slope for index, line in lines.items()}
    used = rows.of_calls() if by_calls else rows
    found = agreed(used, {first}, slopes)
    for _ in range(_ROUNDS):
        kept = rows.without(broken(rows, found))
        if len(kept) == len(used):
            break
        used, found = kept, agreed(kept, {first}, slopes)
    for index, correction in found.items():
        if index != first:
            lines[index] = correction.line(rows.zero_ns).after(lines[index])
    kept = rows_of(series, lines)
    kept = kept.without(np.setdiff1d(kept.stream, used.stream))
    doubts: dict[int, float | None] = dict.fromkeys(series)
    for index, strip in clock_bounds(kept, {first}).items():
        if index != first:
            correction = strip.kept(Correction())
            lines[index] = correction.line(kept.zero_ns).after(lines[index])
            doubts[index] = strip.doubt(correction)
    return lines, doubts


_KEPT = Evidence.WALL_CLOCK
_EVIDENCE = {
    Quality.TIGHT: Evidence.COMPLETIONS,
    Quality.MESSAGES: Evidence.MESSAGES,
    Quality.LOOSE: Evidence.ISSUES,
}


def _looks(stream: ClockStream, calls: CallTimes) -> int:
    """How good the evidence of a stream will be at best."""
    if stream.is_message:
        return Quality.MESSAGES
    return Quality.TIGHT if calls.waits.any() else Quality.LOOSE
