"""The table of phases as lines of text: a tree, with what each phase took, on one rank or over
many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torchwhere.diagnose.phases import PhaseRow, Phases, PhaseTimes
from torchwhere.render.text import (
    Cell,
    Column,
    Line,
    duration,
    fitted,
    plain,
    plural,
    ranks_text,
    table,
    twig,
)

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
    """`mean` and `max` are of a single time that the phase ran; `self` is without the phases inside
    it.

    Of many ranks: `count` and `total` are those of one rank on average, `least` and `most` the
    totals of the fastest and the slowest rank.
    """
    if not phases.rows:
        yield [("no phase was recorded", "bold")]
        yield from _remarks(phases)
        return
    yield fitted([(phases_title(phases), "bold")], width)
    columns, rows = phases_table(phases)
    narrowing = _NARROWING_ONE if len(phases.ranks) == 1 else _NARROWING_MANY
    yield from table(columns, rows, width=width, narrowing=narrowing)
    yield from phases_remarks(phases)


def phases_table(phases: Phases) -> tuple[list[Column], list[list[Cell]]]:
    headings = _ONE if len(phases.ranks) == 1 else _MANY
    columns = [Column("phase"), *(Column(heading, right=True) for heading in headings)]
    rows = (_cells(row, label, phases) for row, label in _labelled(phases))
    return columns, [*rows, *_rest(phases, len(columns))]


def phases_remarks(phases: Phases) -> Iterator[Line]:
    yield from _running(phases)
    yield from _remarks(phases)


def phases_title(phases: Phases) -> str:
    ranks, times = phases.ranks, list(phases.steps.values())
    who = f"rank {ranks[0]}" if len(ranks) == 1 else plural(len(ranks), "rank")
    count = max(one.count for one in times)
    watched = f"{duration(phases.watched_ns / len(ranks))} watched"
    if not count:
        return f"{who}, no step has ended, {watched}"
    mean = sum(one.total_ns - one.running_ns for one in times) / sum(one.count for one in times)
    longest = max(times, key=lambda one: one.max_ns)
    return (
        f"{who}, {plural(count, 'step')} of {duration(mean)} (longest {duration(longest.max_ns)}),"
        f" {watched}"
    )


def _labelled(phases: Phases) -> Iterator[tuple[PhaseRow, Line]]:
    """The rows with their names as a tree. Where threads differ, those that are not the main one's
    say so."""
    for is_main in (True, False):
        for row in phases.inside(None, is_main=is_main):
            mark = [] if is_main else [("  other threads", "dim")]
            yield row, [(plain(row.name), "bold"), *mark]
            yield from _below(phases, row, "")


def _below(phases: Phases, row: PhaseRow, guide: str) -> Iterator[tuple[PhaseRow, Line]]:
    inner = phases.inside(row)
    for left, one in zip(range(len(inner), 0, -1), inner, strict=True):
        yield one, [*twig(guide, left), (plain(one.name), "bold")]
        yield from _below(phases, one, guide + ("│ " if left > 1 else "  "))


def _cells(row: PhaseRow, label: Line, phases: Phases) -> list[Cell]:
    times, ranks = row.all, row.by_rank.values()
    if len(phases.ranks) == 1:
        return [
            label,
            _count(ranks),
            duration(times.total_ns),
            *_each(times),
            *_shares(times, phases),
        ]
    least, most = (duration(row.by_rank[rank].total_ns) for rank in (row.fastest, row.slowest))
    total = duration(times.total_ns / len(row.by_rank))
    slowest = (
        f"only rank {row.slowest}"
        if len(row.by_rank) == 1
        else ""
        if least == most
        else f"rank {row.slowest}"
    )
    return [
        label,
        _count(ranks),
        total,
        least,
        most,
        slowest,
        *_each(times),
        *_shares(times, phases),
    ]


def _count(times: Iterable[PhaseTimes]) -> str:
    """How often, on one rank."""
    counts = sorted({one.count for one in times})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"


def _each(times: PhaseTimes) -> list[Cell]:
    return [duration(times.mean_ns), duration(times.max_ns)] if times.count else ["", ""]


def _shares(times: PhaseTimes, phases: Phases) -> list[Cell]:
    return [_percent(times.total_ns, phases.watched_ns), _percent(times.self_ns, phases.watched_ns)]


def _percent(part_ns: float, whole_ns: float) -> str:
    return f"{100 * part_ns / whole_ns:.1f} %" if whole_ns else "-"


def _rest(phases: Phases, columns: int) -> Iterator[list[Cell]]:
    """What the main thread did in no phase at all."""
    rest_ns = phases.watched_ns - sum(row.all.total_ns for row in phases.inside(None))
    if rest_ns > 0:
        share = _percent(rest_ns, phases.watched_ns)
        total = duration(rest_ns / len(phases.ranks))
        yield [[("in no phase", "dim")], "", total, *[""] * (columns - 5), share, share]


def _running(phases: Phases) -> Iterator[Line]:
    """Who was in the middle of what."""
    for row in phases.rows:
        inner = [one for one in phases.inside(row) if one.all.running]
        ranks = [
            rank
            for rank, times in row.by_rank.items()
            if times.running and not any(_runs(one, rank) for one in inner)
        ]
        if ranks:
            longest = max(row.by_rank[rank].running_ns for rank in ranks)
            where = plain(" > ".join(row.path))
            who = f"rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)}"
            yield [(f"not ended: {where} on {who}, after {duration(longest)}", "yellow")]


def _runs(row: PhaseRow, rank: int) -> bool:
    return rank in row.by_rank and row.by_rank[rank].running > 0


def _remarks(phases: Phases) -> Iterator[Line]:
    for remark in phases.remarks:
        yield [(remark, "yellow")]
