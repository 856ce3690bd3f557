"""The parts of a step as lines of text, on the CPU and on the devices: one row for each rank.

With many ranks, only those that waited the least and the most have a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torchwhere.core.sanitize import plural
from torchwhere.core.units import duration
from torchwhere.diagnose.device_time.job import JobDeviceTimes, UsualStep
from torchwhere.diagnose.step_parts import PART_NAMES, WAIT, JobStepParts
from torchwhere.render.lines import Cell, Column, Line, Narrowing, fitted, table

_MOST_ROWS = 16
_RARE = ("checkpoint", "evaluation")  # shown if a rank has such time
_LEAST_WAIT = 0.01  # of a step: shorter waits name no rank
_DEVICE_HEADINGS = ("step", "compute, idle", "hidden", "unclear", "exposed", "waited")
ON_CPU = (
    "These are times of the CPU, which issues work for the device. It does not wait for collectives"
    " on a device."
)
UNCLEAR = (
    "unclear: a collective that is asynchronous or has its own stream was in flight. It is not"
    " known whether the job computed or waited for it."
)


def step_parts_lines(parts: JobStepParts, *, width: int | None) -> Iterator[Line]:
    """The mean time of each part on the CPU: a title, a row for each rank, and remarks."""
    by_rank = parts.by_rank
    steps = max(len(own) for own in by_rank.values())
    yield fitted([(f"parts of a step, mean of {plural(steps, 'step')}", "bold")], width)
    names = _shown_parts(parts)
    yield from _rank_table(
        [Column(name, right=True) for name in ("step", *names)],
        {rank: own.mean_ns(WAIT) for rank, own in by_rank.items()},
        lambda rank: [duration(by_rank[rank].mean_ns(name)) for name in (None, *names)],
        width=width,
        narrowing=(("optimizer", 0), ("data", 0)),
    )
    if parts.has_device_calls:
        yield [(ON_CPU, "dim")]
    if len(by_rank) > 1 and "hosts" in parts.clocks:
        yield [(f"Ranks are compared by {parts.clocks}.", "dim")]


def _shown_parts(parts: JobStepParts) -> list[str]:
    return [
        name
        for name in PART_NAMES
        if (name not in _RARE or any(any(own.parts_ns[name]) for own in parts.by_rank.values()))
        and (name != WAIT or len(parts.by_rank) > 1)
    ]


def _rank_table(
    columns: Sequence[Column],
    waits_ns: Mapping[int, float],
    cells: Callable[[int], Sequence[Cell]],
    *,
    width: int | None,
    narrowing: Narrowing,
) -> Iterator[Line]:
    """A row for each rank, or for those that waited the least and the most."""
    ranks = list(waits_ns)
    left_out = len(ranks) - _MOST_ROWS
    if left_out > 0:
        ranks.sort(key=lambda rank: waits_ns[rank])
        ranks = sorted([*ranks[: _MOST_ROWS // 2], *ranks[-_MOST_ROWS // 2 :]])
    rows = ([str(rank), *cells(rank)] for rank in ranks)
    yield from table([Column("rank", right=True), *columns], rows, width=width, narrowing=narrowing)
    if left_out > 0:
        yield [(f"and {plural(left_out, 'rank')} between them; --json has all", "dim")]


# -- devices ---------------------------------------------------------------------------------------


def device_time_lines(device: JobDeviceTimes, *, width: int | None) -> Iterator[Line]:
    """The usual step on each device: a title, a row for each rank, and what is not known."""
    usual = {rank: device.usual(rank) for rank in device.by_rank}
    counts = {step.steps for step in usual.values()}
    are_equal = len(counts) == 1
    steps = plural(max(counts), "step") if are_equal else "the steps of each rank"
    yield fitted([(f"device, median of {steps}", "bold")], width)
    headings = _DEVICE_HEADINGS if are_equal else ("steps", *_DEVICE_HEADINGS)
    columns = [Column(name, right=True) for name in headings]
    yield from _rank_table(
        [*columns, Column("waited for", optional=True)],
        {rank: step.waited_ns for rank, step in usual.items()},
        lambda rank: _device_cells(usual[rank], has_steps=not are_equal),
        width=width,
        narrowing=(("waited for", 0), ("hidden", 0)),
    )
    if any(step.unclear_ns for step in usual.values()):
        yield [(UNCLEAR, "dim")]
    open_calls = sum(step.open_calls for step in usual.values())
    if open_calls:
        remark = (
            f"The end of {plural(open_calls, 'collective')} was not recorded. Each counts only"
            " until the last device reached it; a send, a recv or a collective with a root counts"
            " as compute."
        )
        yield [(remark, "dim")]
    yield [(f"Devices are compared by {device.clocks}.", "dim")]


def _device_cells(step: UsualStep, *, has_steps: bool) -> list[Cell]:
    is_long = step.waited_for is not None and step.waited_ns >= _LEAST_WAIT * step.device_ns
    waited_for = f"rank {step.waited_for} in {plural(step.waited_steps, 'step')}"
    times = (
        step.device_ns,
        step.compute_ns,
        step.hidden_ns,
        step.unclear_ns,
        step.exposed_ns,
        step.waited_ns,
    )
    steps = [str(step.steps)] if has_steps else []
    return [*steps, *map(duration, times), waited_for if is_long else ""]
