"""Reads the device sections of a box: which of the collectives that the CPU issued the accelerator
had reached.

A box has these sections if its process used the native extension, with a torch that was built for
an accelerator. They are empty until a device reaches the first mark.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchwhere.blackbox.box import NO_GEOMETRY, Box, training_cursor
from torchwhere.blackbox.device_place import (
    DeviceLane,
    DeviceSource,
    read_device_place,
    read_lanes,
)
from torchwhere.blackbox.file_format import (
    DONE_BEFORE,
    DONE_MASK,
    FLAG_ON_DEVICE,
    TIMES_BYTES,
    TIMES_DONE,
    TIMES_LANE_SHIFT,
    TIMES_NUMBER,
    TIMES_NUMBER_MASK,
    TIMES_REACHED,
    TIMES_WAITED,
    WAITED_LANE_SHIFT,
    WAITED_MASK,
    EntryType,
)
from torchwhere.blackbox.replays import NO_ROW, replay_rows
from torchwhere.blackbox.string_table import group_of, op_of
from torchwhere.core.arrays import Bools
from torchwhere.core.device_place import DevicePlace
from torchwhere.core.events import Kind
from torchwhere.core.place import Place, unknown_place

Words = npt.NDArray[np.uint64]
_MOST_UNREACHED = 256
_NAMES = (EntryType.MODULE, EntryType.LINE)  # of places; a damaged place may have any id
_NUMBER_MASK = np.uint64(TIMES_NUMBER_MASK)


class DeviceState(NamedTuple):
    """The progress of the device of a rank when its box was read."""

    device_place: DevicePlace
    # for each lane with pending marks: the record of the last collective that it has reached
    reached: tuple[int, ...]
    unreached: tuple[int, ...]  # records of the first collectives that it has not reached
    skipped: int = 0  # marks that were left out

    @property
    def place(self) -> Place | None:
        """The last place that it has reached; None if it is not known."""
        return self.device_place.place


def device_lanes(box: Box) -> list[DeviceLane]:
    """The progress of each device stream that had marks."""
    return read_lanes(device_source(box))[0]


def device_state(box: Box) -> DeviceState | None:
    """The progress of the device of a rank; None if the box has no data about it."""
    lanes, _, skipped = read_lanes(device_source(box))
    if not lanes:
        return None
    return DeviceState(
        device_place=device_place(box),
        reached=_reached(box, lanes),
        unreached=_unreached(box, lanes),
        skipped=skipped,
    )


def device_place(box: Box) -> DevicePlace:
    """Where the device of a rank was, beside its CPU, when its box was read."""
    cursor = training_cursor(box, box.cursors())
    cpu = cursor.place if cursor is not None else unknown_place(box.rank)
    return read_device_place(device_source(box), cpu=cpu)


def device_source(box: Box) -> DeviceSource:
    """Access to the device sections of a box."""
    geometry = box.geometry or NO_GEOMETRY

    def read(at: int, length: int) -> bytes:
        is_device = at >= geometry.lanes_at
        data, start = (box._device, at - geometry.lanes_at) if is_device else (box._head, at)
        return data[start : start + length]

    return DeviceSource(
        geometry,
        read=read,
        name=lambda entry_id: box.name(entry_id) if box.entry_type(entry_id) in _NAMES else None,
        op=lambda entry_id: op_of(box.value(entry_id)),
        group=lambda name: group_of(box.groups().get(name)),
        wall_ns=box.wall_ns,
    )


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


def device_times(box: Box) -> tuple[Words, Words]:
    """The times when the device reached and finished each record of the box; 0: unknown.

    It may have finished before that time: see `ends_are_bounds`. A collective of a CUDA graph has
    the times of the replay: there are no marks inside a graph. Times are on the clock of the
    records (`Box.wall_ns`).
    """
    times = _times(box)
    if box.has_device:
        replays = replay_rows(box)
        is_replayed = replays != NO_ROW
        times[is_replayed] = times[replays[is_replayed]]
    return times[:, TIMES_REACHED], times[:, TIMES_DONE] & np.uint64(DONE_MASK)


def ends_are_bounds(box: Box) -> Bools:
    """For each record of the box, whether the device may have finished it before the time that
    `device_times` gives. So it is for collectives on other streams than that of the job."""
    are_bounds: Bools = _times(box)[:, TIMES_DONE] & np.uint64(DONE_BEFORE) != 0
    return are_bounds


def device_waits(box: Box) -> tuple[Words, npt.NDArray[np.int64]]:
    """The time when a stream came to the wait for each collective on another stream, and the lane
    of the stream that waits; 0 and -1: unknown."""
    words = _times(box)[:, TIMES_WAITED]
    lanes = (words >> np.uint64(WAITED_LANE_SHIFT)).astype(np.int64) - 1
    return words & np.uint64(WAITED_MASK), lanes


def device_lane_numbers(box: Box) -> npt.NDArray[np.int64]:
    """The lane of each record of the box: an index of `device_lanes`; -1: unknown."""
    words = _times(box)[:, TIMES_NUMBER]
    return (words >> np.uint64(TIMES_LANE_SHIFT)).astype(np.int64) - 1


def _times(box: Box) -> Words:
    """The slot of the section of times that belongs to each record of the box; zeros if it belongs
    to another record by now, or is not in the file."""
    numbers, slots = box.records["number"].astype(np.uint64), box.times_slots()
    times = np.zeros((len(numbers), TIMES_BYTES // 8), np.uint64)
    words = slots.shape[1]  # fewer in older files
    if box.geometry is not None and box.has_device:
        rows = (numbers % np.uint64(box.geometry.capacity)).astype(np.int64)
        is_read = rows < len(slots)
        times[is_read, :words] = slots[rows[is_read]]
        times[times[:, TIMES_NUMBER] & _NUMBER_MASK != numbers + np.uint64(1)] = 0
    return times
