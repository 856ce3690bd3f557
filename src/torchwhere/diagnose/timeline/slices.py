"""What one rank did, as slices with a start and an end, and as instants.

Slices are steps, phases, modules, compilations and collectives. `timeline` takes a box and the
arrivals of all ranks at its calls, and gives a `Timeline` in aligned time. Slices of one lane are
nested or apart, never overlapping. A slice that would overlap another one (phases of coroutines
that take turns) gets another lane.

A box records when a collective was issued, not when it ended. A call that waits ends when the last
rank arrives, or when its own thread records the next event if that is earlier. If not all ranks
are known to have arrived, it ends at the next event of its thread, or after `CAP_NS`. A call that
does not wait is drawn for `ISSUE_NS`, because nothing says how long it took. All these ends are
marked as estimated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.device import device_place
from torchwhere.core.arrays import Bools, Times
from torchwhere.core.events import Kind
from torchwhere.core.grouping import per_distinct
from torchwhere.diagnose.clocks.arrivals import (
    NEVER,
    ClockStream,
    arrivals,
    has_moved,
    next_times_ns,
    times_ns,
)
from torchwhere.diagnose.clocks.call_arrivals import CallArrivals, JobArrivals
from torchwhere.diagnose.clocks.clocks import Clocks

CAP_NS = 10_000_000
ISSUE_NS = 10_000
AFTER_NS = 1_000  # a call ends this long after the last arrival
# The thread number of steps. They have their own track: an optimizer may step within a phase.
STEPS = -1

_INSTANTS = {Kind.START, Kind.END, Kind.OPTIMIZER, Kind.NOTE, Kind.EXCEPTION, Kind.REPLAY}
# The kinds of slices: the events that begin and end one, and the fields that both have in common.
_SPANS: dict[str, tuple[Kind, Kind, tuple[str, ...]]] = {
    "step": (Kind.STEP_BEGIN, Kind.STEP_END, ("step",)),
    "phase": (Kind.PHASE_BEGIN, Kind.PHASE_END, ("subject",)),
    "module": (Kind.MODULE_ENTER, Kind.MODULE_EXIT, ("module", "call", "pass")),
    "compile": (Kind.COMPILE_BEGIN, Kind.COMPILE_END, ("subject",)),
    # the end of a capture that failed has a subject of its own
    "capture": (Kind.CAPTURE_BEGIN, Kind.CAPTURE_END, ()),
}
_BEGINS = {begin for begin, _, _ in _SPANS.values()}
_NAMES = {kind: name for name, (begin, end, _) in _SPANS.items() for kind in (begin, end)}


class Mark:
    """Properties of a slice, as bits. Not an enum: that is ten times as slow."""

    NONE = 0
    EARLY = 1  # its start is overwritten
    UNFINISHED = 2  # it had not ended when the box was read
    ESTIMATED = 4  # its end is estimated
    CUT_BEGIN = 8  # it begins before the wanted window
    CUT_END = 16  # it ends after the wanted window


class Slice(NamedTuple):
    """Something that lasts from one time to another."""

    begin_ns: int
    end_ns: int
    kind: str
    at: int  # index of its first record; of the last one if the first is overwritten
    thread: int
    marks: int = Mark.NONE
    stream: ClockStream | None = None
    arrivals: CallArrivals | None = None
    lane: int = 0


class Instant(NamedTuple):
    """Something that happens at one moment."""

    t_ns: int
    kind: Kind
    at: int
    thread: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """The timeline of one rank. Slices are ordered by begin, outer slices first."""

    rank: int
    slices: list[Slice]
    instants: list[Instant]
    # when a step began, and the bytes of its collectives
    step_bytes: list[tuple[int, int]] = field(default_factory=list)
    has_modules: bool = False


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """The part of a rank's time that is drawn, in aligned time."""

    begin_ns: int
    end_ns: int  # `NEVER` if nothing was recorded after the wanted steps
    last_ns: int  # the last known moment within
    steps: range | None = None  # the wanted steps; None: all
    # when the rank was last known alive, if that is after all that it recorded; else 0
    alive_ns: int = 0


def window(box: Box, clocks: Clocks, steps: range | None) -> TimeWindow | None:
    """Returns when a rank was in some steps; None if its box has none of them.

    Without steps, the window reaches from its first record to its last.
    """
    times = clocks.aligned_ns(box.rank, times_ns(box))
    step = box.records["step"].astype(np.int64)
    inside = (
        np.ones(len(times), np.bool_)
        if steps is None
        else (step >= steps.start) & (step < steps.stop)
    )
    if not inside.any():
        return None
    begin, last = int(times[inside].min()), int(times[inside].max())
    has_ended = (box.records["kind"] == Kind.END).any()
    if has_ended or (steps is not None and (step[times >= last] >= steps.stop).any()):
        return TimeWindow(begin, last + 1, last, steps)
    newest = int(times_ns(box).max())
    cursors = [
        clocks.aligned_ns(box.rank, cursor.t_ns)
        for cursor in box.cursors()
        if has_moved(cursor.t_ns, newest)
    ]
    return TimeWindow(begin, NEVER, max([last, *cursors]), steps, _alive_ns(box, clocks))


def _alive_ns(box: Box, clocks: Clocks) -> int:
    """When a rank was last known alive, by its heartbeat and its last look at the device, if that
    is after its last record; else 0. A job that hangs records nothing, but its ranks live."""
    newest = int(times_ns(box).max())
    signs = [t_ns for t_ns in (box.beat_ns, device_place(box).looked_ns) if has_moved(t_ns, newest)]
    return int(clocks.aligned_ns(box.rank, max(signs))) if signs else 0


def timeline(
    box: Box, *, clocks: Clocks, job_arrivals: JobArrivals, within: TimeWindow, end_ns: int
) -> Timeline:
    """Returns everything a rank did within a window. Unfinished slices last until `end_ns`."""
    wall = times_ns(box)
    next_ns = next_times_ns(box, wall)
    is_last = next_ns == NEVER
    times = _Times(
        ns=clocks.aligned_ns(box.rank, wall),
        next_ns=np.where(
            is_last, end_ns, clocks.aligned_ns(box.rank, np.where(is_last, wall, next_ns))
        ),
        is_last=is_last,
    )
    stop_ns = min(within.end_ns, end_ns)
    near = (times.ns < stop_ns) & (times.next_ns >= within.begin_ns)
    slices = [*_spans(box, times.ns, end_ns), *_collectives(box, job_arrivals, times, near)]
    cut = (_cut(piece, within.begin_ns, stop_ns) for piece in slices)
    kinds = box.records["kind"]
    return Timeline(
        box.rank,
        slices=list(_in_lanes([piece for piece in cut if piece is not None])),
        instants=_instants(box, times.ns, within.begin_ns, stop_ns),
        step_bytes=[
            (begin_ns, size)
            for begin_ns, size in _step_bytes(box, times.ns)
            if within.begin_ns <= begin_ns < stop_ns
        ],
        has_modules=bool(np.isin(kinds, (Kind.MODULE_ENTER, Kind.MODULE_EXIT)).any()),
    )


class _Times(NamedTuple):
    """Aligned times of all records of a box."""

    ns: Times
    next_ns: Times  # when the thread recorded its next event; the end of the trace for its last one
    is_last: Bools


def _instants(box: Box, times: Times, begin_ns: int, stop_ns: int) -> list[Instant]:
    kinds = box.records["kind"]
    at = np.flatnonzero(np.isin(kinds, list(_INSTANTS)) & (times >= begin_ns) & (times <= stop_ns))
    columns = (times[at], kinds[at], at, box.records["thread"][at])
    return [
        Instant(t_ns, Kind(kind), index, thread)
        for t_ns, kind, index, thread in zip(*(c.tolist() for c in columns), strict=True)
    ]


def _cut(span: Slice, begin_ns: int, end_ns: int) -> Slice | None:
    """Cuts a slice to a window; None if it is outside."""
    if begin_ns <= span.begin_ns and span.end_ns <= end_ns and span.begin_ns < end_ns:
        return span
    if span.end_ns <= begin_ns or span.begin_ns >= end_ns:
        return None
    marks = Mark.CUT_BEGIN * (span.begin_ns < begin_ns) | Mark.CUT_END * (span.end_ns > end_ns)
    begin, end = max(span.begin_ns, begin_ns), min(span.end_ns, end_ns)
    return span._replace(begin_ns=begin, end_ns=end, marks=span.marks | marks)


# -- slices ----------------------------------------------------------------------------------------


def _spans(box: Box, times: Times, end_ns: int) -> Iterator[Slice]:
    """Matches begin events with end events of the same thread. A step may end on another thread."""
    records, begun_ns = box.records, int(times.min(initial=end_ns))
    at = np.flatnonzero(np.isin(records["kind"], list(_NAMES)))
    columns = {
        name: records[name][at].tolist()
        for name in ("kind", "thread", "step", "subject", "module", "call", "pass")
    }
    open_: dict[tuple[object, ...], list[tuple[int, int, int]]] = {}
    for row, (index, t_ns) in enumerate(zip(at.tolist(), times[at].tolist(), strict=True)):
        kind, thread = Kind(columns["kind"][row]), columns["thread"][row]
        name = _NAMES[kind]
        own_thread = None if name == "step" else thread
        key = (name, own_thread, *(columns[part][row] for part in _SPANS[name][2]))
        if kind in _BEGINS:
            open_.setdefault(key, []).append((t_ns, index, thread))
        elif begun := open_.get(key):
            begin_ns, first, begin_thread = begun.pop()
            yield Slice(begin_ns, max(t_ns, begin_ns), name, first, begin_thread)
        else:
            yield Slice(begun_ns, max(t_ns, begun_ns), name, index, thread, Mark.EARLY)
    is_over = bool((records["kind"] == Kind.END).any())
    stop_ns = int(times.max(initial=begun_ns)) if is_over else end_ns
    for key, begun in open_.items():
        # A watch that ended in order also ended the last step. Anything else that is still open
        # has lost its end to an error.
        marks = Mark.NONE if is_over and key[0] == "step" else Mark.UNFINISHED
        for begin_ns, first, begin_thread in begun:
            yield Slice(begin_ns, max(stop_ns, begin_ns), str(key[0]), first, begin_thread, marks)


def _collectives(
    box: Box, job_arrivals: JobArrivals, times: _Times, near: Bools
) -> Iterator[Slice]:
    """Yields the collectives whose records are `near`."""
    is_over = bool((box.records["kind"] == Kind.END).any())
    threads = box.records["thread"]
    is_left = near & (box.records["kind"] == Kind.COLLECTIVE)
    for stream, calls in arrivals(box).streams.items():
        is_left[calls.at] = False
        chosen, size = near[calls.at], stream.size
        at = calls.at[chosen]
        columns = (at, times.ns[at], times.next_ns[at], times.is_last[at], calls.waits[chosen])
        rows = zip(*(column.tolist() for column in (*columns, threads[at])), strict=True)
        call_arrivals = job_arrivals.of(stream, calls.numbers[chosen])
        for came, row in zip(call_arrivals, rows, strict=True):
            index, t_ns, next_ns, is_newest, waits, thread = row
            is_complete = came is not None and 0 < size <= came.arrived
            marks = Mark.ESTIMATED
            if is_newest and not is_complete and not is_over:
                marks, end = Mark.UNFINISHED, next_ns
            elif not waits:
                end = t_ns + ISSUE_NS
            elif came is not None and is_complete:
                end = max(came.last_ns, t_ns) + AFTER_NS
            else:
                end = t_ns + CAP_NS
            end = max(t_ns, min(end, next_ns))
            yield Slice(t_ns, end, "collective", index, thread, marks, stream, came)
    for index in np.flatnonzero(is_left).tolist():  # their table entries are lost
        t_ns = int(times.ns[index])
        end = max(t_ns, min(t_ns + ISSUE_NS, int(times.next_ns[index])))
        yield Slice(t_ns, end, "collective", index, int(threads[index]), Mark.ESTIMATED)


def _step_bytes(box: Box, times: Times) -> list[tuple[int, int]]:
    """Returns when each step began, and the bytes of its collectives."""
    records = box.records
    at = np.flatnonzero(records["kind"] == Kind.COLLECTIVE)
    begins = np.flatnonzero(records["kind"] == Kind.STEP_BEGIN)
    sizes = per_distinct(
        records["subject"][at], lambda subject: _bytes(box.value(subject)), np.float64
    )
    steps, of_step = np.unique(records["step"][at], return_inverse=True)
    totals = np.bincount(of_step, weights=sizes, minlength=len(steps)) if len(at) else np.zeros(0)
    by_step = dict(zip(steps.tolist(), totals.tolist(), strict=True))
    return [
        (int(times[begin]), int(by_step.get(int(records["step"][begin]), 0)))
        for begin in begins.tolist()
    ]


def _bytes(signature: object) -> float:
    size = signature.get("bytes") if isinstance(signature, dict) else None
    return float(size) if isinstance(size, int) and 0 <= size < 1 << 62 else 0.0


# -- lanes -----------------------------------------------------------------------------------------


def _in_lanes(slices: list[Slice]) -> Iterator[Slice]:
    """Orders slices, and puts each in the first lane of its thread where it overlaps no other."""
    lanes: dict[int, list[list[int]]] = {}
    slices.sort(key=itemgetter(1), reverse=True)  # the longest first, if several begin at once
    slices.sort(key=itemgetter(0))
    for piece in slices:
        thread = STEPS if piece.kind == "step" else piece.thread
        lane = _free_lane(lanes.setdefault(thread, []), piece.begin_ns, piece.end_ns)
        yield (
            piece
            if (lane, thread) == (0, piece.thread)
            else piece._replace(lane=lane, thread=thread)
        )


def _free_lane(lanes: list[list[int]], begin_ns: int, end_ns: int) -> int:
    for lane, ends in enumerate(lanes):
        while ends and ends[-1] <= begin_ns:
            ends.pop()
        if not ends or end_ns <= ends[-1]:
            ends.append(end_ns)
            return lane
    lanes.append([end_ns])
    return len(lanes) - 1
