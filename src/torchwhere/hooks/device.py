"""Records the progress of the accelerator: sets marks on its streams, which the native extension
reads.

On a GPU a collective does not block the CPU. The CPU issues all work and blocks later, so the place
of the CPU is not the place of the job. A mark is an event on the current stream just before a
collective: when the event completes, the device has reached the collective. If the collective runs
on the current stream, a second mark after it shows when it was done.

The marks need the native extension. Without it, the progress of the device is unknown.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torchwhere.blackbox.writer import BoxWriter

_REACHED, _DONE = range(2)  # `Point` in device_progress.h
_MOST_DEVICES = 16  # described in a box


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


def describe_device(device: torch.device) -> dict[str, Any] | None:
    """What identifies a device on its host; None if the job has not initialised it.

    torch reads the properties of a device once, without waiting for the device. UUID and PCI
    address stay right with `CUDA_VISIBLE_DEVICES`; in a MIG instance the UUID is that of the
    instance.
    """
    module = torch.get_device_module(device)
    if not getattr(module, "is_initialized", bool)():
        return None
    properties = module.get_device_properties(device)
    pci = [getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
    return {
        "type": device.type,
        "index": device.index or 0,
        "uuid": str(getattr(properties, "uuid", "") or ""),
        "pci": "{:08x}:{:02x}:{:02x}.0".format(*pci) if min(pci) >= 0 else "",
        "name": str(getattr(properties, "name", "")),
        "total_bytes": getattr(properties, "total_memory", None),
        "hip": torch.version.hip is not None,
    }


class DeviceHook:
    """Marks the collectives of one watch on their devices."""

    def __init__(self, box: BoxWriter) -> None:
        self._box = box
        self._native = box.native
        self._types: dict[torch.device, int] = {}
        self._devices: set[torch.device] = set()  # that the box describes
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
        number = self._types.get(device)
        if number is None:
            number = self._types[device] = self._native.device_type(device.type)
            self.meet(device)
        return number

    def meet(self, device: torch.device) -> None:
        """Describe a device in the box, so that a monitor can find it on its host."""
        if device in self._devices or len(self._devices) >= _MOST_DEVICES:
            return
        self._devices.add(device)
        described = describe_device(device)
        if described is not None:
            meta = self._box.meta
            self._box.meta = meta | {"devices": [*meta.get("devices", []), described]}
            self._box.write_meta()

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
