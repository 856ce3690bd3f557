"""What one rank did, as slices with a beginning and an end: steps, phases, modules, compilations,
collectives; and instants.

Takes a box and what is known of its calls on other ranks, gives a `Timeline` in aligned time. The
slices of a lane lie inside each other or beside each other, never across: those that would (phases
of coroutines that take turns) get a lane of their own.

A box knows when a collective was issued and not when it ended. A call that waits ends when the last
rank has come to it, and not after the next thing that its thread did; where not all ranks are
known, at the next thing, or after `CAP_NS`. One that does not wait is drawn for `ISSUE_NS`: how
long it was under way is not known. All these ends are marked as estimated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchwhere.blackbox.box import Box
from torchwhere.core.events import Kind
from torchwhere.diagnose.clocks.arrivals import (
    NEVER,
    Arrivals,
    ClockStream,
    Times,
    arrivals,
    has_moved,
    next_times_ns,
    times_ns,
)
from torchwhere.diagnose.clocks.clocks import Clocks
from torchwhere.diagnose.clocks.meetings import Meeting, Meetings

Bools = npt.NDArray[np.bool_]

CAP_NS = 10_000_000
ISSUE_NS = 10_000
AFTER_NS = 1_000  # a call ends at least so long after the last rank has come
STEPS = -1  # instead of a thread, for the steps: an optimizer may step in the middle of a phase

_BEGINS = {
    Kind.STEP_BEGIN: "step",
    Kind.PHASE_BEGIN: "phase",
    Kind.MODULE_ENTER: "module",
    Kind.COMPILE_BEGIN: "compile",
}
_ENDS = {
    Kind.STEP_END: "step",
    Kind.PHASE_END: "phase",
    Kind.MODULE_EXIT: "module",
    Kind.COMPILE_END: "compile",
}
_INSTANTS = {Kind.START, Kind.END, Kind.OPTIMIZER, Kind.NOTE, Kind.EXCEPTION}
_KEYS = {
    "step": ("step",),
    "phase": ("subject",),
    "module": ("module", "call", "pass"),
    "compile": ("subject",),
}


class Mark:
    """What is to be known of a slice, as bits. Not an enum: to look at one of these takes ten times
    as long."""

    NONE = 0
    EARLY = 1  # it began before the ring does
    UNFINISHED = 2  # it had not ended when the box was read
    ESTIMATED = 4  # its end
    CUT_BEGIN = 8  # by the window that was asked for
    CUT_END = 16


class Slice(NamedTuple):
    """From one time to another."""

    begin_ns: int
    end_ns: int
    kind: str
    at: int  # index of its record: of the first, or of the last if that is all there is
    thread: int
    marks: int = Mark.NONE
    stream: ClockStream | None = None
    meeting: Meeting | None = None
    lane: int = 0


class Instant(NamedTuple):
    """One moment."""

    t_ns: int
    kind: Kind
    at: int
    thread: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Of one rank. Slices are in the order of their beginnings, each before those inside it."""

    rank: int
    slices: list[Slice]
    instants: list[Instant]
    # when a step began, and what was issued in it
    step_bytes: list[tuple[int, int]] = field(default_factory=list)
    has_modules: bool = False


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """Of one rank, in aligned time."""

    begin_ns: int
    end_ns: int  # `NEVER` if it did not end: nothing was recorded after what was asked for
    last_ns: int  # the last moment that is known, within


def window(box: Box, clocks: Clocks, steps: range | None) -> TimeWindow | None:
    """When a rank was in some steps; None if its box has none of them. Without steps, from its
    first record to its last."""
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
        return TimeWindow(begin, last + 1, last)
    newest = int(times_ns(box).max())
    cursors = [
        clocks.aligned_ns(box.rank, cursor.t_ns)
        for cursor in box.cursors()
        if has_moved(cursor.t_ns, newest)
    ]
    return TimeWindow(begin, NEVER, max([last, *cursors]))


def timeline(
    box: Box, *, clocks: Clocks, meetings: Meetings, within: TimeWindow, end_ns: int
) -> Timeline:
    """All that a rank did within a window; what had not ended goes on to `end_ns`."""
    found = arrivals(box)
    wall = times_ns(box)
    times = clocks.aligned_ns(box.rank, wall)
    stop_ns = min(within.end_ns, end_ns)
    later = next_times_ns(box, wall)
    is_last = later == NEVER
    later = np.where(is_last, end_ns, clocks.aligned_ns(box.rank, np.where(is_last, wall, later)))
    near = (times < stop_ns) & (later >= within.begin_ns)
    spans = [
        *_spans(box, times, end_ns),
        *_collectives(box, found, meetings, times, later, is_last, near),
    ]
    cut = [each for span in spans if (each := _cut(span, within.begin_ns, stop_ns)) is not None]
    kinds = box.records["kind"]
    at = np.flatnonzero(
        np.isin(kinds, list(_INSTANTS)) & (times >= within.begin_ns) & (times <= stop_ns)
    )
    rows = zip(
        times[at].tolist(),
        map(Kind, kinds[at].tolist()),
        at.tolist(),
        box.records["thread"][at].tolist(),
        strict=True,
    )
    has_modules = bool(np.isin(kinds, (Kind.MODULE_ENTER, Kind.MODULE_EXIT)).any())
    counter = [point for point in _step_bytes(box, times) if within.begin_ns <= point[0] < stop_ns]
    return Timeline(
        box.rank, list(_in_lanes(cut)), [Instant(*row) for row in rows], counter, has_modules
    )


def _cut(span: Slice, begin_ns: int, end_ns: int) -> Slice | None:
    if begin_ns <= span.begin_ns and span.end_ns <= end_ns and span.begin_ns < end_ns:
        return span
    if span.end_ns <= begin_ns or span.begin_ns >= end_ns:
        return None
    marks = Mark.CUT_BEGIN * (span.begin_ns < begin_ns) | Mark.CUT_END * (span.end_ns > end_ns)
    begin, end = max(span.begin_ns, begin_ns), min(span.end_ns, end_ns)
    return span._replace(begin_ns=begin, end_ns=end, marks=span.marks | marks)


# -- what begins and ends --------------------------------------------------------------------------


def _spans(box: Box, times: Times, end_ns: int) -> Iterator[Slice]:
    """Beginnings with their ends. Each thread has its own, but for steps: those may end on another
    thread."""
    records, begun_ns = box.records, int(times.min(initial=end_ns))
    at = np.flatnonzero(np.isin(records["kind"], [*_BEGINS, *_ENDS]))
    is_over = bool((records["kind"] == Kind.END).any())
    columns = {
        name: records[name][at].tolist()
        for name in ("kind", "thread", "step", "subject", "module", "call", "pass")
    }
    open_: dict[tuple[object, ...], list[tuple[int, int, int]]] = {}
    for row, (index, t_ns) in enumerate(zip(at.tolist(), times[at].tolist(), strict=True)):
        kind, thread = Kind(columns["kind"][row]), columns["thread"][row]
        name = _BEGINS.get(kind) or _ENDS[kind]
        key = (
            name,
            None if name == "step" else thread,
            *(columns[part][row] for part in _KEYS[name]),
        )
        if kind in _BEGINS:
            open_.setdefault(key, []).append((t_ns, index, thread))
        elif begun := open_.get(key):
            begin_ns, first, where = begun.pop()
            yield Slice(begin_ns, max(t_ns, begin_ns), name, first, where)
        else:
            yield Slice(begun_ns, max(t_ns, begun_ns), name, index, thread, Mark.EARLY)
    last_ns = int(times.max(initial=begun_ns))
    for key, left in open_.items():
        for begin_ns, first, where in left:
            # A watch that ended in order ends the last step. What else is open then has lost its
            # end to an error.
            marks = Mark.NONE if is_over and key[0] == "step" else Mark.UNFINISHED
            end = last_ns if is_over else end_ns
            yield Slice(begin_ns, max(end, begin_ns), str(key[0]), first, where, marks)


def _collectives(
    box: Box,
    found: Arrivals,
    meetings: Meetings,
    times: Times,
    later: Times,
    is_last: Bools,
    near: Bools,
) -> Iterator[Slice]:
    """Those that are `near`; `later` is when their threads went on, for what `is_last` the end of
    the trace."""
    is_over = bool((box.records["kind"] == Kind.END).any())
    threads = box.records["thread"]
    for stream, calls in found.streams.items():
        chosen, size = near[calls.at], stream.size
        at = calls.at[chosen]
        columns = (
            each.tolist()
            for each in (at, times[at], later[at], is_last[at], calls.waits[chosen], threads[at])
        )
        rows = zip(meetings.of(stream, calls.numbers[chosen]), *columns, strict=True)
        for meeting, index, t_ns, next_ns, is_newest, waits, thread in rows:
            is_met = meeting is not None and 0 < size <= meeting.came
            if is_newest and not is_met and not is_over:
                yield Slice(
                    t_ns,
                    max(t_ns, next_ns),
                    "collective",
                    index,
                    thread,
                    Mark.UNFINISHED,
                    stream,
                    meeting,
                )
                continue
            if not waits:
                end = t_ns + ISSUE_NS
            elif is_met and meeting is not None:
                end = max(meeting.last_ns, t_ns) + AFTER_NS
            else:
                end = t_ns + CAP_NS
            yield Slice(
                t_ns,
                max(t_ns, min(end, next_ns)),
                "collective",
                index,
                thread,
                Mark.ESTIMATED,
                stream,
                meeting,
            )
    near = near & (box.records["kind"] == Kind.COLLECTIVE)
    for calls in found.streams.values():
        near[calls.at] = False
    for index in np.flatnonzero(near).tolist():  # what they were is lost
        t_ns = int(times[index])
        end = max(t_ns, min(t_ns + ISSUE_NS, int(later[index])))
        yield Slice(t_ns, end, "collective", index, int(threads[index]), Mark.ESTIMATED)


def _step_bytes(box: Box, times: Times) -> list[tuple[int, int]]:
    """How many bytes the collectives of each step have, at the beginning of the step."""
    records = box.records
    at = np.flatnonzero(records["kind"] == Kind.COLLECTIVE)
    begins = np.flatnonzero(records["kind"] == Kind.STEP_BEGIN)
    packed_ids, of_what = np.unique(records["subject"][at], return_inverse=True)
    sizes = np.array([_bytes(box.value(what)) for what in packed_ids.tolist()], np.float64)
    steps, of_step = np.unique(records["step"][at], return_inverse=True)
    totals = (
        np.bincount(of_step, weights=sizes[of_what], minlength=len(steps))
        if len(at)
        else np.zeros(0)
    )
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
    """In order, each in the first lane of its thread where it lies across no other."""
    lanes: dict[int, list[list[int]]] = {}
    slices.sort(key=itemgetter(1), reverse=True)  # the longest first, where several begin at once
    slices.sort(key=itemgetter(0))
    for each in slices:
        thread = STEPS if each.kind == "step" else each.thread
        lane = _room(lanes.setdefault(thread, []), each.begin_ns, each.end_ns)
        yield (
            each if (lane, thread) == (0, each.thread) else each._replace(lane=lane, thread=thread)
        )


def _room(lanes: list[list[int]], begin_ns: int, end_ns: int) -> int:
    for lane, ends in enumerate(lanes):
        while ends and ends[-1] <= begin_ns:
            ends.pop()
        if not ends or end_ns <= ends[-1]:
            ends.append(end_ns)
            return lane
    lanes.append([end_ns])
    return len(lanes) - 1
