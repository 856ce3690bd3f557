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

from torchwhere.blackbox.box import Box, training_cursor
from torchwhere.blackbox.device_place import (
    NO_SECTIONS,
    DeviceLane,
    DeviceSource,
    call_name,
    read_device_place,
    read_lanes,
    read_progress,
)
from torchwhere.blackbox.file_format import (
    COUNTER_STREAM,
    FLAG_ON_DEVICE,
    PROGRESS_DONE,
    PROGRESS_DONE_TIME,
    PROGRESS_REACHED,
    PROGRESS_REACHED_TIME,
    TIMES_BYTES,
    TIMES_DONE,
    TIMES_LANE_SHIFT,
    TIMES_NUMBER,
    TIMES_NUMBER_MASK,
    TIMES_REACHED,
    unpack_stream,
)
from torchwhere.blackbox.replays import NO_ROW, replay_rows
from torchwhere.core.device_place import DevicePlace
from torchwhere.core.events import Kind
from torchwhere.core.place import Place, unknown_place

Words = npt.NDArray[np.uint64]
_MOST_UNREACHED = 256
_NUMBER_MASK = np.uint64(TIMES_NUMBER_MASK)


class DeviceState(NamedTuple):
    """The progress of the device of a rank when its box was read."""

    device_place: DevicePlace
    # for each lane with pending marks: the record of the last collective that it has reached
    reached: tuple[int, ...]
    unreached: tuple[int, ...]  # records of the first collectives that it has not reached

    @property
    def looked_ns(self) -> int:
        """Wall clock when the device was last looked at; 0: unknown."""
        return self.device_place.looked_ns

    @property
    def reached_ns(self) -> int:
        """Wall clock of the last mark that it has reached; 0: none."""
        return self.device_place.t_ns

    @property
    def place(self) -> Place | None:
        """The place of that mark."""
        return self.device_place.place

    @property
    def pending(self) -> int:
        """The number of marks that it has not reached."""
        return self.device_place.pending


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
    source = _source(box)
    return [] if source is None else read_lanes(source)[0]


def device_state(box: Box) -> DeviceState | None:
    """The progress of the device of a rank; None if the box has no data about it."""
    lanes = device_lanes(box)
    if not lanes:
        return None
    return DeviceState(
        device_place=device_place(box),
        reached=_reached(box, lanes),
        unreached=_unreached(box, lanes),
    )


def device_place(box: Box) -> DevicePlace:
    """Where the device of a rank was, beside its CPU, when its box was read."""
    cursor = training_cursor(box, box.cursors())
    cpu = cursor.place if cursor is not None else unknown_place(box.rank)
    source = _source(box)
    if source is None:
        return DevicePlace(cpu, problem=NO_SECTIONS)
    return read_device_place(source, cpu=cpu)


def _source(box: Box) -> DeviceSource | None:
    """Access to the device sections of a box; None if its header is lost."""
    geometry = box.geometry
    if geometry is None:
        return None

    def read(at: int, length: int) -> bytes:
        is_device = at >= geometry.lanes_at
        data, start = (box._device, at - geometry.lanes_at) if is_device else (box._head, at)
        return data[start : start + length]

    def op_and_group(entry_id: int) -> tuple[str, str]:
        return call_name(box.value(entry_id), lambda name: box.groups().get(name))

    return DeviceSource(geometry, read, box.name, op_and_group, box.wall_ns)


def _reached(box: Box, lanes: list[DeviceLane]) -> tuple[int, ...]:
    """The record of the last collective that each lane with pending marks has reached. A device
    that has reached a replay of a CUDA graph is in the first collective of the graph."""
    reached = [lane.record for lane in lanes if lane.pending and lane.record is not None]
    numbers, replays = box.records["number"], replay_rows(box)
    rows = np.flatnonzero(replays != NO_ROW)[::-1]
    # in reverse, so that the first collective of a replay is the last one that is stored
    first = dict(zip(numbers[replays[rows]].tolist(), numbers[rows].tolist(), strict=True))
    return tuple(first.get(record, record) for record in reached)


def _unreached(box: Box, lanes: list[DeviceLane]) -> tuple[int, ...]:
    """The records of the first collectives that the device has not reached."""
    first = min((_first_unreached(lane) for lane in lanes if lane.pending), default=None)
    if first is None:
        return ()
    numbers, flags = box.records["number"], box.records["flags"]
    is_issued = (box.records["kind"] == int(Kind.COLLECTIVE)) & (numbers >= first)
    is_on_device = flags & FLAG_ON_DEVICE != 0
    if is_on_device.any():  # no mark belongs to a collective on the CPU
        is_issued &= is_on_device
    is_waiting = is_issued & (device_times(box)[0] == 0)
    return tuple(numbers[is_waiting][:_MOST_UNREACHED].tolist())


def _first_unreached(lane: DeviceLane) -> int:
    """The lowest number of a collective that a lane may not have reached. If its first pending mark
    is a place, only the last collective that it has reached is known."""
    if lane.next_record is not None:
        return lane.next_record
    return 0 if lane.record is None else lane.record + 1


def stream_progress(box: Box) -> list[StreamProgress]:
    """The progress of all streams of collectives with marks."""
    source = _source(box)
    if source is None or not source.geometry.lanes:
        return []
    return [
        StreamProgress(
            *unpack_stream(counter[COUNTER_STREAM]),
            reached=slot[PROGRESS_REACHED],
            reached_ns=_wall_ns(box, slot[PROGRESS_REACHED_TIME]),
            done=slot[PROGRESS_DONE],
            done_ns=_wall_ns(box, slot[PROGRESS_DONE_TIME]),
        )
        for counter, slot in read_progress(source)
        if slot[PROGRESS_REACHED] or slot[PROGRESS_DONE]
    ]


def device_times(box: Box) -> tuple[Words, Words]:
    """The times when the device reached and finished each record of the box; 0: unknown.

    A collective of a CUDA graph has the times of the replay: there are no marks inside a graph.
    Times are on the clock of the records (`Box.wall_ns`).
    """
    geometry = box.geometry
    numbers = box.records["number"].astype(np.uint64)
    reached, done = np.zeros(len(numbers), np.uint64), np.zeros(len(numbers), np.uint64)
    if geometry is None or not geometry.lanes:
        return reached, done
    slots = _times(box)
    rows = numbers % np.uint64(geometry.capacity)
    is_read = rows < len(slots)
    times = slots[np.where(is_read, rows, 0)] if len(slots) else np.zeros((len(rows), 3), np.uint64)
    is_own = is_read & (times[:, TIMES_NUMBER] & _NUMBER_MASK == numbers + np.uint64(1))
    reached[is_own] = times[is_own, TIMES_REACHED]
    done[is_own] = times[is_own, TIMES_DONE]
    replays = replay_rows(box)
    is_replayed = replays != NO_ROW
    reached[is_replayed], done[is_replayed] = (
        of_replay[replays[is_replayed]] for of_replay in (reached.copy(), done.copy())
    )
    return reached, done


def device_lane_numbers(box: Box) -> npt.NDArray[np.int64]:
    """The lane of each record of the box: an index of `device_lanes`; -1: unknown."""
    geometry = box.geometry
    numbers = box.records["number"].astype(np.uint64)
    words = np.zeros(len(numbers), np.uint64)
    if geometry is not None and geometry.lanes:
        slots = _times(box)
        rows = (numbers % np.uint64(geometry.capacity)).astype(np.int64)
        is_read = rows < len(slots)
        words[is_read] = slots[rows[is_read], TIMES_NUMBER]
        words[words & _NUMBER_MASK != numbers + np.uint64(1)] = 0
    return (words >> np.uint64(TIMES_LANE_SHIFT)).astype(np.int64) - 1


def _times(box: Box) -> Words:
    """The slots of the section of times, as rows of words."""
    geometry = box.geometry
    if geometry is None or not geometry.lanes:
        return np.empty((0, TIMES_BYTES // 8), np.uint64)
    start = geometry.times_at - geometry.lanes_at
    data = box._device[start : start + geometry.capacity * TIMES_BYTES]
    whole = len(data) // TIMES_BYTES * TIMES_BYTES
    return np.frombuffer(data[:whole], np.uint64).reshape(-1, TIMES_BYTES // 8)


def _wall_ns(box: Box, t_ns: int) -> int:
    return box.wall_ns(t_ns) if t_ns else 0
