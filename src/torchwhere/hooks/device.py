"""Records the progress of the accelerator: sets marks on its streams, which the native extension
reads.

On a GPU a collective does not block the CPU. The CPU issues all work and blocks later, so the place
of the CPU is not the place of the job. A mark is an event on the current stream just before a
collective: when the event completes, the device has reached the collective. If the collective runs
on the current stream, a second mark after it shows when it was done.

The marks need the native extension. Without it, the progress of the device is unknown.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchwhere.blackbox.writer import BoxWriter

_REACHED, _DONE = range(2)  # `Point` in device_progress.h


class DeviceMark(NamedTuple):
    """The arguments of a mark: a collective, and the device that it runs on."""

    device_type: int
    device_index: int
    record: int
    counter: int  # -1: its stream has no counter
    total: int  # number of collectives issued in its stream, including this one
    place: int
    step: int
    t_ns: int


def may_have_device() -> bool:
    """Whether this torch was built for an accelerator. Calls neither the device nor its driver."""
    return torch.accelerator.current_accelerator(check_available=False) is not None


class DeviceHook:
    """Marks the collectives of one watch on their devices."""

    def __init__(self, box: BoxWriter) -> None:
        self._box = box
        self._native = box.native
        self._types: dict[str, int] = {}
        self.is_on = False

    def install(self) -> None:
        geometry = self._box.geometry
        if self._native is None or self._box.native_box is None or not geometry.lanes:
            return
        self.is_on = self._native.device_begin(
            self._box.native_box,
            geometry.lanes_at >> 3,
            geometry.times_at >> 3,
            (geometry.progress_at - geometry.counters_at) >> 3,
        )

    def remove(self) -> None:
        if self.is_on and self._native is not None:
            self.is_on = False
            self._native.device_end()

    def abandon(self) -> None:
        """Stop marking in a forked child, which must not touch the device."""
        if self.is_on and self._native is not None:
            self.is_on = False
            self._native.device_abandon()

    def type_number(self, device: torch.device) -> int:
        """The number of a type of device in C++ (`c10::DeviceType`)."""
        assert self._native is not None
        number = self._types.get(device.type)
        if number is None:
            number = self._types[device.type] = self._native.device_type(device.type)
        return number

    def reach(self, mark: DeviceMark) -> None:
        """Set a mark just before a collective."""
        self._mark(_REACHED, mark)

    def finish(self, mark: DeviceMark) -> None:
        """Set a mark just after a collective that runs on the current stream."""
        self._mark(_DONE, mark)

    def _mark(self, point: int, mark: DeviceMark) -> None:
        assert self._native is not None
        self._native.device_mark(
            mark.device_type,
            mark.device_index,
            point,
            mark.record,
            mark.counter,
            mark.total,
            mark.place,
            mark.step,
            mark.t_ns,
        )
