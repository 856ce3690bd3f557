"""Records the memory of the accelerator: allocated, reserved and peak bytes in each step.

The numbers are those of torch's caching allocator. Reading them calls neither the device nor its
driver, creates no context, and changes nothing: the allocator's own peak is never reset. The native
extension reads them when a thread goes from one module to another, so it knows where the peak was;
while memory is steady, at most every 0.5 ms. Without it, Python reads them once a step and knows
only the step.

A record describes the time since the record before. Long jobs lose old records: now and then, less
and less often, the numbers also go into the table of the box, at most about 100 times.
"""

from __future__ import annotations

import json
import time
from typing import Any, NamedTuple

import torch

from torchwhere.blackbox.file_format import (
    FLAG_AT_LEAST,
    FLAG_UNKNOWN,
    MEMORY_MASK,
    MEMORY_RESERVED_SHIFT,
    MEMORY_UNIT_BYTES,
    EntryType,
)
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.events import Kind
from torchwhere.core.place import Pass
from torchwhere.hooks import _torch
from torchwhere.hooks.device import may_have_device
from torchwhere.hooks.error_limiter import ErrorLimiter
from torchwhere.hooks.threads import Track

_HISTORY_NS = 1_000_000_000  # between the first two entries in the table
_HISTORY_GROWTH = 0.25  # of the time since the first one, between later ones
_MOST_DEVICES = 16  # described in a box


class MemoryNow(NamedTuple):
    """What an allocator reports."""

    allocated: int
    reserved: int
    peak: int  # since the process began, or since the job has reset it


class PeakRise:
    """Derives the peak of a step from the allocator's peak, which is never reset for it."""

    def __init__(self) -> None:
        self._before: int | None = None

    def of_step(self, now: MemoryNow) -> tuple[int, bool]:
        """The peak since the last call, and whether it is exact.

        If the allocator's peak has risen, it rose now. Otherwise only the present amount is known.
        """
        has_risen = self._before is not None and now.peak > self._before
        self._before = now.peak
        return (now.peak, True) if has_risen else (now.allocated, False)


class MemoryHook:
    """Records the memory of the current device of one watch."""

    def __init__(self, box: BoxWriter) -> None:
        self._box = box
        self._native = box.native
        self._described: set[torch.device] = set()  # the devices that the box describes
        self._stats: Any = None
        self._rise = PeakRise()
        self._device: torch.device | None = None
        self.is_on = False
        self._began_ns = self._history_at_ns = 0
        self.errors = ErrorLimiter("device memory", self.remove)

    def install(self) -> list[str]:
        self._stats = _torch.private("device_stats")
        self.is_on = may_have_device() and self._stats is not None
        self.begin()
        return _torch.missing("device memory")

    def remove(self) -> None:
        self.is_on = False
        if self._device is not None and self._native is not None:
            self._native.memory_end()
        self._device = None

    def record(self, track: Track) -> None:
        """Record the memory since the last record. Called at the end of a step, and when an
        allocation has failed, on the thread that trains."""
        if self.begin():
            with self.errors:
                self._record(track)

    def begin(self) -> bool:
        """Follow the current device, if the job has initialised it. Returns whether it has."""
        with self.errors:
            return self.is_on and self._begin()
        return False

    def _begin(self) -> bool:
        device = _used_device()
        if device is None or device == self._device:
            return device is not None
        self._describe(device)
        if not _has_cheap_stats(device):
            self.is_on = False
            return False
        self._device, self._rise = device, PeakRise()
        self._began_ns = self._history_at_ns = time.monotonic_ns()
        if self._native is not None:
            self.is_on = self._native.memory_begin(device.type, device.index, int(Kind.MEMORY))
        else:
            self._rise.of_step(memory_now(self._stats(device.index)))
        return self.is_on

    def _describe(self, device: torch.device) -> None:
        """Describe a device in the box, once, so that a monitor can find it on its host."""
        if device not in self._described and len(self._described) < _MOST_DEVICES:
            self._described.add(device)
            devices = [*self._box.meta.get("devices", []), _description(device)]
            self._box.write_meta(devices=devices)

    def _record(self, track: Track) -> None:
        if self._native is not None and self._box.native_box is not None:
            self._native.memory_record(self._box.native_box, track.number, track.top)
            values = self._native.memory_now()
            now = MemoryNow(*values) if values is not None else None
        else:
            now = self._record_in_python(track)
        if now is not None and time.monotonic_ns() >= self._history_at_ns:
            self._add_to_history(now)

    def _record_in_python(self, track: Track) -> MemoryNow:
        assert self._device is not None
        now = memory_now(self._stats(self._device.index))
        peak, is_exact = self._rise.of_step(now)
        amounts = units(now.allocated) | units(now.reserved) << MEMORY_RESERVED_SHIFT
        self._box.record(
            int(Kind.MEMORY),
            time.monotonic_ns(),
            int(Pass.OUTSIDE),
            FLAG_UNKNOWN | (0 if is_exact else FLAG_AT_LEAST),
            min(track.number, 255),
            self._box.counter.step,
            0,
            0,
            0,
            0,
            units(peak),
            0,
            0,
            amounts,
        )
        return now

    def _add_to_history(self, now: MemoryNow) -> None:
        t_ns = time.monotonic_ns()
        since_ns = t_ns - self._began_ns
        self._history_at_ns = t_ns + max(_HISTORY_NS, int(since_ns * _HISTORY_GROWTH))
        entry = {
            "step": self._box.counter.step,
            "t_ns": t_ns,
            "allocated_bytes": now.allocated,
            "reserved_bytes": now.reserved,
        }
        self._box.intern(EntryType.MEMORY, json.dumps(entry))


def memory_now(stats: dict[str, Any]) -> MemoryNow:
    """The amounts in the statistics that torch returns."""
    allocated = stats["allocated_bytes"]["all"]
    reserved = stats["reserved_bytes"]["all"]
    return MemoryNow(allocated["current"], reserved["current"], allocated["peak"])


def units(nbytes: int) -> int:
    return min(nbytes // MEMORY_UNIT_BYTES, MEMORY_MASK)


def _has_cheap_stats(device: torch.device) -> bool:
    """Whether the allocator keeps its own statistics. That of `cudaMallocAsync` asks the driver."""
    return device.type != "cuda" or torch.cuda.get_allocator_backend() == "native"


# -- the devices -----------------------------------------------------------------------------------


def _used_device() -> torch.device | None:
    """The current device of this thread; None if the job has not initialised an accelerator."""
    accelerator = torch.accelerator.current_accelerator(check_available=False)
    if accelerator is None:
        return None
    is_initialized = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    if is_initialized is None or not is_initialized():
        return None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _description(device: torch.device) -> dict[str, Any]:
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
