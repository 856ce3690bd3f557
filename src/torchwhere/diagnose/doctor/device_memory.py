"""Explains why a rank ran out of device memory: what the allocator said, what grew since when, and
where the peak was.

Takes the message of the exception and the memory samples in the box of the rank. Memory that is
still allocated at the end of a step counts as growth if it rises from step to step: it is held from
one step to the next. The first steps do not count, because optimizers create their state in them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from torchwhere.blackbox.memory import MemorySample, memory_samples
from torchwhere.core.place import Place
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.exit_records import is_out_of_memory

_MOST_RANKS = 4
_WARM_UP = 2  # the first steps
_DIP = 0.01  # growth may pause by this share
_LEAST_GROWTH = 0.1  # of the memory at its start
_LEAST_RECENT = 0.1  # of the growth, in the second half of the steps: it continues
_LEAST_SAMPLES = 3

_SIZE = r"([\d.]+) (bytes|[KMGT]iB)"
_BYTES = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_DEVICE = re.compile(r"(?:CUDA|HIP|XPU) out of memory|Tried to allocate", re.IGNORECASE)
_AMOUNTS = {
    "tried_bytes": re.compile(rf"Tried to allocate {_SIZE}"),
    "total_bytes": re.compile(rf"total capacity of {_SIZE}"),
    "free_bytes": re.compile(rf"of which {_SIZE} is free"),
    "allowed_bytes": re.compile(rf"{_SIZE} allowed;"),
    "process_bytes": re.compile(rf"this process has {_SIZE} memory in use"),
    "allocated_bytes": re.compile(rf"allocated memory {_SIZE} is allocated by PyTorch"),
    "unused_bytes": re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated"),
}


class AllocatorReport(NamedTuple):
    """What the exception says. None: it does not say it."""

    tried_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    allowed_bytes: int | None = None  # the limit that the job set for this process
    process_bytes: int | None = None  # all memory of this process on the device
    allocated_bytes: int | None = None
    unused_bytes: int | None = None  # reserved but not allocated

    @property
    def other_bytes(self) -> int | None:
        """Memory that other processes use on the device."""
        if self.total_bytes is None or self.free_bytes is None or self.process_bytes is None:
            return None
        return max(0, self.total_bytes - self.free_bytes - self.process_bytes)


class MemoryGrowth(NamedTuple):
    """Allocated memory at the ends of two steps."""

    from_step: int | None
    from_bytes: int
    to_step: int | None
    to_bytes: int


class MemoryPeak(NamedTuple):
    """The most memory that was allocated, and where the CPU was."""

    peak_bytes: int
    is_exact: bool  # False: it may have been higher
    place: Place


@dataclass(frozen=True, slots=True)
class OutOfDeviceMemory:
    """Why an allocation of one rank failed."""

    rank: int
    report: AllocatorReport
    has_samples: bool
    growth: MemoryGrowth | None  # None: the memory at the ends of steps did not grow
    between_steps_bytes: int | None  # allocated at the end of the last step
    peak: MemoryPeak | None

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        peak = self.peak
        return values | {
            "report": self.report._asdict() | {"other_bytes": self.report.other_bytes},
            "growth": self.growth._asdict() if self.growth is not None else None,
            "peak": peak._asdict() | {"place": peak.place.to_dict()} if peak is not None else None,
        }


def parse_report(message: str) -> AllocatorReport | None:
    """Read the message of `torch.OutOfMemoryError`; None for another one, such as the host's."""
    if not is_out_of_memory(message) or not _DEVICE.search(message):
        return None
    return AllocatorReport(**{name: _amount(text, message) for name, text in _AMOUNTS.items()})


def _amount(pattern: re.Pattern[str], message: str) -> int | None:
    match = pattern.search(message)
    try:
        return int(float(match[1]) * _BYTES[match[2]]) if match is not None else None
    except ValueError:
        return None


def out_of_device_memory(context: Context, ranks: Iterable[int]) -> list[OutOfDeviceMemory]:
    """Of these ranks, those that failed because their device ran out of memory."""
    facts = (_of_rank(context, rank) for rank in ranks if rank in context.by_rank)
    return [fact for fact in facts if fact is not None][:_MOST_RANKS]


def _of_rank(context: Context, rank: int) -> OutOfDeviceMemory | None:
    report = parse_report(context.exits.exit_message(rank))
    if report is None:
        return None
    box = context.by_rank[rank].box
    samples = memory_samples(box) if box is not None else []
    error = context.by_rank[rank].exception
    failed_step = error.place.step if error is not None else None
    ends = [sample for sample in samples if sample.step != failed_step]
    return OutOfDeviceMemory(
        rank=rank,
        report=report,
        has_samples=bool(samples),
        growth=growth(ends),
        between_steps_bytes=ends[-1].allocated_bytes if ends else None,
        peak=_peak(samples),
    )


def growth(ends: Sequence[MemorySample]) -> MemoryGrowth | None:
    """Where the memory at the ends of steps began to rise, if it rose until the end."""
    ends = ends[_WARM_UP:]
    if len(ends) < _LEAST_SAMPLES:
        return None
    begin = last = len(ends) - 1
    least = ends[last].allocated_bytes
    while begin and ends[begin - 1].allocated_bytes <= least * (1 + _DIP):
        begin -= 1
        least = min(least, ends[begin].allocated_bytes)
    first, now = ends[begin], ends[last]
    rise = now.allocated_bytes - first.allocated_bytes
    middle_ns = (first.t_ns + now.t_ns) // 2
    at_middle = [end for end in ends[begin:] if end.t_ns <= middle_ns][-1]
    recent = now.allocated_bytes - at_middle.allocated_bytes
    is_growth = rise > _LEAST_GROWTH * first.allocated_bytes and recent > _LEAST_RECENT * rise
    if last - begin + 1 < _LEAST_SAMPLES or not is_growth:
        return None
    return MemoryGrowth(first.step, first.allocated_bytes, now.step, now.allocated_bytes)


def _peak(samples: Iterable[MemorySample]) -> MemoryPeak | None:
    peaks = [
        MemoryPeak(sample.peak_bytes, sample.peak_is_exact, sample.peak_place)
        for sample in samples
        if sample.peak_bytes is not None and sample.peak_place is not None
    ]
    return max(peaks, key=lambda peak: peak.peak_bytes, default=None)
