"""Finds where a late rank is more often than the other ranks, from samples of their stacks.

All ranks take a few samples a second (`recorder/stack_samples.py`). While a rank is late, it is in
the code that takes too long, and the others wait elsewhere. So the place that counts is the one
whose share of samples exceeds that of the other ranks most. The excess must explain at least half
of the time that the job loses: otherwise no place is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.step_clock import StepPart
from torchwhere.core.events import SideKind
from torchwhere.core.place import PASS_LABELS
from torchwhere.diagnose.calls.job_calls import JobCalls

_LEAST = 3  # samples at a place
_EXPLAINS = 0.5  # of the lost time
_COMPARED = 8  # other ranks
_MUCH_MORE = 1.5  # times the excess of a line: then its function is named, with several lines


class _Sample(NamedTuple):
    step: int
    line: str
    function: str
    module: str | None
    pass_: str
    part: str
    inside: str | None  # the frame of a library that this line has called

    @property
    def in_function(self) -> tuple[str, str]:
        """The file and the function."""
        return self.line.rpartition(":")[0], self.function


@dataclass(frozen=True, slots=True)
class SampledPlace:
    """The place where a late rank loses its time.

    Attributes:
        count: How many samples are there.
        of: How many samples were taken since the rank is late.
        function: The function of the user's line.
        line: The user's line; the most frequent one if several lines of the function are slow.
        module: The module that runs; None outside all modules, and in backward.
        pass_: The pass of the module.
        part: The part of the step.
        inside: The frame of a library that the line has called; None without one.
    """

    count: int
    of: int
    function: str
    line: str
    module: str | None
    pass_: str
    part: str
    inside: str | None


def sampled_place(
    job_calls: JobCalls,
    rank: int,
    *,
    others: Sequence[int],
    since_step: int | None,
    share: float,
    is_repeated: bool = False,
) -> SampledPlace | None:
    """The place of a late rank, from the samples since a step; None if no place stands out.

    Args:
        job_calls: The calls of all ranks, with their boxes.
        rank: The late rank.
        others: Ranks that are not late.
        since_step: The first step in which it is late; None: all samples count.
        share: The share of the job's time that it costs.
        is_repeated: Whether the place must stand out in several steps. Then the step with the most
            samples of the rank does not count: it may have paused once.
    """
    own = _samples(job_calls, rank, since_step)
    if is_repeated and own:
        longest = _most_common(sample.step for sample in own)
        own = [sample for sample in own if sample.step != longest]
    compared = [
        samples
        for other in others[:_COMPARED]
        if len(samples := _samples(job_calls, other, since_step)) >= _LEAST
    ]
    if len(own) < _LEAST or not compared:
        return None
    line, by_line = _most_exceeding(
        [sample.line for sample in own],
        [[sample.line for sample in samples] for samples in compared],
    )
    function, by_function = _most_exceeding(
        [sample.in_function for sample in own],
        [[sample.in_function for sample in samples] for samples in compared],
    )
    if max(by_line, by_function) < _EXPLAINS * share:
        return None
    is_spread = by_function > _MUCH_MORE * by_line
    here = [
        sample
        for sample in own
        if (sample.in_function == function if is_spread else sample.line == line)
    ]
    return _place(here, of=len(own)) if len(here) >= _LEAST else None


def _place(here: list[_Sample], *, of: int) -> SampledPlace:
    most = {
        name: _most_common(getattr(sample, name) for sample in here)
        for name in _Sample._fields
        if name != "step"
    }
    return SampledPlace(count=len(here), of=of, **most)


def _most_common(values: Iterable[Any]) -> Any:
    return Counter(values).most_common(1)[0][0]


def _most_exceeding(
    own: Sequence[object], compared: Sequence[Sequence[object]]
) -> tuple[object, float]:
    """The value whose share exceeds the median share of the others most, and by how much."""
    counts = Counter(own)
    elsewhere = [Counter(values) for values in compared]
    excess = {
        value: count / len(own)
        - float(np.median([other[value] / other.total() for other in elsewhere]))
        for value, count in counts.items()
    }
    value = max(excess, key=lambda value: excess[value])
    return value, excess[value]


def _samples(job_calls: JobCalls, rank: int, since_step: int | None) -> list[_Sample]:
    """The samples of a rank that have a line."""
    rank_calls = job_calls.by_rank.get(rank)
    box = rank_calls.box if rank_calls is not None else None
    if box is None:
        return []
    rows = box.side_records[box.side_records["kind"] == int(SideKind.SAMPLE)]
    if since_step is not None:
        rows = rows[rows["step"] >= since_step]
    samples = []
    for row in rows:
        users, library = _frame(box, int(row["subject"])), _frame(box, int(row["beneficiary"]))
        frame = users or library
        if frame is None:
            continue
        inside = f"{library[1]} ({library[0]})" if library is not None and users else None
        part = int(row["extra"])
        samples.append(
            _Sample(
                step=int(row["step"]),
                line=frame[0],
                function=frame[1],
                module=box.name(int(row["module"])),
                pass_=PASS_LABELS.get(int(row["pass"]), "outside"),
                part=StepPart(part).label if part < len(StepPart) else StepPart.OTHER.label,
                inside=inside,
            )
        )
    return samples


def _frame(box: Box, entry_id: int) -> tuple[str, str] | None:
    value = box.value(entry_id) if entry_id else None
    if not isinstance(value, list) or len(value) != 2:
        return None
    return str(value[0]), str(value[1])
