"""When one rank came to its collectives, and when it went on after them.

Takes a box, gives `Arrivals`: for every stream the numbers of the calls, when each was issued, when
the next thing was recorded on the same thread, and from where to where the program went between the
two. That is all that ranks are compared by: by whom a call was reached last, and whose clock is
off. Times are wall-clock times of the rank's host, as arrays.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import FLAG_ASYNC
from torchwhere.core.events import Kind
from torchwhere.diagnose.calls.keys import P2P

Times = npt.NDArray[np.int64]

NEVER = np.iinfo(np.int64).max  # nothing came after
_MOST_NS = 1 << 61  # 73 years: sums of two such times fit into a word
_MONTH_NS = 30 * 86_400 * 10**9
_MET = ("all_", "reduce_scatter", "barrier", "monitored_barrier", "recv")
# whose calls end on the host; others may only go into the queue of a device
_HOST_BACKENDS = frozenset({"gloo", "mpi"})
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_PLACE = ("subject", "module", "line", "pass")


class ClockStream(NamedTuple):
    """What is counted in one sequence: the collectives of a group, or the messages from one rank to
    another (else -1)."""

    group: str
    members: tuple[int, ...]  # two groups of one name are not the same
    source: int = -1
    destination: int = -1

    @property
    def is_message(self) -> bool:
        return self.source >= 0 or self.destination >= 0

    @property
    def size(self) -> int:
        """How many ranks take part; 0 if that is not known."""
        return 2 if self.is_message else len(self.members)


@dataclass(frozen=True, slots=True)
class CallTimes:
    """The calls of one rank in one stream, by number."""

    numbers: Times
    issued_ns: Times
    next_ns: Times  # when the same thread did the next thing; `NEVER`
    # it returns when all ranks have come (a recv: when its send has), as far as calls tell
    waits: npt.NDArray[np.bool_]
    at: Times  # index among the records of the box
    # equal where the program went the same way from the call to the next record, on any rank
    sites: Times

    def __len__(self) -> int:
        return len(self.numbers)

    def thinned(self, most: int) -> CallTimes:
        """At most about so many, strewn: every second number would be that of the same line, where
        a step has two calls. Different ranks keep the same ones."""
        if len(self) <= most:
            return self
        halvings = int(np.ceil(np.log2(len(self) / most)))
        strewn = self.numbers.astype(np.uint64) * _GOLDEN
        chosen = strewn >> np.uint64(64 - halvings) == 0
        return CallTimes(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Of one rank."""

    rank: int
    host: str
    offset_ns: int  # from the clock of its host to wall-clock time
    streams: dict[ClockStream, CallTimes] = field(default_factory=dict)
    step_ns: float | None = None  # how long a step takes, the median
    # whose calls may return before all have come, for all that is known
    unsure: frozenset[ClockStream] = frozenset()


def wall_offset_ns(box: Box) -> int:
    """What to add to the times in a box, kept within what an array can hold."""
    return max(-_MOST_NS, min(_MOST_NS, box.wall_ns(0)))


def times_ns(box: Box) -> Times:
    """Wall clock of every record."""
    found: Times = np.minimum(box.records["t_ns"], np.uint64(_MOST_NS)).astype(np.int64) + np.int64(
        wall_offset_ns(box)
    )
    return found


def next_times_ns(box: Box, times: Times) -> Times:
    """For every record, when its thread did the next thing that is known: its next record, or where
    its cursor has moved to."""
    found = np.full(len(times), NEVER, np.int64)
    threads = box.records["thread"]
    moved = {cursor.place.thread: cursor.t_ns for cursor in box.cursors()}
    for number in np.unique(threads).tolist():
        at = np.flatnonzero(threads == number)
        found[at[:-1]] = times[at[1:]]
        cursor_ns = moved.get(box.thread(number))
        if cursor_ns is not None and has_moved(cursor_ns, int(times[at[-1]])):
            found[at[-1]] = cursor_ns
    return np.maximum(found, times)


def has_moved(cursor_ns: int, last_ns: int) -> bool:
    """Whether a cursor says more than the last record. Nothing seals cursors: one that is far off
    is damaged."""
    return last_ns < cursor_ns < min(last_ns + _MONTH_NS, _MOST_NS)


def arrivals(box: Box) -> Arrivals:
    """The collectives of a box, by stream."""
    records, times = box.records, times_ns(box)
    later = next_times_ns(box, times)
    at = np.flatnonzero(records["kind"] == Kind.COLLECTIVE)
    at = at[records["extra"][at] < np.uint64(_MOST_NS)]
    packed_ids, sites = records["subject"][at], _sites(box, at)
    by_stream: dict[ClockStream, list[int]] = {}
    members: dict[str, tuple[int, ...]] = {}
    for what in np.unique(packed_ids).tolist():
        stream = _stream_of(box, box.value(what), members)
        if stream is not None:
            by_stream.setdefault(stream, []).append(what)
    found = {}
    for stream, ids in by_stream.items():
        own = np.flatnonzero(np.isin(packed_ids, ids))
        numbers, first = np.unique(records["extra"][at[own]].astype(np.int64), return_index=True)
        own = own[first]
        here = at[own]
        waits = np.isin(
            records["subject"][here], [what for what in ids if _is_met(box.value(what))]
        )
        waits &= records["flags"][here] & FLAG_ASYNC == 0
        found[stream] = CallTimes(numbers, times[here], later[here], waits, here, sites[own])
    unsure = frozenset(stream for stream in found if not _ends_on_host(box, stream.group))
    return Arrivals(
        box.rank,
        str(box.meta.get("host", "")),
        wall_offset_ns(box),
        found,
        _step_ns(box, times),
        unsure,
    )


def _sites(box: Box, at: Times) -> Times:
    """From where each call was issued, and what its thread recorded next. Other ranks give the same
    places the same codes."""
    records = box.records
    follows = _following(records["thread"])[at]
    keys = np.where(follows < 0, 0, records["kind"][follows]).astype(np.uint64)
    for name in _PLACE:
        keys = (keys + records[name][at]) * _GOLDEN
        keys ^= keys >> np.uint64(32)
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    codes = [_site(box, int(at[index]), int(follows[index])) for index in first.tolist()]
    found: Times = np.array(codes, np.int64)[which.reshape(-1)]
    return found


def _site(box: Box, at: int, follows: int) -> int:
    row = box.records[at]
    signature = box.value(int(row["subject"]))
    op = signature.get("op") if isinstance(signature, dict) else None
    kind = int(box.records["kind"][follows]) if follows >= 0 else 0
    words = (op, box.name(int(row["module"])), box.name(int(row["line"])), int(row["pass"]), kind)
    return zlib.crc32(repr(words).encode("utf-8", "replace"))


def _following(threads: npt.NDArray[np.uint8]) -> Times:
    """For every record the next one of its thread; -1 for the last."""
    found = np.full(len(threads), -1, np.int64)
    for number in np.unique(threads).tolist():
        at = np.flatnonzero(threads == number)
        found[at[:-1]] = at[1:]
    return found


def _ends_on_host(box: Box, group: str) -> bool:
    backend = box.groups().get(group, {}).get("backend")
    return (
        isinstance(backend, str)
        and {part.rpartition(":")[2] for part in backend.split(",")} <= _HOST_BACKENDS
    )


def _stream_of(box: Box, signature: Any, members: dict[str, tuple[int, ...]]) -> ClockStream | None:
    """The stream that a collective is counted in; None where its entry is lost."""
    if not isinstance(signature, dict) or not isinstance(signature.get("group"), str):
        return None
    name, op, peer = signature["group"], str(signature.get("op")), signature.get("peer")
    if name not in members:
        ranks = box.groups().get(name, {}).get("ranks")
        members[name] = (
            tuple(rank for rank in ranks if isinstance(rank, int))
            if isinstance(ranks, list)
            else ()
        )
    if op not in P2P:
        return ClockStream(name, members[name])
    other = peer if isinstance(peer, int) else -1
    return ClockStream(
        name, members[name], *((box.rank, other) if op == "send" else (other, box.rank))
    )


def _is_met(signature: dict[str, Any]) -> bool:
    """Whether nobody leaves such a call before all have come to it. The root of a broadcast does,
    and whoever sends."""
    return str(signature.get("op")).startswith(_MET)


def _step_ns(box: Box, times: Times) -> float | None:
    begins = times[box.records["kind"] == Kind.STEP_BEGIN]
    return float(np.median(np.diff(begins))) if len(begins) > 2 else None
