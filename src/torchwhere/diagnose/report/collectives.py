"""The collectives section of a report: the last calls of each group, the arrivals of its ranks, and
its first mismatch. On an accelerator, a rank arrives when its device reaches the call.

Takes the calls of a job, gives `Streams`: the most important groups (that of the verdict, those of
its culprits, then by bytes, some of every kind), each with its last calls. `window` names the
clocks that compare the arrivals. Only the chosen groups are read rank by rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchwhere.blackbox.file_format import NO_STEP
from torchwhere.core.arrays import Floats, Times
from torchwhere.core.place import line_text, shown
from torchwhere.core.results import plain, plain_fields
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.calls.stream_calls import StreamCalls, signature_ids
from torchwhere.diagnose.clocks.host_clocks import HostClocks
from torchwhere.diagnose.doctor.mismatch import Mismatch, mismatches
from torchwhere.diagnose.doctor.verdict import Verdict
from torchwhere.diagnose.report.facts import DifferingCall, ShownCalls
from torchwhere.diagnose.report.stream_choice import MOST_RANKS, by_importance, title
from torchwhere.diagnose.report.texts import cut

MOST_GROUPS = 24
MOST_NUMBERS = 200
# most ranks and numbers of the first four groups, the next four, all others
_LIMITS = ((MOST_RANKS, MOST_NUMBERS), (16, MOST_NUMBERS), (16, 100))
_MOST_STEPS = 100
_MOST_COHORTS = 8
_NEVER = np.iinfo(np.int64).min
_LATEST = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class CallRow:
    """One numbered call of a group."""

    number: int
    op: str
    bytes: int
    step: int | None
    line: str | None
    module: str | None
    arrived: int  # number of ranks that have issued it, or whose devices have reached it
    of: int
    skew_ms: float | None  # between the first and the last known arrival
    first_rank: int | None
    last_rank: int | None
    differs: bool

    def to_dict(self) -> dict[str, Any]:
        return plain_fields(self)


@dataclass(frozen=True, slots=True)
class StreamRows:
    """The last calls of one group, or of the messages from one rank to another."""

    group: str
    desc: str
    members: tuple[int, ...]
    window: ShownCalls
    rows: tuple[CallRow, ...]
    ranks: tuple[int, ...]  # the rows of `late_ms`
    # for each rank and number: the time after the first arrival
    late_ms: list[list[float | None]]
    bytes_per_step: tuple[tuple[int, int], ...]
    first_difference: dict[str, Any] | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "group": cut(self.group),
            "desc": cut(self.desc),
            "size": len(self.members),
            "members": list(self.members) if len(self.members) <= MOST_RANKS else None,
            "count": len(self.members),
            "first": self.rows[0].number,
            "last": self.rows[-1].number,
            "window": str(self.window),
            "rows": plain(self.rows),
            "matrix": {"ranks": list(self.ranks), "ms": self.late_ms},
            **plain_fields(self, "bytes_per_step", "first_difference"),
        }


@dataclass(frozen=True, slots=True)
class Streams:
    """The groups that are shown, and the number of the others."""

    shown: tuple[StreamRows, ...]
    more: int


def streams(job_calls: JobCalls, verdict: Verdict, when: HostClocks) -> Streams:
    """The most important groups. `when` converts times to the clock that compares arrivals."""
    by_stream: dict[StreamKey, dict[int, StreamCalls]] = {}
    for rank, rank_calls in job_calls.by_rank.items():
        for key, calls in rank_calls.calls.items():
            by_stream.setdefault(key, {})[rank] = calls
    mismatch_of = {mismatch.key: mismatch for mismatch in mismatches(job_calls)}
    chosen = by_importance(job_calls, by_stream, verdict, mismatch_of)
    rows = []
    for at, key in enumerate(chosen[:MOST_GROUPS]):
        limits = _LIMITS[min(at // 4, 2)]
        reader = _StreamReader(
            job_calls, key, by_stream[key], verdict.culprits, when, limits=limits
        )
        rows.append(reader.rows(mismatch_of.get(key)))
    return Streams(tuple(rows), max(0, len(chosen) - len(rows)))


class _StreamReader:
    """Reads one stream, rank by rank."""

    def __init__(
        self,
        job_calls: JobCalls,
        key: StreamKey,
        of_ranks: Mapping[int, StreamCalls],
        culprits: tuple[int, ...],
        when: HostClocks,
        *,
        limits: tuple[int, int],
    ) -> None:
        self._job_calls, self._key, self._culprits, self._when = job_calls, key, culprits, when
        self._most_ranks, most_numbers = limits
        self._members = job_calls.members(key)
        # A box whose rank is not in its own group is damaged or of another run: it counts only if
        # no rank is in the group.
        self._ranks = sorted(set(of_ranks).intersection(self._members) or of_ranks)
        self._calls = [of_ranks[rank] for rank in self._ranks]
        self._end = max(calls.last for calls in self._calls) + 1
        self._first = max(min(calls.first for calls in self._calls), self._end - most_numbers)
        self._members = self._members or tuple(self._ranks)
        self._is_on_device = any(self._has_reached(calls) for calls in self._calls)
        self._times = self._column_times()
        self._is_known = self._times != _NEVER
        self._earliest = np.where(self._is_known, self._times, _LATEST)

    def _span(self, calls: StreamCalls) -> tuple[int, int]:
        """The numbers that are shown and that a rank still has, as a range."""
        low = max(calls.first, self._first)
        return low, max(low, min(calls.last + 1, self._end))

    def _has_reached(self, calls: StreamCalls) -> bool:
        """Whether the device of a rank has reached any of these calls."""
        span = self._span(calls)
        return calls.has_device_delays and bool((calls.device_delays_ns(*span) >= 0).any())

    def _column_times(self) -> Times:
        """One row a rank, one column a number; `_NEVER` for calls that the ring has lost, and for
        calls that the device has not reached."""
        times = np.full((len(self._calls), self._end - self._first), _NEVER, np.int64)
        for rank, row, calls in zip(self._ranks, times, self._calls, strict=True):
            low, high = self._span(calls)
            arrived = self._when.aligned_ns(rank, calls.times_ns(low, high))
            if self._is_on_device:
                delays = calls.device_delays_ns(low, high)
                arrived = np.where(delays >= 0, arrived + delays, _NEVER)
            row[low - self._first : high - self._first] = arrived
        return times

    def rows(self, mismatch: Mismatch | None) -> StreamRows:
        ranks = self._shown_ranks()
        return StreamRows(
            group=title(self._job_calls, self._key),
            desc=self._job_calls.group(self._key).description,
            members=self._members,
            window=self._window(),
            rows=self._rows(mismatch),
            ranks=tuple(self._ranks[row] for row in ranks),
            late_ms=self._late_ms(ranks),
            bytes_per_step=self._bytes_per_step(),
            first_difference=None if mismatch is None else self._difference(mismatch),
        )

    def _window(self) -> ShownCalls:
        issued = max(self._job_calls.by_rank[rank].counts.get(self._key, 0) for rank in self._ranks)
        clocks = self._when.description(self._ranks)
        return ShownCalls(self._first, self._end - 1, issued, clocks, self._is_on_device)

    def _rows(self, mismatch: Mismatch | None) -> tuple[CallRow, ...]:
        first = self._earliest.argmin(axis=0).tolist()
        last = self._times.argmax(axis=0).tolist()
        counts = self._is_known.sum(axis=0).tolist()
        skew_ms = _milliseconds(self._times.max(axis=0) - self._earliest.min(axis=0)).tolist()
        arrived, differs = self._arrived(), self._differs(mismatch)
        rows = []
        for column, number in enumerate(range(self._first, self._end)):
            has_time = counts[column] > 0
            rows.append(
                self._row(
                    number,
                    first[column],
                    arrived=arrived[column],
                    skew_ms=skew_ms[column] if counts[column] > 1 else None,
                    first_rank=self._ranks[first[column]] if has_time else None,
                    last_rank=self._ranks[last[column]] if has_time else None,
                    differs=differs[column],
                )
            )
        return tuple(rows)

    def _row(self, number: int, first: int, **arrivals: Any) -> CallRow:
        """The row of a call, with the fields of its first arrival; `first` is an index of ranks."""
        calls = self._calls[first]
        if calls.at(number) is None:
            return CallRow(number, "?", 0, None, None, None, of=len(self._members), **arrivals)
        signature, site = calls.of(number)
        module, _, line, _ = site.site_id
        step = int(calls.steps(number, number + 1)[0])
        return CallRow(
            number=number,
            op=cut(signature.op),
            bytes=signature.bytes,
            step=None if step == NO_STEP else step,
            line=cut(line_text(line)) if line is not None else None,
            module=cut(shown(module)) if module is not None else None,
            of=len(self._members),
            **arrivals,
        )

    def _arrived(self) -> list[int]:
        """The number of ranks that have arrived at each call, from counters that outlive the
        ring."""
        counts = [self._job_calls.by_rank[rank].counts.get(self._key, 0) for rank in self._ranks]
        below = np.sort(np.array(counts, np.int64))
        numbers = np.arange(self._first, self._end)
        arrived = len(counts) - np.searchsorted(below, numbers, side="right")
        if self._is_on_device:
            for row, calls in zip(self._times, self._calls, strict=True):
                low, high = (number - self._first for number in self._span(calls))
                arrived[low:high] -= row[low:high] == _NEVER  # issued, and not reached
        counted: list[int] = arrived.tolist()
        return counted

    def _differs(self, mismatch: Mismatch | None) -> list[bool]:
        """For each number whether the ranks issued different calls, or the first mismatch is
        there."""
        differs = np.zeros(self._end - self._first, np.bool_)
        usual = np.full(len(differs), -1, np.int64)
        if any(
            calls.signature_id < 0 or calls.signature_id != self._calls[0].signature_id
            for calls in self._calls
        ):
            for row, calls in zip(self._is_known, self._calls, strict=True):
                low, high = self._span(calls)
                if row.any():
                    own = signature_ids(calls.packed_ids(low, high))
                    here = usual[low - self._first : high - self._first]
                    differs[low - self._first : high - self._first] |= (here >= 0) & (here != own)
                    here[here < 0] = own[here < 0]
        if mismatch is not None and self._first <= mismatch.number < self._end:
            differs[mismatch.number - self._first] = True
        return [bool(value) for value in differs]

    # -- rank by rank ------------------------------------------------------------------------------

    def _shown_ranks(self) -> list[int]:
        """Rows of the ranks whose times are shown: all, or of many ranks the culprits and the
        earliest and latest on average."""
        if len(self._ranks) <= self._most_ranks:
            return list(range(len(self._ranks)))
        culprit_set = set(self._culprits)
        culprits = [row for row, rank in enumerate(self._ranks) if rank in culprit_set]
        late = np.where(self._is_known, self._times - self._usual(), 0).mean(axis=1)
        order = np.argsort(late, kind="stable").tolist()
        extremes = [row for pair in zip(reversed(order), order, strict=True) for row in pair]
        shown = dict.fromkeys([*culprits[: self._most_ranks // 2], *extremes])
        return sorted(list(shown)[: self._most_ranks])

    def _usual(self) -> Times:
        """The median arrival at each number."""
        order = np.sort(self._earliest, axis=0)
        middle = np.maximum(self._is_known.sum(axis=0) - 1, 0) // 2
        median: Times = order[middle, np.arange(order.shape[1])]
        return median

    def _late_ms(self, rows: list[int]) -> list[list[float | None]]:
        late_ms = _milliseconds(self._times[rows] - self._earliest.min(axis=0)).astype(object)
        late_ms[~self._is_known[rows]] = None
        shown_ms: list[list[float | None]] = late_ms.tolist()
        return shown_ms

    def _bytes_per_step(self) -> tuple[tuple[int, int], ...]:
        """The bytes of each step on the rank whose ring goes back furthest."""
        calls = max(self._calls, key=len)
        steps = calls.steps()
        sizes: dict[int, int] = {}
        _, first, code_of = np.unique(calls.codes(), return_index=True, return_inverse=True)
        size = np.array([calls.of(calls.first + at)[0].bytes for at in first.tolist()], np.int64)
        for step, nbytes in zip(steps.tolist(), size[code_of].tolist(), strict=True):
            if step != NO_STEP:
                sizes[step] = sizes.get(step, 0) + nbytes
        return tuple(sorted(sizes.items())[-_MOST_STEPS:])

    def _difference(self, mismatch: Mismatch) -> dict[str, Any]:
        cohorts = []
        for cohort in mismatch.cohorts[:_MOST_COHORTS]:
            call = self._job_calls.by_rank[cohort[0]].issued(mismatch.key, mismatch.number)
            shown_ranks = list(cohort[:MOST_RANKS])
            what = cut(DifferingCall(call))
            cohorts.append({"ranks": shown_ranks, "count": len(cohort), "what": what})
        return {"number": mismatch.number, "in": mismatch.aspect, "cohorts": cohorts}


def _milliseconds(ns: Times) -> Floats:
    """Rounded in one way: equal times stay equal."""
    return (ns / 1e6).round(3)
