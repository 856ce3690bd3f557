"""The place of the device of this process, from its own box.

It reads words that the native extension has written, and does not call the device: it never waits,
and it works after an error of the device.
"""

from __future__ import annotations

import time

from torchwhere.blackbox.device_place import DeviceSource, read_device_place
from torchwhere.blackbox.file_format import EntryType
from torchwhere.blackbox.string_table import group_of, json_int, json_object, op_of
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.device_place import DevicePlace
from torchwhere.core.place import Place
from torchwhere.core.sanitize import printable

NO_WATCH = "no watch is running"
NO_EXTENSION = "the native extension is not in use; `torchwhere native` builds it"
NO_ACCELERATOR = "this torch was built without an accelerator"


def own_device_place(box: BoxWriter, cpu: Place) -> DevicePlace:
    """Return where the device of this process is, given where its CPU is."""
    if not box.geometry.lanes:
        return DevicePlace(cpu, problem=NO_ACCELERATOR if box.native else NO_EXTENSION)
    offset_ns = json_int(box.meta, "clock_offset_ns")
    # of several entries of a name the last one wins: its mesh became known later
    groups = map(json_object, box.names_of_type(EntryType.GROUP))
    by_name = {str(group.get("name")): group for group in groups}
    source = DeviceSource(
        box.geometry,
        read=box.read,
        name=box.name,
        op=lambda entry_id: op_of(json_object(box.name(entry_id))),
        group=lambda name: group_of(by_name.get(name)),
        wall_ns=lambda t_ns: t_ns + offset_ns,
    )
    return read_device_place(source, cpu=cpu)


def device_note(device: DevicePlace) -> str:
    """The note on an error of the device, which surfaces later than the kernel that failed."""
    if device.problem is not None:
        return device.device_text()
    parts = [f"the GPU had reached: {device.reached_text()}"]
    following = device.next_text()
    if following is not None:
        parts.append(f"not reached: {following}")
    if device.looked_ns:
        ago_ms = max(0, time.time_ns() - device.looked_ns) / 1e6
        parts.append(f"as of {ago_ms:.0f} ms before this exception")
    return printable("; ".join(parts))
