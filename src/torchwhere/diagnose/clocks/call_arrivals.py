"""Which rank arrived at a call first, and which one last, over all ranks, by aligned clocks.

Ranks are added one after another. For each call two times, two ranks and a count are kept, and for
each rank the number of its last call in each stream: memory does not grow with ranks times calls.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from torchwhere.core.arrays import Times
from torchwhere.diagnose.clocks.arrivals import NEVER, Arrivals, ClockStream
from torchwhere.diagnose.clocks.clocks import Clocks
from torchwhere.diagnose.clocks.host_clocks import HostClocks


class CallArrivals(NamedTuple):
    """The arrivals of all ranks at one call."""

    call: int  # index among all calls of the job
    first_ns: int
    first_rank: int
    last_ns: int
    last_rank: int
    arrived: int  # how many ranks
    # until when the first rank did nothing else; its own arrival if it did not wait
    held_ns: int


@dataclass(slots=True)
class _StreamArrivals:
    """The calls of one stream, ordered by number."""

    numbers: Times
    first_ns: Times
    first_rank: Times
    last_ns: Times
    last_rank: Times
    arrived: Times
    held_ns: Times

    def add(self, numbers: Times, times: Times, held: Times, rank: int) -> None:
        if not np.array_equal(numbers, self.numbers):
            self._insert(np.union1d(self.numbers, numbers))
        at = np.searchsorted(self.numbers, numbers)
        # Ranks are added in order: of two that arrived at the same time, the lower one is first.
        is_first = (self.arrived[at] == 0) | (times < self.first_ns[at])
        is_last = (self.arrived[at] == 0) | (times >= self.last_ns[at])
        self.first_ns[at[is_first]], self.first_rank[at[is_first]] = times[is_first], rank
        self.held_ns[at[is_first]] = held[is_first]
        self.last_ns[at[is_last]], self.last_rank[at[is_last]] = times[is_last], rank
        self.arrived[at] += 1

    def _insert(self, numbers: Times) -> None:
        at = np.searchsorted(numbers, self.numbers)
        for column in fields(self)[1:]:
            wider = np.zeros(len(numbers), np.int64)
            wider[at] = getattr(self, column.name)
            setattr(self, column.name, wider)
        self.numbers = numbers


class JobArrivals:
    """The arrivals of all ranks at all calls of a job."""

    def __init__(self, clocks: Clocks | HostClocks) -> None:
        self._clocks = clocks
        self._streams: dict[ClockStream, _StreamArrivals] = {}
        self._begins: dict[ClockStream, int] | None = None
        self._newest: dict[ClockStream, dict[int, int]] = {}  # the last call of each rank
        self._ranks: set[int] = set()

    def add(self, arrivals: Arrivals, *, window: tuple[int, int] | None = None) -> None:
        """Adds one rank, or its calls within a window of aligned times. Ranks come in order."""
        self._ranks.add(arrivals.rank)
        for stream, calls in arrivals.streams.items():
            numbers = calls.numbers
            if len(numbers):
                self._newest.setdefault(stream, {})[arrivals.rank] = int(numbers.max())
            times = self._clocks.aligned_ns(arrivals.rank, calls.issued_ns)
            next_ns = times + (calls.next_ns - calls.issued_ns)
            held = np.where(calls.next_ns == NEVER, NEVER, next_ns)
            held = np.where(calls.waits, held, times)
            if window is not None:
                inside = (times >= window[0]) & (times < window[1])
                numbers, times, held = numbers[inside], times[inside], held[inside]
            if stream not in self._streams:
                empty = (np.empty(0, np.int64) for _ in fields(_StreamArrivals))
                self._streams[stream] = _StreamArrivals(*empty)
            self._streams[stream].add(numbers, times, held, arrivals.rank)
        self._begins = None

    def of(self, stream: ClockStream, numbers: Times) -> list[CallArrivals | None]:
        """Returns the arrivals at some calls; None for a call that no rank has."""
        table = self._streams.get(stream)
        if table is None or not len(table.numbers):
            return [None] * len(numbers)
        at = np.minimum(np.searchsorted(table.numbers, numbers), len(table.numbers) - 1)
        is_known = (table.numbers[at] == numbers).tolist()
        columns = [
            (at + self._begin(stream)).tolist(),
            *(getattr(table, column.name)[at].tolist() for column in fields(table)[1:]),
        ]
        rows = map(CallArrivals, *columns)
        return [row if known else None for row, known in zip(rows, is_known, strict=True)]

    def last(self, stream: ClockStream, numbers: Times) -> tuple[Times, Times]:
        """Returns time and rank of the last arrival at some calls; -1 if not all ranks arrived."""
        last = [
            (call.last_ns, call.last_rank)
            if call is not None and 0 < stream.size <= call.arrived
            else (-1, -1)
            for call in self.of(stream, numbers)
        ]
        last_ns, last_rank = np.array(last, np.int64).reshape(-1, 2).T
        return last_ns, last_rank

    def absent(self, stream: ClockStream, number: int) -> list[int]:
        """Returns the members that have not arrived at a call. Ranks that were not added are
        unknown and left out."""
        ends = (stream.source, stream.destination)
        members = ends if stream.is_message else stream.members
        newest = self._newest.get(stream, {})
        return [rank for rank in members if rank in self._ranks and newest.get(rank, -1) < number]

    def _begin(self, stream: ClockStream) -> int:
        """Returns the index of the first call of a stream."""
        if self._begins is None:
            sizes = [len(table.numbers) for table in self._streams.values()]
            begins = np.cumsum([0, *sizes]).tolist()
            self._begins = dict(zip(self._streams, begins, strict=False))
        return self._begins[stream]
