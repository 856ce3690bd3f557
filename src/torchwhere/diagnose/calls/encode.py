"""What boxes say, written down: the collectives of many ranks in a few arrays, everything else of a
rank in a few words.

Takes boxes one after another, gives `CallBatch`s. A transcript needs no box any more and can be
sent to another process: about 10 bytes a collective. Ids are a box's own; here they become numbers
of the clerk who reads (of groups, signatures and spots), and a transcript brings along what its
clerk has not told before. `testimony.py` makes them mean the same for all clerks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.summary import BoxSummary, summarize
from torchwhere.core.errors import FAILED
from torchwhere.core.events import Event, Kind
from torchwhere.core.place import Place
from torchwhere.diagnose.calls.ids import LocalIds
from torchwhere.diagnose.calls.keys import CallSite, Group, Signature, StreamKey
from torchwhere.diagnose.calls.order import SortedCalls, Sorter, narrow

_SAME_MOMENT_NS = 1_000_000
_STEPS = 50  # the last so many make the pace
_LINES = 64  # among the last so many records a line is looked for
_EXCEPTIONS = 4
_MAKINGS = 16


class StreamSlice(NamedTuple):
    """What one rank issued in one stream, as far as its ring goes back without a hole; `at` is
    where in the arrays."""

    key: StreamKey  # its group is the clerk's number
    issued: int  # ever
    first: int = 0
    at: int = 0
    length: int = 0
    signature: int = -1  # of all these calls, if they have but one


class GroupCreation(NamedTuple):
    """A process group that a rank began to make: all ranks must come there."""

    op: str
    number: int  # of groups that it made before
    ranks: tuple[int, ...] | None  # that are in it; None for all
    since_ns: int  # wall clock
    place: Place
    is_made: bool


class RankSummary(NamedTuple):
    """One rank. What the arrays of its calls count from, and everything that is not in them."""

    label: BoxSummary
    parts: tuple[StreamSlice, ...] = ()
    last: tuple[StreamKey, int] | None = None  # its last collective: stream and number
    end: Event | None = None
    exceptions: tuple[Event, ...] = ()  # the last few
    place: Place | None = None  # where its main thread is
    in_collective_since_ns: int | None = None
    # how many it issued in each group, where it is lost which groups these are
    unnamed: tuple[int, ...] | None = None
    group_creations: tuple[GroupCreation, ...] = ()  # the last few
    is_compiling: bool = False
    last_line: str | None = None
    steps_per_s: float | None = None
    last_step: int | None = None
    steppers: tuple[str, ...] = ()  # the threads that count steps: one, as a rule
    pairs_at: int = 0
    records: int = 0  # written ever
    record: int = 0  # number of the first one in the arrays
    step: int = 0
    start_ns: int = 0  # wall clock
    tick_ns: int = 1


@dataclass(slots=True)
class CallBatch:
    """Some ranks. The arrays of calls have one length: all of the first rank, stream by stream,
    then the next one's."""

    rank_summaries: list[RankSummary]
    codes: npt.NDArray[Any]  # which of its rank's pairs
    steps: npt.NDArray[Any]
    records: npt.NDArray[Any]
    ticks: npt.NDArray[Any]
    pairs: npt.NDArray[np.int32]  # signature and spot of each code
    groups: list[Group] = field(default_factory=list)  # what is new since the transcript before
    signatures: list[Signature] = field(default_factory=list)
    call_sites: list[CallSite] = field(default_factory=list)
    extra: Any = None  # what somebody else took from the same boxes


class _Columns(NamedTuple):
    """The arrays of one rank."""

    codes: npt.NDArray[Any]
    steps: npt.NDArray[Any]
    records: npt.NDArray[Any]
    ticks: npt.NDArray[Any]


_NOTHING = _Columns(*(np.empty(0, np.uint8) for _ in range(4)))


class Encoder:
    """Writes down boxes, and remembers what it has told."""

    def __init__(self) -> None:
        self.decoded = 0  # records, so far
        self._sorter = Sorter()
        self._vocabulary = LocalIds()

    def encode(self, boxes: Iterable[Box]) -> CallBatch:
        rank_summaries: list[RankSummary] = []
        said: list[_Columns] = []
        pairs: list[tuple[int, int]] = []
        at = 0
        for box in boxes:
            rank_summary, calls = self._encode(box, at, pairs)
            rank_summaries.append(rank_summary)
            said.append(calls)
            at += len(calls.codes)
        codes, steps, records, ticks = (
            map(np.concatenate, zip(*said, strict=True)) if said else _NOTHING
        )
        table = np.array(pairs, np.int32).reshape(-1, 2)
        return CallBatch(
            rank_summaries, codes, steps, records, ticks, table, *self._vocabulary.news()
        )

    def _encode(
        self, box: Box, at: int, pairs: list[tuple[int, int]]
    ) -> tuple[RankSummary, _Columns]:
        records, known = box.records, self._vocabulary
        self.decoded += len(records)
        groups = known.groups_of(box)
        classes = self._sorter.alike(records)
        own_pairs, keys = known.pairs(box, records, classes, groups)
        found = self._sorter.sort(records["extra"], classes, keys)
        counts = known.counts(box, groups)
        said, base = _said(box, found)
        own_label = summarize(box)
        rank_summary = RankSummary(
            label=own_label,
            parts=_parts(found, counts, at, _single(keys, own_pairs)),
            last=found.last,
            records=int(records["number"][-1]) + 1 if len(records) else 0,
            unnamed=_unnamed(box) if own_label.lacks_counts else None,
            pairs_at=len(pairs),
            **base,
            **_besides(box),
        )
        pairs += own_pairs
        return rank_summary, said


def _said(box: Box, found: SortedCalls) -> tuple[_Columns, dict[str, Any]]:
    """The arrays of a rank, and what they count from."""
    records, order = box.records, found.order
    times = records["t_ns"].astype(np.int64)[order]
    start, span = (int(times.min()), int(times.max() - times.min())) if len(times) else (0, 0)
    tick = 1 + (span >> 32)
    steps, step = narrow(records["step"][order])
    numbers, number = narrow(records["number"][order])
    said = _Columns(found.codes, steps, numbers, ((times - start) // tick).astype(np.uint32))
    return said, {"record": number, "step": step, "start_ns": box.wall_ns(start), "tick_ns": tick}


def _single(
    keys: list[StreamKey | None], pairs: list[tuple[int, int]]
) -> dict[StreamKey | None, int]:
    """The signature that all calls of a stream have; -1 where there are several."""
    found: dict[StreamKey | None, int] = {}
    for key, (signature, _) in zip(keys, pairs, strict=True):
        if found.setdefault(key, signature) != signature:
            found[key] = -1
    return found


def _parts(
    found: SortedCalls, counts: dict[StreamKey, int], at: int, single: dict[StreamKey | None, int]
) -> tuple[StreamSlice, ...]:
    """The streams of a rank: those that its ring still has, and those that it has only counted."""
    parts = []
    for key, first, begin, length in found.stretches:
        issued = max(counts.pop(key, 0), first + length)
        parts.append(StreamSlice(key, issued, first, at + begin, length, single[key]))
    return (*parts, *(StreamSlice(key, count) for key, count in counts.items()))


def _unnamed(box: Box) -> tuple[int, ...] | None:
    """The counts of a box that was cut behind its counters: what they count was in the part that is
    lost."""
    if box.geometry is None or len(box._head) < box.geometry.ring_at:
        return None
    return tuple(
        count
        for (_, source, destination), count in box.counters().items()
        if source == destination == -1
    )


# -- what is not a collective ----------------------------------------------------------------------


def _besides(box: Box) -> dict[str, Any]:
    """What a statement says besides: where it is, how it ended, how fast it went."""
    kinds = np.bincount(box.records["kind"], minlength=256)
    cursors = box.cursors()
    main = [cursor for cursor in cursors if cursor.place.thread == "MainThread"]
    cursor = max(main or cursors, key=lambda cursor: cursor.t_ns, default=None)
    begins = (
        np.flatnonzero(box.records["kind"] == int(Kind.STEP_BEGIN))
        if kinds[Kind.STEP_BEGIN]
        else None
    )
    steps_per_s, last_step = _pace(box, begins) if begins is not None else (None, None)
    return {
        "end": _last_of(box, Kind.END)[-1] if kinds[Kind.END] else None,
        "exceptions": _last_of(box, Kind.EXCEPTION) if kinds[Kind.EXCEPTION] else (),
        "place": cursor.place if cursor is not None else None,
        "in_collective_since_ns": _in_collective_since(
            box, max((cursor.t_ns for cursor in cursors), default=0)
        ),
        "group_creations": _group_creations(box) if kinds[Kind.GROUP_BEGIN] else (),
        "is_compiling": bool(kinds[Kind.COMPILE_BEGIN] > kinds[Kind.COMPILE_END]),
        "last_line": _last_line(box),
        "steps_per_s": steps_per_s,
        "last_step": last_step,
        "steppers": _steppers(box, begins) if begins is not None else (),
    }


def _last_of(box: Box, kind: Kind) -> tuple[Event, ...]:
    rows = np.flatnonzero(box.records["kind"] == int(kind))
    return tuple(box.event(int(row)) for row in rows[-_EXCEPTIONS:])


def _group_creations(box: Box) -> tuple[GroupCreation, ...]:
    kinds = box.records["kind"]
    rows = np.flatnonzero(kinds == int(Kind.GROUP_BEGIN))[-_MAKINGS:]
    is_made = bool((kinds[rows[-1] :] == int(Kind.GROUP_END)).any())
    return tuple(_group_creation(box.event(int(row)), is_made or row != rows[-1]) for row in rows)


def _group_creation(event: Event, is_made: bool) -> GroupCreation:
    op, number, ranks = (event.fields.get(name) for name in ("op", "number", "ranks"))
    members = (
        tuple(rank for rank in ranks if isinstance(rank, int)) if isinstance(ranks, list) else None
    )
    return GroupCreation(
        str(op),
        number if isinstance(number, int) else 0,
        members,
        event.t_ns,
        event.place,
        bool(is_made),
    )


def _in_collective_since(box: Box, moved_ns: int) -> int | None:
    """Wall clock of its last record, if that is a collective and no cursor has moved since; else
    None. That it was interrupted there, by hand, says nothing else of where it was."""
    records = box.records[: len(box.records) - _interruption(box)]
    if not len(records) or records["kind"][-1] != int(Kind.COLLECTIVE):
        return None
    issued = box.wall_ns(int(records["t_ns"][-1]))
    return None if moved_ns > issued + _SAME_MOMENT_NS else issued


def _interruption(box: Box) -> int:
    """How many records at the end say that it was interrupted by hand."""
    kinds = box.records["kind"]
    if not len(kinds) or kinds[-1] not in (int(Kind.END), int(Kind.EXCEPTION)):
        return 0
    told = box.event(len(kinds) - 1).fields
    if (
        not str(told.get("reason", told.get("text")))
        .removeprefix(FAILED)
        .startswith("KeyboardInterrupt")
    ):
        return 0
    return 2 if len(kinds) > 1 and kinds[-2] == int(Kind.EXCEPTION) else 1


def _last_line(box: Box) -> str | None:
    lines = box.records["line"][-_LINES:]
    known = lines[lines != 0]
    return box.name(int(known[-1])) if len(known) else None


def _steppers(box: Box, begins: npt.NDArray[np.int64]) -> tuple[str, ...]:
    threads = set(box.records["thread"][begins].tolist())
    return tuple(sorted(str(box.thread(number)) for number in threads))


def _pace(box: Box, begins: npt.NDArray[np.int64]) -> tuple[float | None, int]:
    """Steps a second, lately, and the last step."""
    records, begins = box.records, begins[-_STEPS:]
    lasted = int(records["t_ns"][begins[-1]]) - int(records["t_ns"][begins[0]])
    return (len(begins) - 1) * 1e9 / lasted if len(begins) > 1 and lasted > 0 else None, int(
        records["step"][begins[-1]]
    )
