"""Describes in the box which accelerators a process uses, so that a monitor can find them on its
host."""

from __future__ import annotations

from typing import Any

import torch

from torchwhere.blackbox.writer import BoxWriter

_MOST_DEVICES = 16  # described in a box


def used_device() -> torch.device | None:
    """The current device of this thread; None if the job has not initialised an accelerator."""
    accelerator = torch.accelerator.current_accelerator(check_available=False)
    if accelerator is None:
        return None
    is_initialized = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    if is_initialized is None or not is_initialized():
        return None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def describe_device(device: torch.device) -> dict[str, Any]:
    """What identifies a device that the job has initialised on its host.

    torch reads the properties of a device once, without waiting for the device. UUID and PCI
    address stay right with `CUDA_VISIBLE_DEVICES`; in a MIG instance the UUID is that of the
    instance.
    """
    # not every accelerator has this function
    read = getattr(torch.get_device_module(device), "get_device_properties", None)
    properties = None if read is None else read(device)
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


class DeviceIdentities:
    """The devices that a box describes."""

    def __init__(self, box: BoxWriter) -> None:
        self._box = box
        self._devices: set[torch.device] = set()

    def add(self, device: torch.device) -> None:
        """Describe a device, once."""
        if device in self._devices or len(self._devices) >= _MOST_DEVICES:
            return
        self._devices.add(device)
        meta = self._box.meta
        devices = [*meta.get("devices", []), describe_device(device)]
        self._box.meta = meta | {"devices": devices}
        self._box.write_meta()
