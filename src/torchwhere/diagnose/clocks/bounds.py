"""How far off a clock can be at most, whatever the ranks did between calls.

No rank leaves a call that waits before all ranks have arrived. Let d_i(t) be how far clock i is
ahead of the reference, and d_ij = d_j - d_i. For two clocks i and j each such call is a point that
the line d_ij passes below or above. At a moment t, all lines that respect all points are within

    l_ij(t)  <=  d_j(t) - d_i(t)  <=  u_ij(t)

Over many pairs these are difference constraints. Their tightest consequence for one clock is a
shortest path, which Bellman-Ford finds: d_j <= dist(reference, j) with edge weights u_ij from i to
j and -l_ij from j to i. The lower bound follows in the same way.

Nothing is assumed except that calls wait and that clocks drift evenly. Points are left out to save
time, and paths are combined moment by moment. Both make the bounds wider, never too narrow.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from torchwhere.core.arrays import Bools, Floats, Ints
from torchwhere.diagnose.clocks.call_table import CallTable
from torchwhere.diagnose.clocks.line import range_at, tightest

_MOMENTS = 5
_ALL_PAIRS = 12  # with more clocks in a stream, not all pairs are compared
_PAIRS_AT_ONCE = 512
# Bounds may contradict each other by this much, because clocks are read a little late.
_TOLERANCE_NS = 200_000.0

# Times and values that a line passes below, then times and values that it passes above.
Points = tuple[Floats, Floats, Floats, Floats]


def uncertainties(table: CallTable, reference: int) -> dict[int, float | None]:
    """Returns how far each clock of the table can be from the reference at most.

    The table is corrected already, so that is the largest distance of the bounds from 0. None if a
    clock has no bound. Clocks without a call that surely waits are left out.
    """
    sure = table.at(table.is_sure)
    if not len(sure):
        return {}
    by_clock = _by_clock(sure)
    pairs = np.array(sorted(_pairs(sure)), np.int64)
    ends = np.array([sure.came.min(), sure.came.max()])
    moments = np.linspace(ends[0], ends[1], _MOMENTS)
    parts = [
        _pair_bounds([_points(by_clock[x], by_clock[y], ends) for x, y in part.tolist()], moments)
        for part in np.array_split(pairs, -(-len(pairs) // _PAIRS_AT_ONCE))
    ]
    least, most = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    agrees = (least <= most + _TOLERANCE_NS).all(axis=1)
    least, most = least[agrees], most[agrees]
    clocks = np.array(sorted(by_clock))
    at = np.searchsorted(clocks, pairs[agrees])
    is_start = clocks == reference
    upper = _shortest_paths(is_start, at, most, -least)
    lower = -_shortest_paths(is_start, at, -least, most)
    farthest = np.maximum(np.abs(upper), np.abs(lower))
    return {
        clock: _worst(moments, farthest[place], by_clock[clock].came)
        for place, clock in enumerate(clocks.tolist())
    }


def _worst(moments: Floats, farthest: Floats, came: Floats) -> float | None:
    """Returns the largest distance at the moments around the calls of a clock.

    A rank may stop early; later moments do not matter.
    """
    first = max(0, int(np.searchsorted(moments, came.min(), side="right")) - 1)
    last = min(len(moments), int(np.searchsorted(moments, came.max())) + 1)
    worst = float(farthest[first:last].max(initial=0.0))
    return worst if last > first and np.isfinite(worst) else None


def _by_clock(table: CallTable) -> dict[int, CallTable]:
    order = np.argsort(table.clock, kind="stable")
    clocks, begins = np.unique(table.clock[order], return_index=True)
    parts = np.split(order, begins[1:])
    return {clock: table.at(rows) for clock, rows in zip(clocks.tolist(), parts, strict=True)}


def _pairs(table: CallTable) -> Iterator[tuple[int, int]]:
    """Yields the pairs of clocks to compare: all pairs of the clocks of a call, if they are few."""
    begins = np.flatnonzero(np.r_[True, np.diff(table.call) != 0])
    groups = {tuple(clocks.tolist()) for clocks in np.split(table.clock, begins[1:])}
    seen: set[tuple[int, int]] = set()
    for group in groups:
        members = sorted(set(group))
        is_small = len(members) <= _ALL_PAIRS
        pairs = itertools.combinations(members, 2) if is_small else _some_pairs(members)
        for pair in pairs:
            if pair not in seen:
                seen.add(pair)
                yield pair


def _some_pairs(members: list[int]) -> Iterable[tuple[int, int]]:
    """Pairs each member with the first one, and with those 1, 4, 16 ... places further.

    Then there is a short path between any two members.
    """
    size = len(members)
    yield from ((members[0], member) for member in members[1:])
    step = 1
    while step < size:
        further = ((members[i], members[(i + step) % size]) for i in range(size))
        yield from ((min(pair), max(pair)) for pair in further)
        step *= 4


def _points(x: CallTable, y: CallTable, ends: Floats) -> Points:
    """Returns the points that bound how far clock `y` is ahead of clock `x`."""
    if not np.array_equal(x.call, y.call):
        _, i, j = np.intersect1d(x.call, y.call, assume_unique=True, return_indices=True)
        x, y = x.at(i), y.at(j)
    below = tightest(y.left, y.left - x.bound, ends, 1)
    above = tightest(y.bound, y.bound - x.left, ends, -1)
    return (*below, *above)


def _pair_bounds(points: list[Points], moments: Floats) -> tuple[Floats, Floats]:
    """Returns the lower and the upper bound of each pair at each moment."""
    below_at, below, above_at, above = (np.stack(arrays) for arrays in zip(*points, strict=True))
    stacked = (below_at, below, above_at, above)
    ranges = [range_at(stacked, moment) for moment in moments.tolist()]
    least, most = (np.stack(columns, axis=1) for columns in zip(*ranges, strict=True))
    return least, most


def _shortest_paths(is_start: Bools, pairs: Ints, there: Floats, back: Floats) -> Floats:
    """Bellman-Ford from the start to every clock, at each moment separately.

    `there` and `back` are the lengths of each pair in both directions.
    """
    lengths = np.where(is_start[:, None], 0.0, np.full((len(is_start), there.shape[1]), np.inf))
    for _ in range(len(is_start)):
        before = lengths.copy()
        np.minimum.at(lengths, pairs[:, 1], before[pairs[:, 0]] + there)
        np.minimum.at(lengths, pairs[:, 0], before[pairs[:, 1]] + back)
        lengths[is_start] = 0.0
        if np.array_equal(before, lengths):
            break
    return lengths
