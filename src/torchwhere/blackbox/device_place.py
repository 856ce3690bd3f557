"""Reads the place of a device from a box: that of this process, one that is polled, or a file.

Reads a few hundred bytes by offset, without numpy. It makes no call of the device or its driver.
Like all readers, it never raises on content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchwhere.blackbox.file_format import (
    COUNTER_BYTES,
    COUNTER_COUNT,
    COUNTER_STREAM,
    COUNTER_TIME,
    LANE_BYTES,
    LANE_NEXT_PLACE,
    LANE_NEXT_RECORD,
    LANE_PENDING,
    LANE_PLACE,
    LANE_RECORD,
    LANE_STEP,
    LANE_STREAM,
    LANE_TIME,
    NO_STEP,
    PROGRESS_BYTES,
    PROGRESS_DONE,
    PROGRESS_REACHED,
    RECORD_BYTES,
    TIMES_BYTES,
    TIMES_DONE,
    TIMES_NUMBER,
    TIMES_NUMBER_MASK,
    TIMES_REACHED,
    Geometry,
    Record,
    cursor_place,
    unpack_record,
)
from torchwhere.blackbox.live_names import UNKNOWN_OP
from torchwhere.blackbox.string_table import group_of, text_of
from torchwhere.core.device_place import CallState, DeviceCall, DevicePlace
from torchwhere.core.events import Kind
from torchwhere.core.place import Place, line_fields

NO_SECTIONS = "the box has no data on a device"
NO_MARKS = "nothing was marked on a device yet"

_COUNTERS_AT_ONCE = 16

Words = list[int]


@dataclass(frozen=True, slots=True)
class DeviceSource:
    """Access to one box: its bytes by offset, and its names by id."""

    geometry: Geometry
    read: Callable[[int, int], bytes]  # offset and length; less where the file ends
    name: Callable[[int], str | None]
    op_and_group: Callable[[int], tuple[str, str]]  # of a COLLECTIVE entry, as users know them
    wall_ns: Callable[[int], int]


def call_name(entry: Any, group: Callable[[str], Any]) -> tuple[str, str]:
    """The op of a COLLECTIVE entry and the title of its group. `group` returns the entry of a
    group, by its name."""
    fields = entry if isinstance(entry, dict) else {}
    name = text_of(fields, "group") or ""
    its_group = group_of(group(name))
    return text_of(fields, "op") or UNKNOWN_OP[
        0
    ], its_group.title if its_group is not None else name


def read_device_place(source: DeviceSource, *, cpu: Place) -> DevicePlace:
    """Read where the device of a rank is, given where its CPU is."""
    if not source.geometry.lanes:
        return DevicePlace(cpu, problem=NO_SECTIONS)
    lanes, looked = _lanes(source)
    if not lanes:
        return DevicePlace(cpu, problem=NO_MARKS)
    last = max(lanes, key=lambda lane: lane[LANE_TIME])
    pending = [lane for lane in lanes if lane[LANE_PENDING]]
    first = last if last[LANE_PENDING] else min(pending, key=_issue_order, default=None)
    place, collective = _reached(source, last, cpu.rank)
    following, next_collective = _unreached(source, first, cpu.rank)
    return DevicePlace(
        cpu,
        place=place,
        collective=collective,
        next=following,
        next_collective=next_collective,
        collectives_behind=sum(stream.issued - stream.reached for stream in device_streams(source)),
        pending=sum(lane[LANE_PENDING] for lane in pending),
        t_ns=source.wall_ns(last[LANE_TIME]) if last[LANE_TIME] else 0,
        looked_ns=source.wall_ns(looked) if looked else 0,
    )


def _issue_order(lane: Words) -> int:
    """The record of the first pending mark. A mark without a record comes last."""
    return lane[LANE_NEXT_RECORD] or 1 << 64


def _reached(
    source: DeviceSource, lane: Words, rank: int
) -> tuple[Place | None, DeviceCall | None]:
    """The last mark of a lane that the device has reached: its place, and its collective."""
    if not lane[LANE_TIME]:
        return None, None
    state = _call_state(source, lane)
    record = _record(source, lane[LANE_RECORD]) if state is not None else None
    call = _call(source, record, state) if state is not None else None
    return _place(source, lane[LANE_PLACE], lane[LANE_STEP], record, rank), call


def _call_state(source: DeviceSource, lane: Words) -> CallState | None:
    """How far the device is in the last collective of a lane; None if a later mark was reached."""
    geometry, number = source.geometry, lane[LANE_RECORD]
    if not number:
        return None
    at = geometry.times_at + (number - 1) % geometry.capacity * TIMES_BYTES
    times = _words(source.read(at, TIMES_BYTES))
    if len(times) < TIMES_BYTES // 8 or times[TIMES_NUMBER] & TIMES_NUMBER_MASK != number:
        return None
    if times[TIMES_DONE] == lane[LANE_TIME]:
        return CallState.DONE
    if times[TIMES_REACHED] != lane[LANE_TIME]:
        return None
    is_running = lane[LANE_PENDING] and lane[LANE_NEXT_RECORD] == number
    return CallState.RUNNING if is_running else CallState.REACHED


def _unreached(
    source: DeviceSource, lane: Words | None, rank: int
) -> tuple[Place | None, DeviceCall | None]:
    """The first mark of a lane that the device has not reached: its place, and its collective."""
    if lane is None:
        return None, None
    number = lane[LANE_NEXT_RECORD]
    record = _record(source, number) if number else None
    state = CallState.RUNNING if number and number == lane[LANE_RECORD] else CallState.ISSUED
    step = record.step if record is not None else NO_STEP
    return _place(source, lane[LANE_NEXT_PLACE], step, record, rank), _call(source, record, state)


def _place(
    source: DeviceSource, packed_place: int, step: int, record: Record | None, rank: int
) -> Place:
    return Place(
        rank=rank,
        step=None if step == NO_STEP else step,
        **line_fields(source.name(record.line) if record is not None else None),
        **cursor_place(packed_place, name=source.name),
    )


def _record(source: DeviceSource, number: int) -> Record | None:
    """The record of a collective, by its number plus 1; None if it was overwritten or is torn."""
    geometry = source.geometry
    at = geometry.ring_at + (number - 1) % geometry.capacity * RECORD_BYTES
    record = unpack_record(source.read(at, RECORD_BYTES))
    if record is None or record.number != number - 1 or record.kind != Kind.COLLECTIVE:
        return None
    return record


def _call(source: DeviceSource, record: Record | None, state: CallState) -> DeviceCall | None:
    if record is None:
        return None
    op, group = source.op_and_group(record.subject)
    return DeviceCall(op, group, record.extra, state)


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
    lanes, looked = _lanes(source)
    is_idle = not any(lane[LANE_PENDING] for lane in lanes)
    for counter, progress in _counters(source) if lanes else ():
        if progress[PROGRESS_REACHED] or progress[PROGRESS_DONE]:
            issued = counter[COUNTER_COUNT]
            has_all = is_idle and counter[COUNTER_TIME] <= looked
            reached = issued if has_all else min(issued, progress[PROGRESS_REACHED])
            yield DeviceStream(counter[COUNTER_STREAM], issued, reached)


def _counters(source: DeviceSource) -> Iterator[tuple[Words, Words]]:
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


def _lanes(source: DeviceSource) -> tuple[list[Words], int]:
    """The lanes in use, and the time of the last look at the device."""
    geometry = source.geometry
    *slots, last = _slots(source, geometry.lanes_at, geometry.lanes, LANE_BYTES) or [[0]]
    return [words for words in slots if words[LANE_STREAM]], last[0]


def _slots(source: DeviceSource, at: int, count: int, size: int) -> list[Words]:
    """The slots of a section; zeros where the file is cut short."""
    data = source.read(at, count * size).ljust(count * size, b"\0")
    words = _words(data)
    return [words[slot : slot + size // 8] for slot in range(0, len(words), size // 8)]


def _words(data: bytes) -> Words:
    return memoryview(data[: len(data) // 8 * 8]).cast("Q").tolist()
