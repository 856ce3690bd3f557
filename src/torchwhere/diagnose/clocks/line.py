"""Straight lines: how far one clock is ahead of another, and which lines satisfy given bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, overload

import numpy as np

from torchwhere.core.arrays import Floats, Times

TimeOrTimes = TypeVar("TimeOrTimes", int, Times)  # one time, or an array of them

# Two clocks do not drift apart faster than this, in ns per ns. A larger slope comes from two
# points that are too close together.
MOST_SLOPE = 1e-3
_BLOCKS = 32


@dataclass(frozen=True, slots=True)
class Line:
    """How far a clock is ahead of another: offset_ns + slope * (t_ns - zero_ns).

    `t_ns` is the time that the clock itself shows.
    """

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
        """Chains two lines.

        If `self` says how far clock B is ahead of A, and `inner` how far C is ahead of B, the
        result says how far C is ahead of A.
        """
        if inner == Line():
            return self
        offset_ns = (
            inner.offset_ns
            + self.offset_ns
            + self.slope * (inner.zero_ns - inner.offset_ns - self.zero_ns)
        )
        return Line(offset_ns, inner.slope + self.slope * (1 - inner.slope), inner.zero_ns)


def tightest(times: Floats, values: Floats, ends: Floats, sign: int) -> tuple[Floats, Floats]:
    """Returns the lowest point of each block of time (the highest for sign -1).

    There may be many points; the others of a block hardly bound a line any further. A block without
    points has an infinite value.
    """
    block_times, block_values = np.zeros(_BLOCKS), np.full(_BLOCKS, sign * np.inf)
    is_finite = np.isfinite(values) & np.isfinite(times)
    times, values = times[is_finite], values[is_finite]
    if len(times):
        width = max(float(ends[1] - ends[0]), 1.0)
        block = np.clip(((times - ends[0]) / width * _BLOCKS).astype(np.int64), 0, _BLOCKS - 1)
        order = np.lexsort((sign * values, block))
        blocks, first = np.unique(block[order], return_index=True)
        block_times[blocks] = times[order[first]]
        block_values[blocks] = values[order[first]]
    return block_times, block_values


def highest(below_at: Floats, below: Floats, above_at: Floats, above: Floats) -> Floats:
    """Returns max f(0) over all lines f with f(below_at) <= below and f(above_at) >= above.

    Each row of the arrays is a problem of its own. A linear program in two unknowns, offset and
    slope: eliminating the slope (Fourier-Motzkin) leaves one bound for each pair of points that
    bounds the slope from two sides. The slope is limited to `MOST_SLOPE`.
    """
    bound = (below + MOST_SLOPE * np.abs(below_at)).min(axis=1)
    x, u = below_at[:, :, None], below[:, :, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        # below a point on the left and below a point on the right
        z, v = below_at[:, None, :], below[:, None, :]
        between = np.where((x < 0) & (z > 0), (u * z - v * x) / (z - x), np.inf)
        # below a near point and above a far point on the same side
        z, v = above_at[:, None, :], above[:, None, :]
        beyond = np.where((x * z > 0) & (np.abs(x) < np.abs(z)), (u * z - v * x) / (z - x), np.inf)
    both = np.minimum(between, beyond)
    least: Floats = np.minimum(bound, np.where(np.isnan(both), np.inf, both).min(axis=(1, 2)))
    return least


def range_at(points: tuple[Floats, Floats, Floats, Floats], moment: float) -> tuple[Floats, Floats]:
    """Returns the least and the most that a line between the points can be at a moment.

    `points` are the times and values that lines pass below, then those that they pass above.
    """
    below_at, below, above_at, above = points
    most = highest(below_at - moment, below, above_at - moment, above)
    least = -highest(above_at - moment, -above, below_at - moment, -below)
    return least, most
