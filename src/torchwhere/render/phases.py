"""The table of phases as lines of text: a tree with the time of each phase, on one rank or many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torchwhere.core.rank_text import ranks_phrase
from torchwhere.core.sanitize import plural
from torchwhere.core.units import duration
from torchwhere.diagnose.phases import PhaseRow, Phases, PhaseTimes
from torchwhere.render.lines import (
    Cell,
    Column,
    Line,
    Table,
    fitted,
    plain,
    table,
    twigs,
)
from torchwhere.render.step_parts import device_time_lines, step_parts_lines

_ONE = ("count", "total", "mean", "max", "share", "self")
_MANY = ("count", "total", "least", "most", "slowest", "mean", "max", "share", "self")
_NARROWING_ONE = (("max", 0), ("mean", 0), ("phase", 20), ("self", 0), ("phase", 12))
_NARROWING_MANY = (
    ("mean", 0),
    ("max", 0),
    ("self", 0),
    ("phase", 24),
    ("least", 0),
    ("count", 0),
    ("phase", 12),
)


def phases_lines(phases: Phases, *, width: int | None) -> Iterator[Line]:
    """A title, the table, remarks, the parts of a step, and the times of the devices.

    The parts and the times of the devices are missing if no box has them.

    `mean` and `max` are times of a single run of the phase; `self` excludes the phases inside it.
    With many ranks, `count` and `total` are the average of one rank, `least` and `most` the totals
    of the fastest and the slowest rank.
    """
    if phases.rows:
        yield fitted([(phases_title(phases), "bold")], width)
        columns, rows = phases_table(phases)
        narrowing = _NARROWING_ONE if len(phases.ranks) == 1 else _NARROWING_MANY
        yield from table(columns, rows, width=width, narrowing=narrowing)
    elif phases.parts is None:
        yield [("no phase was recorded", "bold")]
    yield from phases_remarks(phases)
    yield from phases_further(phases, width=width)


def phases_further(phases: Phases, *, width: int | None) -> Iterator[Line]:
    """The parts of a step, and the time of each step on the devices; nothing if the boxes do not
    have them."""
    if phases.parts is not None:
        if phases.rows:
            yield [("", "")]
        yield from step_parts_lines(phases.parts, width=width)
    if phases.device is not None:
        yield [("", "")]
        yield from device_time_lines(phases.device, width=width)


def phases_table(phases: Phases) -> Table:
    headings = _ONE if len(phases.ranks) == 1 else _MANY
    columns = [Column("phase"), *(Column(heading, right=True) for heading in headings)]
    rows = (_cells(row, label, phases) for row, label in _labelled(phases))
    return columns, [*rows, *_rest(phases, len(columns))]


def phases_remarks(phases: Phases) -> Iterator[Line]:
    yield from _running(phases)
    for remark in phases.remarks:
        yield [(remark, "yellow")]


def phases_title(phases: Phases) -> str:
    ranks, steps = phases.ranks, list(phases.steps.values())
    ranks_text = f"rank {ranks[0]}" if len(ranks) == 1 else plural(len(ranks), "rank")
    count = max(step.count for step in steps)
    watched = f"{duration(phases.watched_ns / len(ranks))} watched"
    if not count:
        return f"{ranks_text}, no step has ended, {watched}"
    total_ns = sum(step.total_ns - step.running_ns for step in steps)
    mean = duration(total_ns / sum(step.count for step in steps))
    longest = duration(max(step.max_ns for step in steps))
    return f"{ranks_text}, {plural(count, 'step')} of {mean} (longest {longest}), {watched}"


def _labelled(phases: Phases) -> Iterator[tuple[PhaseRow, Line]]:
    """The rows with their names as a tree. Rows of other threads than the main one are marked."""
    for is_main in (True, False):
        for row in phases.inside(None, is_main=is_main):
            mark = [] if is_main else [("  other threads", "dim")]
            yield row, [(plain(row.name), "bold"), *mark]
            yield from _below(phases, row, "")


def _below(phases: Phases, row: PhaseRow, guide: str) -> Iterator[tuple[PhaseRow, Line]]:
    for child, twig, inset in twigs(phases.inside(row), guide):
        yield child, [*twig, (plain(child.name), "bold")]
        yield from _below(phases, child, inset)


def _cells(row: PhaseRow, label: Line, phases: Phases) -> list[Cell]:
    times = row.all
    cells: list[Cell] = [label, _count(row.by_rank.values())]
    if len(phases.ranks) == 1:
        cells.append(duration(times.total_ns))
    else:
        least = duration(row.by_rank[row.fastest].total_ns)
        most = duration(row.by_rank[row.slowest].total_ns)
        cells += [duration(times.total_ns / len(row.by_rank)), least, most]
        cells.append(_slowest(row, are_equal=least == most))
    return [*cells, *_each(times), _share(times.total_ns, phases), _share(times.self_ns, phases)]


def _slowest(row: PhaseRow, *, are_equal: bool) -> str:
    if len(row.by_rank) == 1:
        return f"only rank {row.slowest}"
    return "" if are_equal else f"rank {row.slowest}"


def _count(times: Iterable[PhaseTimes]) -> str:
    """How many times the phase ran on one rank."""
    counts = sorted({rank_times.count for rank_times in times})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"


def _each(times: PhaseTimes) -> list[Cell]:
    return [duration(times.mean_ns), duration(times.max_ns)] if times.count else ["", ""]


def _share(part_ns: float, phases: Phases) -> str:
    whole_ns = phases.watched_ns
    return f"{100 * part_ns / whole_ns:.1f} %" if whole_ns else "-"


def _rest(phases: Phases, columns: int) -> Iterator[list[Cell]]:
    """The time of the main thread outside all phases."""
    rest_ns = phases.watched_ns - sum(row.all.total_ns for row in phases.inside(None))
    if rest_ns > 0:
        share = _share(rest_ns, phases)
        total = duration(rest_ns / len(phases.ranks))
        yield [[("in no phase", "dim")], "", total, *[""] * (columns - 5), share, share]


def _running(phases: Phases) -> Iterator[Line]:
    """The phases that had not ended, and on which ranks."""
    for row in phases.rows:
        inner = [_running_ranks(child) for child in phases.inside(row)]
        ranks = _running_ranks(row).difference(*inner)
        if ranks:
            longest = max(row.by_rank[rank].running_ns for rank in ranks)
            path = plain(" > ".join(row.path))
            on = ranks_phrase(ranks, most=None)
            yield [(f"not ended: {path} on {on}, after {duration(longest)}", "yellow")]


def _running_ranks(row: PhaseRow) -> set[int]:
    return {rank for rank, times in row.by_rank.items() if times.running}
