"""Sorts what one rank did: records that are alike share a code, calls of one stream stand together.

Takes records as a box has them, gives small arrays. Works on columns only: a rank has thousands of
them, a job thousands of ranks. Ranks of one stage do the same things in the same order: mostly, a
`Sorter` finds what it found for the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchwhere.blackbox.ring import as_words
from torchwhere.diagnose.calls.keys import StreamKey

# threads may write down two calls in the wrong order; a number that falls back further was counted
# anew
_SWAPPED = 64
# The words of a record, of 8 bytes, without what differs from call to call: its number, time, step,
# and number in the stream.
_WORDS = slice(2, 7)
_MASKS = np.array([[0xFFFFFFFF], *[[0xFFFFFFFFFFFFFFFF]] * 3, [0xFFFFFFFF]], np.uint64)
_FACTORS = np.array(
    [
        [0x9E3779B97F4A7C15],
        [0xC2B2AE3D27D4EB4F],
        [0x165667B19E3779F9],
        [0xD6E8FEB86659FD93],
        [0xFF51AFD7ED558CCD],
    ],
    np.uint64,
)


class Classes(NamedTuple):
    """Which records are alike: of every record the code of its class, of every class its first
    record."""

    codes: npt.NDArray[np.int64]
    examples: npt.NDArray[np.int64]


class Stretch(NamedTuple):
    """The calls of one stream, numbered without a hole."""

    key: StreamKey
    first: int
    at: int
    length: int


class SortedCalls(NamedTuple):
    """The calls of a rank, stream by stream; those of no known group, and those before a hole, are
    left out."""

    order: npt.NDArray[np.int64]
    codes: npt.NDArray[Any]
    stretches: list[Stretch]
    last: tuple[StreamKey, int] | None


class _Order(NamedTuple):
    """The calls of a rank by stream."""

    # the codes that were sorted, or that the sorted ones are the first of
    of: npt.NDArray[np.int64]
    length: int
    streams: list[int]  # of each code
    order: npt.NDArray[np.int64]
    codes: npt.NDArray[Any]
    begins: npt.NDArray[np.int64]  # of each stream
    ends: npt.NDArray[np.int64]


class Sorter:
    """Sorts the calls of one rank after another."""

    def __init__(self) -> None:
        self._columns = np.empty((5, 0), np.uint64)
        self._classes = Classes(np.empty(0, np.int64), np.empty(0, np.int64))
        self._order: _Order | None = None

    def alike(self, records: npt.NDArray[Any]) -> Classes:
        """Records of the same kind, signature and place."""
        columns, known = as_words(records).T[_WORDS] & _MASKS, self._classes
        is_seen = known.examples.max(initial=-1) < len(records) <= len(known.codes)
        if is_seen and np.array_equal(columns, self._columns[:, : len(records)]):
            return Classes(known.codes[: len(records)], known.examples)
        self._columns, self._classes = columns, _classes(columns)
        return self._classes

    def sort(
        self, numbers: npt.NDArray[Any], classes: Classes, keys: Sequence[StreamKey | None]
    ) -> SortedCalls:
        """By stream, and in each by number. `keys` are the streams of the classes; None is none."""
        index = {
            key: number
            for number, key in enumerate(dict.fromkeys(key for key in keys if key is not None))
        }
        streams = [len(index) if key is None else index[key] for key in keys]
        found = self._by_stream(streams, classes.codes, len(index))
        in_order = numbers[found.order].astype(np.int64)
        follows = in_order[1:] - in_order[:-1] == 1
        follows[found.begins[1:] - 1] = True  # where another stream begins
        if not follows.all():
            return _with_holes(found, in_order, list(index))
        columns = (
            in_order[found.begins].tolist(),
            found.begins.tolist(),
            (found.ends - found.begins).tolist(),
        )
        stretches = [Stretch(key, *each) for key, *each in zip(index, *columns, strict=True)]
        return SortedCalls(found.order, found.codes, stretches, _last(found.order, stretches))

    def _by_stream(self, streams: list[int], codes: npt.NDArray[np.int64], count: int) -> _Order:
        known, of = self._order, self._classes.codes
        is_known = (
            known is not None
            and known.of is of
            and known.length == len(codes)
            and known.streams == streams
        )
        # of no stream at all, all are number 0 too
        if known is not None and is_known and len(known.ends) == count:
            return known
        of_record = np.array(streams, np.uint16)[codes]
        lengths = np.bincount(of_record, minlength=count)[:count]
        ends = np.cumsum(lengths)
        order = np.argsort(of_record, kind="stable")[: int(ends[-1]) if count else 0]
        self._order = _Order(
            of, len(codes), streams, order, narrow(codes[order], base=0)[0], ends - lengths, ends
        )
        return self._order


def _classes(columns: npt.NDArray[np.uint64]) -> Classes:
    # by a hash: equal ones come to stand together
    order = (columns * _FACTORS).sum(axis=0).argsort()
    in_order = columns[:, order]
    # Told apart by what they are: where two hashes are equal by chance, a class falls into pieces,
    # and nothing is wrong.
    begins = np.ones(len(order), np.bool_)
    begins[1:] = (in_order[:, 1:] != in_order[:, :-1]).any(axis=0)
    codes = np.empty(len(order), np.int64)
    codes[order] = np.cumsum(begins) - 1
    starts = np.flatnonzero(begins)
    return Classes(codes, np.minimum.reduceat(order, starts) if len(order) else order)


def _with_holes(
    found: _Order, numbers: npt.NDArray[np.int64], keys: Sequence[StreamKey]
) -> SortedCalls:
    """Of each stream, the newest calls without a hole between them."""
    pieces: list[npt.NDArray[np.int64]] = []
    stretches: list[Stretch] = []
    begin, at = 0, 0
    for key, end in zip(keys, found.ends.tolist(), strict=True):
        chosen = begin + _newest(numbers[begin:end])
        pieces.append(chosen)
        stretches.append(Stretch(key, int(numbers[chosen[0]]), at, len(chosen)))
        begin, at = end, at + len(chosen)
    kept = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
    return SortedCalls(
        found.order[kept], found.codes[kept], stretches, _last(found.order[kept], stretches)
    )


def _newest(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where the newest calls of a stream stand whose numbers follow each other, by number."""
    # the group was made anew and counts from its start
    anew = np.flatnonzero(numbers[1:] < numbers[:-1] - _SWAPPED)
    start = int(anew[-1]) + 1 if len(anew) else 0
    values, where = np.unique(numbers[start:], return_index=True)
    holes = np.flatnonzero(values[1:] - values[:-1] != 1)
    found: npt.NDArray[np.int64] = where[int(holes[-1]) + 1 if len(holes) else 0 :] + start
    return found


def _last(
    order: npt.NDArray[np.int64], stretches: Sequence[Stretch]
) -> tuple[StreamKey, int] | None:
    """Stream and number of the last call of all."""
    if not stretches:
        return None
    lasts = order[[stretch.at + stretch.length - 1 for stretch in stretches]]
    stretch = stretches[int(lasts.argmax())]
    return stretch.key, stretch.first + stretch.length - 1


def narrow(column: npt.NDArray[Any], *, base: int | None = None) -> tuple[npt.NDArray[Any], int]:
    """Numbers in as few bytes as they need, and what they count from."""
    if not len(column):
        return np.empty(0, np.uint8), 0
    base = int(column.min()) if base is None else base
    most = int(column.max()) - base
    kind = (
        np.uint8
        if most < 1 << 8
        else np.uint16
        if most < 1 << 16
        else np.uint32
        if most < 1 << 32
        else np.uint64
    )
    return (column - column.dtype.type(base)).astype(kind), base
