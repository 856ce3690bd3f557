"""Finds repeats in a long list of rows: 32 layers of 7 rows each become one block, 32 times.

Takes a key for each row (equal keys: equal rows up to the numbers in their names) and those
numbers; gives a list of rows and folds. A repeat may contain repeats. From one repeat to the next,
each number of a row must change by the same step: layers 3, 2, 1, 0 are a repeat, layers 3, 1, 2
are not. The longest period is 512 rows, for a million rows 256; those take seconds.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_LONGEST_PERIOD = 512
_MOST_COMPARED = 1 << 28  # comparisons in all: more rows get shorter periods
_LEAST_SAVED = 2  # rows; a fold that saves fewer is not easier to read
_MOST_ROUNDS = 4
_HOLE, _BETWEEN = "\1", "\0"
_NUMBER = re.compile(r"(?<![\w-])\d{1,9}(?![\w-])")  # one whole part of a dotted name


class Step(NamedTuple):
    """How a number changes from one repeat to the next, and how many repeats there are."""

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
        """The texts again, with a span for a number that changes: `0-31`, `1,3..31`."""
        first, *rest = self.key.split(_HOLE)
        spans = [_span(number, step) for number, step in zip(self.numbers, steps, strict=True)]
        joined = first + "".join(span + part for span, part in zip(spans, rest, strict=True))
        return joined.split(_BETWEEN)


def _span(number: int, steps: Sequence[Step]) -> str:
    """From the first to the last number; a step other than 1 is shown."""
    if not steps:
        return str(number)
    low, high = sorted((number, number + sum(step.by * (step.times - 1) for step in steps)))
    by, times = abs(steps[0].by), steps[0].times
    if len(steps) > 1 or by == 1:
        return f"{low}-{high}"
    return f"{low},{high}" if times == 2 else f"{low},{low + by}..{high}"


@dataclass(frozen=True, slots=True)
class Fold:
    """`times` repeats of the `period` rows from `start` on. `items` are those of the first
    repeat."""

    start: int
    period: int
    times: int
    items: list[int | Fold]

    @property
    def end(self) -> int:
        return self.start + self.period * self.times


def fold(keys: Sequence[Hashable], numbers: Sequence[tuple[int, ...]]) -> list[int | Fold]:
    """Fold all repeats."""
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
    """Fold the rows from `start` to `end`. Each level halves the period: the recursion is
    shallow."""
    taken = np.zeros(end - start, bool)
    chosen: list[tuple[int, int, int]] = []
    for _ in range(_MOST_ROUNDS):
        repeats = _choose(coded[start:end], numbers[start:end], taken)
        if not repeats:
            break
        chosen += repeats
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
    """Choose repeats that do not overlap, as (start, period, times); the largest saving first."""
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
    """Runs with a period, as (negative number of rows saved, start, period, length)."""
    candidates = []
    longest = min(_LONGEST_PERIOD, len(coded) // 2, max(64, _MOST_COMPARED // (len(coded) + 1)))
    for period in range(1, longest + 1):
        same = np.concatenate(([False], coded[:-period] == coded[period:], [False]))
        edges = np.flatnonzero(same[1:] != same[:-1])
        begins, lengths = edges[::2], edges[1::2] - edges[::2]
        for at in np.flatnonzero(lengths >= max(period, _LEAST_SAVED)):
            length = int(lengths[at]) + period
            candidates.append(((1 - length // period) * period, int(begins[at]), period, length))
    return sorted(candidates)


def _turn(numbers: NDArray[np.int64], period: int) -> int:
    """Where a block shall begin: a run is as periodic from the middle of a layer, but a block
    should hold one layer."""
    distinct = [
        len(np.unique(numbers[at : at + period], axis=0)) for at in range(len(numbers) - period + 1)
    ]
    return int(np.argmin(distinct))


def _steady(numbers: NDArray[np.int64]) -> int:
    """How many repeats change by the same step."""
    steps = np.diff(numbers, axis=0)
    odd = np.flatnonzero((steps != steps[0]).any(axis=(1, 2))) if numbers.shape[2] else np.array([])
    return int(odd[0]) + 1 if len(odd) else len(numbers)
