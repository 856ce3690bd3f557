"""Sentences on ranks whose device ran out of memory."""

from __future__ import annotations

from collections.abc import Sequence

from torchwhere.core.place import Certainty
from torchwhere.core.units import memory_amount
from torchwhere.diagnose.doctor.device_memory import (
    AllocatorReport,
    MemoryGrowth,
    MemoryPeak,
    OutOfDeviceMemory,
)
from torchwhere.render.verdict_text.phrases import in_place

_MOST_OTHERS = 1 << 30  # bytes of other processes that are worth a sentence


def out_of_memory_text(facts: Sequence[OutOfDeviceMemory]) -> list[str]:
    """What the allocator said, what grew, and where the peak was."""
    return [f"  rank {fact.rank}, memory: {part}" for fact in facts for part in _parts(fact)]


def _parts(fact: OutOfDeviceMemory) -> list[str]:
    parts = [_report_text(fact.report)]
    allowed = fact.report.allowed_bytes
    if allowed is not None:  # free memory of the device does not help
        parts.append(
            f"the job limits this process to {memory_amount(allowed)} of this device"
            " (torch.cuda.set_per_process_memory_fraction)"
        )
    other = fact.report.other_bytes
    if other is not None and other >= _MOST_OTHERS:
        parts.append(f"other processes use {memory_amount(other)} of this device")
    if not fact.has_samples:
        return [*parts, "what grew is not known: the box has no memory samples"]
    if fact.growth is not None:
        parts.append(_growth_text(fact.growth))
    elif fact.between_steps_bytes is not None:
        parts.append(
            f"{memory_amount(fact.between_steps_bytes)} allocated at the end of the last step;"
            " it did not grow from step to step"
        )
    if fact.peak is not None:
        parts.append(_peak_text(fact.peak))
    return parts


def _report_text(report: AllocatorReport) -> str:
    tried = "an allocation failed"
    if report.tried_bytes is not None:
        tried = f"tried to allocate {memory_amount(report.tried_bytes)}"
    amounts = (
        (report.allocated_bytes, "allocated"),
        (report.unused_bytes, "reserved but not allocated"),
        (report.free_bytes, "free"),
    )
    shares = [f"{memory_amount(nbytes)} {state}" for nbytes, state in amounts if nbytes is not None]
    total = f" of {memory_amount(report.total_bytes)}" if report.total_bytes is not None else ""
    return f"{tried}; {', '.join(shares)}{total}" if shares else tried


def _growth_text(growth: MemoryGrowth) -> str:
    return (
        f"allocated memory grew from {memory_amount(growth.from_bytes)} at the end of step"
        f" {growth.from_step} to {memory_amount(growth.to_bytes)} at the end of step"
        f" {growth.to_step}: something holds tensors from step to step"
    )


def _peak_text(peak: MemoryPeak) -> str:
    at_least = "" if peak.is_exact else "at least "
    where = in_place(peak.place)
    if peak.place.certainty is Certainty.UNKNOWN:
        where = f"in step {peak.place.step}, in an unknown module"
    elif peak.place.certainty is Certainty.INFERRED:  # several modules between two samples
        where = f"{where}, or shortly before"
    return f"the peak was {at_least}{memory_amount(peak.peak_bytes)}, {where}"
