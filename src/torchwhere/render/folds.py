"""Finds what repeats in a long list of rows: 32 layers of 7 rows each become one block of 7 rows,
32 times.

Takes a key for each row (equal keys: the rows are alike but for the numbers in their names) and
those numbers, gives a list of rows and folds. A repeat may hold repeats. The numbers of a row must
go on by the same step from one repeat to the next: layers 3, 2, 1, 0 are a repeat, layers 3, 1, 2
are not. Periods of up to 512 rows are looked for, of a million rows up to 256; that takes seconds.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_LONGEST_PERIOD = 512
_MOST_COMPARED = 1 << 28  # in all: for more rows, shorter periods
_LEAST_SAVED = 2  # rows; a fold that saves fewer is no easier to read
_MOST_ROUNDS = 4
_HOLE, _BETWEEN = "\1", "\0"
_NUMBER = re.compile(r"(?<![\w-])\d{1,9}(?![\w-])")  # a whole part of a dotted name


class Step(NamedTuple):
    """How a number goes on from one repeat to the next."""

    by: int
    times: int


class NumberedNames(NamedTuple):
    """Texts with their numbers taken out."""

    key: str
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, texts: Iterable[str]) -> NumberedNames:
        joined = _BETWEEN.join(texts)
        return cls(_NUMBER.sub(_HOLE, joined), tuple(map(int, _NUMBER.findall(joined))))

    def spanned(self, steps: Sequence[Sequence[Step]]) -> list[str]:
        """The texts again; a number that goes on in the repeats around it is shown as a span:
        `0-31`, `1,3..31`."""
        filled, parts = iter(zip(self.numbers, steps, strict=True)), self.key.split(_HOLE)
        return (parts[0] + "".join(_span(*next(filled)) + part for part in parts[1:])).split(
            _BETWEEN
        )


def _span(number: int, steps: Sequence[Step]) -> str:
    """From the first to the last; where only every other number is met, that is said."""
    if not steps:
        return str(number)
    low, high = sorted((number, number + sum(step.by * (step.times - 1) for step in steps)))
    by, times = abs(steps[0].by), steps[0].times
    if len(steps) > 1 or by == 1:
        return f"{low}-{high}"
    return f"{low},{high}" if times == 2 else f"{low},{low + by}..{high}"


@dataclass(frozen=True, slots=True)
class Fold:
    """The `period` rows from `start` on come `times` times. `items` are those of the first time."""

    start: int
    period: int
    times: int
    items: list[int | Fold]

    @property
    def end(self) -> int:
        return self.start + self.period * self.times


def fold(keys: Sequence[Hashable], numbers: Sequence[tuple[int, ...]]) -> list[int | Fold]:
    """All rows, with repeats folded."""
    codes: dict[Hashable, int] = {}
    coded = np.fromiter((codes.setdefault(key, len(codes)) for key in keys), np.int64, len(keys))
    widest = max(map(len, numbers), default=0)
    table = np.array([row + (0,) * (widest - len(row)) for row in numbers], np.int64).reshape(
        len(keys), widest
    )
    return _items(coded, table, 0, len(keys))


def _items(
    coded: NDArray[np.int64], numbers: NDArray[np.int64], start: int, end: int
) -> list[int | Fold]:
    """Folds are at most a period long inside, and each level halves that: the recursion is never
    deep."""
    taken = np.zeros(end - start, bool)
    chosen: list[tuple[int, int, int]] = []
    for _ in range(_MOST_ROUNDS):
        found = _choose(coded[start:end], numbers[start:end], taken)
        if not found:
            break
        chosen += found
    items: list[int | Fold] = []
    at = start
    for begin, period, times in sorted(chosen):
        items += range(at, start + begin)
        at = start + begin
        items.append(Fold(at, period, times, _items(coded, numbers, at, at + period)))
        at += period * times
    return items + list(range(at, end))


def _choose(
    coded: NDArray[np.int64], numbers: NDArray[np.int64], taken: NDArray[Any]
) -> list[tuple[int, int, int]]:
    """Repeats that do not overlap, as (start, period, times); those that save most first."""
    chosen = []
    for _, start, period, length in _candidates(np.where(taken, -1 - np.arange(len(coded)), coded)):
        if taken[start] or taken[start + length - 1]:
            continue
        times, spare = divmod(length, period)
        start += _turn(numbers[start : start + period + spare], period)
        times = _steady(numbers[start : start + period * times].reshape(times, period, -1))
        end = start + period * times
        if (times - 1) * period >= _LEAST_SAVED and not taken[start:end].any():
            taken[start:end] = True
            chosen.append((start, period, times))
    return chosen


def _candidates(coded: NDArray[np.int64]) -> list[tuple[int, int, int, int]]:
    """Runs that repeat themselves after a period: (rows saved, negative; start; period; rows in
    all)."""
    found = []
    longest = min(_LONGEST_PERIOD, len(coded) // 2, max(64, _MOST_COMPARED // (len(coded) + 1)))
    for period in range(1, longest + 1):
        same = np.concatenate(([False], coded[:-period] == coded[period:], [False]))
        edges = np.flatnonzero(same[1:] != same[:-1])
        begins, lengths = edges[::2], edges[1::2] - edges[::2]
        for at in np.flatnonzero(lengths >= max(period, _LEAST_SAVED)):
            length = int(lengths[at]) + period
            found.append(((1 - length // period) * period, int(begins[at]), period, length))
    return sorted(found)


def _turn(numbers: NDArray[np.int64], period: int) -> int:
    """Where to begin: a run of layers is as periodic from the middle of a layer, but a block is
    best of one layer alone."""
    distinct = [
        len(np.unique(numbers[at : at + period], axis=0)) for at in range(len(numbers) - period + 1)
    ]
    return int(np.argmin(distinct))


def _steady(numbers: NDArray[np.int64]) -> int:
    """How many repeats go on by the same step."""
    steps = np.diff(numbers, axis=0)
    odd = np.flatnonzero((steps != steps[0]).any(axis=(1, 2))) if numbers.shape[2] else np.array([])
    return int(odd[0]) + 1 if len(odd) else len(numbers)
