"""Reads the memory of a rank's device over time from its box."""

from __future__ import annotations

from typing import Any, NamedTuple

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import EntryType
from torchwhere.blackbox.string_table import json_int
from torchwhere.core.events import Kind
from torchwhere.core.place import Place


class MemorySample(NamedTuple):
    """The memory of a device at the end of a step, or when an allocation failed."""

    t_ns: int  # wall clock
    step: int | None
    allocated_bytes: int
    reserved_bytes: int
    # the most since the sample before, and where the CPU was; None in old samples of a long job
    peak_bytes: int | None = None
    peak_is_exact: bool = False  # False: it may have been higher
    peak_place: Place | None = None


def memory_samples(box: Box) -> list[MemorySample]:
    """All samples, oldest first. The ring holds one for each of the last steps, the table a few
    from the whole run."""
    recent = [
        MemorySample(event.t_ns, event.place.step, **event.fields, peak_place=event.place)
        for event in box.events(kinds={Kind.MEMORY.label})
    ]
    begin_ns = recent[0].t_ns if recent else None
    values = (
        box.value(entry_id)
        for entry_id, (entry_type, _) in sorted(box.names.items())
        if entry_type == EntryType.MEMORY
    )
    old = [_old_sample(box, value) for value in values if isinstance(value, dict)]
    return [sample for sample in old if begin_ns is None or sample.t_ns < begin_ns] + recent


def _old_sample(box: Box, value: dict[str, Any]) -> MemorySample:
    return MemorySample(
        t_ns=box.wall_ns(json_int(value, "t_ns")),
        step=json_int(value, "step"),
        allocated_bytes=json_int(value, "allocated_bytes"),
        reserved_bytes=json_int(value, "reserved_bytes"),
    )
