"""Groups the records of one rank: equal records share a code, calls of one stream are contiguous.

It takes the records of a box and gives small arrays. All work is done on columns, because a rank
has thousands of records and a job has thousands of ranks. Ranks of one pipeline stage do the same
things in the same order, so a `CallSorter` keeps the result of the box before and can mostly reuse
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torchwhere.blackbox.ring import as_words
from torchwhere.core.arrays import AnyArray, Ints, Words
from torchwhere.diagnose.calls.keys import StreamKey

# Two threads may record two calls in the wrong order. A number that falls back by more than this
# comes from a group that was created again and counts from 0.
_SWAPPED = 64
# The 8-byte words of a record, without the fields that differ from call to call: record number,
# time, step, and number in the stream.
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


class RecordClasses(NamedTuple):
    """Classes of records that are equal in kind, signature and place."""

    codes: Ints  # the class of each record
    examples: Ints  # the first record of each class


class Stretch(NamedTuple):
    """The calls of one stream, with consecutive numbers."""

    key: StreamKey
    first: int  # number of the first call
    at: int  # index of the first call in `SortedCalls.order`
    length: int


class SortedCalls(NamedTuple):
    """The calls of a rank, stream by stream.

    Calls of unknown groups and calls before a gap in the numbers are left out.
    """

    order: Ints  # indexes of the records
    codes: AnyArray
    stretches: list[Stretch]
    last: tuple[StreamKey, int] | None  # stream and number of the last call of all


class _Order(NamedTuple):
    """The order of a rank's calls by stream, and what it was computed from."""

    of: Ints  # the codes; the array itself is compared, not its contents
    length: int  # how many of these codes were used
    streams: list[int]  # the stream of each code
    order: Ints
    codes: AnyArray
    begins: Ints  # of each stream
    ends: Ints


class CallSorter:
    """Sorts the calls of one rank after another."""

    def __init__(self) -> None:
        self._columns = np.empty((5, 0), np.uint64)
        self._classes = RecordClasses(np.empty(0, np.int64), np.empty(0, np.int64))
        self._order: _Order | None = None

    def classify(self, records: AnyArray) -> RecordClasses:
        """Finds the records that are equal in kind, signature and place."""
        columns, previous = as_words(records).T[_WORDS] & _MASKS, self._classes
        may_reuse = previous.examples.max(initial=-1) < len(records) <= len(previous.codes)
        if may_reuse and np.array_equal(columns, self._columns[:, : len(records)]):
            return RecordClasses(previous.codes[: len(records)], previous.examples)
        self._columns, self._classes = columns, _classes(columns)
        return self._classes

    def sort(
        self, numbers: AnyArray, classes: RecordClasses, keys: Sequence[StreamKey | None]
    ) -> SortedCalls:
        """Sorts calls by stream, and by number within each stream.

        `keys` are the streams of the classes; None if a class belongs to no stream.
        """
        distinct = dict.fromkeys(key for key in keys if key is not None)
        index = {key: number for number, key in enumerate(distinct)}
        streams = [len(index) if key is None else index[key] for key in keys]
        by_stream = self._by_stream(streams, classes.codes, len(index))
        in_order = numbers[by_stream.order].astype(np.int64)
        follows = in_order[1:] - in_order[:-1] == 1
        follows[by_stream.begins[1:] - 1] = True  # where the next stream begins
        if not follows.all():
            return _without_gaps(by_stream, in_order, list(index))
        columns = (
            in_order[by_stream.begins].tolist(),
            by_stream.begins.tolist(),
            (by_stream.ends - by_stream.begins).tolist(),
        )
        stretches = [Stretch(key, *row) for key, *row in zip(index, *columns, strict=True)]
        last = _last(by_stream.order, stretches)
        return SortedCalls(by_stream.order, by_stream.codes, stretches, last)

    def _by_stream(self, streams: list[int], codes: Ints, count: int) -> _Order:
        previous, of = self._order, self._classes.codes
        if (
            previous is not None
            and previous.of is of
            and previous.length == len(codes)
            and previous.streams == streams
            and len(previous.ends) == count  # without any stream, all codes have stream 0 too
        ):
            return previous
        of_record = np.array(streams, np.uint16)[codes]
        lengths = np.bincount(of_record, minlength=count)[:count]
        ends = np.cumsum(lengths)
        order = np.argsort(of_record, kind="stable")[: int(ends[-1]) if count else 0]
        self._order = _Order(
            of, len(codes), streams, order, narrow(codes[order], base=0)[0], ends - lengths, ends
        )
        return self._order


def _classes(columns: Words) -> RecordClasses:
    # Sorting by a hash brings equal records together.
    order = (columns * _FACTORS).sum(axis=0).argsort()
    in_order = columns[:, order]
    # Neighbours are compared by value. If two hashes collide, a class is split in pieces, which is
    # harmless.
    begins = np.ones(len(order), np.bool_)
    begins[1:] = (in_order[:, 1:] != in_order[:, :-1]).any(axis=0)
    codes = np.empty(len(order), np.int64)
    codes[order] = np.cumsum(begins) - 1
    starts = np.flatnonzero(begins)
    return RecordClasses(codes, np.minimum.reduceat(order, starts) if len(order) else order)


def _without_gaps(by_stream: _Order, numbers: Ints, keys: Sequence[StreamKey]) -> SortedCalls:
    """Keeps the newest calls of each stream that have consecutive numbers."""
    pieces: list[Ints] = []
    stretches: list[Stretch] = []
    begin, at = 0, 0
    for key, end in zip(keys, by_stream.ends.tolist(), strict=True):
        chosen = begin + _newest(numbers[begin:end])
        pieces.append(chosen)
        stretches.append(Stretch(key, int(numbers[chosen[0]]), at, len(chosen)))
        begin, at = end, at + len(chosen)
    rows = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
    order = by_stream.order[rows]
    return SortedCalls(order, by_stream.codes[rows], stretches, _last(order, stretches))


def _newest(numbers: Ints) -> Ints:
    """Returns the indexes of the newest calls with consecutive numbers, ordered by number."""
    restarts = np.flatnonzero(numbers[1:] < numbers[:-1] - _SWAPPED)
    start = int(restarts[-1]) + 1 if len(restarts) else 0
    values, where = np.unique(numbers[start:], return_index=True)
    gaps = np.flatnonzero(values[1:] - values[:-1] != 1)
    newest: Ints = where[int(gaps[-1]) + 1 if len(gaps) else 0 :] + start
    return newest


def _last(order: Ints, stretches: Sequence[Stretch]) -> tuple[StreamKey, int] | None:
    """Returns stream and number of the last call of all."""
    if not stretches:
        return None
    lasts = order[[stretch.at + stretch.length - 1 for stretch in stretches]]
    stretch = stretches[int(lasts.argmax())]
    return stretch.key, stretch.first + stretch.length - 1


def narrow(column: AnyArray, *, base: int | None = None) -> tuple[AnyArray, int]:
    """Stores integers in as few bytes as possible. Returns them and the base they count from."""
    if not len(column):
        return np.empty(0, np.uint8), 0
    base = int(column.min()) if base is None else base
    kind = np.min_scalar_type(int(column.max()) - base)
    return (column - column.dtype.type(base)).astype(kind), base
