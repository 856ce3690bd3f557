"""How each result shows itself: on one line (`repr`), as text (`str`), and as HTML in a notebook.

Takes any result of the reading side, gives texts. What a text says is what the result's own command
prints; it is made by the views beside this file. Results of the watching side (`backward_graph`,
`graphs`, `names`) know their views themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import singledispatch
from typing import Any

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.run import BoxRun, RunSummary
from torchwhere.core.events import Event
from torchwhere.core.model_layout import Layout
from torchwhere.core.place import Place, shown
from torchwhere.diagnose.comms.tree import Comms, CommsNode
from torchwhere.diagnose.diff.cohorts import Comparison, Divergence, Version
from torchwhere.diagnose.diff.comparison import Diff
from torchwhere.diagnose.diff.remarks import DiffRemark
from torchwhere.diagnose.doctor.verdict import RankReport, Verdict
from torchwhere.diagnose.groups import Groups
from torchwhere.diagnose.layout.layouts import LayoutCohort, Layouts
from torchwhere.diagnose.layout.remarks import LayoutRemark
from torchwhere.diagnose.phases import PhaseRow, Phases
from torchwhere.diagnose.report.facts import ReportFact
from torchwhere.flight_recorder.facts import DumpFact
from torchwhere.render import diff_remarks, flight_recorder_text, layout_remarks, report_text
from torchwhere.render import html as page
from torchwhere.render import text as view
from torchwhere.render.diff import diff_lines
from torchwhere.render.layout import layout_text, layouts_lines
from torchwhere.render.layout_html import layout_html
from torchwhere.render.phases import phases_lines, phases_remarks, phases_table, phases_title
from torchwhere.render.text import Cell, Column, Line, amount, as_text, duration, plain, plural
from torchwhere.render.verdict import verdict_lines

_MOST_SHOWN = 8  # events of a box, layouts
_MOST_RANKS = 64  # of a verdict
_SHORT = 60  # characters of a list of ranks
_LINE = 300  # characters


def one_line(result: object) -> str:
    """A result on one line, cut where names in it are absurdly long."""
    said = brief(result)
    return said if len(said) <= _LINE else f"{said[: _LINE - 2]}…>"


@singledispatch
def brief(result: object) -> str:
    return object.__repr__(result)


@singledispatch
def text(result: object) -> str:
    """A result as its command prints it."""
    return repr(result)


@singledispatch
def html(result: object) -> str:
    """A result in a notebook."""
    return page.fragment(page.lines([(line, "")] for line in str(result).splitlines()))


def _joined(lines: Iterable[Line]) -> str:
    return as_text(lines).rstrip("\n")


# -- places and events -----------------------------------------------------------------------------


@html.register
def _(result: Place) -> str:
    found = result.to_dict() | {"module": None if result.module is None else shown(result.module)}
    return page.fragment(page.facts(found.items()))


@brief.register
def _(result: Event) -> str:
    return f"<Event {result.number} of {text(result)}>"


@text.register
def _(result: Event) -> str:
    return plain(f"{result.place}: {view.what(result)}")


@html.register
def _(result: Event) -> str:
    named = {key: value for key, value in result.to_dict().items() if value not in (None, [], {})}
    return page.fragment(page.facts(named.items()))


# -- boxes and runs --------------------------------------------------------------------------------


@brief.register
def _(result: Box) -> str:
    said = [f"{len(result.records):,} events", *result.problems]
    return plain(f"<Box of rank {result.rank}: {', '.join(said)}; {result.path}>")


@html.register
def _(result: Box) -> str:
    last = list(result.events(last=_MOST_SHOWN))
    started = result.meta.get("started_ns")
    columns, rows = view.events_table(last, started_ns=started if isinstance(started, int) else 0)
    title = f"rank {result.rank}: {len(result.records):,} events, {result.path}"
    return page.fragment(
        page.said(title, style="bold"), *map(page.said, result.problems), page.table(columns, rows)
    )


@brief.register
def _(result: RunSummary) -> str:  # type: ignore[type-arg]
    return plain(f"<{type(result).__name__} {result.folder}: {_ranks_of(result)}>")


def _ranks_of(run: RunSummary[Any]) -> str:
    ranks = f"{len(run.boxes):,} of {run.world_size:,} ranks"
    events = sum(box.counts.good for box in run.summaries.values())
    return f"{ranks}, {events:,} events"


@text.register
def _(result: RunSummary) -> str:  # type: ignore[type-arg]
    return "\n".join(map(plain, [f"{result.folder}: {_ranks_of(result)}", *result.caveats()]))


@html.register
def _(result: BoxRun) -> str:
    columns = [
        Column("rank", right=True),
        Column("host"),
        Column("step", right=True),
        Column("place"),
        Column("events", right=True),
    ]
    columns.append(Column("overwritten", right=True, optional=True))
    rows = (_box_row(box) for _, box in result.in_order())
    caveats = [page.said(caveat, style="yellow") for caveat in result.caveats()]
    return page.fragment(
        page.said(f"{result.folder}: {_ranks_of(result)}", style="bold"),
        page.table(columns, rows),
        *caveats,
    )


def _box_row(box: Box) -> list[Cell]:
    cursor = max(box.cursors(), key=lambda one: one.t_ns, default=None)
    place = cursor.place if cursor is not None else None
    step = str(place.step) if place is not None and place.step is not None else ""
    where = (
        plain(str(place).partition(", step ")[2].partition(", ")[2] or place)
        if place is not None
        else ""
    )
    overwritten = f"{box.counts.overwritten:,}" if box.counts.overwritten else ""
    return [
        str(box.rank),
        plain(box.meta.get("host") or ""),
        step,
        where,
        f"{len(box.records):,}",
        overwritten,
    ]


# -- verdicts --------------------------------------------------------------------------------------


@brief.register
def _(result: Verdict) -> str:
    culprits = f", by {_few(result.culprits)}" if result.culprits else ""
    return plain(
        f"<Verdict on {plural(len(result.ranks), 'rank')}: {result.kind}{culprits}"
        f" ({result.certainty})>"
    )


@text.register
def _(result: Verdict) -> str:
    return "\n".join(verdict_lines(result))


@html.register
def _(result: Verdict) -> str:
    """The text, then the ranks: the culprits first, and of very many ranks only so many."""
    first, *rest = verdict_lines(result)
    style = "bold green" if result.kind == "healthy" else "bold red"
    order = [
        *result.culprits,
        *(rank for rank in sorted(result.ranks) if rank not in set(result.culprits)),
    ]
    columns = [
        Column("rank", right=True),
        *map(Column, ("state", "place", "last collective", "detail")),
    ]
    rows = (_rank_row(rank, result.ranks[rank]) for rank in order if rank in result.ranks)
    lines = page.lines(([(line, "")] for line in rest), wrap=True)
    return page.fragment(
        page.said(first, style=style), lines, page.table(columns, rows, most=_MOST_RANKS)
    )


def _rank_row(rank: int, report: RankReport) -> list[Cell]:
    last = report.last or {}
    call = f"{last.get('op')} #{last.get('number')}" if last else ""
    where = str(report.place).partition(", ")[2]
    return [str(rank), str(report.state), plain(where), plain(call), plain(report.detail or "")]


@brief.register
def _(result: RankReport) -> str:
    return f"<RankReport {text(result)}>"


@text.register
def _(result: RankReport) -> str:
    return plain(": ".join(filter(None, (f"{result.state}", f"{result.place}", result.detail))))


# -- tables ----------------------------------------------------------------------------------------


@brief.register
def _(result: Comms) -> str:
    said = ", ".join(f"{op}={count}" for op, count in sorted(result.counts.items()))
    return plain(f"<Comms of {plural(len(result.ranks), 'rank')}: {said or 'no collectives'}>")


@text.register
def _(result: Comms) -> str:
    return _joined(view.comms_lines(result, width=None))


@html.register
def _(result: Comms) -> str:
    if not result.ranks:
        return page.fragment(page.said(text(result)))
    columns, rows = view.comms_table(result)
    last = text(result).splitlines()[-1] if result.overwritten else None
    return page.fragment(
        page.table(columns, rows), *([page.said(last, style="yellow")] if last else [])
    )


@brief.register
def _(result: CommsNode) -> str:
    total = result.total()
    name = "outside any module" if result.name is None else shown(result.name)
    return plain(
        f"<CommsNode {name}: {total.count:,} collectives, {amount(total.bytes)};"
        f" {len(result.children)} below>"
    )


@brief.register
def _(result: Phases) -> str:
    return f"<Phases: {plural(len(result.rows), 'phase')} of {plural(len(result.steps), 'rank')}>"


@brief.register
def _(result: PhaseRow) -> str:
    times, path = result.all, " > ".join(result.path)
    return plain(
        f"<PhaseRow {path}: {times.count:,} times on {plural(len(result.by_rank), 'rank')},"
        f" {duration(times.total_ns)}>"
    )


@text.register
def _(result: Phases) -> str:
    return _joined(phases_lines(result, width=None))


@html.register
def _(result: Phases) -> str:
    if not result.rows:
        return page.fragment(page.lines(phases_lines(result, width=None)))
    columns, rows = phases_table(result)
    remarks = list(phases_remarks(result))
    return page.fragment(
        page.said(phases_title(result), style="bold"),
        page.table(columns, rows),
        page.lines(remarks),
    )


@brief.register
def _(result: Groups) -> str:
    return plain(
        "<Groups:"
        f" {', '.join(str(group.get('name')) for group in itertools.islice(result, _MOST_SHOWN))}>"
    )


@text.register
def _(result: Groups) -> str:
    return _joined(view.groups_lines(result, width=None)) or "no process groups"


@html.register
def _(result: Groups) -> str:
    return page.fragment(page.table(*view.groups_table(result)))


@brief.register
def _(result: Layouts) -> str:
    count = sum(len(cohort.ranks) for cohort in result.cohorts)
    verdict = "laid out alike" if result.is_alike else f"in {len(result.cohorts)} cohorts"
    return f"<Layouts of {plural(count, 'rank')}: {verdict if count else 'none recorded'}>"


@text.register
def _(result: Layout) -> str:
    return layout_text(result)


@html.register
def _(result: Layout) -> str:
    return layout_html(result)


@brief.register
def _(result: LayoutCohort) -> str:
    return plain(f"<Cohort of {_few(result.ranks)}: {result.layout!r}>")


@text.register
def _(result: Layouts) -> str:
    return _joined(layouts_lines(result, width=None))


@html.register
def _(result: Layouts) -> str:
    """The layouts as trees that open and close, then how the ranks compare."""
    trees = [layout_html(cohort.layout) for cohort in result.cohorts if not cohort.differences][
        :_MOST_SHOWN
    ]
    told = _joined(layouts_lines(result, width=None)).rpartition("\n\n")[2]
    return page.fragment(*trees, page.lines([(line, "")] for line in told.splitlines()))


@brief.register
def _(result: Diff) -> str:
    found = [
        (name, one)
        for name, one in (("events", result.events), ("logs", result.logs))
        if one is not None
    ]
    said = [
        f"{name} of {plural(len(one.ranks), 'rank')} {_diverging(len(one.divergences))}"
        for name, one in found
    ]
    return f"<Diff: {', '.join(said)}>"


@brief.register
def _(result: Comparison) -> str:
    ranks = plural(len(result.ranks), "rank")
    return f"<Comparison of {ranks}: {_diverging(len(result.divergences))}>"


@brief.register
def _(result: Divergence) -> str:
    step = "" if result.step is None else f" in step {result.step}"
    return plain(f"<Divergence{step}: {'; '.join(map(_version, result.versions[:_MOST_SHOWN]))}>")


@brief.register
def _(result: Version) -> str:
    return plain(f"<Version of {_version(result)}>")


def _version(version: Version) -> str:
    return (
        f"{_few(version.ranks)}: {version.entry.text if version.entry is not None else 'nothing'}"
    )


def _few(ranks: Sequence[int]) -> str:
    """Ranks, as long as they are a short text."""
    listed = view.ranks_text(ranks)
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {listed}" if len(listed) < _SHORT else plural(len(ranks), "rank")


def _diverging(count: int) -> str:
    return f"diverge in {plural(count, 'place')}" if count else "are equal"


@text.register
def _(result: Diff) -> str:
    return _joined(diff_lines(result, width=None))


text.register(DiffRemark, diff_remarks.remark_text)
text.register(LayoutRemark, layout_remarks.remark_text)
text.register(ReportFact, report_text.fact_text)
text.register(DumpFact, flight_recorder_text.dump_fact_text)


@html.register
def _(result: Diff) -> str:
    return page.fragment(page.lines(diff_lines(result, width=None)))
