"""Compares two clocks by the calls that ranks of both took part in.

Let x and y be the clocks, and d(t) = a + b t how far y is ahead of x. For each call k that both
took part in, x_k and y_k are the times of arrival, x'_k and y'_k the times of the next record. No
rank leaves a blocking collective before the last rank enters it, so

    y_k - x'_k  <=  d(t_k)  <=  y'_k - x_k                                          (bounds)

The call ends for all ranks at the same moment, and the next record of each follows soon. So d is
estimated by least absolute deviations of the ends, with more weight on calls with tight bounds:

    minimize  sum_k  w_k |y'_k - x'_k - d(t_k)|,   w_k = 1 / (50 us + slack_k)

Arrivals are not compared: that would turn the lateness of a rank into an offset of its clock. If d
violates too many bounds, the line in the middle of the bounds is used instead. If there is no such
line either, the calls cannot have waited.

A call that does not wait (asynchronous, or only queued on a GPU) gives no bounds, only arrivals.
Then the wall clocks are trusted unless they are off by more than ranks may be late.

These lines are the starting point of `joint_fit.py`. They are final only where no call waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from torchwhere.core.arrays import Bools, Floats, Times
from torchwhere.diagnose.clocks.arrivals import NEVER, ClockStream
from torchwhere.diagnose.clocks.call_table import ClockCalls
from torchwhere.diagnose.clocks.line import MOST_SLOPE, Line, range_at, tightest

_SOON_NS = 50_000.0  # a record this soon after a call came at once
_TOLERANCE_NS = 200_000.0  # by which a bound may be violated
_MOST_VIOLATIONS = 0.05  # share of violated bounds above which the calls cannot have waited
_MOST_SLOPE = MOST_SLOPE / 2  # of one clock
_FEWEST_FOR_SLOPE = 8
_ROUNDS = 30
# How far ranks of one host may be apart in calls that do not wait; or three steps, if that is more.
_APART_NS = 1e9


class Quality(IntEnum):
    """How good the evidence is, the best first."""

    TIGHT = 0  # blocking collectives
    MESSAGES = 1
    LOOSE = 2  # calls that do not wait


@dataclass(frozen=True, slots=True)
class Fit:
    """How one clock runs against another."""

    line: Line = field(default_factory=Line)
    quality: Quality = Quality.TIGHT
    calls: int = 0
    scatter_ns: float | None = None  # nine of ten calls are closer to the line than this


@dataclass(frozen=True, slots=True)
class _CommonCalls:
    """The calls of one stream that both clocks have."""

    stream: ClockStream
    x_issued: Times
    x_next: Times
    y_issued: Times
    y_next: Times
    x_waits: Bools
    y_waits: Bools


def _in_common(x: ClockCalls, y: ClockCalls) -> list[_CommonCalls]:
    common = []
    for stream, of_x in x.streams.items():
        of_y = y.streams.get(stream)
        if of_y is None:
            continue
        _, i, j = np.intersect1d(
            of_x.numbers, of_y.numbers, assume_unique=True, return_indices=True
        )
        if len(i):
            calls = _CommonCalls(
                stream,
                of_x.issued_ns[i],
                of_x.next_ns[i],
                of_y.issued_ns[j],
                of_y.next_ns[j],
                of_x.waits[i] & (of_x.next_ns[i] != NEVER),
                of_y.waits[j] & (of_y.next_ns[j] != NEVER),
            )
            common.append(calls)
    return common


# Events that both clocks saw, one in each column. The rows are the time, how far y is ahead of x by
# the event, and the least and the most of that.
_NO_SAMPLES: Times = np.empty((4, 0), np.int64)


def _ends(common: list[_CommonCalls]) -> Times:
    """Returns the ends of the collectives that wait."""
    parts = [_NO_SAMPLES]
    for calls in common:
        if not calls.stream.is_message:
            on = calls.x_waits & calls.y_waits
            x, x_next = calls.x_issued[on], calls.x_next[on]
            y, y_next = calls.y_issued[on], calls.y_next[on]
            parts.append(np.stack([y_next, y_next - x_next, y - x_next, y_next - x]))
    return np.concatenate(parts, axis=1)


def _issues(common: list[_CommonCalls]) -> Times:
    """Returns when calls were issued. These samples have no bounds."""
    parts = [_NO_SAMPLES]
    for calls in common:
        ahead = calls.y_issued - calls.x_issued
        parts.append(np.stack([calls.y_issued, ahead, ahead, ahead]))
    return np.concatenate(parts, axis=1)


def compare(x: ClockCalls, y: ClockCalls, step_ns: float | None) -> Fit | None:
    """Returns how far clock `y` is ahead of clock `x`; None if they have no call in common."""
    common = _in_common(x, y)
    ends = _ends(common)
    if ends.size:
        is_sure = not any(calls.stream in x.unsure | y.unsure for calls in common)
        return _by_ends(ends, step_ns, is_sure=is_sure)
    by_messages = _by_messages(common, x)
    if by_messages is not None:
        return by_messages
    issues = _issues(common)
    return _Centred(issues).loose_fit(step_ns) if issues.size else None


def shares_a_clock(x: ClockCalls, y: ClockCalls, step_ns: float | None) -> bool:
    """Whether two ranks of one host can have one clock."""
    common = _in_common(x, y)
    ends = _ends(common)
    if ends.size:
        _, _, least, most = ends
        is_violated = (least > _TOLERANCE_NS) | (most < -_TOLERANCE_NS)
        if is_violated.mean() <= _MOST_VIOLATIONS:
            return True
        # An offset that is not 0 satisfies the bounds.
        if _by_ends(ends, step_ns).quality is Quality.TIGHT:
            return False
    samples = ends if ends.size else _issues(common)
    if not samples.size:
        return True
    return abs(float(np.median(samples[1]))) <= max(_APART_NS, 3 * (step_ns or 0.0))


# -- fits ------------------------------------------------------------------------------------------


class _Centred:
    """Samples as floats that are exact to a nanosecond: relative to the median time and to the
    first offset."""

    def __init__(self, samples: Times) -> None:
        t_ns, ahead_ns = samples[:2]
        self.zero_ns, self.base_ns = int(np.median(t_ns)), int(ahead_ns[0])
        self.t = (t_ns - self.zero_ns).astype(np.float64)
        self.ahead, self.least, self.most = (samples[1:] - self.base_ns).astype(np.float64)

    def is_violated(self, offset: float, slope: float) -> bool:
        """Whether a line violates more bounds than calls that wait can explain."""
        line = offset + slope * self.t
        excess = np.maximum(self.least - line, line - self.most)
        return bool((excess > _TOLERANCE_NS).mean() > _MOST_VIOLATIONS)

    def fit(self, offset: float, slope: float, quality: Quality) -> Fit:
        scatter = float(np.quantile(np.abs(self.ahead - (offset + slope * self.t)), 0.9))
        line = Line(self.base_ns + offset, slope, self.zero_ns)
        return Fit(line, quality, len(self.t), scatter)

    def loose_fit(self, step_ns: float | None) -> Fit:
        """Fits a line through the middle of all samples.

        The wall clocks are trusted if they are not off by more than ranks may be late.
        """
        fit = self.fit(*_least_absolute(self.t, self.ahead, np.ones_like(self.t)), Quality.LOOSE)
        edges = (self.zero_ns + int(self.t.min()), self.zero_ns + int(self.t.max()))
        farthest = max(abs(fit.line.at(edge)) for edge in edges)
        if farthest <= max(3 * (fit.scatter_ns or 0.0), (step_ns or 0.0) / 2):
            return Fit(Line(), Quality.LOOSE, fit.calls, fit.scatter_ns)
        return fit


def _middle(
    most_at: Floats, most: Floats, least_at: Floats, least: Floats
) -> tuple[float, float, float] | None:
    """Returns a line in the middle of the bounds: offset, slope, and distance to the bounds.

    None if no line satisfies the bounds, or if there are bounds on one side only.
    """
    if not len(most) or not len(least):
        return None
    times = np.concatenate([most_at, least_at])
    ends = np.array([times.min(), times.max()])
    below, below_values = tightest(most_at, most, ends, 1)
    above, above_values = tightest(least_at, least, ends, -1)
    points = (below[None], below_values[None], above[None], above_values[None])
    (low, high) = (range_at(points, end) for end in ends.tolist())
    bottoms, tops = np.array([low[0][0], high[0][0]]), np.array([low[1][0], high[1][0]])
    if not (bottoms <= tops + _TOLERANCE_NS).all():
        return None
    begin, end = ((bottoms + tops) / 2).tolist()
    slope = (end - begin) / max(float(ends[1] - ends[0]), 1.0)
    return begin - slope * float(ends[0]), slope, float(np.abs(tops - bottoms).mean()) / 2


def _by_ends(samples: Times, step_ns: float | None, *, is_sure: bool = False) -> Fit:
    centred = _Centred(samples)
    t, ahead, least, most = centred.t, centred.ahead, centred.least, centred.most
    slack = np.maximum(np.maximum(ahead - least, most - ahead), 0.0)
    offset, slope = _least_absolute(t, ahead, 1 / (_SOON_NS + slack))
    if is_sure and centred.is_violated(offset, slope):
        offset, slope, _ = _middle(t, most, t, least) or (offset, slope, 0.0)
    if centred.is_violated(offset, slope):
        return centred.loose_fit(step_ns)
    return centred.fit(offset, slope, Quality.TIGHT)


def _by_messages(common: list[_CommonCalls], x: ClockCalls) -> Fit | None:
    """Takes the middle between the bounds of the two directions.

    No recv ends before its send begins. So messages from x to y bound from above how far y is
    ahead, messages from y to x bound it from below. If there is no middle, because all messages go
    one way or the recvs did not wait, the tightest bounds decide.
    """
    above, below = [_NO_POINTS], [_NO_POINTS]
    for calls in common:
        if not calls.stream.is_message:
            continue
        if calls.stream.source in x.ranks:
            on = calls.y_waits
            above.append((calls.y_next[on], calls.y_next[on] - calls.x_issued[on]))
        else:
            on = calls.x_waits
            below.append((calls.y_issued[on], calls.y_issued[on] - calls.x_next[on]))
    most_at, most = map(np.concatenate, zip(*above, strict=True))
    least_at, least = map(np.concatenate, zip(*below, strict=True))
    times = np.concatenate([most_at, least_at])
    if not len(times):
        return None
    bounds = [int(most.min())] if len(most) else []
    bounds += [int(least.max())] if len(least) else []
    zero_ns, base_ns = int(np.median(times)), bounds[0]
    centred = (most_at - zero_ns, most - base_ns, least_at - zero_ns, least - base_ns)
    middle = _middle(*(column.astype(np.float64) for column in centred))
    if middle is None or abs(middle[1]) > _MOST_SLOPE:
        half_gap = (bounds[-1] - base_ns) / 2
        middle = half_gap, 0.0, abs(half_gap)
    offset, slope, width = middle
    line = Line(base_ns + offset, slope, zero_ns)
    scatter = width if len(bounds) == 2 else None
    return Fit(line, Quality.MESSAGES, len(times), scatter)


_NO_POINTS = (np.empty(0, np.int64), np.empty(0, np.int64))


def _least_absolute(t: Floats, values: Floats, weights: Floats) -> tuple[float, float]:
    """Minimizes sum weights * |values - offset - slope * t|.

    That is robust: single calls may be far off the line. It uses iteratively reweighted least
    squares: each round divides the weights by the distances of the round before.
    """
    if len(t) < _FEWEST_FOR_SLOPE or t.max() <= t.min():
        return _weighted_median(values, weights), 0.0
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
    if abs(slope / scale) > _MOST_SLOPE:
        return _weighted_median(values, weights), 0.0
    return offset, slope / scale


def _weighted_median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order[int(np.searchsorted(reached, reached[-1] / 2))]])
