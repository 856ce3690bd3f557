"""Fits all clocks at once: improves lines that were found pair by pair.

Correct clock i by d_i(t) = a_i + b_i t. If rank i was the last to arrive at a call, at C, and rank
j continued after it at L, then j needed the time

    room  =  (L - d_j(L))  -  (C - d_i(C))  -  s  >=  0

for what it did next, beyond the least time s that this place of the program takes. Most of these
times may be long. But the smallest of many is close to 0, and that determines the lines. Rooms are
collected for each clock and stream, for both halves of the run, and for both roles: another clock
came last, or this one did. In each collection, let r be the estimated end of the distribution of
its rooms. The fit is a weighted least-squares problem with two unknowns for every clock:

    minimize   sum over the 16 smallest rooms of each collection   w (change of room + r)^2
             + sum over clocks   (total slope / 200 ppm)^2

Conjugate gradients solve it. Which rooms are the smallest depends on the lines, so it is solved
again until nothing moves. The cost grows with the number of rows.

The least time s of a place (a site: the call and the next record) is measured by ranks that came
last themselves: their own clock shows how long they took. Where no rank shows it, s is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from torchwhere.core.arrays import AnyArray, Bools, Floats, Ints
from torchwhere.diagnose.clocks.call_table import CallTable, Correction
from torchwhere.diagnose.clocks.line import MOST_SLOPE

_LOWEST = 16  # the values that the end of a distribution is estimated from
_SURE_NS, _UNSURE_NS = 20_000.0, 1e7  # standard error of an end: at best, and from a single value
_MEASURED_NS = 100_000.0  # how much least times of one site differ between ranks
_UNMEASURED_NS = 50_000.0  # how much unmeasured least times differ from 0, at least
_SAME_KIND_NS = 300_000.0  # sites whose least times differ by less are treated as one
# A stream does not wait if more than this share of its calls end this much too early.
_EARLY_NS, _MOST_EARLY = 300_000.0, 0.05
_FEWEST_AT_A_SITE = 8
_ALONE = 0.8  # share of the calls of a site that one clock shows alone
_CALLS_IN_A_BLOCK, _BLOCKS = 30, 2
_ROUNDS, _SETTLED_NS = 20, 10_000.0
_ITERATIONS = 200  # of conjugate gradients
_LIKELY_SLOPE = 2e-4  # of one clock against another; larger ones are rare


def fit(table: CallTable, reference: int, slopes: Mapping[int, float]) -> dict[int, Correction]:
    """Returns the correction of each clock. The reference is not corrected.

    `slopes` are the slopes by which the table is corrected already.
    """
    return _JointFit(table, reference, slopes).corrections() if len(table) else {}


def streams_that_do_not_wait(table: CallTable, corrections: Mapping[int, Correction]) -> Ints:
    """Returns the streams in which ranks too often leave a call before the last one arrives."""
    if not len(table):
        return np.empty(0, np.int64)
    clocks, clock = np.unique(table.clock, return_inverse=True)
    applied = [corrections.get(index, Correction()) for index in clocks.tolist()]
    offset = np.array([correction.offset for correction in applied])[clock]
    slope = np.array([correction.slope for correction in applied])[clock]
    came = table.bound - offset - slope * table.came
    left = table.left - offset - slope * table.came
    last, _ = _Calls(table.call).greatest_of_others(came)
    on = np.isfinite(last) & np.isfinite(left)
    streams, of = np.unique(table.stream[on], return_inverse=True)
    is_early = (left - last)[on] < -_EARLY_NS
    share = np.bincount(of, weights=is_early, minlength=len(streams)) / np.bincount(of)
    return streams[share > _MOST_EARLY]


class _JointFit:
    """The unknowns of the fit, and one round of it."""

    def __init__(self, table: CallTable, reference: int, slopes: Mapping[int, float]) -> None:
        self._table, self._calls = table, _Calls(table.call)
        self._clocks, self._clock = np.unique(table.clock, return_inverse=True)
        self._sites, self._site = np.unique(table.site, return_inverse=True)
        # Times are scaled to -1 .. 1, so that offsets and slopes have the same unit.
        self._scale = max(float(np.abs(table.came).max()), 1.0)
        self._x_came = table.came / self._scale
        self._x_left = np.where(np.isfinite(table.left), table.left, table.came) / self._scale
        self._lines = np.zeros((len(self._clocks), 2))  # offset and scaled slope
        self._slopes = np.array([slopes[index] for index in self._clocks.tolist()]) * self._scale
        self._middle = np.bincount(self._clock, weights=self._x_came) / np.bincount(self._clock)
        self._is_free = self._clocks != reference
        key = table.stream * len(self._clocks) + self._clock
        _, collection = np.unique(key, return_inverse=True)
        self._collection = collection * _BLOCKS + _halves(collection, table.came)

    def corrections(self) -> dict[int, Correction]:
        for number in range(_ROUNDS):
            # Half steps in the second half of the rounds, in case it oscillates.
            change = self._change() * (1.0 if number < _ROUNDS // 2 else 0.5)
            self._lines += change
            self._limit_slopes()
            if np.abs(change).sum(axis=1).max(initial=0.0) < _SETTLED_NS:
                break
        return {
            index: Correction(float(offset), float(slope) / self._scale)
            for index, (offset, slope) in zip(
                self._clocks.tolist(), self._lines.tolist(), strict=True
            )
        }

    def _limit_slopes(self) -> None:
        """Keeps the total slope of each clock below half of `MOST_SLOPE`."""
        most = MOST_SLOPE / 2 * self._scale
        limited = np.clip(self._slopes + self._lines[:, 1], -most, most) - self._slopes
        slope = np.where(self._is_free, limited, 0.0)
        self._lines[:, 0] += (self._lines[:, 1] - slope) * self._middle
        self._lines[:, 1] = slope

    def _corrected(self, times: Floats, x: Floats) -> Floats:
        lines = self._lines[self._clock]
        corrected: Floats = times - lines[:, 0] - lines[:, 1] * x
        return corrected

    def _change(self) -> Floats:
        """Returns how the lines should change: one least-squares problem."""
        came = self._corrected(self._table.bound, self._x_came)
        left = self._corrected(self._table.left, self._x_left)
        last, last_row = self._calls.greatest_of_others(came)
        least = self._least_times(last)
        least_here = np.where(np.isfinite(least), least, 0.0)[self._site]
        kind = _kinds(least)[self._site]
        first, first_row = self._calls.greatest_of_others(least_here - left)
        rows = np.arange(len(came))
        # Rows where another clock came last, and rows where this one did.
        after = rows[np.isfinite(left) & np.isfinite(last) & (last >= came)]
        before = rows[np.isfinite(came) & np.isfinite(first) & (came > last)]
        leaving = np.r_[after, first_row[before]]
        collection = np.r_[self._collection[after] * 2, self._collection[before] * 2 + 1]
        rooms = _Rooms(
            left=leaving,
            came=np.r_[last_row[after], before],
            room=np.r_[(left - least_here - last)[after], -first[before] - came[before]],
            key=collection * (len(least) + 1) + kind[leaving],
        )
        return self._least_squares(*rooms.smallest(least_here, kind < len(least)))

    def _least_squares(self, left: Ints, came: Ints, excess: Floats, weight: Floats) -> Floats:
        """Returns the change of lines that reduces each room by its excess, as well as possible."""
        j, i = self._clock[left], self._clock[came]
        x_j, x_i = self._x_left[left], self._x_came[came]
        free = np.stack([self._is_free] * 2, axis=1).astype(np.float64)
        prior = np.array([1e-24, (_LIKELY_SLOPE * self._scale) ** -2])
        count = len(self._clocks)

        def summed(values: Floats, power: int = 1, sign: float = -1.0) -> Floats:
            """The transposed design matrix times `values`."""
            columns = [
                np.bincount(j, weights=on_j, minlength=count)
                + sign * np.bincount(i, weights=on_i, minlength=count)
                for on_j, on_i in (
                    (values, values),
                    (values * x_j**power, values * x_i**power),
                )
            ]
            sums: Floats = np.stack(columns, axis=1) * free
            return sums

        def normal_matrix(lines: Floats) -> Floats:
            moved = lines[j, 0] + lines[j, 1] * x_j - lines[i, 0] - lines[i, 1] * x_i
            product: Floats = summed(weight * moved) + lines * prior * free
            return product

        right = summed(weight * excess)
        right[:, 1] -= (self._slopes + self._lines[:, 1]) * prior[1] * free[:, 1]
        return _conjugate_gradients(normal_matrix, right, summed(weight, 2, 1.0) + prior)

    def _least_times(self, last: Floats) -> Floats:
        """Returns the least time from a call to the next record of each site; infinity if unknown.

        Ranks that came last to a call show it by their own clock.
        """
        table = self._table
        came = self._corrected(table.came, self._x_came)
        rows = np.flatnonzero((came >= last) & np.isfinite(table.left))
        took = (table.left - table.came)[rows]
        order = np.lexsort((took, self._site[rows]))
        site = self._site[rows[order]]
        begins, counts, ends, _ = _ends(took[order], site)
        is_enough = counts >= _FEWEST_AT_A_SITE
        least = np.full(len(self._sites), np.inf)
        least[site[begins[is_enough]]] = np.maximum(ends[is_enough], 0.0)
        return self._without_slow_clocks(least, rows)

    def _without_slow_clocks(self, least: Floats, rows: Ints) -> Floats:
        """Lowers the least times that nearly one clock alone shows: it may be slow there.

        Such a site gets the least time of all sites that this clock shows alone. `rows` are the
        rows that show a time.
        """
        count = len(self._clocks)
        key, shown = np.unique(self._site[rows] * count + self._clock[rows], return_counts=True)
        site, clock = np.divmod(key, count)
        is_alone = shown > _ALONE * np.bincount(self._site[rows], minlength=len(least))[site]
        site, clock = site[is_alone], clock[is_alone]
        least_alone = np.full(count, np.inf)
        np.minimum.at(least_alone, clock, least[site])
        lowered = least.copy()
        lowered[site] = np.where(np.isfinite(least[site]), least_alone[clock], np.inf)
        return lowered


@dataclass(frozen=True, slots=True)
class _Rooms:
    """How long after the last arrival a row left, minus the least time of its site."""

    left: Ints  # the row that left
    came: Ints  # the row that came last
    room: Floats
    key: Ints  # the collection: rooms with equal keys have one end

    def smallest(self, least: Floats, is_measured: Bools) -> tuple[Ints, Ints, Floats, Floats]:
        """Returns the smallest rooms of each collection: left, came, excess room, and weight."""
        order = self._by_key_and_room()
        left, came = self.left[order], self.came[order]
        begins, counts, ends, error = _ends(self.room[order], self.key[order])
        least, is_measured = least[left[begins]], is_measured[left[begins]]
        variance = error**2 + np.where(is_measured, _MEASURED_NS, _UNMEASURED_NS) ** 2
        # Some ranks may be faster than those that showed the least time. But none may leave before
        # the last one has arrived.
        whole = ends + least
        is_faster = is_measured & (ends < 0) & (whole >= 0)
        variance = np.where(is_faster, np.maximum(variance, ends**2 / 4), variance)
        ends = np.where(is_measured & (whole < 0), whole, ends)
        lowest = np.minimum(counts, _LOWEST)
        position = np.arange(len(order)) - np.repeat(begins, counts)
        chosen = position < np.repeat(lowest, counts)
        weight = np.repeat(1 / (variance * lowest), counts)[chosen]
        return left[chosen], came[chosen], np.repeat(ends, counts)[chosen], weight

    def _by_key_and_room(self) -> Ints:
        """Sorts by both in one integer, which is three times as fast as sorting by two."""
        if self.key.max(initial=0) >= 1 << 26:
            return np.lexsort((self.room, self.key))
        rooms = np.clip(self.room / 16, -(1 << 35), (1 << 35) - 1).astype(np.int64)
        order: Ints = np.argsort((self.key << 36) + rooms)
        return order


def _ends(values: Floats, key: Ints) -> tuple[Ints, Ints, Floats, Floats]:
    """Estimates the lower end of the distribution of values, which are sorted within each key.

    The smallest of many lies above the end by about the mean gap between the smallest ones.
    Returns for each key where its values begin, how many there are, the end, and its standard
    error.
    """
    begins = np.flatnonzero(np.r_[True, np.diff(key) != 0])[: len(key)]
    counts = np.diff(np.r_[begins, len(key)])
    lowest = np.minimum(counts, _LOWEST)
    gap = (values[begins + lowest - 1] - values[begins]) / np.maximum(lowest - 1, 1)
    error = np.where(lowest > 1, (gap + _SURE_NS) * (1 + 4 / lowest**2), _UNSURE_NS)
    return begins, counts, values[begins] - gap, error


def _kinds(least: Floats) -> Ints:
    """Numbers sites so that those with nearly equal least times share a number.

    Sites whose least time is unknown get the number `len(least)`.
    """
    order = np.argsort(least, kind="stable")
    with np.errstate(invalid="ignore"):
        is_apart = np.diff(least[order]) > _SAME_KIND_NS
    kinds = np.empty(len(least), np.int64)
    kinds[order] = np.cumsum(np.r_[0, is_apart])
    kinds[~np.isfinite(least)] = len(least)
    return kinds


def _conjugate_gradients(
    matrix: Callable[[Floats], Floats], right: Floats, diagonal: Floats
) -> Floats:
    """Solves matrix(x) = right for a symmetric positive definite matrix.

    The diagonal is the preconditioner.
    """
    solution, rest = np.zeros_like(right), right
    direction = scaled = rest / diagonal
    product = first = float((rest * scaled).sum())
    for _ in range(_ITERATIONS):
        if product <= 1e-12 * first or product <= 0:
            break
        image = matrix(direction)
        length = product / max(float((direction * image).sum()), 1e-300)
        solution = solution + length * direction
        rest = rest - length * image
        scaled = rest / diagonal
        product, before = float((rest * scaled).sum()), product
        direction = scaled + product / before * direction
    return solution


def _halves(group: Ints, times: Floats) -> Ints:
    """Returns 0 or 1 for the first or second half of a group's rows in time; 0 if they are few.

    So a line is held at both ends.
    """
    order = np.lexsort((times, group))
    counts = np.bincount(group)
    position = np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)
    halves = np.empty(len(group), np.int64)
    blocks = np.clip(counts // _CALLS_IN_A_BLOCK, 1, _BLOCKS)
    halves[order] = position * np.repeat(blocks, counts) // np.repeat(counts, counts)
    return halves


class _Calls:
    """Rows grouped by call; the rows of a call are contiguous."""

    def __init__(self, call: Ints) -> None:
        self._begins = np.flatnonzero(np.r_[True, np.diff(call) != 0])
        self._sizes = np.diff(np.r_[self._begins, len(call)])

    def _repeat(self, values: AnyArray) -> AnyArray:
        return np.repeat(values, self._sizes)

    def _greatest(self, values: Floats) -> tuple[Floats, Ints]:
        """Returns the greatest value of the row's call, and the row that has it."""
        greatest = self._repeat(np.maximum.reduceat(values, self._begins))
        rows = np.where(values == greatest, np.arange(len(values)), -1)
        return greatest, self._repeat(np.maximum.reduceat(rows, self._begins))

    def greatest_of_others(self, values: Floats) -> tuple[Floats, Ints]:
        """Returns the greatest value of the other rows of a row's call, and which row has it.

        Minus infinity if there are no others.
        """
        greatest, row = self._greatest(values)
        has_it = row == np.arange(len(values))
        second, second_row = self._greatest(np.where(has_it, -np.inf, values))
        return np.where(has_it, second, greatest), np.where(has_it, second_row, row)
