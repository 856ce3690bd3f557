"""When a rank arrived at its collectives, and when it continued after them.

`arrivals` takes a box and gives `Arrivals`: for every stream the numbers of the calls, when each
was issued, when the same thread recorded its next event, and from which place of the program to
which it went in between. That is all that the comparison of clocks and the search for the last
rank of a call need. Times are wall-clock times of the rank's host, as arrays.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import FLAG_ASYNC
from torchwhere.blackbox.string_table import ranks_of, stream_ends
from torchwhere.core.arrays import Bools, Times, Words
from torchwhere.core.events import Kind
from torchwhere.core.grouping import grouped

NEVER = np.iinfo(np.int64).max  # there is no later event
_MOST_NS = 1 << 61  # 73 years: the sum of two such times fits into 64 bits
_MONTH_NS = 30 * 86_400 * 10**9
# Calls that no rank leaves before all have arrived. The root of a broadcast does, and so does a
# sender.
_BLOCKING = ("all_", "reduce_scatter", "barrier", "monitored_barrier", "recv")
# The calls of these backends end on the host. Calls of others may only be queued on a device.
_HOST_BACKENDS = frozenset({"gloo", "mpi"})
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_PLACE = ("subject", "module", "line", "pass")


class ClockStream(NamedTuple):
    """Names a stream as `StreamName` does, by the name and the members of the group."""

    group: str
    members: tuple[int, ...]  # two groups may have the same name
    source: int = -1
    destination: int = -1

    @property
    def is_message(self) -> bool:
        return self.source >= 0 or self.destination >= 0

    @property
    def size(self) -> int:
        """How many ranks take part; 0 if unknown."""
        return 2 if self.is_message else len(self.members)


@dataclass(frozen=True, slots=True)
class CallTimes:
    """The calls of one rank in one stream, ordered by number."""

    numbers: Times
    issued_ns: Times
    next_ns: Times  # when the same thread recorded its next event; `NEVER` if it did not
    # whether the call returns only when all ranks have arrived, or the send of a recv
    waits: Bools
    at: Times  # index of the record in the box
    # equal if the program went from the same place to the same next record, on any rank
    sites: Times

    def __len__(self) -> int:
        return len(self.numbers)

    def shifted(self, by_ns: int) -> CallTimes:
        """Returns the same calls with times that are later by `by_ns`."""
        next_ns = np.where(self.next_ns == NEVER, NEVER, self.next_ns + by_ns)
        return replace(self, issued_ns=self.issued_ns + by_ns, next_ns=next_ns)

    def thinned(self, most: int) -> CallTimes:
        """Keeps about `most` calls at most; all ranks keep the same numbers.

        The choice is pseudo-random. If a step has two calls, every second number would always be
        the same call.
        """
        if len(self) <= most:
            return self
        halvings = int(np.ceil(np.log2(len(self) / most)))
        hashes = self.numbers.astype(np.uint64) * _GOLDEN
        return self.chosen(hashes >> np.uint64(64 - halvings) == 0)

    def chosen(self, is_chosen: Bools) -> CallTimes:
        """Returns some of the calls."""
        return CallTimes(*(getattr(self, name)[is_chosen] for name in self.__dataclass_fields__))


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The arrivals of one rank."""

    rank: int
    host: str
    offset_ns: int  # from the monotonic clock of its host to wall-clock time
    streams: dict[ClockStream, CallTimes] = field(default_factory=dict)
    step_ns: float | None = None  # median duration of a step
    # streams whose calls may return before all ranks have arrived
    unsure: frozenset[ClockStream] = frozenset()


def wall_offset_ns(box: Box) -> int:
    """Returns what to add to the times of a box, limited to what an array can hold."""
    return max(-_MOST_NS, min(_MOST_NS, box.wall_ns(0)))


def times_ns(box: Box) -> Times:
    """Returns the wall-clock time of every record."""
    return as_wall_ns(box, box.records["t_ns"])


def as_wall_ns(box: Box, times: Words) -> Times:
    """Converts times of a box to wall-clock times."""
    wall: Times = np.minimum(times, np.uint64(_MOST_NS)).astype(np.int64)
    wall += np.int64(wall_offset_ns(box))
    return wall


def next_times_ns(box: Box, times: Times) -> Times:
    """Returns when the thread of each record continued: its next record, or its cursor."""
    threads = box.records["thread"]
    follows = _following(threads)
    next_ns = np.where(follows < 0, NEVER, times[follows]) if len(times) else times
    cursors = {cursor.place.thread: cursor.t_ns for cursor in box.cursors()}
    for last in np.flatnonzero(follows < 0).tolist():
        cursor_ns = cursors.get(box.thread(int(threads[last])))
        if cursor_ns is not None and has_moved(cursor_ns, int(times[last])):
            next_ns[last] = cursor_ns
    return np.maximum(next_ns, times)


def has_moved(cursor_ns: int, last_ns: int) -> bool:
    """Whether a cursor is newer than the last record.

    Cursors have no checksum: one that is far off is damaged.
    """
    return last_ns < cursor_ns < min(last_ns + _MONTH_NS, _MOST_NS)


def arrivals(box: Box) -> Arrivals:
    """Returns the collectives of a box by stream."""
    records, times = box.records, times_ns(box)
    next_ns = next_times_ns(box, times)
    at = np.flatnonzero(records["kind"] == Kind.COLLECTIVE)
    at = at[records["extra"][at] < np.uint64(_MOST_NS)]
    subjects, sites = records["subject"][at], _sites(box, at)
    members: dict[str, tuple[int, ...]] = {}
    by_stream = grouped(
        (stream, subject)
        for subject in np.unique(subjects).tolist()
        if (stream := _stream_of(box, box.value(subject), members)) is not None
    )
    streams = {}
    for stream, own_subjects in by_stream.items():
        own = np.flatnonzero(np.isin(subjects, own_subjects))
        numbers, first = np.unique(records["extra"][at[own]].astype(np.int64), return_index=True)
        own = own[first]
        here = at[own]
        blocking = [subject for subject in own_subjects if waits_for_all(box.value(subject))]
        waits = np.isin(records["subject"][here], blocking)
        waits &= records["flags"][here] & FLAG_ASYNC == 0
        streams[stream] = CallTimes(numbers, times[here], next_ns[here], waits, here, sites[own])
    return Arrivals(
        rank=box.rank,
        host=str(box.meta.get("host", "")),
        offset_ns=wall_offset_ns(box),
        streams=streams,
        step_ns=_step_ns(box, times),
        unsure=frozenset(stream for stream in streams if not _ends_on_host(box, stream.group)),
    )


def _sites(box: Box, at: Times) -> Times:
    """Returns a code for the place of each call and the kind of the next record of its thread.

    The codes are equal for equal places on all ranks.
    """
    records = box.records
    follows = _following(records["thread"])[at]
    keys = np.where(follows < 0, 0, records["kind"][follows]).astype(np.uint64)
    for name in _PLACE:
        keys = (keys + records[name][at]) * _GOLDEN
        keys ^= keys >> np.uint64(32)
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    codes = [_site(box, int(at[index]), int(follows[index])) for index in first.tolist()]
    sites: Times = np.array(codes, np.int64)[which.reshape(-1)]
    return sites


def _site(box: Box, at: int, follows: int) -> int:
    row = box.records[at]
    signature = box.value(int(row["subject"]))
    op = signature.get("op") if isinstance(signature, dict) else None
    kind = int(box.records["kind"][follows]) if follows >= 0 else 0
    place = (op, box.name(int(row["module"])), box.name(int(row["line"])), int(row["pass"]), kind)
    return zlib.crc32(repr(place).encode("utf-8", "replace"))


def _following(threads: npt.NDArray[np.uint8]) -> Times:
    """Returns the index of the next record of the same thread; -1 for the last one."""
    follows = np.full(len(threads), -1, np.int64)
    for number in np.unique(threads).tolist():
        at = np.flatnonzero(threads == number)
        follows[at[:-1]] = at[1:]
    return follows


def _ends_on_host(box: Box, group: str) -> bool:
    backend = box.groups().get(group, {}).get("backend")
    if not isinstance(backend, str):
        return False
    return {part.rpartition(":")[2] for part in backend.split(",")} <= _HOST_BACKENDS


def _stream_of(box: Box, signature: Any, members: dict[str, tuple[int, ...]]) -> ClockStream | None:
    """Returns the stream that a call is counted in; None if its table entry is lost.

    `members` caches the members of groups by name.
    """
    if not isinstance(signature, dict) or not isinstance(signature.get("group"), str):
        return None
    name, op, peer = signature["group"], str(signature.get("op")), signature.get("peer")
    if name not in members:
        members[name] = ranks_of(box.groups().get(name, {}).get("ranks"))
    other = peer if isinstance(peer, int) else -1
    return ClockStream(name, members[name], *stream_ends(op, rank=box.rank, peer=other))


def waits_for_all(signature: dict[str, Any]) -> bool:
    """Whether no rank leaves such a call before all have arrived."""
    return str(signature.get("op")).startswith(_BLOCKING)


def _step_ns(box: Box, times: Times) -> float | None:
    begins = times[box.records["kind"] == Kind.STEP_BEGIN]
    return float(np.median(np.diff(begins))) if len(begins) > 2 else None
