"""Boxes with device sections that tests write word by word: no device is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torchwhere.blackbox import file_format
from torchwhere.blackbox.file_format import EntryType
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.events import Kind
from torchwhere.core.place import Pass

S = 10**9


class DeviceBox:
    """The box of a rank that trains on a device. Times are in seconds."""

    def __init__(self, path: Path | None, *, rank: int = 0, world_size: int = 1) -> None:
        meta = {"rank": rank, "world_size": world_size, "clock_offset_ns": 1_000 * S, "pid": 1}
        self.box = BoxWriter(path, meta=meta, records=64, has_device=True)
        self.module = self.box.intern(EntryType.MODULE, "layers.1.mlp")
        self.line = self.box.intern(EntryType.LINE, "train.py:35")
        self.group = self._json(EntryType.GROUP, name="0", ranks=[0, 1], backend="nccl")
        self.signature = self._json(EntryType.COLLECTIVE, op="all_reduce", group="0")
        self.counter = self.box.counter_at((self.group, -1, -1)) or 0
        self.count = 0

    def _json(self, entry_type: EntryType, **fields: Any) -> int:
        return self.box.intern(entry_type, json.dumps(fields))

    def place(self, pass_: Pass = Pass.FORWARD) -> int:
        return self.module << file_format.MODULE_SHIFT | int(pass_) << file_format.PASS_SHIFT

    def cpu(self, *, step: int, at_s: float) -> None:
        """Put the CPU outside any module."""
        cursor = self.box.cursor_at(0)
        self.box.words[cursor + file_format.CURSOR_TIME] = int(at_s * S)
        self.box.words[cursor + file_format.CURSOR_STEP] = step

    def issue(self, *, step: int, at_s: float) -> int:
        """Issue an all_reduce. Returns the number of its record."""
        t_ns = int(at_s * S)
        ids = (self.module, 0, self.line, 0, self.signature, 0, 0, self.count)
        number = self.box.record(Kind.COLLECTIVE, t_ns, Pass.BACKWARD, 0, 0, step, *ids)
        self.count += 1
        self.box.words[self.counter + file_format.COUNTER_COUNT] = self.count
        self.box.words[self.counter + file_format.COUNTER_TIME] = t_ns
        self.box.words[self.counter + file_format.COUNTER_RECORD] = number
        return number

    def lane(self, slot: int = 0, **fields: int) -> None:
        """Set words of a lane: `place`, `time`, `step`, `record`, `pending`, `next_place`,
        `next_record`. Records are plus 1."""
        first = (self.box.geometry.lanes_at + slot * file_format.LANE_BYTES) >> 3
        self.box.words[first + file_format.LANE_STREAM] = slot + 1 << 8 | 1
        for name, value in fields.items():
            self.box.words[first + getattr(file_format, f"LANE_{name.upper()}")] = value

    def look(self, at_s: float) -> None:
        """Set the time of the last look at the device."""
        geometry = self.box.geometry
        last = (geometry.lanes_at + (geometry.lanes - 1) * file_format.LANE_BYTES) >> 3
        self.box.words[last] = int(at_s * S)

    def reach(self, record: int, *, at_s: float, done_s: float = 0) -> None:
        """Let the device reach a collective, and finish it."""
        geometry, number = self.box.geometry, self.count_of(record)
        at = (geometry.times_at + record % geometry.capacity * file_format.TIMES_BYTES) >> 3
        self.box.words[at + file_format.TIMES_NUMBER] = record + 1
        self.box.words[at + file_format.TIMES_REACHED] = int(at_s * S)
        self.box.words[at + file_format.TIMES_DONE] = int(done_s * S)
        progress = self.counter + (geometry.progress_at - geometry.counters_at >> 3)
        self.box.words[progress + file_format.PROGRESS_REACHED] = number + 1
        if done_s:
            self.box.words[progress + file_format.PROGRESS_DONE] = number + 1

    def count_of(self, record: int) -> int:
        """The number of a collective in its stream."""
        return file_format.RECORD.unpack(self.box.copy_of(record)[:-4])[-1]
