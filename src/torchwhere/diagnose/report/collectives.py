"""The collectives of a report: per group the last numbers, who arrived when, and where ranks first
issued something different.

Takes a hearing, gives `Streams`: the groups that matter most (the verdict's, its culprits', then by
bytes, of every kind of group some), each with its last numbers. By which clocks arrivals are
compared is said in `window`. Only the chosen groups are looked at rank by rank.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from torchwhere.blackbox.file_format import NO_STEP
from torchwhere.core.place import shown
from torchwhere.diagnose.calls.job_calls import StreamCalls, signature_ids
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.calls.rank_calls import JobCalls
from torchwhere.diagnose.clocks.host_clocks import Moments
from torchwhere.diagnose.doctor.mismatch import Mismatch, mismatches
from torchwhere.diagnose.doctor.verdict import Verdict
from torchwhere.diagnose.doctor.wait_text import call_text
from torchwhere.diagnose.doctor.waits import members
from torchwhere.diagnose.report.texts import cut, milliseconds

MOST_GROUPS = 24
MOST_NUMBERS = 200
MOST_RANKS = 64  # of a group, with their times
# of the first four groups, the next four, all others
_ROOMS = ((MOST_RANKS, MOST_NUMBERS), (16, MOST_NUMBERS), (16, 100))
_MOST_STEPS = 100
_MOST_COHORTS = 8
_NEVER = np.iinfo(np.int64).min

Times = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Number:
    """One collective of a group, as its ranks issued it."""

    number: int
    op: str
    bytes: int
    step: int | None
    line: str | None
    module: str | None
    arrived: int  # ranks that have issued it
    of: int
    skew_ms: float | None  # between the first and the last of those whose time is known
    first_rank: int | None
    last_rank: int | None
    differs: bool

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class StreamRows:
    """One group, or the messages from one rank to another: its last numbers."""

    group: str
    desc: str
    members: tuple[int, ...]
    window: str
    rows: tuple[Number, ...]
    ranks: tuple[int, ...]  # whose lateness is in `late_ms`
    # of each rank, at each number: after the first to arrive
    late_ms: tuple[tuple[float | None, ...], ...]
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
            "window": self.window,
            "rows": [row.to_dict() for row in self.rows],
            "matrix": {"ranks": list(self.ranks), "ms": [list(row) for row in self.late_ms]},
            "bytes_per_step": [list(pair) for pair in self.bytes_per_step],
            "first_difference": self.first_difference,
        }


@dataclass(frozen=True, slots=True)
class Streams:
    """The groups that are shown, and how many are not."""

    shown: tuple[StreamRows, ...]
    more: int


def streams(job_calls: JobCalls, verdict: Verdict, when: Moments) -> Streams:
    """The groups that matter most; `when` is the clock that arrivals are compared by."""
    said: dict[StreamKey, dict[int, StreamCalls]] = {}
    for rank, rank_calls in job_calls.by_rank.items():
        for key, calls in rank_calls.calls.items():
            said.setdefault(key, {})[rank] = calls
    parted = {found.key: found for found in mismatches(job_calls)}
    chosen = _chosen(job_calls, said, verdict, parted)
    found = []
    for at, key in enumerate(chosen[:MOST_GROUPS]):
        reading = _Reading(
            job_calls,
            key,
            said[key],
            verdict.culprits,
            when,
            room=_ROOMS[0 if at < 4 else 1 if at < 8 else 2],
        )
        found.append(reading.stream(parted.get(key)))
    return Streams(tuple(found), max(0, len(chosen) - len(found)))


# -- which ones ------------------------------------------------------------------------------------


def _chosen(
    job_calls: JobCalls,
    said: Mapping[StreamKey, Mapping[int, StreamCalls]],
    verdict: Verdict,
    parted: Container[StreamKey],
) -> list[StreamKey]:
    """All streams, what matters most first: the verdict's, those in which ranks differ, its
    culprits'; then by bytes, taking turns between kinds of groups: a thousand groups of one
    dimension tell no more than a few of them."""
    culprits, of_verdict = set(verdict.culprits[:MOST_RANKS]), _of_verdict(job_calls, said, verdict)
    weights = {key: _bytes(calls) for key, calls in said.items()}
    turns: dict[tuple[str, bool], int] = {}
    ranking: list[tuple[Any, ...]] = []
    # What a stream is, and not its number, decides between those that move as much: numbers depend
    # on who read what.
    place = {
        key: (_title(job_calls, key), job_calls.group(key).ranks, job_calls.group(key).name)
        for key in said
    }
    for key in sorted(said, key=lambda key: (-weights[key], place[key])):
        kind = job_calls.group(key).title, _is_message(key)
        turns[kind] = turns.get(kind, -1) + 1
        is_alone = len(said[key]) < 2  # nobody to compare with
        is_culprits = not culprits.isdisjoint(said[key]) and not is_alone
        ranking.append(
            (
                key != of_verdict,
                key not in parted,
                not is_culprits,
                is_alone,
                turns[kind],
                -weights[key],
                place[key],
                key,
            )
        )
    return [order[-1] for order in sorted(ranking)]


def _of_verdict(
    job_calls: JobCalls, said: Mapping[StreamKey, Mapping[int, StreamCalls]], verdict: Verdict
) -> StreamKey | None:
    """The stream that the verdict speaks of: by the group's name and ranks, and what was issued
    there last."""
    call, culprits = verdict.collective or {}, set(verdict.culprits)
    for key, calls in said.items():
        group = job_calls.group(key)
        is_named = group.title == call.get("group") and call.get("group_ranks") in (
            list(group.ranks),
            len(group.ranks),
        )
        is_named = is_named and (
            len(group.ranks) <= MOST_RANKS or not culprits or not culprits.isdisjoint(group.ranks)
        )
        is_p2p = call.get("op") in ("send", "recv")
        is_ours = call.get("peer") in (key.source, key.destination) and _has_last(
            calls, call.get("number")
        )
        if is_named and is_p2p == _is_message(key) and (is_ours or not is_p2p):
            return key
    return None


def _is_message(key: StreamKey) -> bool:
    return key.source >= 0 or key.destination >= 0


def _title(job_calls: JobCalls, key: StreamKey) -> str:
    """What people call it: `tp`, `pp 3 to 11`."""
    title = job_calls.group(key).title
    ends = [str(rank) if rank >= 0 else "any" for rank in (key.source, key.destination)]
    return f"{title} {' to '.join(ends)}" if _is_message(key) else title


def _has_last(calls: Mapping[int, StreamCalls], number: object) -> bool:
    return any(each.last == number for each in calls.values())


def _bytes(said: Mapping[int, StreamCalls]) -> int:
    """About how much a group moves: as much for each call as for the last one."""
    calls = next(iter(said.values()))
    return calls.of(calls.last)[0].bytes * len(calls)


# -- one of them -----------------------------------------------------------------------------------


class _Reading:
    """Looks at one group, rank by rank."""

    def __init__(
        self,
        job_calls: JobCalls,
        key: StreamKey,
        said: Mapping[int, StreamCalls],
        culprits: tuple[int, ...],
        when: Moments,
        *,
        room: tuple[int, int],
    ) -> None:
        self._job_calls, self._key, self._culprits, self._when = job_calls, key, culprits, when
        self._room, most = room
        self._members = members(job_calls, key)
        # A rank that is not in its own group is damaged, or of another run: only where nobody is,
        # all of them count.
        self._ranks = sorted(set(said).intersection(self._members) or said)
        self._said = [said[rank] for rank in self._ranks]
        self._end = max(calls.last for calls in self._said) + 1
        self._first = max(min(calls.first for calls in self._said), self._end - most)
        self._members = self._members or tuple(self._ranks)
        self._times = self._column_times()

    def _column_times(self) -> Times:
        """One row a rank, one column a number; `_NEVER` where the ring does not have it."""
        found = np.full((len(self._said), self._end - self._first), _NEVER, np.int64)
        for rank, row, calls in zip(self._ranks, found, self._said, strict=True):
            low, high = max(calls.first, self._first), min(calls.last + 1, self._end)
            if low < high:
                row[low - self._first : high - self._first] = self._when.of(
                    rank, calls.times_ns(low, high)
                )
        return found

    def stream(self, parted: Mismatch | None) -> StreamRows:
        ranks = self._shown_ranks()
        return StreamRows(
            group=_title(self._job_calls, self._key),
            desc=self._job_calls.group(self._key).desc,
            members=self._members,
            window=self._window(),
            rows=self._rows(parted),
            ranks=tuple(self._ranks[row] for row in ranks),
            late_ms=self._late_ms(ranks),
            bytes_per_step=self._bytes_per_step(),
            first_difference=self._difference(parted) if parted is not None else None,
        )

    def _window(self) -> str:
        issued = max(self._job_calls.by_rank[rank].counts.get(self._key, 0) for rank in self._ranks)
        said = f"numbers {self._first} to {self._end - 1}" + (
            f", the last of {issued}" if self._first else ""
        )
        return f"{said}; arrival by {self._when.said(self._ranks)}"

    def _rows(self, parted: Mismatch | None) -> tuple[Number, ...]:
        is_known = self._times != _NEVER
        latest = np.where(is_known, self._times, _NEVER)
        earliest = np.where(is_known, self._times, np.iinfo(np.int64).max)
        first, last = earliest.argmin(axis=0).tolist(), latest.argmax(axis=0).tolist()
        known = is_known.sum(axis=0).tolist()
        skew = (latest.max(axis=0) - earliest.min(axis=0)).tolist()
        arrived, differs = self._arrived(), self._differs(is_known, parted)
        rows = []
        for column, number in enumerate(range(self._first, self._end)):
            has_time = known[column] > 0
            rows.append(
                self._row(
                    number,
                    first[column],
                    arrived=arrived[column],
                    skew_ms=milliseconds(skew[column]) if known[column] > 1 else None,
                    first_rank=self._ranks[first[column]] if has_time else None,
                    last_rank=self._ranks[last[column]] if has_time else None,
                    differs=differs[column],
                )
            )
        return tuple(rows)

    def _row(self, number: int, stall_snapshot: int, **about: Any) -> Number:
        calls = self._said[stall_snapshot]
        if calls.at(number) is None:
            return Number(number, "?", 0, None, None, None, of=len(self._members), **about)
        signature, spot = calls.of(number)
        module, _, line, _ = spot.site_id
        step = int(calls.steps(number, number + 1)[0])
        return Number(
            number=number,
            op=cut(signature.op),
            bytes=signature.bytes,
            step=None if step == NO_STEP else step,
            line=cut(line) if line is not None else None,
            module=cut(shown(module)) if module is not None else None,
            of=len(self._members),
            **about,
        )

    def _arrived(self) -> list[int]:
        """How many ranks have issued each number: by their counts, which outlive the ring."""
        counts = [self._job_calls.by_rank[rank].counts.get(self._key, 0) for rank in self._ranks]
        below = np.sort(np.array(counts, np.int64))
        numbers = np.arange(self._first, self._end)
        arrived: list[int] = (len(counts) - np.searchsorted(below, numbers, side="right")).tolist()
        return arrived

    def _differs(self, is_known: npt.NDArray[np.bool_], parted: Mismatch | None) -> list[bool]:
        """Where ranks issued what does not fit together; and where the first difference of all
        is."""
        found = np.zeros(self._end - self._first, np.bool_)
        usual = np.full(len(found), -1, np.int64)
        if any(
            calls.signature_id < 0 or calls.signature_id != self._said[0].signature_id
            for calls in self._said
        ):
            for known, calls in zip(is_known, self._said, strict=True):
                if known.any():
                    low, high = max(calls.first, self._first), min(calls.last + 1, self._end)
                    own = signature_ids(calls.packed_ids(low, high))
                    here = usual[low - self._first : high - self._first]
                    found[low - self._first : high - self._first] |= (here >= 0) & (here != own)
                    here[here < 0] = own[here < 0]
        if parted is not None and self._first <= parted.number < self._end:
            found[parted.number - self._first] = True
        differs: list[bool] = found.tolist()
        return differs

    # -- rank by rank ------------------------------------------------------------------------------

    def _shown_ranks(self) -> list[int]:
        """Rows of the ranks whose times are shown: all of a few; of many the culprits and those
        most often first or last."""
        if len(self._ranks) <= self._room:
            return list(range(len(self._ranks)))
        culprits = [row for row, rank in enumerate(self._ranks) if rank in set(self._culprits)][
            : self._room // 2
        ]
        is_known = self._times != _NEVER
        middle = self._usual(is_known)
        late = np.where(is_known, self._times - middle, 0).mean(axis=1)
        order = np.argsort(late, kind="stable").tolist()
        extremes = [row for pair in zip(reversed(order), order, strict=True) for row in pair]
        return sorted(list(dict.fromkeys([*culprits, *extremes]))[: self._room])

    def _usual(self, is_known: npt.NDArray[np.bool_]) -> Times:
        """When a number was issued, by the middle of those who did."""
        order = np.sort(np.where(is_known, self._times, np.iinfo(np.int64).max), axis=0)
        middle = np.maximum(is_known.sum(axis=0) - 1, 0) // 2
        found: Times = order[middle, np.arange(order.shape[1])]
        return found

    def _late_ms(self, rows: list[int]) -> tuple[tuple[float | None, ...], ...]:
        is_known = self._times != _NEVER
        first = np.where(is_known, self._times, np.iinfo(np.int64).max).min(axis=0)
        late = (np.where(is_known[rows], self._times[rows] - first, 0) / 1e6).round(3).tolist()
        known = is_known[rows].tolist()
        return tuple(
            tuple(value if is_there else None for value, is_there in zip(*pair, strict=True))
            for pair in zip(late, known, strict=True)
        )

    def _bytes_per_step(self) -> tuple[tuple[int, int], ...]:
        """What the rank whose ring goes back furthest moved in each step."""
        calls = max(self._said, key=len)
        steps = calls.steps()
        sizes: dict[int, int] = {}
        _, first, which = np.unique(calls.codes(), return_index=True, return_inverse=True)
        size = np.array([calls.of(calls.first + at)[0].bytes for at in first.tolist()], np.int64)[
            which
        ]
        for step, nbytes in zip(steps.tolist(), size.tolist(), strict=True):
            if step != NO_STEP:
                sizes[step] = sizes.get(step, 0) + nbytes
        return tuple(sorted(sizes.items())[-_MOST_STEPS:])

    def _difference(self, parted: Mismatch) -> dict[str, Any]:
        cohorts = []
        for cohort in parted.cohorts[:_MOST_COHORTS]:
            call = self._job_calls.by_rank[cohort[0]].issued(parted.key, parted.number)
            what = (
                cut(call_text(call)) if call is not None else "not known: its ring no longer has it"
            )
            cohorts.append({"ranks": list(cohort[:MOST_RANKS]), "count": len(cohort), "what": what})
        return {"number": parted.number, "in": parted.what, "cohorts": cohorts}
