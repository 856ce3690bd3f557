"""The calls of all ranks that share one clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchwhere.core.grouping import grouped
from torchwhere.diagnose.clocks.arrivals import Arrivals, CallTimes


class ClockCalls:
    """The calls of all ranks that share a clock, in its own wall-clock time.

    For each call it has the last arrival of these ranks and the first moment at which one of them
    went on. With `only`, it has the calls of that one of the ranks.
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
