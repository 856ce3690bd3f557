"""Many clocks at once: lines that were found two by two, made better by what all ranks say of each
call.

Nobody leaves a call that waits before the last has come to it. So of each clock, against all others
together, two things are seen. Where another came last: how long after that this one went on. Where
this one came last: how long after it the first of the others did. Each is a time that a rank took
for what it did next. Most of these times may be long; the least of many is known well all the same,
and a line is right if that least time is

- the one that ranks show by their own clock when they came last themselves, at the same site of the
  program;
- where nobody shows it, as near to nothing on both sides as there is room.

Takes the table of a circle of clocks; gives how much each is to be corrected. It is a problem of
least squares, with an offset and a slope for every clock. Which calls leave the least room depends
on the lines: it is solved again until nothing moves. What that costs grows with the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from torchwhere.diagnose.clocks.call_table import Bools, Correction, Ints, Rows
from torchwhere.diagnose.clocks.line_bounds import MOST_SLOPE, Floats

_LOWEST = 16  # of so many is the least time told
_SURE_NS, _UNSURE_NS = 20_000.0, 1e7  # how well it is known, at best and by a single call
_LIKE_NS = 100_000.0  # least times of one site differ so much between ranks
# and those that nobody has shown by its own clock differ so much from 0, or more
_UNLIKE_NS = 50_000.0
_ALIKE_NS = 300_000.0  # sites whose least times differ by less are taken together
# who leaves by so much too soon has not waited, if it happens as often
_BROKEN_NS, _MOST_BROKEN = 300_000.0, 0.05
_FEWEST_AT_A_SITE, _ALONE = 8, 0.8
_CALLS_IN_A_BLOCK, _BLOCKS = 30, 2
_ROUNDS, _SETTLED_NS = 20, 10_000.0
_ITERATIONS = 200  # of conjugate gradients
_LIKELY_SLOPE = 2e-4  # of one clock against another: more is seldom


def agreed(
    rows: Rows, fixed: Collection[int], slopes: Mapping[int, float]
) -> dict[int, Correction]:
    """How much each clock is to be corrected, that those of `fixed` are not. `slopes` are what was
    taken out already."""
    return _JointFit(rows, frozenset(fixed), slopes).corrections() if len(rows) else {}


def broken(rows: Rows, found: Mapping[int, Correction]) -> Ints:
    """The streams that cannot be what they seem: too often, somebody leaves a call before the last
    has come."""
    if not len(rows):
        return np.empty(0, np.int64)
    clocks, clock = np.unique(rows.clock, return_inverse=True)
    lines = np.array(
        [
            (each.offset, each.slope)
            for each in (found.get(index, Correction()) for index in clocks.tolist())
        ]
    )[clock]
    came, left = (
        times - lines[:, 0] - lines[:, 1] * rows.came for times in (rows.bound, rows.left)
    )
    last, _ = _Grouped(rows.call).greatest_of_others(came)
    on = np.isfinite(last) & np.isfinite(left)
    streams, of = np.unique(rows.stream[on], return_inverse=True)
    share = np.bincount(
        of, weights=(left - last)[on] < -_BROKEN_NS, minlength=len(streams)
    ) / np.bincount(of, minlength=len(streams))
    return streams[share > _MOST_BROKEN]


class _JointFit:
    """All clocks, each between the walls that others make it. A wall is a call: who leaves it keeps
    behind who came last."""

    def __init__(self, rows: Rows, fixed: frozenset[int], slopes: Mapping[int, float]) -> None:
        self._rows, self._calls = rows, _Grouped(rows.call)
        self._clocks, self._clock = np.unique(rows.clock, return_inverse=True)
        self._sites, self._site = np.unique(rows.site, return_inverse=True)
        self._scale = max(float(np.abs(rows.came).max()), 1.0)
        self._x_came = rows.came / self._scale
        self._x_left = np.where(np.isfinite(rows.left), rows.left, rows.came) / self._scale
        self._lines = np.zeros((len(self._clocks), 2))  # offset, and slope over the scale
        self._tilt = np.array([slopes[index] for index in self._clocks.tolist()]) * self._scale
        self._middle = np.bincount(self._clock, weights=self._x_came) / np.bincount(self._clock)
        self._is_free = np.array([index not in fixed for index in self._clocks.tolist()])
        _, together = np.unique(rows.stream * len(self._clocks) + self._clock, return_inverse=True)
        self._part = together * _BLOCKS + _blocks(together, rows.came)

    def corrections(self) -> dict[int, Correction]:
        for number in range(_ROUNDS):
            # half of it, should it go to and fro
            step = self._step() * (1.0 if number < _ROUNDS // 2 else 0.5)
            self._lines += step
            self._upright()
            if np.abs(step).sum(axis=1).max(initial=0.0) < _SETTLED_NS:
                break
        return {
            index: Correction(float(offset), float(slope) / self._scale)
            for index, (offset, slope) in zip(
                self._clocks.tolist(), self._lines.tolist(), strict=True
            )
        }

    def _upright(self) -> None:
        """No clock drifts faster than clocks do."""
        most = MOST_SLOPE / 2 * self._scale
        slope = np.where(
            self._is_free, np.clip(self._tilt + self._lines[:, 1], -most, most) - self._tilt, 0.0
        )
        self._lines[:, 0] += (self._lines[:, 1] - slope) * self._middle
        self._lines[:, 1] = slope

    def _times(self) -> tuple[Floats, Floats]:
        """When clocks came, where others wait for them, and when they left; corrected."""
        rows, lines = self._rows, self._lines[self._clock]
        came = rows.bound - lines[:, 0] - lines[:, 1] * self._x_came
        return came, rows.left - lines[:, 0] - lines[:, 1] * self._x_left

    def _step(self) -> Floats:
        """How lines are to be changed."""
        came, left = self._times()
        last, by = self._calls.greatest_of_others(came)
        least = self._least_times(last)
        kind, spent = (
            _alike(least)[self._site],
            np.where(np.isfinite(least), least, 0.0)[self._site],
        )
        first, of = self._calls.greatest_of_others(spent - left)
        every = np.arange(len(came))
        after = every[np.isfinite(left) & np.isfinite(last) & (last >= came)]  # another came last
        # it came last itself
        before = every[np.isfinite(came) & np.isfinite(first) & (came > last)]
        seen = _Seen(
            left=np.r_[after, of[before]],
            came=np.r_[by[after], before],
            room=np.r_[(left - spent)[after] - last[after], -first[before] - came[before]],
            key=np.r_[self._part[after] * 2, self._part[before] * 2 + 1] * (len(least) + 1)
            + kind[np.r_[after, of[before]]],
        )
        return self._least_squares(*seen.walls(spent, kind < len(least)))

    def _least_squares(self, left: Ints, came: Ints, beyond: Floats, weight: Floats) -> Floats:
        """The change of lines by which, as nearly as can be, each row leaves by so much sooner
        after that which came last."""
        j, i, x_j, x_i = (
            self._clock[left],
            self._clock[came],
            self._x_left[left],
            self._x_came[came],
        )
        free = np.stack([self._is_free] * 2, axis=1).astype(np.float64)
        upright = np.array([1e-24, (_LIKELY_SLOPE * self._scale) ** -2])
        n = len(self._clocks)

        def gathered(values: Floats, power: int = 1, sign: float = -1.0) -> Floats:
            ones = np.bincount(j, weights=values, minlength=n) + sign * np.bincount(
                i, weights=values, minlength=n
            )
            on_j, on_i = values * x_j**power, values * x_i**power
            tilts = np.bincount(j, weights=on_j, minlength=n) + sign * np.bincount(
                i, weights=on_i, minlength=n
            )
            found: Floats = np.stack([ones, tilts], axis=1) * free
            return found

        def applied(lines: Floats) -> Floats:
            moved = lines[j, 0] + lines[j, 1] * x_j - lines[i, 0] - lines[i, 1] * x_i
            bent: Floats = gathered(weight * moved) + lines * upright * free
            return bent

        rest = gathered(weight * beyond)
        rest[:, 1] -= (self._tilt + self._lines[:, 1]) * upright[1] * free[:, 1]
        return _solved(applied, rest, gathered(weight, 2, 1.0) + upright)

    def _least_times(self, last: Floats) -> Floats:
        """Of every site, the least time from a call to the next record, as those show by their own
        clock who came last. Who shows it nearly alone may be slow there: then the least of all that
        it shows alone."""
        rows, lines = self._rows, self._lines[self._clock]
        came = rows.came - lines[:, 0] - lines[:, 1] * self._x_came
        at = np.flatnonzero((came >= last) & np.isfinite(rows.left))
        order = np.lexsort((rows.left[at] - rows.came[at], self._site[at]))
        at = at[order]
        begins, counts, ends, _ = _ends(rows.left[at] - rows.came[at], self._site[at])
        pairs, shown = np.unique(
            self._site[at] * len(self._clocks) + self._clock[at], return_counts=True
        )
        site, clock = np.divmod(pairs, len(self._clocks))
        least, of = np.full(len(self._sites), np.inf), np.zeros(len(self._sites), np.int64)
        enough = counts >= _FEWEST_AT_A_SITE
        least[self._site[at[begins[enough]]]] = np.maximum(ends[enough], 0.0)
        of[self._site[at[begins]]] = counts
        is_alone = shown > _ALONE * of[site]
        least_alone = np.full(len(self._clocks), np.inf)
        np.minimum.at(least_alone, clock[is_alone], least[site[is_alone]])
        least[site[is_alone]] = np.where(
            np.isfinite(least[site[is_alone]]), least_alone[clock[is_alone]], np.inf
        )
        return least


@dataclass(frozen=True, slots=True)
class _Seen:
    """Who left how long after whom who came last, less what is known to be spent in between."""

    left: Ints
    came: Ints
    room: Floats
    key: Ints  # what is seen under one key has one least

    def walls(self, spent: Floats, is_shown: Bools) -> tuple[Ints, Ints, Floats, Floats]:
        """Of each key those with the least room: who left, who came, how much less room there
        should be, and the weight."""
        order = self._by_key_and_room()
        left, came, room, key = (
            self.left[order],
            self.came[order],
            self.room[order],
            self.key[order],
        )
        begins, counts, least, sure = _ends(room, key)
        shown = is_shown[left[begins]]
        variance = sure**2 + np.where(shown, _LIKE_NS, _UNLIKE_NS) ** 2
        # Some may be faster than those who have shown how long it takes, but nobody leaves before
        # the last has come.
        whole = least + spent[left[begins]]
        variance = np.where(
            shown & (least < 0) & (whole >= 0), np.maximum(variance, least**2 / 4), variance
        )
        least = np.where(shown & (whole < 0), whole, least)
        lowest = np.minimum(counts, _LOWEST)
        chosen = np.arange(len(key)) - np.repeat(begins, counts) < np.repeat(lowest, counts)
        weight = np.repeat(1 / (variance * lowest), counts)[chosen]
        return left[chosen], came[chosen], np.repeat(least, counts)[chosen], weight

    def _by_key_and_room(self) -> Ints:
        """In one number, which is sorted three times as fast as two."""
        if self.key.max(initial=0) >= 1 << 26:
            return np.lexsort((self.room, self.key))
        found: Ints = np.argsort(
            (self.key << 36) + np.clip(self.room / 16, -(1 << 35), (1 << 35) - 1).astype(np.int64)
        )
        return found


def _ends(values: Floats, key: Ints) -> tuple[Ints, Ints, Floats, Floats]:
    """Of values in order under each key: where they begin, how many they are, the end of what they
    are spread over, and how sure that is. The least of many lies above the end by about as much as
    those next to it lie apart."""
    begins = np.flatnonzero(np.r_[True, np.diff(key) != 0])[: len(key)]
    counts = np.diff(np.r_[begins, len(key)])
    lowest = np.minimum(counts, _LOWEST)
    gap = (values[begins + lowest - 1] - values[begins]) / np.maximum(lowest - 1, 1)
    sure = np.where(lowest > 1, (gap + _SURE_NS) * (1 + 4 / lowest**2), _UNSURE_NS)
    return begins, counts, values[begins] - gap, sure


def _alike(least: Floats) -> Ints:
    """Sites whose least times are nearly the same, as one kind; the last kind are those that nobody
    shows."""
    order = np.argsort(least, kind="stable")
    with np.errstate(invalid="ignore"):
        apart = np.diff(least[order]) > _ALIKE_NS
    found = np.empty(len(least), np.int64)
    found[order] = np.cumsum(np.r_[0, apart])
    found[~np.isfinite(least)] = len(least)
    return found


def _solved(applied: Callable[[Floats], Floats], right: Floats, diagonal: Floats) -> Floats:
    """By conjugate gradients."""
    found, rest = np.zeros_like(right), right
    ahead = eased = rest / diagonal
    product = first = float((rest * eased).sum())
    for _ in range(_ITERATIONS):
        if product <= 1e-12 * first or product <= 0:
            break
        bent = applied(ahead)
        along = product / max(float((ahead * bent).sum()), 1e-300)
        found = found + along * ahead
        rest = rest - along * bent
        eased = rest / diagonal
        product, before = float((rest * eased).sum()), product
        ahead = eased + product / before * ahead
    return found


def _blocks(group: Ints, times: Floats) -> Ints:
    """Which part of the time of its group each row is in: a line is held at both ends."""
    order = np.lexsort((times, group))
    counts = np.bincount(group)
    position = np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)
    found = np.empty(len(group), np.int64)
    blocks = np.clip(counts // _CALLS_IN_A_BLOCK, 1, _BLOCKS)
    found[order] = position * np.repeat(blocks, counts) // np.repeat(counts, counts)
    return found


class _Grouped:
    """Rows that come in groups, one after the other."""

    def __init__(self, group: Ints) -> None:
        self._begins = np.flatnonzero(np.r_[True, np.diff(group) != 0])
        self._sizes = np.diff(np.r_[self._begins, len(group)])

    def _spread(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.repeat(values, self._sizes)

    def _greatest(self, values: Floats) -> tuple[Floats, Ints]:
        """And which row has it."""
        greatest = self._spread(np.maximum.reduceat(values, self._begins))
        rows = np.where(values == greatest, np.arange(len(values)), -1)
        return greatest, self._spread(np.maximum.reduceat(rows, self._begins))

    def greatest_of_others(self, values: Floats) -> tuple[Floats, Ints]:
        """For each row, and which has it; minus infinity if there are no others."""
        greatest, by = self._greatest(values)
        is_it = by == np.arange(len(values))
        second, second_by = self._greatest(np.where(is_it, -np.inf, values))
        return np.where(is_it, second, greatest), np.where(is_it, second_by, by)
