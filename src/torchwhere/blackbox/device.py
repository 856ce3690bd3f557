"""Reads the device sections of a box: which of the collectives that the CPU issued the accelerator
had reached.

A box has these sections if its process used the native extension, with a torch that was built for
an accelerator. They are empty until a device reaches the first mark.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import (
    COUNTER_STREAM,
    LANE_BYTES,
    LANE_NEXT_PLACE,
    LANE_NEXT_RECORD,
    LANE_PENDING,
    LANE_PLACE,
    LANE_RECORD,
    LANE_STEP,
    LANE_STREAM,
    LANE_TIME,
    PROGRESS_BYTES,
    PROGRESS_DONE,
    PROGRESS_DONE_TIME,
    PROGRESS_REACHED,
    PROGRESS_REACHED_TIME,
    TIMES_BYTES,
    TIMES_DONE,
    TIMES_NUMBER,
    TIMES_REACHED,
    cursor_place,
    unpack_stream,
)
from torchwhere.core.events import Kind
from torchwhere.core.place import Place

Words = npt.NDArray[np.uint64]
_MOST_UNREACHED = 256


@dataclass(frozen=True, slots=True)
class DeviceLane:
    """The progress of a device on one of its streams."""

    device: int
    stream: int
    place: Place | None  # the last mark that the device has reached; None: none yet
    t_ns: int  # wall clock when it reached that mark
    record: int | None  # number of the record of the last collective that it has reached
    pending: int  # marks that it has not reached
    next_place: Place | None
    next_record: int | None


class DeviceState(NamedTuple):
    """The progress of the device of a rank when its box was read."""

    looked_ns: int  # wall clock when the device was last polled; 0: unknown
    reached_ns: int  # wall clock of the last mark that it has reached; 0: none
    place: Place | None  # of that mark
    pending: int  # marks that it has not reached
    # for each lane with pending marks: the record of the last collective that it has reached
    reached: tuple[int, ...]
    unreached: tuple[int, ...]  # records of the first collectives that it has not reached


@dataclass(frozen=True, slots=True)
class StreamProgress:
    """How many collectives of a stream the device has reached, and how many are done."""

    group: int  # id of the GROUP entry
    source: int
    destination: int
    reached: int
    reached_ns: int  # wall clock; 0: none
    done: int
    done_ns: int


def device_lanes(box: Box) -> list[DeviceLane]:
    """The progress of each device stream that had marks."""
    slots = _section(box, 0, LANE_BYTES)[:-1]
    return [_lane(box, words) for words in slots if words[LANE_STREAM]]


def device_state(box: Box) -> DeviceState | None:
    """The progress of the device of a rank; None if the box has no data about it."""
    lanes = device_lanes(box)
    if not lanes:
        return None
    looked = _section(box, 0, LANE_BYTES)[-1]
    last = max((lane for lane in lanes if lane.place), key=lambda lane: lane.t_ns, default=None)
    return DeviceState(
        looked_ns=_wall_ns(box, looked[0]),
        reached_ns=last.t_ns if last is not None else 0,
        place=last.place if last is not None else None,
        pending=sum(lane.pending for lane in lanes),
        reached=tuple(lane.record for lane in lanes if lane.pending and lane.record is not None),
        unreached=_unreached(box, lanes),
    )


def _unreached(box: Box, lanes: list[DeviceLane]) -> tuple[int, ...]:
    """The records of the first collectives that the device has not reached."""
    pending = [lane.next_record for lane in lanes if lane.next_record is not None]
    if not pending:
        return ()
    numbers = box.records["number"]
    is_issued = (box.records["kind"] == int(Kind.COLLECTIVE)) & (numbers >= min(pending))
    is_waiting = is_issued & (device_times(box)[0] == 0)
    return tuple(numbers[is_waiting][:_MOST_UNREACHED].tolist())


def stream_progress(box: Box) -> list[StreamProgress]:
    """The progress of all streams of collectives with marks."""
    geometry = box.geometry
    if geometry is None or not geometry.lanes:
        return []
    counters = np.frombuffer(box._head[geometry.counters_at : geometry.ring_at], np.uint64)
    streams = counters.reshape(-1, 4)[:, COUNTER_STREAM]
    slots = _section(box, geometry.progress_at - geometry.lanes_at, PROGRESS_BYTES)
    return [
        StreamProgress(
            *unpack_stream(int(stream)),
            reached=int(slot[PROGRESS_REACHED]),
            reached_ns=_wall_ns(box, slot[PROGRESS_REACHED_TIME]),
            done=int(slot[PROGRESS_DONE]),
            done_ns=_wall_ns(box, slot[PROGRESS_DONE_TIME]),
        )
        for stream, slot in zip(streams, slots, strict=False)
        if stream and (slot[PROGRESS_REACHED] or slot[PROGRESS_DONE])
    ]


def device_times(box: Box) -> tuple[Words, Words]:
    """The times when the device reached and finished each record of the box; 0: unknown.

    Times are on the clock of the records (`Box.wall_ns`).
    """
    geometry = box.geometry
    numbers = box.records["number"].astype(np.uint64)
    reached, done = np.zeros(len(numbers), np.uint64), np.zeros(len(numbers), np.uint64)
    if geometry is None or not geometry.lanes:
        return reached, done
    slots = _section(box, geometry.times_at - geometry.lanes_at, TIMES_BYTES)
    rows = numbers % np.uint64(geometry.capacity)
    is_read = rows < len(slots)
    times = slots[np.where(is_read, rows, 0)] if len(slots) else np.zeros((len(rows), 3), np.uint64)
    is_own = is_read & (times[:, TIMES_NUMBER] == numbers + np.uint64(1))
    reached[is_own] = times[is_own, TIMES_REACHED]
    done[is_own] = times[is_own, TIMES_DONE]
    return reached, done


def _section(box: Box, start: int, slot_bytes: int) -> Words:
    """The slots of one device section, as rows of words."""
    geometry = box.geometry
    if geometry is None or not geometry.lanes:
        return np.empty((0, slot_bytes // 8), np.uint64)
    slots = {
        LANE_BYTES: geometry.lanes,
        PROGRESS_BYTES: geometry.counters,
        TIMES_BYTES: geometry.capacity,
    }[slot_bytes]
    data = box._device[start : start + slots * slot_bytes]
    whole = len(data) // slot_bytes * slot_bytes
    return np.frombuffer(data[:whole], np.uint64).reshape(-1, slot_bytes // 8)


def _lane(box: Box, words: Words) -> DeviceLane:
    stream, t_ns = int(words[LANE_STREAM]), int(words[LANE_TIME])
    pending = int(words[LANE_PENDING])
    return DeviceLane(
        device=(stream & 0xFF) - 1,
        stream=stream >> 8,
        place=_place(box, words[LANE_PLACE], int(words[LANE_STEP])) if t_ns else None,
        t_ns=_wall_ns(box, t_ns),
        record=_number(words[LANE_RECORD]),
        pending=pending,
        next_place=_place(box, words[LANE_NEXT_PLACE], None) if pending else None,
        next_record=_number(words[LANE_NEXT_RECORD]),
    )


def _place(box: Box, word: np.uint64, step: int | None) -> Place:
    return Place(rank=box.rank, step=step, **cursor_place(int(word), name=box.name))


def _number(word: np.uint64) -> int | None:
    return int(word) - 1 if word else None


def _wall_ns(box: Box, t_ns: int | np.uint64) -> int:
    return box.wall_ns(int(t_ns)) if t_ns else 0
