"""Who came to a call first and who came last, over all ranks, by aligned clocks.

Takes the arrivals of ranks one after another, keeps for each call two times, two ranks and a count:
what that takes does not grow with the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchwhere.diagnose.clocks.arrivals import NEVER, Arrivals, ClockStream, Times
from torchwhere.diagnose.clocks.clocks import Clocks


class Meeting(NamedTuple):
    """One call."""

    call: int  # its number among all calls of the job
    first_ns: int
    first_rank: int
    last_ns: int
    last_rank: int
    came: int  # so many ranks
    held_ns: int  # until when who came first did nothing else; its own arrival, if it did not wait


@dataclass(slots=True)
class MeetingTable:
    """The calls of one stream, by number."""

    numbers: Times
    first_ns: Times
    first_rank: Times
    last_ns: Times
    last_rank: Times
    count: Times
    held_ns: Times

    def add(self, numbers: Times, times: Times, held: Times, rank: int) -> None:
        if not np.array_equal(numbers, self.numbers):
            self._make_room(np.union1d(self.numbers, numbers))
        at = np.searchsorted(self.numbers, numbers)
        # Ranks come in order: of two that came at the same time the lower one was first.
        is_first = (self.count[at] == 0) | (times < self.first_ns[at])
        is_last = (self.count[at] == 0) | (times >= self.last_ns[at])
        self.first_ns[at[is_first]], self.first_rank[at[is_first]] = times[is_first], rank
        self.held_ns[at[is_first]] = held[is_first]
        self.last_ns[at[is_last]], self.last_rank[at[is_last]] = times[is_last], rank
        self.count[at] += 1

    def _make_room(self, numbers: Times) -> None:
        at = np.searchsorted(numbers, self.numbers)
        for each in fields(self)[1:]:
            wider = np.zeros(len(numbers), np.int64)
            wider[at] = getattr(self, each.name)
            setattr(self, each.name, wider)
        self.numbers = numbers


class Meetings:
    """All calls of a job."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._tables: dict[ClockStream, MeetingTable] = {}
        self._begins: dict[ClockStream, int] | None = None

    def add(self, found: Arrivals, *, window: tuple[int, int] | None = None) -> None:
        """The calls of one more rank; only those within a window of aligned times. Ranks come in
        order."""
        for stream, calls in found.streams.items():
            numbers, times = calls.numbers, self._clocks.aligned_ns(found.rank, calls.issued_ns)
            held = np.where(
                calls.next_ns == NEVER, NEVER, times + (calls.next_ns - calls.issued_ns)
            )
            held = np.where(calls.waits, held, times)
            if window is not None:
                inside = (times >= window[0]) & (times < window[1])
                numbers, times, held = numbers[inside], times[inside], held[inside]
            table = self._tables.get(stream)
            if table is None:
                table = self._tables[stream] = MeetingTable(
                    *(np.empty(0, np.int64) for _ in fields(MeetingTable))
                )
            table.add(numbers, times, held, found.rank)
        self._begins = None

    def of(self, stream: ClockStream, numbers: Times) -> list[Meeting | None]:
        """What is known of some calls; None for one that nobody has told of."""
        table = self._tables.get(stream)
        if table is None or not len(table.numbers):
            return [None] * len(numbers)
        at = np.minimum(np.searchsorted(table.numbers, numbers), len(table.numbers) - 1)
        known: npt.NDArray[np.bool_] = table.numbers[at] == numbers
        begin = self._begin(stream)
        columns = [
            (at + begin).tolist(),
            *(getattr(table, each.name)[at].tolist() for each in fields(MeetingTable)[1:]),
        ]
        rows = map(Meeting, *columns)
        return [
            row if is_known else None for row, is_known in zip(rows, known.tolist(), strict=True)
        ]

    def _begin(self, stream: ClockStream) -> int:
        """The index of the first call of a stream."""
        if self._begins is None:
            ends = np.cumsum([0, *(len(table.numbers) for table in self._tables.values())]).tolist()
            self._begins = dict(zip(self._tables, ends, strict=False))
        return self._begins[stream]
