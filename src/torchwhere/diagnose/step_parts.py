"""Where the time of each step goes, on each rank, without any call in the script.

Takes the boxes of a run, gives `JobStepParts`. Each rank measures the parts of its steps
(`blackbox/step_clock.py`). The wait for other ranks follows from the arrivals of all ranks at a
collective, and is subtracted from the part in which the rank waited. So the parts of a step always
add up to its time.

A wait counts only where it is certain that the CPU waited:

- A collective that blocks the CPU until all ranks have issued it: until the last rank did.
- The last asynchronous collective of a backward pass, because DDP ends the pass only after it.

Only waits of the thread that trains count. Collectives on a device do not block the CPU
(`device_time/` has their waits). Time in which data travels is not a wait: it stays in the part of
the collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import FLAG_ASYNC, FLAG_LOADS, FLAG_ON_DEVICE, FLAG_SAVES
from torchwhere.blackbox.step_clock import StepPart
from torchwhere.blackbox.step_times import StepTimes, step_times
from torchwhere.core.arrays import AnyArray, Bools, Ints, Times
from torchwhere.core.events import Kind
from torchwhere.core.place import Pass
from torchwhere.core.results import plain, plain_fields
from torchwhere.diagnose.clocks.arrivals import Arrivals, CallTimes, ClockStream, arrivals
from torchwhere.diagnose.clocks.call_arrivals import JobArrivals
from torchwhere.diagnose.clocks.host_clocks import HostClocks

MOST_STEPS = 100
WAIT, OTHER = "wait", StepPart.OTHER.label
# in the order of the table
PART_NAMES = (
    *(
        part.label
        for part in (StepPart.DATA, StepPart.FORWARD, StepPart.BACKWARD, StepPart.OPTIMIZER)
    ),
    WAIT,
    *(part.label for part in (StepPart.CHECKPOINT, StepPart.EVALUATION, StepPart.OTHER)),
)
# Where the time of a wait is taken from, by the pass of the collective: the first part that has
# any left.
_OF_PASS = {
    int(Pass.FORWARD): (StepPart.FORWARD, StepPart.OTHER),
    int(Pass.SHAPE_INFERENCE): (StepPart.FORWARD, StepPart.OTHER),
    int(Pass.BACKWARD): (StepPart.BACKWARD, StepPart.OTHER),
    int(Pass.RECOMPUTE): (StepPart.BACKWARD, StepPart.OTHER),
    int(Pass.OPTIMIZER): (StepPart.OPTIMIZER, StepPart.OTHER),
}
_OUTSIDE = (StepPart.OTHER, StepPart.FORWARD, StepPart.BACKWARD, StepPart.OPTIMIZER)
# The same for a collective that says in its flags what the rank did.
_OF_FLAGS = {
    FLAG_LOADS: (StepPart.DATA, StepPart.OTHER),
    FLAG_SAVES: (StepPart.CHECKPOINT, StepPart.OTHER),
    FLAG_LOADS | FLAG_SAVES: (StepPart.EVALUATION, StepPart.OTHER),
}


@dataclass(frozen=True, slots=True)
class StepParts:
    """The last steps of one rank. Each column has one item for each step.

    Attributes:
        steps: The numbers of the steps.
        step_ns: The time of each step.
        parts_ns: The columns of the parts, by name. They add up to `step_ns`.
    """

    steps: tuple[int, ...]
    step_ns: tuple[int, ...]
    parts_ns: dict[str, tuple[int, ...]]

    def __len__(self) -> int:
        return len(self.steps)

    def mean_ns(self, part: str | None = None) -> float:
        """The mean time of a part, or of the whole step."""
        return mean(self.step_ns if part is None else self.parts_ns[part])

    def to_dict(self) -> dict[str, Any]:
        columns = {f"{part}_ns": list(times) for part, times in self.parts_ns.items()}
        return plain_fields(self, "steps", "step_ns") | columns


@dataclass(frozen=True, slots=True)
class JobStepParts:
    """The parts of the steps of some ranks.

    Attributes:
        by_rank: The steps of each rank that has any.
        clocks: The clocks by which ranks are compared, in words.
        has_device_calls: Whether a collective ran on a device: its wait is not in these parts.

    Example:
        parts = torchwhere.phases("run/").parts
        print(parts.by_rank[0].mean_ns("data"))
    """

    by_rank: dict[int, StepParts]
    clocks: str
    has_device_calls: bool

    def to_dict(self) -> dict[str, Any]:
        return {"clocks": self.clocks, "ranks": plain(self.by_rank)}


class _RankTimes(NamedTuple):
    """What one box says about the last steps of its rank."""

    times: StepTimes
    calls: Arrivals  # in these steps


def step_parts_of(
    read: Callable[[], Iterable[Box]], *, clocks: HostClocks, ranks: set[int] | None = None
) -> JobStepParts | None:
    """The parts of the last steps of a run, on all ranks or on `ranks`; None if no box has them.

    `read` gives the boxes of all ranks, in order. It is called twice.
    """
    job_arrivals, with_steps, has_device_calls = JobArrivals(clocks), set(), False
    for box in read():
        own = _of_rank(box)
        if own is not None:
            job_arrivals.add(own.calls)
            with_steps.add(box.rank)
            flags = box.records["flags"][box.records["kind"] == Kind.COLLECTIVE]
            has_device_calls |= bool((flags & FLAG_ON_DEVICE).any())
    chosen = with_steps if ranks is None else with_steps & ranks
    by_rank = {}
    for box in read() if chosen else ():
        own = _of_rank(box) if box.rank in chosen else None
        if own is not None:
            by_rank[box.rank] = _parts(box, own, clocks, job_arrivals)
    if not by_rank:
        return None
    return JobStepParts(by_rank, clocks.description(with_steps), has_device_calls)


def _of_rank(box: Box) -> _RankTimes | None:
    """The last steps of a box. The step in which the watch began is left out if there are others:
    it has the set-up of the job."""
    times = step_times(box)
    if not len(times):
        return None
    has_first = not box.counts.overwritten
    times = times.last(max(1, min(MOST_STEPS, len(times) - has_first)))
    begin_ns = box.wall_ns(int(times.end_ns[0] - times.total_ns[0]))
    own = arrivals(box)
    for stream, calls in own.streams.items():
        own.streams[stream] = calls.chosen(calls.issued_ns >= begin_ns)
    return _RankTimes(times, own)


def _parts(box: Box, own: _RankTimes, clocks: HostClocks, job_arrivals: JobArrivals) -> StepParts:
    times = own.times
    parts_ns, waited_ns = times.parts_ns.copy(), np.zeros(len(times), np.int64)
    for stream, calls in own.calls.streams.items():
        waits = _waits_ns(box, stream, calls, clocks, job_arrivals)
        rows = box.records[calls.at]
        columns = np.searchsorted(times.end_ns, rows["t_ns"].astype(np.int64))
        is_inside = (waits > 0) & (columns < len(times))
        is_inside &= _is_of_training(rows, times.threads[np.minimum(columns, len(times) - 1)])
        for index in np.flatnonzero(is_inside).tolist():
            column = columns[index]
            waited_ns[column] += _taken(parts_ns[:, column], int(waits[index]), rows[index])
    by_name = {part.label: parts_ns[part] for part in StepPart} | {WAIT: waited_ns}
    return StepParts(
        steps=tuple(times.steps.tolist()),
        step_ns=tuple(times.total_ns.tolist()),
        parts_ns={name: tuple(by_name[name].tolist()) for name in PART_NAMES},
    )


def _is_of_training(rows: AnyArray, threads: Ints) -> Bools:
    """Which calls block the thread whose steps are timed. A wait of another thread, for example one
    that saves a checkpoint in the background, is no part of a step; but a backward may run on
    threads of the autograd engine."""
    is_own: Bools = rows["thread"] == threads
    is_own |= np.isin(rows["pass"], (Pass.BACKWARD, Pass.RECOMPUTE))
    return is_own


def _waits_ns(
    box: Box,
    stream: ClockStream,
    calls: CallTimes,
    clocks: HostClocks,
    job_arrivals: JobArrivals,
) -> Times:
    """How long the CPU certainly waited in each call for the last rank."""
    is_on_host = box.records["flags"][calls.at] & FLAG_ON_DEVICE == 0
    counts = is_on_host & (calls.waits | _ends_backward(box, calls))
    issued = clocks.aligned_ns(box.rank, calls.issued_ns)
    last_ns, _ = job_arrivals.last(stream, calls.numbers)
    waits = np.minimum(last_ns - issued, calls.next_ns - calls.issued_ns)
    return np.where(counts, np.maximum(waits, 0), 0)


def _ends_backward(box: Box, calls: CallTimes) -> Bools:
    """Which calls are the last asynchronous ones of a backward pass: the next record is not another
    one."""
    records = box.records
    is_async = _is_async_in_backward(records[calls.at])
    after = np.minimum(calls.at + 1, len(records) - 1)
    follows = _is_async_in_backward(records[after]) & (after > calls.at)
    return is_async & ~follows


def _is_async_in_backward(rows: AnyArray) -> Bools:
    is_call = (rows["kind"] == Kind.COLLECTIVE) & (rows["flags"] & FLAG_ASYNC != 0)
    is_in_backward: Bools = is_call & (rows["pass"] == Pass.BACKWARD)
    return is_in_backward


def _taken(parts_ns: Times, wait_ns: int, row: Any) -> int:
    """Take the time of a wait from the parts of a step. Returns how much there was to take."""
    left_ns = wait_ns
    for part in _around(row):
        taken_ns = min(left_ns, int(parts_ns[part]))
        parts_ns[part] -= taken_ns
        left_ns -= taken_ns
    return wait_ns - left_ns


def _around(row: Any) -> tuple[StepPart, ...]:
    """The parts in which a collective can be, the most likely one first."""
    named = _OF_FLAGS.get(int(row["flags"]) & (FLAG_LOADS | FLAG_SAVES))
    return _OF_PASS.get(int(row["pass"]), _OUTSIDE) if named is None else named
