"""The parts of the steps as lines of text: the mean time of each part, one row for each rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torchwhere.core.sanitize import plural
from torchwhere.core.units import duration
from torchwhere.diagnose.step_parts import PART_NAMES, WAIT, JobStepParts
from torchwhere.render.lines import Column, Line, fitted, table

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
    by_rank = parts.by_rank
    steps = max(len(own) for own in by_rank.values())
    yield fitted([(f"parts of a step, mean of {plural(steps, 'step')}", "bold")], width)
    names = _shown_parts(parts)
    columns = [Column(name, right=True) for name in ("rank", "step", *names)]
    rows = (
        [str(rank), *(duration(by_rank[rank].mean_ns(name)) for name in (None, *names))]
        for rank in shown_ranks({rank: own.mean_ns(WAIT) for rank, own in by_rank.items()})
    )
    yield from table(columns, rows, width=width, narrowing=_NARROWING)
    yield from left_out_lines(len(by_rank))
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


def shown_ranks(waits_ns: Mapping[int, float]) -> list[int]:
    """The ranks that have a row: of many, those that waited the least and the most."""
    if len(waits_ns) <= _MOST_ROWS:
        return list(waits_ns)
    by_wait = sorted(waits_ns, key=lambda rank: waits_ns[rank])
    return sorted([*by_wait[: _MOST_ROWS // 2], *by_wait[-_MOST_ROWS // 2 :]])


def left_out_lines(ranks: int) -> Iterator[Line]:
    """A line for the ranks without a row, if `ranks` is more than the table shows."""
    if ranks > _MOST_ROWS:
        yield [(f"and {plural(ranks - _MOST_ROWS, 'rank')} between them; --json has all", "dim")]
