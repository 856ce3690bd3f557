"""How each result shows itself: on one line (`repr`), as text (`str`), and as HTML in a notebook.

Takes any result of the reading side. The text is what the result's own command prints; the views
beside this file make it. Results of the watching side (`backward_graph`, `graphs`, `names`) call
their views themselves.

`VIEWS` holds one `ResultView` for each type of result. A type without an entry, or without one of
the three functions, uses that of its base class.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.device import device_lanes
from torchwhere.blackbox.run import BoxRun, RunSummary
from torchwhere.blackbox.summary import started_ns
from torchwhere.core.events import Event
from torchwhere.core.model_layout import Layout
from torchwhere.core.place import Place, shown
from torchwhere.core.rank_text import ranks_phrase
from torchwhere.core.results import Fact
from torchwhere.core.sanitize import plural
from torchwhere.core.units import amount, duration
from torchwhere.diagnose.comms.tree import Comms, CommsNode
from torchwhere.diagnose.diff.cohorts import Comparison, Divergence, Version
from torchwhere.diagnose.diff.comparison import Diff
from torchwhere.diagnose.doctor.verdict import RankReport, Verdict
from torchwhere.diagnose.groups import Groups
from torchwhere.diagnose.layout.layouts import LayoutCohort, Layouts
from torchwhere.diagnose.phases import PhaseRow, Phases
from torchwhere.render import html as page
from torchwhere.render import phases as phases_view
from torchwhere.render.diff import diff_lines
from torchwhere.render.fact_text import fact_text
from torchwhere.render.layout import layout_lines, layouts_lines
from torchwhere.render.layout_html import layout_html
from torchwhere.render.lines import Cell, Column, Line, as_text, plain
from torchwhere.render.text import (
    comms_lines,
    comms_table,
    event_text,
    events_table,
    groups_lines,
    groups_table,
    step_cell,
)
from torchwhere.render.verdict import verdict_lines, verdict_text

_MOST_SHOWN = 8  # events of a box, layouts
_MOST_RANKS = 64  # of a verdict
_SHORT = 60  # characters of a list of ranks
_LONGEST = 300  # characters of one line


@dataclass(frozen=True, slots=True)
class ResultView:
    """How results of one type are shown. None: as the base class is."""

    one_line: Callable[[Any], str] | None = None
    text: Callable[[Any], str] | None = None
    html: Callable[[Any], str] | None = None


def one_line(result: object) -> str:
    """A result on one line. Absurdly long names are cut."""
    line = plain(_function("one_line", result)(result))
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 2]}…>"


def text(result: object) -> str:
    """A result as its command prints it."""
    return _function("text", result)(result)


def html(result: object) -> str:
    """A result as HTML for a notebook."""
    return _function("html", result)(result)


def _function(name: str, result: object) -> Callable[[Any], str]:
    for base in type(result).__mro__:
        function: Callable[[Any], str] | None = getattr(VIEWS.get(base), name, None)
        if function is not None:
            return function
    raise TypeError(f"no view of {type(result).__name__}")


def _object_html(result: object) -> str:
    return page.text_fragment(str(result))


def _whole_text(make_lines: Callable[..., Iterable[Line]]) -> Callable[[Any], str]:
    """Make the text function of a result from the function that makes its lines."""
    return lambda result: as_text(make_lines(result, width=None)).rstrip("\n")


# -- places and events -----------------------------------------------------------------------------


def _place_html(place: Place) -> str:
    module = None if place.module is None else shown(place.module)
    return page.fragment(page.facts((place.to_dict() | {"module": module}).items()))


def _event_line(event: Event) -> str:
    return f"<Event {event.number} of {text(event)}>"


def _event_text(event: Event) -> str:
    return plain(f"{event.place}: {event_text(event)}")


def _event_html(event: Event) -> str:
    values = {key: value for key, value in event.to_dict().items() if value not in (None, [], {})}
    return page.fragment(page.facts(values.items()))


# -- boxes and runs --------------------------------------------------------------------------------


def _box_line(box: Box) -> str:
    facts = [f"{len(box.records):,} events", *box.problems]
    return f"<Box of rank {box.rank}: {', '.join(facts)}; {box.path}>"


def _box_html(box: Box) -> str:
    columns, rows = events_table(
        list(box.events(last=_MOST_SHOWN)),
        started_ns=started_ns(box),
        has_device=bool(device_lanes(box)),
    )
    title = f"rank {box.rank}: {len(box.records):,} events, {box.path}"
    return page.fragment(
        page.paragraph(title, style="bold"),
        *map(page.paragraph, box.problems),
        page.table(columns, rows),
    )


def _run_line(run: RunSummary[Any]) -> str:
    return f"<{type(run).__name__} {_run_title(run)}>"


def _run_title(run: RunSummary[Any]) -> str:
    events = sum(box.counts.good for box in run.summaries.values())
    return f"{run.folder}: {len(run.boxes):,} of {run.world_size:,} ranks, {events:,} events"


def _run_text(run: RunSummary[Any]) -> str:
    return "\n".join(map(plain, [_run_title(run), *run.caveats()]))


def _run_html(run: BoxRun) -> str:
    columns = [
        Column("rank", right=True),
        Column("host"),
        Column("step", right=True),
        Column("place"),
        Column("events", right=True),
        Column("overwritten", right=True, optional=True),
    ]
    return page.fragment(
        page.paragraph(_run_title(run), style="bold"),
        page.table(columns, (_box_row(box) for _, box in run.in_order())),
        *(page.paragraph(caveat, style="yellow") for caveat in run.caveats()),
    )


def _box_row(box: Box) -> list[Cell]:
    step = place_text = ""
    cursor = max(box.cursors(), key=lambda cursor: cursor.t_ns, default=None)
    if cursor is not None:
        place = cursor.place
        step = step_cell(place)
        after_step = str(place).partition(", step ")[2].partition(", ")[2]
        place_text = plain(after_step or place)
    return [
        str(box.rank),
        plain(box.meta.get("host") or ""),
        step,
        place_text,
        f"{len(box.records):,}",
        f"{box.counts.overwritten:,}" if box.counts.overwritten else "",
    ]


# -- verdicts --------------------------------------------------------------------------------------


def _verdict_line(verdict: Verdict) -> str:
    culprits = f", by {_short_ranks(verdict.culprits)}" if verdict.culprits else ""
    ranks = plural(len(verdict.ranks), "rank")
    return f"<Verdict on {ranks}: {verdict.kind}{culprits} ({verdict.certainty})>"


def _verdict_html(verdict: Verdict) -> str:
    """The text, then a table of the ranks with the culprits first."""
    first, *rest = verdict_lines(verdict)
    style = "bold green" if verdict.kind == "healthy" else "bold red"
    culprits = set(verdict.culprits)
    order = [*verdict.culprits, *(rank for rank in sorted(verdict.ranks) if rank not in culprits)]
    headings = ("state", "place", "last collective", "detail")
    columns = [Column("rank", right=True), *map(Column, headings), Column("GPU", optional=True)]
    rows = (_rank_row(rank, verdict.ranks[rank]) for rank in order if rank in verdict.ranks)
    return page.fragment(
        page.paragraph(first, style=style),
        page.lines(([(line, "")] for line in rest), wrap=True),
        page.table(columns, rows, most=_MOST_RANKS),
    )


def _rank_row(rank: int, report: RankReport) -> list[Cell]:
    last = report.last
    call = f"{last.get('op')} #{last.get('number')}" if last else ""
    place = str(report.place).partition(", ")[2]
    device = _device_text(report).removeprefix("GPU: ")
    texts = (place, call, report.detail or "", device)
    return [str(rank), str(report.state), *map(plain, texts)]


def _device_text(report: RankReport) -> str:
    return report.device.device_text() if report.device is not None else ""


def _rank_report_line(report: RankReport) -> str:
    return f"<RankReport {text(report)}>"


def _rank_report_text(report: RankReport) -> str:
    parts = (str(report.state), str(report.place), report.detail, _device_text(report))
    return plain(": ".join(part for part in parts if part))


# -- tables ----------------------------------------------------------------------------------------


def _comms_line(comms: Comms) -> str:
    counts = ", ".join(f"{op}={count}" for op, count in sorted(comms.counts.items()))
    return f"<Comms of {plural(len(comms.ranks), 'rank')}: {counts or 'no collectives'}>"


def _comms_html(comms: Comms) -> str:
    if not comms.ranks:
        return page.fragment(page.paragraph(text(comms)))
    parts = [page.table(*comms_table(comms))]
    if comms.overwritten:
        parts.append(page.paragraph(text(comms).splitlines()[-1], style="yellow"))
    return page.fragment(*parts)


def _comms_node_line(node: CommsNode) -> str:
    total = node.total()
    name = "outside any module" if node.name is None else shown(node.name)
    return (
        f"<CommsNode {name}: {total.count:,} collectives, {amount(total.bytes)};"
        f" {len(node.children)} below>"
    )


def _phases_line(phases: Phases) -> str:
    return f"<Phases: {plural(len(phases.rows), 'phase')} of {plural(len(phases.steps), 'rank')}>"


def _phase_row_line(row: PhaseRow) -> str:
    times, path = row.all, " > ".join(row.path)
    return (
        f"<PhaseRow {path}: {times.count:,} times on {plural(len(row.by_rank), 'rank')},"
        f" {duration(times.total_ns)}>"
    )


def _phases_html(phases: Phases) -> str:
    if not phases.rows:
        return page.fragment(page.lines(phases_view.phases_lines(phases, width=None)))
    return page.fragment(
        page.paragraph(phases_view.phases_title(phases), style="bold"),
        page.table(*phases_view.phases_table(phases)),
        page.lines(
            [*phases_view.phases_remarks(phases), *phases_view.phases_further(phases, width=None)]
        ),
    )


def _groups_line(groups: Groups) -> str:
    names = (str(group.get("name")) for group in itertools.islice(groups, _MOST_SHOWN))
    return f"<Groups: {', '.join(names)}>"


def _groups_text(groups: Groups) -> str:
    return _whole_text(groups_lines)(groups) or "no process groups"


def _groups_html(groups: Groups) -> str:
    return page.fragment(page.table(*groups_table(groups)))


# -- layouts ---------------------------------------------------------------------------------------


def _layouts_line(layouts: Layouts) -> str:
    count = sum(len(cohort.ranks) for cohort in layouts.cohorts)
    if not count:
        result = "none recorded"
    elif layouts.is_alike:
        result = "laid out alike"
    else:
        result = f"in {len(layouts.cohorts)} cohorts"
    return f"<Layouts of {plural(count, 'rank')}: {result}>"


def _layouts_html(layouts: Layouts) -> str:
    """The layouts as trees that open and close, then how the ranks compare."""
    cohorts = [cohort for cohort in layouts.cohorts if not cohort.differences][:_MOST_SHOWN]
    comparison = text(layouts).rpartition("\n\n")[2]
    return page.fragment(
        *(layout_html(cohort.layout) for cohort in cohorts),
        page.lines([(line, "")] for line in comparison.splitlines()),
    )


def _layout_cohort_line(cohort: LayoutCohort) -> str:
    return f"<Cohort of {_short_ranks(cohort.ranks)}: {cohort.layout!r}>"


# -- differences -----------------------------------------------------------------------------------


def _diff_line(diff: Diff) -> str:
    comparisons = {"events": diff.events, "logs": diff.logs}
    results = [
        f"{name} of {plural(len(comparison.ranks), 'rank')} {_result(comparison)}"
        for name, comparison in comparisons.items()
        if comparison is not None
    ]
    return f"<Diff: {', '.join(results)}>"


def _diff_html(diff: Diff) -> str:
    return page.fragment(page.lines(diff_lines(diff, width=None)))


def _comparison_line(comparison: Comparison) -> str:
    return f"<Comparison of {plural(len(comparison.ranks), 'rank')}: {_result(comparison)}>"


def _result(comparison: Comparison) -> str:
    count = len(comparison.divergences)
    return f"diverge in {plural(count, 'place')}" if count else "are equal"


def _divergence_line(divergence: Divergence) -> str:
    step = "" if divergence.step is None else f" in step {divergence.step}"
    versions = "; ".join(map(_version_text, divergence.versions[:_MOST_SHOWN]))
    return f"<Divergence{step}: {versions}>"


def _version_line(version: Version) -> str:
    return f"<Version of {_version_text(version)}>"


def _version_text(version: Version) -> str:
    entry = version.entry.text if version.entry is not None else "nothing"
    return f"{_short_ranks(version.ranks)}: {entry}"


def _short_ranks(ranks: Sequence[int]) -> str:
    """A list of ranks, or their number if the list is long."""
    listed = ranks_phrase(ranks, most=None)
    return listed if len(listed) < _SHORT else plural(len(ranks), "rank")


VIEWS: dict[type, ResultView] = {
    object: ResultView(object.__repr__, repr, _object_html),
    Place: ResultView(html=_place_html),
    Event: ResultView(_event_line, _event_text, _event_html),
    Box: ResultView(_box_line, html=_box_html),
    RunSummary: ResultView(_run_line, _run_text),
    BoxRun: ResultView(html=_run_html),
    Verdict: ResultView(_verdict_line, verdict_text, _verdict_html),
    RankReport: ResultView(_rank_report_line, _rank_report_text),
    Comms: ResultView(_comms_line, _whole_text(comms_lines), _comms_html),
    CommsNode: ResultView(_comms_node_line),
    Phases: ResultView(_phases_line, _whole_text(phases_view.phases_lines), _phases_html),
    PhaseRow: ResultView(_phase_row_line),
    Groups: ResultView(_groups_line, _groups_text, _groups_html),
    Layout: ResultView(text=_whole_text(layout_lines), html=layout_html),
    Layouts: ResultView(_layouts_line, _whole_text(layouts_lines), _layouts_html),
    LayoutCohort: ResultView(_layout_cohort_line),
    Diff: ResultView(_diff_line, _whole_text(diff_lines), _diff_html),
    Comparison: ResultView(_comparison_line),
    Divergence: ResultView(_divergence_line),
    Version: ResultView(_version_line),
    Fact: ResultView(text=fact_text),
}
