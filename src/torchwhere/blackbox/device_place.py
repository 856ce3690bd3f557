"""Reads the lanes of a device, and its place, from a box: that of this process, one that is polled,
or a file.

Reads a few hundred bytes by offset, without numpy. It calls neither the device nor its driver.
Like all readers, it never raises on content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torchwhere.blackbox.file_format import (
    COUNTER_BYTES,
    COUNTER_COUNT,
    COUNTER_STREAM,
    COUNTER_TIME,
    DONE_MASK,
    LANE_BYTES,
    LANE_STREAM,
    NO_STEP,
    POLL_SKIPPED,
    POLL_TIME,
    PROGRESS_BYTES,
    PROGRESS_DONE,
    PROGRESS_REACHED,
    RECORD_BYTES,
    TIMES_BYTES,
    TIMES_DONE,
    TIMES_NUMBER,
    TIMES_NUMBER_MASK,
    TIMES_REACHED,
    TIMES_WAITED,
    WAITED_MASK,
    Geometry,
    Record,
    cursor_place,
    slots,
    unpack_record,
)
from torchwhere.blackbox.string_table import Group
from torchwhere.core.device_place import CallState, DeviceCall, DevicePlace
from torchwhere.core.events import Kind
from torchwhere.core.place import Place, line_fields

NO_SECTIONS = "the box has no data on a device"
NO_MARKS = "nothing was marked on a device yet"

_COUNTERS_AT_ONCE = 16

Words = list[int]


class DeviceLane(NamedTuple):
    """The progress of a device on one of its streams, as the box holds it: places are packed, and
    times are on the clock of the records."""

    device: int
    stream: int
    place: int  # of the last mark that the device has reached
    step: int
    t_ns: int  # when it reached that mark; 0: none yet
    record: int | None  # number of the record of the last collective that it has reached
    pending: int  # marks that it has not reached
    next_place: int
    next_record: int | None

    @classmethod
    def of(cls, words: Words) -> DeviceLane:
        # in the order of the constants LANE_PLACE, LANE_TIME, ... of the format
        place, t_ns, step, stream, record, pending, next_place, next_record = words
        return cls(
            device=(stream & 0xFF) - 1,
            stream=stream >> 8,
            place=place,
            step=step,
            t_ns=t_ns,
            record=record - 1 if record else None,
            pending=pending,
            next_place=next_place,
            next_record=next_record - 1 if next_record else None,
        )


@dataclass(frozen=True, slots=True)
class DeviceSource:
    """Access to one box: its bytes by offset, and its names by id."""

    geometry: Geometry
    read: Callable[[int, int], bytes]  # offset and length; less where the file ends
    name: Callable[[int], str | None]
    op: Callable[[int], tuple[str, str]]  # of a COLLECTIVE entry, with the name of its group
    group: Callable[[str], Group | None]  # by its name
    wall_ns: Callable[[int], int]


def read_device_place(source: DeviceSource, *, cpu: Place) -> DevicePlace:
    """Read where the device of a rank is, given where its CPU is."""
    if not source.geometry.lanes:
        return DevicePlace(cpu, problem=NO_SECTIONS)
    lanes, looked, _ = read_lanes(source)
    if not lanes:
        return DevicePlace(cpu, problem=NO_MARKS)
    last = max(lanes, key=lambda lane: lane.t_ns)
    pending = [lane for lane in lanes if lane.pending]
    first = last if last.pending else min(pending, key=_issue_order, default=None)
    place, collective = _reached(source, last, cpu.rank)
    following, next_collective = _unreached(source, first, cpu.rank, is_only=len(lanes) == 1)
    return DevicePlace(
        cpu,
        place=place,
        collective=collective,
        next=following,
        next_collective=next_collective,
        collectives_behind=sum(stream.issued - stream.reached for stream in device_streams(source)),
        pending=sum(lane.pending for lane in pending),
        t_ns=source.wall_ns(last.t_ns) if last.t_ns else 0,
        looked_ns=source.wall_ns(looked) if looked else 0,
    )


def _issue_order(lane: DeviceLane) -> int:
    """The record of the first pending mark. A mark without a record comes last."""
    return 1 << 64 if lane.next_record is None else lane.next_record


def _reached(
    source: DeviceSource, lane: DeviceLane, rank: int
) -> tuple[Place | None, DeviceCall | None]:
    """The last mark of a lane that the device has reached: its place, and its collective."""
    if not lane.t_ns:
        return None, None
    number, state = _last_call(source, lane)
    return _mark(source, lane.place, lane.step, _record(source, number), state, rank)


def _last_call(source: DeviceSource, lane: DeviceLane) -> tuple[int | None, CallState | None]:
    """The record of the collective at the last mark of a lane, and how far the device is in it. Two
    times None if that mark is not at a collective."""
    following = lane.next_record if lane.pending else None
    waited = _times(source, following)
    if waited[TIMES_WAITED] & WAITED_MASK == lane.t_ns and waited[TIMES_REACHED]:
        return following, CallState.RUNNING  # the stream waits for a collective on another stream
    times = _times(source, lane.record)
    if times[TIMES_DONE] & DONE_MASK == lane.t_ns:
        return lane.record, CallState.DONE
    if times[TIMES_REACHED] != lane.t_ns:
        return None, None
    is_running = following is not None and following == lane.record
    return lane.record, CallState.RUNNING if is_running else CallState.REACHED


def _times(source: DeviceSource, number: int | None) -> Words:
    """The times of a record; zeros if they are not known."""
    geometry, no_times = source.geometry, [0] * (TIMES_BYTES // 8)
    if number is None:
        return no_times
    at = geometry.times_at + number % geometry.capacity * geometry.times_bytes
    (times,) = _slots(source, at, 1, geometry.times_bytes)
    is_own = times[TIMES_NUMBER] & TIMES_NUMBER_MASK == number + 1
    return (times + no_times)[: len(no_times)] if is_own else no_times


def _unreached(
    source: DeviceSource, lane: DeviceLane | None, rank: int, *, is_only: bool
) -> tuple[Place | None, DeviceCall | None]:
    """The first mark of a lane that the device has not reached: its place, and its collective. On
    the only lane, a place has the step of the mark before it: each new step has its own mark."""
    if lane is None:
        return None, None
    number = lane.next_record
    record = _record(source, number)
    is_running = _times(source, number)[TIMES_REACHED] > 0
    state = CallState.RUNNING if is_running else CallState.ISSUED
    has_its_step = is_only and number is None and lane.t_ns
    step = lane.step if has_its_step else NO_STEP
    if record is not None:
        step = record.step
    return _mark(source, lane.next_place, step, record, state, rank)


def _mark(
    source: DeviceSource,
    packed_place: int,
    step: int,
    record: Record | None,
    state: CallState | None,
    rank: int,
) -> tuple[Place, DeviceCall | None]:
    """The place of a mark, and the collective of its record, if it has one."""
    place = Place(
        rank=rank,
        step=None if step == NO_STEP else step,
        **line_fields(source.name(record.line) if record is not None else None),
        **cursor_place(packed_place, name=source.name),
    )
    if record is None or state is None:
        return place, None
    op, name = source.op(record.subject)
    group = source.group(name)
    return place, DeviceCall(op, name if group is None else group.title, record.extra, state)


def _record(source: DeviceSource, number: int | None) -> Record | None:
    """The record of a collective; None if it was overwritten or is torn."""
    geometry = source.geometry
    if number is None:
        return None
    at = geometry.ring_at + number % geometry.capacity * RECORD_BYTES
    record = unpack_record(source.read(at, RECORD_BYTES))
    if record is None or record.number != number or record.kind != Kind.COLLECTIVE:
        return None
    return record


class DeviceStream(NamedTuple):
    """A stream of collectives that run on a device."""

    stream: int  # the word of its counter
    issued: int
    reached: int


def device_streams(source: DeviceSource) -> Iterator[DeviceStream]:
    """The streams of collectives on devices. A stream of which no device has reached anything is on
    the CPU, as far as is known.

    If no mark was pending at the last look, the devices had reached everything that was issued
    before: a collective that was captured into a graph has no mark.
    """
    lanes, looked, _ = read_lanes(source)
    is_idle = not any(lane.pending for lane in lanes)
    for counter, progress in read_progress(source) if lanes else ():
        if progress[PROGRESS_REACHED] or progress[PROGRESS_DONE]:
            issued = counter[COUNTER_COUNT]
            has_all = is_idle and counter[COUNTER_TIME] <= looked
            reached = issued if has_all else min(issued, progress[PROGRESS_REACHED])
            yield DeviceStream(counter[COUNTER_STREAM], issued, reached)


def read_progress(source: DeviceSource) -> Iterator[tuple[Words, Words]]:
    """The counters in use, which are the first ones, each with the progress of its stream."""
    geometry = source.geometry
    for first in range(0, geometry.counters, _COUNTERS_AT_ONCE):
        count = min(_COUNTERS_AT_ONCE, geometry.counters - first)
        counters_at = geometry.counters_at + first * COUNTER_BYTES
        progress_at = geometry.progress_at + first * PROGRESS_BYTES
        for counter, progress in zip(
            _slots(source, counters_at, count, COUNTER_BYTES),
            _slots(source, progress_at, count, PROGRESS_BYTES),
            strict=True,
        ):
            if not counter[COUNTER_STREAM]:
                return
            yield counter, progress


def read_lanes(source: DeviceSource) -> tuple[list[DeviceLane], int, int]:
    """The lanes in use, the time of the last look at the device, and how many marks were left
    out."""
    geometry = source.geometry
    if not geometry.lanes:
        return [], 0, 0
    *lanes, last = _slots(source, geometry.lanes_at, geometry.lanes, LANE_BYTES)
    in_use = [DeviceLane.of(words) for words in lanes if words[LANE_STREAM]]
    return in_use, last[POLL_TIME], last[POLL_SKIPPED]


def _slots(source: DeviceSource, at: int, count: int, size: int) -> list[Words]:
    """The slots of a section; zeros for slots that the file does not have whole."""
    data = source.read(at, count * size)
    return slots(data[: len(data) // size * size].ljust(count * size, b"\0"), size)
