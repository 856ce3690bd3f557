"""Who came to which call and went on when: all clocks of a circle in one table, by call.

Takes the series of clocks and the lines that are known so far. Times in the table are by these
lines, from a moment in the middle on, so that floating-point numbers hold them to a nanosecond:
that is the frame.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from torchwhere.diagnose.clocks.arrivals import NEVER, ClockStream
from torchwhere.diagnose.clocks.line_bounds import Floats
from torchwhere.diagnose.clocks.pairwise import Line, Series

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Rows:
    """In order of calls; each has at least two rows, one a clock."""

    zero_ns: int
    clock: Ints
    call: Ints
    came: Floats
    bound: Floats  # the same where others wait for it; minus infinity for who receives
    left: Floats  # infinite where that says nothing
    site: Ints
    stream: Ints
    is_sure: Bools  # the call waits, whatever times say

    def __len__(self) -> int:
        return len(self.call)

    def of_calls(self) -> Rows:
        """Those of collectives."""
        return self.without(np.unique(self.stream[np.isneginf(self.bound)]))

    def without(self, streams: Ints) -> Rows:
        return self.at(~np.isin(self.stream, streams)) if len(streams) else self

    def at(self, chosen: Ints | Bools) -> Rows:
        return Rows(self.zero_ns, *(getattr(self, name)[chosen] for name in _COLUMNS))


_COLUMNS: dict[str, Any] = {
    "clock": np.int64,
    "call": np.int64,
    "came": np.float64,
    "bound": np.float64,
    "left": np.float64,
}
_COLUMNS |= {"site": np.int64, "stream": np.int64, "is_sure": np.bool_}


@dataclass(frozen=True, slots=True)
class Correction:
    """What a clock is still ahead, in the frame: at its zero, and how much more a nanosecond
    later."""

    offset: float = 0.0
    slope: float = 0.0

    def at(self, times: Floats) -> Floats:
        found: Floats = self.offset + self.slope * times
        return found

    def line(self, zero_ns: int) -> Line:
        return Line(self.offset, self.slope, zero_ns)


def rows_of(series: Mapping[int, Series], lines: Mapping[int, Line]) -> Rows:
    """All calls in which at least two of the clocks took part."""
    meeting: defaultdict[ClockStream, list[int]] = defaultdict(list)
    for index, each in series.items():
        for stream in each.streams:
            meeting[stream].append(index)
    zero_ns = _zero_ns(series, lines)
    parts: list[tuple[npt.NDArray[Any], ...]] = []
    calls = 0
    for number, (stream, clocks) in enumerate(meeting.items()):
        if len(clocks) > 1:
            numbers = np.unique(
                np.concatenate([series[index].streams[stream].numbers for index in clocks])
            )
            is_sure = not any(stream in series[index].unsure for index in clocks)
            for index in clocks:
                *own, site = _of_one(series[index], stream, lines[index], zero_ns)
                call = np.searchsorted(numbers, series[index].streams[stream].numbers) + calls
                parts.append(
                    (_all(index, call), call, *own, site, _all(number, call), _all(is_sure, call))
                )
            calls += len(numbers)
    columns = (
        [np.concatenate(each) for each in zip(*parts, strict=True)]
        if parts
        else [np.empty(0)] * len(_COLUMNS)
    )
    found = Rows(
        zero_ns,
        *(column.astype(kind) for column, kind in zip(columns, _COLUMNS.values(), strict=True)),
    )
    at = np.flatnonzero(np.bincount(found.call, minlength=1)[found.call] > 1)
    return found.at(at[np.argsort(found.call[at], kind="stable")])


def _of_one(
    series: Series, stream: ClockStream, line: Line, zero_ns: int
) -> Iterator[npt.NDArray[Any]]:
    """When it came, when that bounds others, when it left, and from where."""
    calls = series.streams[stream]
    came = _framed(calls.issued_ns, line, zero_ns)
    leaves = calls.waits & (calls.next_ns != NEVER)
    receives = stream.is_message and stream.source not in series.ranks
    yield came
    yield np.full_like(came, -np.inf) if receives else came
    yield np.where(
        leaves, _framed(np.where(leaves, calls.next_ns, calls.issued_ns), line, zero_ns), np.inf
    )
    yield calls.sites


def _all(value: int, like: Ints) -> Ints:
    return np.full(len(like), value)


def _framed(times: Ints, line: Line, zero_ns: int) -> Floats:
    found: Floats = (times - zero_ns).astype(np.float64) - line.at(times)
    return found


def _zero_ns(series: Mapping[int, Series], lines: Mapping[int, Line]) -> int:
    for index, each in series.items():
        for calls in each.streams.values():
            if len(calls):
                middle = int(calls.issued_ns[len(calls) // 2])
                return middle - round(lines[index].at(middle))
    return 0
