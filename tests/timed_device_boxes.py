"""Boxes of ranks with a device that never ran: a test says when the device reached each call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchwhere.blackbox.file_format import (
    FLAG_ASYNC,
    FLAG_REPLAYED,
    LANE_BYTES,
    LANE_STREAM,
    LANE_TIME,
    TIMES_BYTES,
    TIMES_DONE,
    TIMES_LANE_SHIFT,
    TIMES_NUMBER,
    TIMES_REACHED,
    TIMES_WAITED,
    WAITED_LANE_SHIFT,
    EntryType,
)
from torchwhere.blackbox.file_names import box_name
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.events import Kind

WALL_NS = 1_800_000_000_000_000_000
BOOT_NS = 10**13  # what the clock of the ranks shows when the job begins
MS = 1_000_000


@dataclass(frozen=True)
class DeviceEvent:
    """A call or the begin of a step, in ms since the begin of the job. The CPU issues it at
    `issued`; None: the device has not reached it, or its end was not recorded."""

    step: int
    reached: float | None
    done: float | None = None
    waited: float | None = None  # when the stream of `wait_lane` came to the wait for it
    wait_lane: int = 0
    issued: float = 0
    op: str = "all_reduce"
    is_async: bool = False
    lane: int | None = 0  # None: unknown
    is_step: bool = False
    is_replayed: bool = False


def step_mark(step: int, reached: float | None) -> DeviceEvent:
    return DeviceEvent(step, reached, is_step=True)


def write_box(
    folder: Path,
    rank: int,
    events: Sequence[DeviceEvent],
    *,
    ranks: int = 2,
    streams: Sequence[int] = (0,),
    host: str = "a",
    ahead_ns: int = 0,
    has_device: bool = True,
) -> None:
    """Write one box. `streams` are those of its lanes; its clock is `ahead_ns` ahead. Without a
    device, the box has only what the CPU issued."""
    meta = {
        "rank": rank,
        "world_size": ranks,
        "run_id": "device",
        "host": host,
        "pid": 100 + rank,
        "started_ns": WALL_NS,
        "clock_offset_ns": WALL_NS - BOOT_NS + ahead_ns,
    }
    box = BoxWriter(folder / box_name(rank), meta=meta, records=64, has_device=has_device)
    box.intern(EntryType.THREAD, "0\tMainThread")
    group = {"name": "0", "desc": "", "ranks": list(range(ranks)), "backend": "nccl"}
    box.intern(EntryType.GROUP, json.dumps(group))
    for index, stream in enumerate(streams if has_device else ()):
        lane_at = (box.geometry.lanes_at + index * LANE_BYTES) // 8
        box.words[lane_at + LANE_STREAM] = stream << 8 | 1
        box.words[lane_at + LANE_TIME] = BOOT_NS
    number = 0
    for event in events:
        fields = {"op": event.op, "group": "0", "dtype": "float32", "shapes": [[4]], "bytes": 16}
        subject = 0 if event.is_step else box.intern(EntryType.COLLECTIVE, json.dumps(fields))
        kind = Kind.STEP_BEGIN if event.is_step else Kind.COLLECTIVE
        flags = FLAG_ASYNC * event.is_async | FLAG_REPLAYED * event.is_replayed
        record = box.record(
            kind, _ns(event.issued), 1, flags, 0, event.step, 0, 0, 0, 0, subject, 0, 0, number
        )
        number += not event.is_step
        if has_device:
            _put_times(box, record, event)
    box.close()


def _ns(ms: float) -> int:
    return BOOT_NS + int(ms * MS)


def _put_times(box: BoxWriter, record: int, event: DeviceEvent) -> None:
    if event.reached is None:
        return
    at = (box.geometry.times_at + record * TIMES_BYTES) // 8
    lane = 0 if event.lane is None else event.lane + 1
    box.words[at + TIMES_NUMBER] = record + 1 | lane << TIMES_LANE_SHIFT
    box.words[at + TIMES_REACHED] = _ns(event.reached)
    box.words[at + TIMES_DONE] = 0 if event.done is None else _ns(event.done)
    if event.waited is not None:
        wait_lane = event.wait_lane + 1
        box.words[at + TIMES_WAITED] = _ns(event.waited) | wait_lane << WAITED_LANE_SHIFT
