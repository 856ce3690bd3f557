"""How far off a line can be: what causality allows, whatever ranks did in between.

Nobody goes on from a call that waits before everybody has come to it. For two clocks each such call
is a point that the line between them passes below, or above. All lines that keep to all points make
a strip; its edges, at some moments spread over the run, bound the offset of the pair. Over many
pairs these are difference constraints: the shortest way from the reference to a clock, over any
others, is the farthest that the clock can be ahead.

Nothing is assumed but that calls wait and that clocks run evenly. Points are left out to save time,
and ways are put together moment by moment: both make strips wider, never narrower than they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from torchwhere.diagnose.clocks.call_table import Bools, Correction, Ints, Rows
from torchwhere.diagnose.clocks.line_bounds import Floats, highest, nearest

_MOMENTS = 5
_ALL_PAIRS = 12  # up to so many clocks of a stream all are compared with each other
_PAIRS_AT_ONCE = 512
# by less bounds may contradict each other: clocks are read a little late
_CONTRADICTS_NS = 200_000.0


@dataclass(frozen=True, slots=True)
class ClockBounds:
    """Of one clock, against the reference: between which corrections it is, at some moments of the
    frame."""

    moments: Floats
    least: Floats
    most: Floats

    def doubt(self, line: Correction) -> float | None:
        """How far from the line the truth can be, at most; None if there is no bound."""
        at = line.at(self.moments)
        worst = float(np.maximum(self.most - at, at - self.least).max())
        return max(worst, 0.0) if np.isfinite(worst) else None

    def kept(self, line: Correction) -> Correction:
        """The line, moved by as little as it takes to keep it within."""
        first, last = float(self.moments[0]), float(self.moments[-1])
        if not (self.least <= self.most).all():
            return line
        begin, end = np.clip(line.at(self.moments), self.least, self.most)[[0, -1]].tolist()
        if last <= first:
            return Correction(begin, 0.0)
        slope = (end - begin) / (last - first)
        return Correction(begin - slope * first, slope)


def clock_bounds(rows: Rows, fixed: Collection[int]) -> dict[int, ClockBounds]:
    """Of all clocks that can be compared with one of `fixed`, in any number of steps."""
    chosen = rows.at(rows.is_sure)
    if not len(chosen):
        return {}
    ends = np.array([chosen.came.min(), chosen.came.max()])
    moments = np.linspace(ends[0], ends[1], _MOMENTS)
    by_clock = _by_clock(chosen)
    pairs = np.array(sorted(_pairs(chosen)), np.int64).reshape(-1, 2)
    parts = [
        _edges([_points(by_clock[x], by_clock[y], ends) for x, y in part.tolist()], moments)
        for part in np.array_split(pairs, max(1, -(-len(pairs) // _PAIRS_AT_ONCE)))
        if len(part)
    ]
    if not parts:
        return {}
    least, most = (np.concatenate([part[k] for part in parts]) for k in range(2))
    agrees = (least <= most + _CONTRADICTS_NS).all(axis=1)
    indexes = {index: place for place, index in enumerate(sorted(by_clock))}
    at = np.array([[indexes[x], indexes[y]] for x, y in pairs[agrees].tolist()], np.int64).reshape(
        -1, 2
    )
    start = np.array([index in fixed for index in indexes])
    upper = _farthest(start, at, most[agrees], -least[agrees])
    lower = -_farthest(start, at, -least[agrees], most[agrees])
    return {
        index: _spanned(moments, lower[place], upper[place], by_clock[index].came)
        for index, place in indexes.items()
    }


def _spanned(moments: Floats, least: Floats, most: Floats, came: Floats) -> ClockBounds:
    """Only the moments around those when the clock was seen: a rank may stop early."""
    first = max(0, int(np.searchsorted(moments, came.min(), side="right")) - 1)
    last = min(len(moments), int(np.searchsorted(moments, came.max())) + 1)
    # by a little: clocks are read a little late
    middle = np.where(least > most, (least + most) / 2, np.nan)
    least, most = (
        np.where(np.isnan(middle), least, middle),
        np.where(np.isnan(middle), most, middle),
    )
    return ClockBounds(moments[first:last], least[first:last], most[first:last])


def _by_clock(rows: Rows) -> dict[int, Rows]:
    order = np.argsort(rows.clock, kind="stable")
    clocks, begins = np.unique(rows.clock[order], return_index=True)
    return {
        index: rows.at(at)
        for index, at in zip(clocks.tolist(), np.split(order, begins[1:]), strict=True)
    }


def _pairs(rows: Rows) -> Iterator[tuple[int, int]]:
    """Which clocks to compare. All of a small circle; of a large one each with the first, and with
    those one, four, sixteen ... places further: then there is a short way from any to any."""
    begins = np.flatnonzero(np.r_[True, np.diff(rows.call) != 0])
    circles = {tuple(each.tolist()) for each in np.split(rows.clock, begins[1:])}
    seen: set[tuple[int, int]] = set()
    for cycle in circles:
        members = sorted(set(cycle))
        for pair in (
            itertools.combinations(members, 2) if len(members) <= _ALL_PAIRS else _spread(members)
        ):
            if pair not in seen:
                seen.add(pair)
                yield pair


def _spread(members: list[int]) -> Iterable[tuple[int, int]]:
    size = len(members)
    yield from ((members[0], member) for member in members[1:])
    step = 1
    while step < size:
        further = ((members[i], members[(i + step) % size]) for i in range(size))
        yield from ((min(pair), max(pair)) for pair in further)
        step *= 4


# -- two clocks ------------------------------------------------------------------------------------

# times and values that the line is below of; and that it is above of
Points = tuple[Floats, Floats, Floats, Floats]


def _points(x: Rows, y: Rows, ends: Floats) -> Points:
    """How far `y` can be ahead of `x`."""
    if not np.array_equal(x.call, y.call):
        _, i, j = np.intersect1d(x.call, y.call, assume_unique=True, return_indices=True)
        x, y = x.at(i), y.at(j)
    below = nearest(y.left, y.left - x.bound, ends, 1)
    above = nearest(y.bound, y.bound - x.left, ends, -1)
    return (*below, *above)


def _edges(points: list[Points], moments: Floats) -> tuple[Floats, Floats]:
    """Of each pair the least and the most, at each moment."""
    below_at, below, above_at, above = (np.stack([each[k] for each in points]) for k in range(4))
    most = [
        highest(below_at - moment, below, above_at - moment, above) for moment in moments.tolist()
    ]
    least = [
        -highest(above_at - moment, -above, below_at - moment, -below)
        for moment in moments.tolist()
    ]
    return np.stack(least, axis=1), np.stack(most, axis=1)


def _farthest(start: Bools, pairs: Ints, ahead: Floats, back: Floats) -> Floats:
    """The shortest way from the start to every clock, at each moment: over a pair one way, or the
    other."""
    found = np.where(
        start[:, None], 0.0, np.full((len(start), ahead.shape[1] if ahead.ndim > 1 else 0), np.inf)
    )
    for _ in range(len(start)):
        before = found.copy()
        np.minimum.at(found, pairs[:, 1], before[pairs[:, 0]] + ahead)
        np.minimum.at(found, pairs[:, 0], before[pairs[:, 1]] + back)
        found[start] = 0.0
        if np.array_equal(before, found):
            break
    return found
