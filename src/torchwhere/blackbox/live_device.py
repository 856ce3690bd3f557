"""Polls the device sections of a box that is being written: where its device is now.

A look reads 500 bytes. The place of the device is read only if it is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torchwhere.blackbox.device_place import DeviceSource, device_streams, read_device_place
from torchwhere.blackbox.file_format import LANE_BYTES, LANE_RECORD, LANE_TIME, Geometry, slots
from torchwhere.blackbox.live_names import BoxNames
from torchwhere.core.device_place import DevicePlace
from torchwhere.core.place import Place

T = TypeVar("T")


class LiveDevice:
    """The device of one box that is polled."""

    def __init__(
        self, path: Path, geometry: Geometry, names: BoxNames, wall_ns: Callable[[int], int]
    ) -> None:
        self._path, self._geometry, self._names = path, geometry, names
        self._wall_ns = wall_ns
        self._lanes = b""
        self._times: list[int] | None = None  # when each lane reached its last mark
        self._place: DevicePlace | None = None  # since the last look
        self._reached: dict[int, int] | None = None  # since a lane or the CPU has changed
        self._last_record = 0

    def look(self, fd: int) -> bool:
        """Read the lanes again. Returns True if the device has reached another mark."""
        self._place = None
        if not self._geometry.lanes:
            return False
        # the last slot is not a lane: it changes with every look at the device
        data = os.pread(fd, (self._geometry.lanes - 1) * LANE_BYTES, self._geometry.lanes_at)
        if data != self._lanes:
            self._lanes, self._reached = data, None
        lanes = slots(data, LANE_BYTES)
        times = [lane[LANE_TIME] for lane in lanes]
        has_moved = self._times is not None and times != self._times
        self._times = times
        self._last_record = max((lane[LANE_RECORD] for lane in lanes), default=0)
        return has_moved

    def cpu_has_moved(self) -> None:
        """Forget what depends on the counters of the CPU."""
        self._reached = None

    @property
    def t_ns(self) -> int:
        """When the device reached its last mark, on the clock of the records; 0: it has none."""
        return max(self._times or (), default=0)

    @property
    def record(self) -> int | None:
        """The record of the last collective that it has reached, in the order of the CPU."""
        return self._last_record - 1 if self._last_record else None

    def place(self, *, cpu: Place) -> DevicePlace | None:
        """Where the device is, given where its CPU is; None if it has reached no mark."""
        if self._place is None and self.t_ns:
            self._place = self._read(lambda source: read_device_place(source, cpu=cpu))
        return self._place

    def reached(self) -> dict[int, int]:
        """How many collectives the device has reached, by the stream words of their counters."""
        if self._reached is None:
            self._reached = self._read(_reached_counts) if self.t_ns else {}
        return self._reached or {}

    def _read(self, question: Callable[[DeviceSource], T]) -> T | None:
        """The answer of a function that reads the box; None if the file is not readable."""
        try:
            with self._path.open("rb") as file:
                fd = file.fileno()
                return question(
                    DeviceSource(
                        self._geometry,
                        read=lambda at, length: os.pread(fd, length, at),
                        name=self._names.name,
                        op=self._names.op,
                        group=self._names.group,
                        wall_ns=self._wall_ns,
                    )
                )
        except OSError:
            return None


def _reached_counts(source: DeviceSource) -> dict[int, int]:
    return {stream.stream: stream.reached for stream in device_streams(source)}
