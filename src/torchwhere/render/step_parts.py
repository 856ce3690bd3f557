"""The parts of the steps as lines of text: the mean time of each part, one row for each rank."""

from __future__ import annotations

from collections.abc import Iterator

from torchwhere.core.sanitize import plural
from torchwhere.core.units import duration
from torchwhere.diagnose.step_parts import PART_NAMES, WAIT, JobStepParts
from torchwhere.render.lines import Cell, Column, Line, fitted, table

_MOST_ROWS = 16
_RARE = ("checkpoint", "evaluation")  # shown if a rank has such time
_NARROWING = (("optimizer", 0), ("data", 0))
ON_CPU = (
    "These are times of the CPU, which issues work for the device. It does not wait for collectives"
    " on a device."
)


def step_parts_lines(parts: JobStepParts, *, width: int | None) -> Iterator[Line]:
    """A title, a row for each rank, and remarks.

    With many ranks, only those that waited the least and the most have a row.
    """
    yield fitted([(step_parts_title(parts), "bold")], width)
    columns, rows = step_parts_table(parts)
    yield from table(columns, rows, width=width, narrowing=_NARROWING)
    for remark in step_parts_remarks(parts):
        yield [(remark, "dim")]


def step_parts_title(parts: JobStepParts) -> str:
    steps = max(len(own) for own in parts.by_rank.values())
    return f"parts of a step, mean of {plural(steps, 'step')}"


def step_parts_table(parts: JobStepParts) -> tuple[list[Column], list[list[Cell]]]:
    names = _shown_parts(parts)
    columns = [Column(name, right=True) for name in ("rank", "step", *names)]
    rows: list[list[Cell]] = []
    for rank in _shown_ranks(parts):
        own = parts.by_rank[rank]
        means = (own.mean_ns(name) for name in (None, *names))
        rows.append([str(rank), *map(duration, means)])
    return columns, rows


def step_parts_remarks(parts: JobStepParts) -> Iterator[str]:
    """Which ranks are left out, and what the times do not include."""
    left_out = len(parts.by_rank) - _MOST_ROWS
    if left_out > 0:
        yield f"and {plural(left_out, 'rank')} between them; --json has all"
    if parts.has_device_calls:
        yield ON_CPU
    if len(parts.by_rank) > 1 and "hosts" in parts.clocks:
        yield f"Ranks are compared by {parts.clocks}."


def _shown_parts(parts: JobStepParts) -> list[str]:
    return [
        name
        for name in PART_NAMES
        if (name not in _RARE or any(any(own.parts_ns[name]) for own in parts.by_rank.values()))
        and (name != WAIT or len(parts.by_rank) > 1)
    ]


def _shown_ranks(parts: JobStepParts) -> list[int]:
    if len(parts.by_rank) <= _MOST_ROWS:
        return list(parts.by_rank)
    by_wait = sorted(parts.by_rank, key=lambda rank: parts.by_rank[rank].mean_ns(WAIT))
    return sorted([*by_wait[: _MOST_ROWS // 2], *by_wait[-_MOST_ROWS // 2 :]])
