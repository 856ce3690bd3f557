"""Two clocks against each other, by the calls that ranks of both took part in.

Nobody leaves a blocking collective before all have come to it. So what a rank does next it does
after everyone's arrival, and an offset between two clocks that would have it otherwise is wrong.
That bounds the offset from both sides. Between the bounds lies what the ends say: the call ends for
all at the same moment, and the next thing each rank does comes soon after it, on a rank that was
late as on one that has waited. The sooner, the more it counts. Arrivals alone are not compared
where this can be: a rank that is always late would have its lateness taken for an offset.

A call that does not wait (asynchronous, or one that only goes into the queue of a GPU) gives no
bound, and only arrivals. Where bounds contradict each other the calls cannot have waited. Then wall
clocks are believed unless they are off by more than ranks may be apart.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from torchwhere.diagnose.clocks.arrivals import NEVER, Arrivals, CallTimes, ClockStream, Times
from torchwhere.diagnose.clocks.line_bounds import MOST_SLOPE, Floats, highest, nearest

_SOON_NS = 50_000.0  # what comes this soon after a call came at once
_BOUND_NS = 200_000.0  # bounds that contradict each other by less are met
_VIOLATIONS = 0.05  # of the calls, from which on they cannot have waited
_MOST_SLOPE = MOST_SLOPE / 2  # of one of them
_FEWEST_FOR_SLOPE = 8
_ROUNDS = 30
# by this much ranks of one host may be apart in calls that do not wait, or by three steps
_APART_NS = 1e9


class Quality(IntEnum):
    """Of the evidence, the best first."""

    TIGHT = 0
    MESSAGES = 1
    LOOSE = 2


@dataclass(frozen=True, slots=True)
class Line:
    """How far one clock is ahead of another, when it shows a time itself."""

    offset_ns: float = 0.0
    slope: float = 0.0
    zero_ns: int = 0

    @overload
    def at(self, t_ns: int) -> float: ...
    @overload
    def at(self, t_ns: Times) -> Floats: ...
    def at(self, t_ns: int | Times) -> float | Floats:
        ahead: float | Floats = self.offset_ns + self.slope * np.float64(t_ns - self.zero_ns)
        return ahead

    def after(self, inner: Line) -> Line:
        """Of a clock that is ahead by `inner` of the one this line is about."""
        offset_ns = (
            inner.offset_ns
            + self.offset_ns
            + self.slope * (inner.zero_ns - inner.offset_ns - self.zero_ns)
        )
        if inner == Line():
            return self
        return Line(offset_ns, inner.slope + self.slope * (1 - inner.slope), inner.zero_ns)


@dataclass(frozen=True, slots=True)
class Fit:
    """How one clock runs against another."""

    line: Line = field(default_factory=Line)
    quality: Quality = Quality.TIGHT
    calls: int = 0
    scatter_ns: float | None = None


class Series:
    """The calls of all ranks that share a clock, in its own wall-clock time: of each call the last
    arrival, and who went on first."""

    def __init__(self, sharing: Sequence[Arrivals], *, only: int | None = None) -> None:
        found: defaultdict[ClockStream, list[CallTimes]] = defaultdict(list)
        zero_ns = sharing[0].offset_ns
        for each in sharing if only is None else sharing[only : only + 1]:
            shift_ns = zero_ns - each.offset_ns
            for stream, calls in each.streams.items():
                later = np.where(calls.next_ns == NEVER, NEVER, calls.next_ns + shift_ns)
                found[stream].append(
                    CallTimes(
                        calls.numbers,
                        calls.issued_ns + shift_ns,
                        later,
                        calls.waits,
                        calls.at,
                        calls.sites,
                    )
                )
        # A message between two ranks of one host says nothing of its clock.
        self.streams = {
            key: _merged(all_calls)
            for key, all_calls in found.items()
            if not (key.is_message and len(all_calls) > 1)
        }
        self.ranks = frozenset(each.rank for each in sharing)
        self.unsure = frozenset(stream for each in sharing for stream in each.unsure)

    def span_ns(self) -> tuple[int, ...]:
        """When the first call was issued, and the last."""
        seen = [
            edge
            for calls in self.streams.values()
            if len(calls)
            for edge in calls.issued_ns[[0, -1]].tolist()
        ]
        return (min(seen), max(seen)) if seen else ()


def _merged(all_calls: list[CallTimes]) -> CallTimes:
    if len(all_calls) == 1:
        return all_calls[0]
    numbers = np.concatenate([calls.numbers for calls in all_calls])
    order = np.argsort(numbers, kind="stable")
    merged, begins = np.unique(numbers[order], return_index=True)
    if not len(merged):
        return all_calls[0]

    def reduced(how: Any, name: str) -> Any:
        return how.reduceat(
            np.concatenate([getattr(calls, name) for calls in all_calls])[order], begins
        )

    rest = reduced(np.logical_and, "waits"), reduced(np.minimum, "at"), reduced(np.minimum, "sites")
    return CallTimes(
        merged, reduced(np.maximum, "issued_ns"), reduced(np.minimum, "next_ns"), *rest
    )


@dataclass(frozen=True, slots=True)
class Both:
    """The calls that two clocks have in common in one stream."""

    stream: ClockStream
    x_issued: Times
    x_next: Times
    y_issued: Times
    y_next: Times
    x_waits: npt.NDArray[np.bool_]
    y_waits: npt.NDArray[np.bool_]


def _in_common(x: Series, y: Series) -> list[Both]:
    found = []
    for stream, of_x in x.streams.items():
        of_y = y.streams.get(stream)
        if of_y is None:
            continue
        _, i, j = np.intersect1d(
            of_x.numbers, of_y.numbers, assume_unique=True, return_indices=True
        )
        if len(i):
            waits = (
                of_x.waits[i] & (of_x.next_ns[i] != NEVER),
                of_y.waits[j] & (of_y.next_ns[j] != NEVER),
            )
            found.append(
                Both(
                    stream,
                    of_x.issued_ns[i],
                    of_x.next_ns[i],
                    of_y.issued_ns[j],
                    of_y.next_ns[j],
                    *waits,
                )
            )
    return found


@dataclass(frozen=True, slots=True)
class Samples:
    """Pairs of times at which something was seen on both clocks: what `y` shows, less what `x`
    shows, and the bounds."""

    t_ns: Times
    ahead_ns: Times
    least_ns: Times
    most_ns: Times

    def __len__(self) -> int:
        return len(self.t_ns)


def _ends(both: list[Both]) -> Samples:
    """Of calls that wait: when they ended."""
    parts = []
    for each in both:
        if not each.stream.is_message:
            on = each.x_waits & each.y_waits
            x, x_next, y, y_next = (
                each.x_issued[on],
                each.x_next[on],
                each.y_issued[on],
                each.y_next[on],
            )
            parts.append((y_next, y_next - x_next, y - x_next, y_next - x))
    return _samples(parts)


def _issues(both: list[Both]) -> Samples:
    """When calls were issued; no bounds."""
    return _samples(
        [
            (each.y_issued, ahead, ahead, ahead)
            for each in both
            for ahead in [each.y_issued - each.x_issued]
        ]
    )


def _samples(parts: list[tuple[Times, Times, Times, Times]]) -> Samples:
    empty = np.empty(0, np.int64)
    return Samples(
        *(np.concatenate([part[k] for part in parts]) if parts else empty for k in range(4))
    )


def compare(x: Series, y: Series, step_ns: float | None) -> Fit | None:
    """How far clock `y` is ahead of clock `x`; None if they have no call in common."""
    both = _in_common(x, y)
    ends = _ends(both)
    if len(ends):
        return _by_ends(
            ends, step_ns, is_sure=not any(each.stream in x.unsure | y.unsure for each in both)
        )
    by_messages = _by_messages(both, x)
    if by_messages is not None:
        return by_messages
    issues = _issues(both)
    return _by_issues(issues, step_ns) if len(issues) else None


def shares_a_clock(x: Series, y: Series, step_ns: float | None) -> bool:
    """Whether nothing speaks against two ranks of one host going by one clock."""
    both = _in_common(x, y)
    ends = _ends(both)
    if len(ends):
        wrong = (ends.least_ns > _BOUND_NS) | (ends.most_ns < -_BOUND_NS)
        if wrong.mean() <= _VIOLATIONS:
            return True
        # there is an offset that explains all, and it is not 0
        if _by_ends(ends, step_ns).quality is Quality.TIGHT:
            return False
    seen = ends if len(ends) else _issues(both)
    return not len(seen) or abs(float(np.median(seen.ahead_ns))) <= max(
        _APART_NS, 3 * (step_ns or 0.0)
    )


# -- fits ------------------------------------------------------------------------------------------


def _by_ends(seen: Samples, step_ns: float | None, *, is_sure: bool = False) -> Fit:
    zero_ns, t, ahead, base_ns = _centred(seen)
    least, most = (
        (seen.least_ns - base_ns).astype(np.float64),
        (seen.most_ns - base_ns).astype(np.float64),
    )
    doubt = np.maximum(ahead - least, most - ahead)
    offset, slope = _fitted(t, ahead, 1 / (_SOON_NS + np.maximum(doubt, 0.0)))
    line = offset + slope * t
    under, over = least - line, line - most  # above 0: a bound is not kept
    if _is_broken(under, over):
        middle = _middle(t, least, most) if is_sure else None
        if middle is None:
            return _loose(zero_ns, t, ahead, base_ns, step_ns)
        offset, slope = middle
        under, over = least - (offset + slope * t), offset + slope * t - most
        if _is_broken(under, over):
            return _loose(zero_ns, t, ahead, base_ns, step_ns)
    up, down = float(under.max()), float(over.max())
    if up > 0 > down or down > 0 > up:
        offset += min(up, -down) if up > 0 else -min(down, -up)
    scatter = _scatter(ahead - (offset + slope * t), 0.9)
    found = Line(base_ns + offset, slope, zero_ns)
    is_nothing = _farthest(found, t, zero_ns) <= _scatter(ahead - (offset + slope * t), 0.75)
    return Fit(Line() if is_nothing else found, Quality.TIGHT, len(seen), scatter)


def _is_broken(under: Floats, over: Floats) -> bool:
    return bool((np.maximum(under, over) > _BOUND_NS).mean() > _VIOLATIONS)


def _middle(t: Floats, least: Floats, most: Floats) -> tuple[float, float] | None:
    """A line in the middle of all that keep to the bounds; None if there is none."""
    ends = np.array([t.min(), t.max()])
    below, above = (
        [each[None] for each in nearest(t, bound, ends, sign)]
        for bound, sign in ((most, 1), (least, -1))
    )
    middles = []
    for end in ends.tolist():
        (top,), (bottom,) = (
            highest(below[0] - end, below[1], above[0] - end, above[1]),
            -highest(above[0] - end, -above[1], below[0] - end, -below[1]),
        )
        if not bottom <= top + _BOUND_NS:
            return None
        middles.append(float(bottom + top) / 2)
    slope = (middles[1] - middles[0]) / max(float(ends[1] - ends[0]), 1.0)
    return middles[0] - slope * float(ends[0]), slope


def _by_issues(seen: Samples, step_ns: float | None) -> Fit:
    zero_ns, t, ahead, base_ns = _centred(seen)
    return _loose(zero_ns, t, ahead, base_ns, step_ns)


def _loose(zero_ns: int, t: Floats, ahead: Floats, base_ns: int, step_ns: float | None) -> Fit:
    """By the middle of all; the wall clock is believed if it is not off by more than ranks may be
    apart."""
    offset, slope = _fitted(t, ahead, np.ones_like(t))
    scatter = _scatter(ahead - (offset + slope * t), 0.9)
    found = Line(base_ns + offset, slope, zero_ns)
    is_nothing = _farthest(found, t, zero_ns) <= max(3 * scatter, (step_ns or 0.0) / 2)
    return Fit(Line() if is_nothing else found, Quality.LOOSE, len(t), scatter)


def _by_messages(both: list[Both], x: Series) -> Fit | None:
    """No recv ends before its send began: messages one way bound the offset from above, those the
    other way from below."""
    above, below = [], []
    for each in both:
        if not each.stream.is_message:
            continue
        if each.stream.source in x.ranks:
            on = each.y_waits
            above.append((each.y_next[on], each.y_next[on] - each.x_issued[on]))
        else:
            on = each.x_waits
            below.append((each.y_issued[on], each.y_issued[on] - each.x_next[on]))
    times = [part for part in (*above, *below) if len(part[0])]
    if not times:
        return None
    zero_ns, base_ns = int(times[0][0][0]), int(times[0][1][0])
    lines = [
        line
        for parts, sign in ((above, 1), (below, -1))
        if (line := _support([(t - zero_ns, ahead - base_ns) for t, ahead in parts], sign))
        is not None
    ]
    offset, slope = (float(np.mean([line[k] for line in lines])) for k in range(2))
    scatter = abs(lines[0][0] - lines[-1][0]) / 2 if len(lines) == 2 else None
    t = np.concatenate([part[0] - zero_ns for part in times]).astype(np.float64)
    found = Line(base_ns + offset, slope, zero_ns)
    is_nothing = scatter is not None and _farthest(found, t, zero_ns) <= scatter
    return Fit(Line() if is_nothing else found, Quality.MESSAGES, len(t), scatter)


def _support(parts: list[tuple[Times, Times]], sign: int) -> tuple[float, float] | None:
    """The line that is nearest to some points and passes below all of them; above them for -1."""
    points = sorted(
        (int(t), sign * int(v))
        for times, values in parts
        for t, v in zip(times.tolist(), values.tolist(), strict=True)
    )
    if not points:
        return None
    hull: list[tuple[int, int]] = []
    for point in points:
        while len(hull) > 1 and _turns_down(hull[-2], hull[-1], point):
            hull.pop()
        if hull and hull[-1][0] == point[0]:
            continue
        hull.append(point)
    middle = sum(t for t, _ in points) / len(points)
    for (t0, v0), (t1, v1) in itertools.pairwise(hull):
        slope = (v1 - v0) / (t1 - t0)
        if t0 <= middle <= t1 and abs(slope) <= _MOST_SLOPE:
            return sign * (v0 - slope * t0), sign * slope
    return float(sign * min(v for _, v in points)), 0.0


def _turns_down(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> bool:
    return (b[0] - a[0]) * (c[1] - a[1]) <= (b[1] - a[1]) * (c[0] - a[0])


def _centred(seen: Samples) -> tuple[int, Floats, Floats, int]:
    """Numbers that a float holds to the nanosecond: times from their middle on, and how far ahead
    from the first."""
    zero_ns, base_ns = int(np.median(seen.t_ns)), int(seen.ahead_ns[0])
    return (
        zero_ns,
        (seen.t_ns - zero_ns).astype(np.float64),
        (seen.ahead_ns - base_ns).astype(np.float64),
        base_ns,
    )


def _farthest(line: Line, t: Floats, zero_ns: int) -> float:
    assert line.zero_ns == zero_ns
    return max(abs(line.offset_ns + line.slope * float(edge)) for edge in (t.min(), t.max()))


def _scatter(rest: Floats, share: float) -> float:
    return float(np.quantile(np.abs(rest), share))


def _fitted(t: Floats, values: Floats, weights: Floats) -> tuple[float, float]:
    """The line with the least weighted sum of distances: single calls may be far off it."""
    if len(t) >= _FEWEST_FOR_SLOPE and t.max() > t.min():
        offset, slope = _least_distances(t, values, weights)
        if abs(slope) <= _MOST_SLOPE:
            return offset, slope
    return _weighted_median(values, weights), 0.0


def _least_distances(t: Floats, values: Floats, weights: Floats) -> tuple[float, float]:
    """By least squares again and again, each time with less weight on what is far away."""
    scale = float(np.abs(t).max())
    x = t / scale
    offset = slope = 0.0
    now = weights
    for _ in range(_ROUNDS):
        total = float(now.sum())
        mean_x, mean_v = float((now * x).sum()) / total, float((now * values).sum()) / total
        spread = float((now * (x - mean_x) ** 2).sum())
        if spread <= 0:
            return _weighted_median(values, weights), 0.0
        slope = float((now * (x - mean_x) * (values - mean_v)).sum()) / spread
        offset = mean_v - slope * mean_x
        now = weights / np.maximum(np.abs(values - offset - slope * x), 1_000.0)
    return offset, slope / scale


def _weighted_median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order[int(np.searchsorted(reached, reached[-1] / 2))]])
