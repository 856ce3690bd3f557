"""Encodes boxes: the collectives of many ranks as a few arrays, everything else as `RankSummary`s.

An `Encoder` takes boxes one after another and gives `CallBatch`es. A batch no longer needs its
boxes and can be pickled: it takes about 10 bytes per collective. A box has its own table ids; the
encoder replaces them by its local ids (`keys.LocalIds`). A batch also contains the meaning of the
local ids that are new since the batch before. `job_calls.py` translates local ids to ids that all
ranks share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchwhere.blackbox.box import Box, training_cursor
from torchwhere.blackbox.device import DeviceState, device_state, device_times
from torchwhere.blackbox.file_format import FLAG_ON_DEVICE
from torchwhere.blackbox.ring import usual_step_ns
from torchwhere.blackbox.string_table import Group, json_int, ranks_of
from torchwhere.blackbox.summary import BoxSummary, summarize
from torchwhere.core.arrays import AnyArray, Ints
from torchwhere.core.errors import FAILED
from torchwhere.core.events import Event, Kind
from torchwhere.core.place import Place
from torchwhere.diagnose.calls.keys import CallSite, LocalIds, Signature, StreamKey
from torchwhere.diagnose.calls.order import CallSorter, SortedCalls, narrow

_SAME_MOMENT_NS = 1_000_000
_LINES = 64  # the last records that are searched for a line
_MOST_EVENTS = 4  # of one kind
_LAST_CALLS = 256  # that show whether a rank uses an accelerator
_MOST_DELAY_US = (1 << 32) - 2
_MOST_GROUP_CREATIONS = 16


class StreamSlice(NamedTuple):
    """The newest calls of one rank in one stream, as far as their numbers have no gap."""

    key: StreamKey  # its group is a local id
    issued: int  # all calls ever issued, also those that the ring has lost
    first: int = 0  # number of the first call
    at: int = 0  # index of the first call in the arrays
    length: int = 0
    signature: int = -1  # the local id that all these calls have; -1 if they have several


class GroupCreation(NamedTuple):
    """A process group that a rank began to create. All ranks must take part."""

    op: str
    number: int  # how many groups the rank had created before
    ranks: tuple[int, ...] | None  # the members; None for all ranks
    since_ns: int  # wall clock
    place: Place
    is_made: bool


class RankSummary(NamedTuple):
    """Everything about one rank that is not in the arrays, and where its part of them begins."""

    box_summary: BoxSummary
    parts: tuple[StreamSlice, ...] = ()
    last: tuple[StreamKey, int] | None = None  # stream and number of its last collective
    end: Event | None = None
    exceptions: tuple[Event, ...] = ()  # the last few
    place: Place | None = None  # of its main thread
    in_collective_since_ns: int | None = None
    moved_ns: int = 0  # wall clock of the last move of any of its threads; 0 if not known
    # the number of calls in each group, if the names of the groups are lost
    unnamed: tuple[int, ...] | None = None
    group_creations: tuple[GroupCreation, ...] = ()  # the last few
    is_compiling: bool = False
    has_unknown_replays: bool = False  # of CUDA graphs that were captured before the watch
    last_line: str | None = None
    steps_per_s: float | None = None
    last_step: int | None = None
    steppers: tuple[str, ...] = ()  # the threads that count steps; usually one
    uses_device: bool = False  # its last collectives ran on an accelerator
    device: DeviceState | None = None  # None: the progress of its device is not known
    pairs_at: int = 0  # index of its first pair
    records: int = 0  # all records ever written
    # The arrays hold differences to these values; times are in ticks.
    record: int = 0
    step: int = 0
    start_ns: int = 0  # wall clock
    tick_ns: int = 1


@dataclass(slots=True)
class CallBatch:
    """The calls of some ranks.

    `codes`, `steps`, `records`, `ticks` and `delays` have one item for each call: the calls of the
    first rank, stream by stream, then those of the next rank.
    """

    rank_summaries: list[RankSummary]
    codes: AnyArray  # index into the pairs of the rank
    steps: AnyArray
    records: AnyArray  # record numbers
    ticks: AnyArray  # times
    # µs from the issue of a call to when the device reached it, plus 1; 0: unknown
    delays: AnyArray
    pairs: npt.NDArray[np.int32]  # local ids of signature and call site; -1 if unknown
    # what got a local id since the batch before, in the order of the ids
    groups: list[Group] = field(default_factory=list)
    signatures: list[Signature] = field(default_factory=list)
    call_sites: list[CallSite] = field(default_factory=list)


# the arrays of one rank: codes, steps, records, ticks, delays
_Columns = tuple[AnyArray, AnyArray, AnyArray, AnyArray, AnyArray]


class Encoder:
    """Encodes boxes. Equal groups, signatures and call sites get equal local ids."""

    def __init__(self) -> None:
        self.decoded = 0  # records so far
        self._sorter = CallSorter()
        self._local_ids = LocalIds()

    def encode(self, boxes: Iterable[Box]) -> CallBatch:
        summaries: list[RankSummary] = []
        nothing = np.empty(0, np.uint8)
        columns: list[_Columns] = [(nothing, nothing, nothing, nothing, nothing)]
        pairs: list[tuple[int, int]] = []
        at = 0
        for box in boxes:
            summary, own_columns = self._encode(box, at, pairs)
            summaries.append(summary)
            columns.append(own_columns)
            at += len(own_columns[0])
        codes, steps, records, ticks, delays = map(np.concatenate, zip(*columns, strict=True))
        table = np.array(pairs, np.int32).reshape(-1, 2)
        new = self._local_ids.take_new()
        return CallBatch(summaries, codes, steps, records, ticks, delays, table, *new)

    def _encode(
        self, box: Box, at: int, pairs: list[tuple[int, int]]
    ) -> tuple[RankSummary, _Columns]:
        """Encodes one box and appends its pairs. `at` is where its calls begin in the batch."""
        records, ids = box.records, self._local_ids
        self.decoded += len(records)
        groups = ids.groups_of(box)
        classes = self._sorter.classify(records)
        own_pairs, keys = ids.pairs(box, classes.examples, groups)
        calls = self._sorter.sort(records["extra"], classes, keys)
        counts = ids.counts(box, groups)
        columns, bases = _columns(box, calls)
        box_summary = summarize(box)
        summary = RankSummary(
            box_summary=box_summary,
            parts=_slices(calls, counts, at, _single_signatures(keys, own_pairs)),
            last=calls.last,
            records=int(records["number"][-1]) + 1 if len(records) else 0,
            unnamed=_unnamed(box) if box_summary.lacks_counts else None,
            pairs_at=len(pairs),
            **bases,
            **_state(box),
        )
        pairs += own_pairs
        return summary, columns


def _columns(box: Box, calls: SortedCalls) -> tuple[_Columns, dict[str, Any]]:
    """Returns the arrays of a rank, and the values they count from."""
    records, order = box.records, calls.order
    times = records["t_ns"].astype(np.int64)[order]
    start, span = (int(times.min()), int(times.max() - times.min())) if len(times) else (0, 0)
    tick = 1 + (span >> 32)
    steps, step = narrow(records["step"][order])
    numbers, number = narrow(records["number"][order])
    ticks = ((times - start) // tick).astype(np.uint32)
    columns = (calls.codes, steps, numbers, ticks, _delays(box, order, times))
    bases = {"record": number, "step": step, "start_ns": box.wall_ns(start), "tick_ns": tick}
    return columns, bases


def _delays(box: Box, order: AnyArray, times: Ints) -> AnyArray:
    """Returns how long after the CPU the device of a rank came to each call."""
    if not box.has_device:
        return np.zeros(len(order), np.uint8)
    reached = device_times(box)[0].astype(np.int64)[order]
    delays = ((reached - times) // 1000).clip(0, _MOST_DELAY_US) + 1
    return np.where(reached > 0, delays, 0).astype(np.uint32)


def _single_signatures(
    keys: list[StreamKey | None], pairs: list[tuple[int, int]]
) -> dict[StreamKey | None, int]:
    """Returns the signature of all calls of each stream; -1 if a stream has several."""
    signatures: dict[StreamKey | None, int] = {}
    for key, (signature, _) in zip(keys, pairs, strict=True):
        if signatures.setdefault(key, signature) != signature:
            signatures[key] = -1
    return signatures


def _slices(
    calls: SortedCalls, counts: dict[StreamKey, int], at: int, single: dict[StreamKey | None, int]
) -> tuple[StreamSlice, ...]:
    """Returns the streams of a rank: those still in its ring, then those it has only counted."""
    slices = []
    for key, first, begin, length in calls.stretches:
        issued = max(counts.pop(key, 0), first + length)
        slices.append(StreamSlice(key, issued, first, at + begin, length, single[key]))
    slices += [StreamSlice(key, count) for key, count in counts.items()]
    return tuple(slices)


def _unnamed(box: Box) -> tuple[int, ...] | None:
    """Returns the counts of a box that was cut after its counters, so that their names are lost."""
    if box.geometry is None or len(box._head) < box.geometry.ring_at:
        return None
    return tuple(
        count
        for (_, source, destination), count in box.counters().items()
        if source == destination == -1
    )


# -- everything that is not a call -----------------------------------------------------------------


def _state(box: Box) -> dict[str, Any]:
    """Returns the fields of `RankSummary` that say where a rank is, how it ended, and its speed."""
    kinds = np.bincount(box.records["kind"], minlength=256)
    cursors = box.cursors()
    cursor = training_cursor(box, cursors)
    moved_ns = max((cursor.t_ns for cursor in cursors), default=0)
    return {
        "end": _last_of(box, Kind.END)[-1] if kinds[Kind.END] else None,
        "exceptions": _last_of(box, Kind.EXCEPTION) if kinds[Kind.EXCEPTION] else (),
        "place": cursor.place if cursor is not None else None,
        "in_collective_since_ns": _in_collective_since(box, moved_ns),
        "moved_ns": moved_ns,
        "group_creations": _group_creations(box) if kinds[Kind.GROUP_BEGIN] else (),
        "is_compiling": bool(kinds[Kind.COMPILE_BEGIN] > kinds[Kind.COMPILE_END]),
        "has_unknown_replays": bool(kinds[Kind.REPLAY]) and _has_unknown_replays(box),
        "last_line": _last_line(box),
        "uses_device": _uses_device(box),
        "device": device_state(box) if box.has_device else None,
        **(_steps(box) if kinds[Kind.STEP_BEGIN] else {}),
    }


def _uses_device(box: Box) -> bool:
    """Whether one of the last collectives ran on an accelerator."""
    rows = np.flatnonzero(box.records["kind"] == int(Kind.COLLECTIVE))[-_LAST_CALLS:]
    return bool((box.records["flags"][rows] & FLAG_ON_DEVICE).any())


def _last_of(box: Box, kind: Kind) -> tuple[Event, ...]:
    rows = np.flatnonzero(box.records["kind"] == int(kind))
    return tuple(box.event(int(row)) for row in rows[-_MOST_EVENTS:])


def _group_creations(box: Box) -> tuple[GroupCreation, ...]:
    kinds = box.records["kind"]
    rows = np.flatnonzero(kinds == int(Kind.GROUP_BEGIN))[-_MOST_GROUP_CREATIONS:]
    is_last_made = bool((kinds[rows[-1] :] == int(Kind.GROUP_END)).any())
    return tuple(
        _group_creation(box.event(int(row)), is_made=is_last_made or bool(row != rows[-1]))
        for row in rows
    )


def _group_creation(event: Event, *, is_made: bool) -> GroupCreation:
    ranks = event.fields.get("ranks")
    return GroupCreation(
        str(event.fields.get("op")),
        json_int(event.fields, "number"),
        ranks_of(ranks) if isinstance(ranks, list) else None,
        event.t_ns,
        event.place,
        is_made,
    )


def _in_collective_since(box: Box, moved_ns: int) -> int | None:
    """Returns the wall-clock time of the last record if the rank is still in that collective.

    That is so if the record is a collective and no cursor has moved since (`moved_ns`). A Ctrl-C
    does not count as a move: it says nothing about where the rank was.
    """
    records = box.records[: len(box.records) - _interruption(box)]
    if not len(records) or records["kind"][-1] != int(Kind.COLLECTIVE):
        return None
    issued = box.wall_ns(int(records["t_ns"][-1]))
    return None if moved_ns > issued + _SAME_MOMENT_NS else issued


def _interruption(box: Box) -> int:
    """Returns how many records at the end come from a Ctrl-C."""
    kinds = box.records["kind"]
    if not len(kinds) or kinds[-1] not in (int(Kind.END), int(Kind.EXCEPTION)):
        return 0
    fields = box.event(len(kinds) - 1).fields
    reason = str(fields.get("reason", fields.get("text"))).removeprefix(FAILED)
    if not reason.startswith("KeyboardInterrupt"):
        return 0
    return 2 if len(kinds) > 1 and kinds[-2] == int(Kind.EXCEPTION) else 1


def _has_unknown_replays(box: Box) -> bool:
    is_replay = box.records["kind"] == int(Kind.REPLAY)
    return bool((is_replay & (box.records["subject"] == 0)).any())


def _last_line(box: Box) -> str | None:
    lines = box.records["line"][-_LINES:]
    recorded = lines[lines != 0]
    return box.name(int(recorded[-1])) if len(recorded) else None


def _steps(box: Box) -> dict[str, Any]:
    """Returns the last step, the steps a second, and the threads that count steps."""
    records = box.records
    begins = np.flatnonzero(records["kind"] == int(Kind.STEP_BEGIN))
    threads = set(records["thread"][begins].tolist())
    step_ns = usual_step_ns(records, from_start=not box.counts.overwritten)
    return {
        "steps_per_s": 1e9 / step_ns if step_ns is not None else None,
        "last_step": int(records["step"][begins[-1]]),
        "steppers": tuple(sorted(str(box.thread(number)) for number in threads)),
    }
