"""The time of devices as lines of text: one row for each rank, with the parts of its usual step."""

from __future__ import annotations

from collections.abc import Iterator

from torchwhere.core.sanitize import plural
from torchwhere.core.units import duration
from torchwhere.diagnose.device_time.job import JobDeviceTimes, UsualStep
from torchwhere.render.lines import Cell, Column, Line, fitted, table
from torchwhere.render.step_parts import left_out_lines, shown_ranks

_LEAST_WAIT = 0.01  # of a step: shorter waits name no rank
_HEADINGS = ("step", "compute, idle", "hidden", "unclear", "exposed", "waited")
_NARROWING = (("waited for", 0), ("hidden", 0))
UNCLEAR = (
    "unclear: a collective that is asynchronous or has its own stream was in flight. It is not"
    " known whether the job computed or waited for it."
)


def device_time_lines(device: JobDeviceTimes, *, width: int | None) -> Iterator[Line]:
    """A title, a row for each rank, and what is not known.

    With many ranks, only those that waited the least and the most have a row.
    """
    usual = {rank: device.usual(rank) for rank in device.by_rank}
    steps = max(step.steps for step in usual.values())
    yield fitted([(f"device, median of {plural(steps, 'step')}", "bold")], width)
    columns = [Column(name, right=True) for name in ("rank", *_HEADINGS)]
    columns.append(Column("waited for", optional=True))
    shown = shown_ranks({rank: step.waited_ns for rank, step in usual.items()})
    rows = ([str(rank), *_cells(usual[rank])] for rank in shown)
    yield from table(columns, rows, width=width, narrowing=_NARROWING)
    yield from left_out_lines(len(usual))
    for sentence in _remarks(device, usual):
        yield [(sentence, "dim")]


def _cells(step: UsualStep) -> list[Cell]:
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
    return [*map(duration, times), waited_for if is_long else ""]


def _remarks(device: JobDeviceTimes, usual: dict[int, UsualStep]) -> Iterator[str]:
    """What the times do not include, and by which clocks devices are compared."""
    if any(step.unclear_ns for step in usual.values()):
        yield UNCLEAR
    open_calls = sum(step.open_calls for step in usual.values())
    if open_calls:
        yield (
            f"The end of {plural(open_calls, 'collective')} was not recorded. Each counts only"
            " until the last device reached it."
        )
    yield f"Devices are compared by {device.clocks}."
