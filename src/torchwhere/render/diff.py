"""Where ranks diverge, as lines of text: what was the same before, then what each cohort has.

Parts that differ are marked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torchwhere.core.rank_text import ranks_phrase, ranks_text
from torchwhere.core.sanitize import plural
from torchwhere.diagnose.diff.cohorts import ComparedItem, Comparison, Divergence, Version
from torchwhere.diagnose.diff.comparison import Diff
from torchwhere.diagnose.diff.log_lines import stripped
from torchwhere.render.lines import GAP, Cell, Column, Line, Narrowing, fitted, plain, table
from torchwhere.render.text import event_text, module_cell, step_cell, steps_text

_MOST_DIVERGENCES = 5
_MOST_VERSIONS = 6
_MOST_RUNS = 8  # of ranks in one cell
_INDENT = "  "
_DIFFERS = "bold red"
_SAME = "dim"
_EVENT_NARROWING = (
    ("event", 56),
    ("line", 20),
    ("event", 40),
    ("line", 12),
    ("module", 12),
    ("ranks", 12),
    ("event", 10),
)
_LOG_NARROWING = (("ranks", 16), ("text", 20))
# The verb for one rank, for several, and for two cohorts of the same size.
_VERBS = {
    "flow": ("diverges from", "diverge from", "diverge"),
    "value": ("has other values than", "have other values than", "have different values"),
    "group": (
        "differs in one collective from",
        "differ in one collective from",
        "differ in one collective",
    ),
}


def diff_lines(diff: Diff, *, width: int | None) -> Iterator[Line]:
    """First the events, then the logs."""
    for name, comparison in (("events", diff.events), ("logs", diff.logs)):
        if comparison is None:
            yield [(f"{name}: nothing to compare", _SAME)]
            continue
        yield from _comparison_lines(name, comparison, width)
        if comparison.divergences and name == "events":
            yield []


def _comparison_lines(name: str, comparison: Comparison, width: int | None) -> Iterator[Line]:
    divergences = comparison.divergences
    yield fitted(_title(name, comparison), width)
    make_lines = _event_lines if name == "events" else _log_lines
    for divergence in divergences[:_MOST_DIVERGENCES]:
        yield []
        yield fitted([(_INDENT + _headline(divergence), _DIFFERS)], width)
        for line in make_lines(divergence, width):
            yield [(_INDENT, ""), *line]
        yield from _remark_lines(divergence.remarks, width)
    if len(divergences) > _MOST_DIVERGENCES:
        left = len(divergences) - _MOST_DIVERGENCES
        yield [(f"{_INDENT}{left} more; --json lists all", "yellow")]
    if divergences and comparison.remarks:
        yield []
    yield from _remark_lines(comparison.remarks, width)


def _remark_lines(remarks: Iterable[str], width: int | None) -> Iterator[Line]:
    for remark in remarks:
        yield fitted([(_INDENT + plain(remark), "yellow")], width)


def _title(name: str, comparison: Comparison) -> Line:
    ranks = plural(len(comparison.ranks), "rank")
    compared = plural(comparison.compared, "event" if name == "events" else "line")
    title = f"{name} of {ranks}{steps_text(comparison.steps)}, {compared}"
    if not comparison.divergences:
        return [(title, "bold"), (": no difference", "green")]
    cohorts = comparison.cohorts
    listed = "; ".join(ranks_text(cohort, most=_MOST_RUNS) for cohort in cohorts[:_MOST_VERSIONS])
    rest = "; ..." if len(cohorts) > _MOST_VERSIONS else ""
    return [(title, "bold"), (f": {plural(len(cohorts), 'cohort')}: {listed}{rest}", "red")]


def _headline(divergence: Divergence) -> str:
    step = "" if divergence.step is None else f" in step {divergence.step}"
    verb_one, verb_many, verb_equal = _VERBS[divergence.kind]
    majority, minority = divergence.versions[0].ranks, divergence.minority.ranks
    if len(divergence.versions) > 2:
        ranks = [rank for version in divergence.versions for rank in version.ranks]
        return f"{ranks_phrase(ranks)} {verb_equal} in {len(divergence.versions)} ways{step}"
    if len(minority) < len(majority):
        verb = verb_one if len(minority) == 1 else verb_many
        return f"{ranks_phrase(minority)} {verb} {ranks_phrase(majority)}{step}"
    return f"{ranks_phrase(majority)} and {ranks_phrase(minority)} {verb_equal}{step}"


def _version_ranks(version: Version) -> str:
    return ranks_text(version.ranks, most=_MOST_RUNS)


def _table_lines(
    divergence: Divergence,
    columns: Sequence[Column],
    rows: list[list[Cell]],
    width: int | None,
    narrowing: Narrowing,
) -> Iterator[Line]:
    inner_width = None if width is None else width - len(_INDENT)
    yield from table(columns, rows, width=inner_width, narrowing=narrowing)
    hidden = divergence.versions[_MOST_VERSIONS:]
    ranks = [rank for version in hidden for rank in version.ranks]
    if ranks:
        versions = plural(len(hidden), "more version")
        yield [(f"and {versions}, of {ranks_phrase(ranks)}", "yellow")]


# -- events ----------------------------------------------------------------------------------------


def _event_lines(divergence: Divergence, width: int | None) -> Iterator[Line]:
    columns = [
        Column("ranks"),
        Column("step", right=True),
        Column("pass"),
        Column("line", keep_end=True),
        Column("module", keep_end=True),
        Column("event"),
    ]
    rows: list[list[Cell]] = [
        [[(cell, _SAME)] for cell in ("same", *_event_cells(entry))] for entry in divergence.before
    ]
    versions = divergence.versions[:_MOST_VERSIONS]
    with_shapes = divergence.kind == "group"
    cells = [_version_cells(version, with_shapes=with_shapes) for version in versions]
    for version, marked in zip(versions, _marked(cells), strict=True):
        rows.append([_version_ranks(version), *marked])
    return _table_lines(divergence, columns, rows, width, _EVENT_NARROWING)


def _version_cells(version: Version, *, with_shapes: bool) -> list[str]:
    if version.entry is not None:
        return _event_cells(version.entry, with_shapes=with_shapes)
    if not version.after:
        return ["", "", "", "", "nothing more"]
    *place, text = _event_cells(version.after[0])
    return [*place, f"instead: {text}"]


def _event_cells(entry: ComparedItem, *, with_shapes: bool = False) -> list[str]:
    event = entry.event
    if event is None:  # the job still runs and has overwritten it
        return ["", "", "", "", entry.text]
    place = event.place
    text = event_text(event)
    if with_shapes:
        name, _, rest = text.partition(GAP)
        text = GAP.join([name, *_agreed(event.fields), rest])
    return [
        step_cell(place),
        place.pass_,
        plain(place.full_line),
        plain(module_cell(event)),
        plain(text),
    ]


def _agreed(fields: dict[str, Any]) -> Iterator[str]:
    """The fields that the ranks of a group must agree on and that other views leave out."""
    for key, prefix in (("shapes", ""), ("out_shapes", "to ")):
        shapes = fields.get(key)
        if isinstance(shapes, list) and shapes:
            yield f"{prefix}{shapes[0] if len(shapes) == 1 else shapes}"
    if fields.get("reduce_op"):
        yield str(fields["reduce_op"])


def _marked(rows: Sequence[Sequence[str]]) -> list[list[Cell]]:
    """Mark the cells that are not the same in all rows."""
    styles = [_DIFFERS if len(set(cells)) > 1 else "" for cells in zip(*rows, strict=True)]
    return [[[(cell, style)] for cell, style in zip(row, styles, strict=True)] for row in rows]


# -- logs ------------------------------------------------------------------------------------------


def _log_lines(divergence: Divergence, width: int | None) -> Iterator[Line]:
    columns = [Column("ranks"), Column("line", right=True), Column("text")]
    same: Line = [("same", _SAME)]
    rows: list[list[Cell]] = [
        _log_row(same, entry, [(plain(entry.text), _SAME)]) for entry in divergence.before
    ]
    versions = divergence.versions[:_MOST_VERSIONS]
    texts = _marked_words([_words(version) for version in versions])
    for version, text in zip(versions, texts, strict=True):
        ranks = _version_ranks(version)
        if version.entry is None:
            rows.append([ranks, "", [("nothing more", _DIFFERS)]])
            continue
        rows.append(_log_row(ranks, version.entry, text))
        if divergence.kind == "flow":
            rows += [_log_row("", entry, [(plain(entry.text), "")]) for entry in version.after]
    return _table_lines(divergence, columns, rows, width, _LOG_NARROWING)


def _log_row(name: Cell, entry: ComparedItem, text: Line) -> list[Cell]:
    return [name, [(str(entry.number), _SAME)], text]


def _words(version: Version) -> list[str]:
    """The words of a line, and the spaces between them."""
    return re.split(r"(\s+)", plain(version.entry.text)) if version.entry is not None else []


def _marked_words(texts: Sequence[list[str]]) -> list[Line]:
    """Mark the words that make lines differ, or whole lines if their numbers of words differ."""
    if len(set(map(len, texts))) > 1:
        return [[("".join(words), _DIFFERS)] for words in texts]
    styles = [_DIFFERS if _matters(at, texts) else "" for at in range(len(texts[0]))]
    return [list(zip(words, styles, strict=True)) for words in texts]


def _matters(at: int, texts: Sequence[list[str]]) -> bool:
    """Whether the words at a position make a difference in the first line."""
    first = texts[0]
    lines = {"".join([*first[:at], words[at], *first[at + 1 :]]) for words in texts}
    return len(lines) > 1 and len(set(map(stripped, lines))) > 1
