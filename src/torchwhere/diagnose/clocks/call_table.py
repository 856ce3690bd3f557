"""All calls of some clocks as one table: a row for each call and clock.

Times in the table are already corrected by the lines found so far, and count from a moment in the
middle of the run. So floats hold them to a nanosecond, and whatever correction is still needed is
small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from torchwhere.core.arrays import AnyArray, Bools, Floats, Ints
from torchwhere.core.grouping import grouped
from torchwhere.diagnose.clocks.arrivals import NEVER, Arrivals, CallTimes, ClockStream
from torchwhere.diagnose.clocks.line import Line


class ClockCalls:
    """The calls of all ranks that share a clock, in its own wall-clock time.

    For each call it has the last arrival of these ranks and the first moment at which one of them
    continued. With `only`, it has the calls of that one of the ranks.
    """

    def __init__(self, sharing: Sequence[Arrivals], *, only: int | None = None) -> None:
        zero_ns = sharing[0].offset_ns
        by_stream = grouped(
            (stream, calls.shifted(zero_ns - arrivals.offset_ns))
            for arrivals in (sharing if only is None else sharing[only : only + 1])
            for stream, calls in arrivals.streams.items()
        )
        # A message between two ranks of one host says nothing about its clock.
        self.streams = {
            stream: _merged(calls)
            for stream, calls in by_stream.items()
            if not (stream.is_message and len(calls) > 1)
        }
        self.ranks = frozenset(arrivals.rank for arrivals in sharing)
        self.unsure = frozenset(stream for arrivals in sharing for stream in arrivals.unsure)

    def span_ns(self) -> tuple[int, ...]:
        """Returns when the first and the last call were issued; empty without calls."""
        edges = [
            edge
            for calls in self.streams.values()
            if len(calls)
            for edge in calls.issued_ns[[0, -1]].tolist()
        ]
        return (min(edges), max(edges)) if edges else ()


def _merged(all_calls: list[CallTimes]) -> CallTimes:
    if len(all_calls) == 1:
        return all_calls[0]
    numbers = np.concatenate([calls.numbers for calls in all_calls])
    order = np.argsort(numbers, kind="stable")
    merged, begins = np.unique(numbers[order], return_index=True)
    if not len(merged):
        return all_calls[0]

    def reduced(operation: np.ufunc, name: str) -> Any:
        column = np.concatenate([getattr(calls, name) for calls in all_calls])
        return operation.reduceat(column[order], begins)

    return CallTimes(
        numbers=merged,
        issued_ns=reduced(np.maximum, "issued_ns"),
        next_ns=reduced(np.minimum, "next_ns"),
        waits=reduced(np.logical_and, "waits"),
        at=reduced(np.minimum, "at"),
        sites=reduced(np.minimum, "sites"),
    )


@dataclass(frozen=True, slots=True)
class CallTable:
    """Rows in the order of calls. Each call has at least two rows, one for each of its clocks."""

    zero_ns: int  # the moment that times count from
    clock: Ints
    call: Ints
    came: Floats  # when the call was issued
    bound: Floats  # the same if others wait for it; minus infinity for a receiver
    left: Floats  # when its thread continued; infinity if that says nothing
    site: Ints
    stream: Ints
    is_sure: Bools  # whether the backend says that the call waits

    def __len__(self) -> int:
        return len(self.call)

    def collectives(self) -> CallTable:
        """Returns the rows of collectives, without messages."""
        return self.without(np.unique(self.stream[np.isneginf(self.bound)]))

    def without(self, streams: Ints) -> CallTable:
        return self.at(~np.isin(self.stream, streams)) if len(streams) else self

    def at(self, rows: Ints | Bools) -> CallTable:
        columns = (getattr(self, column.name)[rows] for column in fields(self)[1:])
        return CallTable(self.zero_ns, *columns)


@dataclass(frozen=True, slots=True)
class Correction:
    """How far a clock of the table is still ahead: offset + slope * time."""

    offset: float = 0.0
    slope: float = 0.0

    def line(self, zero_ns: int) -> Line:
        return Line(self.offset, self.slope, zero_ns)


def call_table(clocks: Mapping[int, ClockCalls], lines: Mapping[int, Line]) -> CallTable:
    """Collects all calls in which at least two of the clocks took part."""
    clocks_of = grouped(
        (stream, index) for index, clock in clocks.items() for stream in clock.streams
    )
    zero_ns = _zero_ns(clocks, lines)
    ints, floats = np.empty(0, np.int64), np.empty(0)
    no_rows = (ints, ints, floats, floats, floats, ints, ints, np.empty(0, np.bool_))
    parts = [CallTable(zero_ns, *no_rows)]
    calls = 0
    for number, (stream, sharing) in enumerate(clocks_of.items()):
        if len(sharing) < 2:
            continue
        numbers = np.unique(
            np.concatenate([clocks[index].streams[stream].numbers for index in sharing])
        )
        is_sure = not any(stream in clocks[index].unsure for index in sharing)
        for index in sharing:
            call = np.searchsorted(numbers, clocks[index].streams[stream].numbers) + calls
            came, bound, left = _times(clocks[index], stream, lines[index], zero_ns)
            part = CallTable(
                zero_ns=zero_ns,
                clock=np.full(len(call), index),
                call=call,
                came=came,
                bound=bound,
                left=left,
                site=clocks[index].streams[stream].sites,
                stream=np.full(len(call), number),
                is_sure=np.full(len(call), is_sure),
            )
            parts.append(part)
        calls += len(numbers)
    columns: list[AnyArray] = [
        np.concatenate([getattr(part, column.name) for part in parts])
        for column in fields(CallTable)[1:]
    ]
    table = CallTable(zero_ns, *columns)
    rows = np.flatnonzero(np.bincount(table.call, minlength=1)[table.call] > 1)
    return table.at(rows[np.argsort(table.call[rows], kind="stable")])


def _times(
    clock: ClockCalls, stream: ClockStream, line: Line, zero_ns: int
) -> tuple[Floats, Floats, Floats]:
    """Returns the columns `came`, `bound` and `left` of one clock and stream."""
    calls = clock.streams[stream]
    came = _corrected(calls.issued_ns, line, zero_ns)
    waits = calls.waits & (calls.next_ns != NEVER)
    left = _corrected(np.where(waits, calls.next_ns, calls.issued_ns), line, zero_ns)
    receives = stream.is_message and stream.source not in clock.ranks
    bound = np.full_like(came, -np.inf) if receives else came
    return came, bound, np.where(waits, left, np.inf)


def _corrected(times: Ints, line: Line, zero_ns: int) -> Floats:
    corrected: Floats = (times - zero_ns).astype(np.float64) - line.at(times)
    return corrected


def _zero_ns(clocks: Mapping[int, ClockCalls], lines: Mapping[int, Line]) -> int:
    for index, clock in clocks.items():
        for calls in clock.streams.values():
            if len(calls):
                middle = int(calls.issued_ns[len(calls) // 2])
                return middle - round(lines[index].at(middle))
    return 0
