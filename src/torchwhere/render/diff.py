"""Divergences of ranks as lines of text: the equal items before, then the item of each cohort, with
the difference marked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torchwhere.core.rank_text import ranks_phrase, ranks_text
from torchwhere.diagnose.diff.cohorts import ComparedItem, Comparison, Divergence, Version
from torchwhere.diagnose.diff.comparison import Diff
from torchwhere.diagnose.diff.log_lines import stripped
from torchwhere.render.text import (
    GAP,
    Cell,
    Column,
    Line,
    fitted,
    module_cell,
    plain,
    plural,
    table,
    what,
)

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


def diff_lines(diff: Diff, *, width: int | None) -> Iterator[Line]:
    """First the events, then the logs."""
    for name, found in (("events", diff.events), ("logs", diff.logs)):
        if found is None:
            yield [(f"{name}: nothing to compare", _SAME)]
        else:
            yield from _comparison_lines(name, found, width)
            if found.divergences and name == "events":
                yield []


def _comparison_lines(name: str, found: Comparison, width: int | None) -> Iterator[Line]:
    yield fitted(_title(name, found), width)
    for divergence in found.divergences[:_MOST_DIVERGENCES]:
        yield []
        yield fitted([(_INDENT, ""), *_headline(divergence)], width)
        lines = (
            _event_lines(divergence, width) if name == "events" else _log_lines(divergence, width)
        )
        yield from ([(_INDENT, ""), *line] for line in lines)
        yield from (
            fitted([(_INDENT + plain(remark), "yellow")], width) for remark in divergence.remarks
        )
    if len(found.divergences) > _MOST_DIVERGENCES:
        yield [
            (
                f"{_INDENT}{len(found.divergences) - _MOST_DIVERGENCES} more: --json has them all",
                "yellow",
            )
        ]
    if found.divergences and found.remarks:
        yield []
    yield from (
        fitted([(f"{_INDENT}{plain(remark)}", "yellow")], width) for remark in found.remarks
    )


def _title(name: str, found: Comparison) -> Line:
    unit = "event" if name == "events" else "line"
    title = (
        f"{name} of {plural(len(found.ranks), 'rank')}{_steps(found)},"
        f" {plural(found.compared, unit)}"
    )
    if not found.divergences:
        return [(title, "bold"), (": no difference", "green")]
    cohorts = "; ".join(
        ranks_text(cohort, most=_MOST_RUNS) for cohort in found.cohorts[:_MOST_VERSIONS]
    )
    more = "; ..." if len(found.cohorts) > _MOST_VERSIONS else ""
    return [(title, "bold"), (f": {plural(len(found.cohorts), 'cohort')}: {cohorts}{more}", "red")]


def _steps(found: Comparison) -> str:
    if found.steps is None:
        return ""
    first, last = found.steps
    return f", step {first}" if first == last else f", steps {first}-{last}"


# The verb for one rank, for several ranks, and for two cohorts of equal size.
_VERBS = {
    "flow": ("diverges from", "diverge from", "diverge"),
    "value": ("has other values than", "have other values than", "have different values"),
    "group": (
        "differs in one collective from",
        "differ in one collective from",
        "differ in one collective",
    ),
}


def _headline(divergence: Divergence) -> Line:
    step = "" if divergence.step is None else f" in step {divergence.step}"
    of_one, of_several, of_equals = _VERBS[divergence.kind]
    most, least = divergence.versions[0].ranks, divergence.minority.ranks
    if len(divergence.versions) > 2:
        ranks = ranks_phrase([rank for version in divergence.versions for rank in version.ranks])
        return [(f"{ranks} {of_equals} in {len(divergence.versions)} ways{step}", _DIFFERS)]
    if len(least) < len(most):
        verb = of_one if len(least) == 1 else of_several
        return [(f"{ranks_phrase(least)} {verb} {ranks_phrase(most)}{step}", _DIFFERS)]
    return [(f"{ranks_phrase(most)} and {ranks_phrase(least)} {of_equals}{step}", _DIFFERS)]


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
    rows: list[list[Cell]] = [["same", *_event_cells(entry)] for entry in divergence.before]
    rows = [[[(str(cell), _SAME)] for cell in row] for row in rows]
    versions = divergence.versions[:_MOST_VERSIONS]
    cells = [
        _version_cells(version, with_shapes=divergence.kind == "group") for version in versions
    ]
    rows += [
        [_ranks(version), *marked] for version, marked in zip(versions, _marked(cells), strict=True)
    ]
    yield from table(
        columns,
        rows,
        width=None if width is None else width - len(_INDENT),
        narrowing=_EVENT_NARROWING,
    )
    yield from _more_versions(divergence)


def _version_cells(version: Version, *, with_shapes: bool) -> list[str]:
    if version.entry is not None:
        return _event_cells(version.entry, with_shapes=with_shapes)
    if not version.after:
        return ["", "", "", "", "nothing more"]
    *place, text = _event_cells(version.after[0])
    return [*place, f"instead: {text}"]


def _event_cells(entry: ComparedItem, *, with_shapes: bool = False) -> list[str]:
    event = entry.event
    if event is None:  # of a job that runs, and has gone on
        return ["", "", "", "", entry.text]
    place = event.place
    text = what(event)
    if with_shapes:
        name, _, rest = text.partition(GAP)
        text = GAP.join([name, *_agreed(event.fields), rest])
    step = "" if place.step is None else str(place.step)
    return [step, place.pass_, plain(place.line or ""), plain(module_cell(event)), plain(text)]


def _agreed(fields: dict[str, Any]) -> Iterator[str]:
    """What the ranks of a group must agree on and other views leave out."""
    for key, name in (("shapes", ""), ("out_shapes", "to ")):
        shapes = fields.get(key)
        if isinstance(shapes, list) and shapes:
            yield f"{name}{shapes[0] if len(shapes) == 1 else shapes}"
    if fields.get("reduce_op"):
        yield str(fields["reduce_op"])


def _marked(rows: Sequence[Sequence[str]]) -> list[list[Cell]]:
    """What is not the same in all rows is marked."""
    differ = [len(set(cells)) > 1 for cells in zip(*rows, strict=True)]
    return [
        [[(cell, _DIFFERS if differs else "")] for cell, differs in zip(row, differ, strict=True)]
        for row in rows
    ]


# -- logs ------------------------------------------------------------------------------------------


def _log_lines(divergence: Divergence, width: int | None) -> Iterator[Line]:
    columns = [Column("ranks"), Column("line", right=True), Column("text")]
    same: Line = [("same", _SAME)]
    rows: list[list[Cell]] = [
        _log_row(same, entry, [(plain(entry.text), _SAME)]) for entry in divergence.before
    ]
    versions = divergence.versions[:_MOST_VERSIONS]
    for version, text in zip(
        versions, _marked_words([_words(version) for version in versions]), strict=True
    ):
        if version.entry is None:
            rows.append([_ranks(version), "", [("nothing more", _DIFFERS)]])
            continue
        rows.append(_log_row(_ranks(version), version.entry, text))
        if divergence.kind == "flow":
            rows += [_log_row("", entry, [(plain(entry.text), "")]) for entry in version.after]
    yield from table(
        columns,
        rows,
        width=None if width is None else width - len(_INDENT),
        narrowing=_LOG_NARROWING,
    )
    yield from _more_versions(divergence)


def _log_row(name: Cell, entry: ComparedItem, text: Line) -> list[Cell]:
    return [name, [(str(entry.number), _SAME)], text]


def _words(version: Version) -> list[str]:
    """The words of a line, and what is between them."""
    return re.split(r"(\s+)", plain(version.entry.text)) if version.entry is not None else []


def _marked_words(texts: Sequence[list[str]]) -> list[Line]:
    """What makes lines differ is marked: words, where they have the same number of them, else
    all."""
    if len(set(map(len, texts))) > 1:
        return [[("".join(words), _DIFFERS)] for words in texts]
    differ = [_matters(at, texts) for at in range(len(texts[0]))]
    return [
        [(word, _DIFFERS if differs else "") for word, differs in zip(words, differ, strict=True)]
        for words in texts
    ]


def _matters(at: int, texts: Sequence[list[str]]) -> bool:
    """Whether a word makes a difference, put into the line of the first."""
    first = texts[0]
    lines = {
        "".join([*first[:at], word, *first[at + 1 :]]) for word in {words[at] for words in texts}
    }
    return len(lines) > 1 and len(set(map(stripped, lines))) > 1


def _ranks(version: Version) -> str:
    return ranks_text(version.ranks, most=_MOST_RUNS)


def _more_versions(divergence: Divergence) -> Iterator[Line]:
    rest: Iterable[Version] = divergence.versions[_MOST_VERSIONS:]
    ranks = [rank for version in rest for rank in version.ranks]
    if ranks:
        yield [
            (
                (
                    f"and {len(divergence.versions) - _MOST_VERSIONS} more versions, of"
                    f" {ranks_phrase(ranks)}"
                ),
                "yellow",
            )
        ]
