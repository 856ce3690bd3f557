"""The terminal's view: events, comms and groups as lines of text, aligned, and coloured where there
is a terminal for it.

Takes what others computed and a width (None: as wide as it takes, for files and pipes), gives
lines: lists of (text, style), because a rich `Text` for each of a million events takes minutes.
Names come from a user's program and may hold anything: they are shown with control characters
replaced, and cut when they are absurdly long.
"""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from torchwhere.core.events import Event
from torchwhere.core.place import ROOT, Certainty, shown
from torchwhere.core.rank_text import ranks_text as ranks_text
from torchwhere.core.units import amount as amount
from torchwhere.core.units import duration as duration
from torchwhere.diagnose.comms.outline import OutlineLine, outline, params_text
from torchwhere.diagnose.comms.tree import Comms, CommsKey, CommsSum

PASS_STYLE = {
    "forward": "green",
    "backward": "magenta",
    "recompute": "yellow",
    "optimizer": "cyan",
    "outside": "dim",
}
_DETAIL_KEYS = ("text", "reason", "phase", "what")
_LONGEST = 1000  # of a text from outside
GAP = "  "
_BLOCK = 1000  # rows that are aligned and printed together

Line = list[tuple[str, str]]  # texts with their styles
Cell = str | Line


# -- texts -----------------------------------------------------------------------------------------


def plain(text: object) -> str:
    """A text from outside, made harmless for a terminal: no escape sequences, no line breaks, no
    direction marks."""
    found = str(text)
    found = found if len(found) <= _LONGEST else found[:_LONGEST] + "…"
    return (
        found
        if found.isprintable()
        else "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in found)
    )


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


# -- columns ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Column:
    """A column that grows with what comes into it."""

    heading: str
    right: bool = False
    keep_end: bool = False  # cut at its start: what tells names apart is at their end
    optional: bool = False  # left out while there is nothing in it
    needed: int = 0
    width: int = 0  # what there is room for; 0: left out

    def measure(self, cells: Iterable[Cell]) -> None:
        widest = max(map(_cells, cells))
        if widest or not self.optional:
            self.needed = max(self.needed, cell_len(self.heading), widest)

    def cell(self, cell: Cell) -> Line:
        parts = [(cell, "")] if isinstance(cell, str) else cell
        room = self.width - _cells(cell)
        if room < 0:
            return _cut(parts, self.width, keep_end=self.keep_end)
        space = [(" " * room, "")] if room else []
        return space + parts if self.right else parts + space


def _cells(cell: Cell) -> int:
    return cell_len(cell) if isinstance(cell, str) else sum(cell_len(text) for text, _ in cell)


def _cut(parts: Line, width: int, *, keep_end: bool = False) -> Line:
    """The parts that have room in `width`, with a mark where something is left out."""
    if keep_end:
        text, style = "".join(text for text, _ in parts), parts[-1][1]
        return [("…" + set_cell_size(text[::-1], width - 1)[::-1], style)]
    kept: Line = []
    for text, style in parts:
        room = width - 1 - _cells(kept)
        if cell_len(text) > room:
            return [*kept, (set_cell_size(text, room) + "…", style)]
        kept.append((text, style))
    return kept


# headings and widths to go down to, 0 for leaving out, until there is room for all
Narrowing = Sequence[tuple[str, int]]


def _fit(columns: Sequence[Column], width: int | None, narrowing: Narrowing) -> None:
    by_heading = {column.heading: column for column in columns}
    for column in columns:
        column.width = column.needed
    for heading, least in narrowing:
        excess = (
            sum(column.width + len(GAP) for column in columns if column.width)
            - len(GAP)
            - (width or _BLOCK**2)
        )
        column = by_heading[heading]
        if excess > 0 and least < column.width:
            column.width = max(least, column.width - excess) if least else 0


def table(
    columns: Sequence[Column],
    rows: Iterable[Sequence[Cell]],
    *,
    width: int | None,
    narrowing: Narrowing = (),
) -> Iterator[Line]:
    """Lines of a table, heading first. Rows are taken block by block: a long table begins at once
    and is never held whole."""
    pending = iter(rows)
    heading: list[Cell] = [[(column.heading, "bold")] for column in columns]
    while block := list(itertools.islice(pending, _BLOCK)):
        for column, cells in zip(columns, zip(*block, strict=True), strict=True):
            column.measure(cells)
        _fit(columns, width, narrowing)
        if heading:
            yield _line(columns, heading, width)
            heading = []
        for row in block:
            yield _line(columns, row, width)


def _line(columns: Iterable[Column], cells: Iterable[Cell], width: int | None) -> Line:
    line: Line = []
    for column, cell in zip(columns, cells, strict=True):
        if column.width:
            line += column.cell(cell)
            line.append((GAP, ""))
    while line and not line[-1][0].strip():
        line.pop()
    if line:
        line[-1] = line[-1][0].rstrip(), line[-1][1]
    return fitted(line, width)


def fitted(line: Line, width: int | None) -> Line:
    """The line, cut where it is wider than `width`."""
    return line if width is None or _cells(line) <= width else _cut(line, width)


# -- events ----------------------------------------------------------------------------------------


def events_lines(events: Iterable[Event], *, started_ns: int, width: int | None) -> Iterator[Line]:
    """One line an event; `time` is in seconds since `started_ns`."""
    columns, rows = events_table(events, started_ns=started_ns)
    narrowing = (
        ("event", 56),
        ("line", 20),
        ("event", 46),
        ("time", 0),
        ("line", 14),
        ("module", 12),
        ("event", 10),
    )
    return table(columns, rows, width=width, narrowing=narrowing)


def events_table(
    events: Iterable[Event], *, started_ns: int
) -> tuple[list[Column], Iterator[list[Cell]]]:
    columns = [
        *(Column(heading, right=True) for heading in ("rank", "step", "time")),
        Column("pass"),
        Column("line", keep_end=True),
        Column("module", keep_end=True),
        Column("event"),
    ]
    return columns, (_event_row(event, started_ns) for event in events)


def _event_row(event: Event, started_ns: int) -> list[Cell]:
    place = event.place
    return [
        str(place.rank),
        "" if place.step is None else str(place.step),
        [(f"{(event.t_ns - started_ns) / 1e9:.3f}", "dim")],
        [(place.pass_, PASS_STYLE.get(place.pass_, ""))],
        [(plain(place.line or ""), "dim")],
        plain(module_cell(event)),
        plain(what(event)),
    ]


_CERTAINTY = {Certainty.EXACT: "", Certainty.INFERRED: "~", Certainty.UNKNOWN: "?"}


def module_cell(event: Event) -> str:
    """The module, or the parameter, and which call of it; `~` before what was inferred, `?` for
    what is not known."""
    place = event.place
    name = place.param if place.param is not None else shown(place.module)
    name = "" if name == "-" and place.certainty is Certainty.UNKNOWN else name
    return _CERTAINTY[place.certainty] + name + (f" call {place.call}" if place.call else "")


def what(event: Event) -> str:
    fields, place = event.fields, event.place
    parts = (
        [_collective(fields, place.module)]
        if event.kind == "collective"
        else [event.kind, _detail(fields)]
    )
    if place.graph is not None and place.graph not in parts:
        parts.append(f"graph {place.graph}")
    if place.thread not in (None, "MainThread"):
        parts.append(f"thread {place.thread}")
    return GAP.join(part for part in parts if part)


def _detail(fields: dict[str, Any]) -> str:
    said = (*_DETAIL_KEYS, "type", "duration_ns")  # an exception's text begins with its type
    named = {
        key: value for key, value in fields.items() if key not in said and value not in (None, [])
    }
    main = next((str(fields[key]) for key in _DETAIL_KEYS if fields.get(key)), "")
    took = duration(fields["duration_ns"]) if isinstance(fields.get("duration_ns"), int) else ""
    return GAP.join(
        [main, *([took] if took else []), *(f"{key}={value}" for key, value in named.items())]
    ).strip()


_PEER = {"send": "to", "recv": "from"}


def _collective(fields: dict[str, Any], module: str | None) -> str:
    parts = [f"{fields.get('op') or 'a collective'} #{fields.get('number')}"]
    if fields.get("peer") is not None:
        parts.append(f"{_PEER.get(str(fields.get('op')), 'root')} {fields['peer']}")
    if fields.get("bytes"):
        parts.append(f"{amount(fields['bytes'])} {fields.get('dtype')}")
    if fields.get("for") not in (None, module):
        parts.append(f"for {_beneficiary(fields['for'])}")
    parts.append(f"on {fields.get('mesh_dim') or fields.get('group_desc') or fields.get('group')}")
    return GAP.join(parts)


def _beneficiary(beneficiary: Any) -> str:
    return (
        params_text(map(str, beneficiary))
        if isinstance(beneficiary, (list, tuple))
        else shown(beneficiary)
    )


# -- comms -----------------------------------------------------------------------------------------


def comms_lines(comms: Comms, *, width: int | None) -> Iterator[Line]:
    """The tree of modules with what each of them causes. `per step` and `steps` are those of one
    rank, `calls` and `total` of all ranks together."""
    if not comms.ranks:
        yield [("no collectives were recorded", "bold")]
        return
    columns, rows = comms_table(comms)
    title = columns[0].heading
    narrowing = (
        ("calls", 0),
        ("steps", 0),
        ("for", 20),
        ("each", 0),
        ("group", 6),
        ("for", 10),
        ("group", 0),
        (title, 30),
    )
    yield from table(columns, rows, width=width, narrowing=narrowing)
    if comms.overwritten:
        yield [
            (
                f"not counted, overwritten in the ring (see --records): {_overwritten(comms)}",
                "yellow",
            )
        ]


def comms_table(comms: Comms) -> tuple[list[Column], Iterator[list[Cell]]]:
    columns = [
        Column(_title(comms)),
        *(
            Column(heading, right=True)
            for heading in ("per step", "steps", "each", "calls", "total")
        ),
        Column("group", optional=True),
        Column("for", optional=True),
    ]
    return columns, _comms_rows(comms)


def _title(comms: Comms) -> str:
    first, last = comms.steps or (None, None)
    steps = (
        "" if first is None else f", step {first}" if first == last else f", steps {first}-{last}"
    )
    group = f", all on {plain(next(iter(comms.groups)))}" if len(comms.groups) == 1 else ""
    return f"{plural(len(comms.ranks), 'rank')}{steps}{group}"


def _overwritten(comms: Comms) -> str:
    return ", ".join(
        f"{count:,} older events of rank {rank}" for rank, count in comms.overwritten.items()
    )


def _comms_rows(comms: Comms) -> Iterator[list[Cell]]:
    for node, label in ((comms.root, ROOT), (comms.outside, "outside any module")):
        if node.total().count:
            yield from _branch_rows(outline(node), [(label, "bold")], "", comms)


def _branch_rows(
    branch: OutlineLine, label: Line, guide: str, comms: Comms
) -> Iterator[list[Cell]]:
    total = branch.total()
    yield [label, "", "", "", [(str(total.count), "bold")], [(amount(total.bytes), "bold")], "", ""]
    entries, below = list(branch.entries()), branch.branches
    left = len(entries) + len(below)
    for key, counter in entries:
        yield _entry_row(key, counter, twig(guide, left), branch, comms)
        left -= 1
    widest = max((cell_len(plain(inner.label)) for inner in below if inner.is_single), default=0)
    for inner in below:
        name, inset = (
            [*twig(guide, left), (plain(inner.label), "bold")],
            guide + ("│ " if left > 1 else "  "),
        )
        left -= 1
        if inner.is_single:
            name.append((" " * (widest - cell_len(plain(inner.label)) + len(GAP)), ""))
            yield from (
                _entry_row(key, counter, name, inner, comms) for key, counter in inner.entries()
            )
        else:
            yield from _branch_rows(inner, name, inset, comms)


def twig(guide: str, left: int) -> Line:
    return [(guide + ("├ " if left > 1 else "└ "), "dim")]


def _entry_row(
    key: CommsKey, counter: CommsSum, label: Line, branch: OutlineLine, comms: Comms
) -> list[Cell]:
    label = [*label, (f"{key.pass_:<9} ", PASS_STYLE.get(key.pass_, "")), (plain(key.op), "")]
    beneficiary = (
        ""
        if key.beneficiary is None or key.beneficiary == branch.name
        else plain(_beneficiary(key.beneficiary))
    )
    only = "" if counter.ranks == comms.ranks else f"(rank {ranks_text(counter.ranks)} only)"
    each = amount(counter.bytes / counter.count) if counter.bytes else ""
    return [
        label,
        f"{round(counter.count / counter.steps, 1):g}",
        f"{round(counter.steps / len(counter.ranks), 1):g}",
        f"~{each}" if len(counter.sizes) > 1 else each,
        str(counter.count),
        amount(counter.bytes) if counter.bytes else "",
        plain(key.group) if len(comms.groups) > 1 else "",
        f"{beneficiary} {only}".strip(),
    ]


# -- groups ----------------------------------------------------------------------------------------


def groups_lines(groups: Iterable[dict[str, Any]], *, width: int | None) -> Iterator[Line]:
    columns, rows = groups_table(groups)
    narrowing = (("ranks", 20), ("description", 20), ("backend", 8), ("group", 8))
    return table(columns, rows, width=width, narrowing=narrowing)


def groups_table(groups: Iterable[dict[str, Any]]) -> tuple[list[Column], Iterator[list[Cell]]]:
    headings = ("group", "description", "mesh dimension", "backend", "ranks")
    return [Column(heading) for heading in headings], map(_group_row, groups)


def _group_row(group: dict[str, Any]) -> list[Cell]:
    known = (group.get(key) for key in ("name", "desc", "mesh_dim", "backend"))
    ranks = [rank for rank in group.get("ranks") or () if isinstance(rank, int)]
    return [*("-" if value in (None, "") else plain(value) for value in known), ranks_text(ranks)]


# -- where it goes ---------------------------------------------------------------------------------


def print_lines(make: Callable[..., Iterator[Line]]) -> None:
    """Print what `make(width=...)` gives: coloured and as wide as the terminal; uncut and
    uncoloured into a file or pipe."""
    console = Console(highlight=False)
    lines = make(width=shutil.get_terminal_size().columns if sys.stdout.isatty() else None)
    render = as_text if console.color_system is None else partial(_coloured_lines, console=console)
    while block := list(itertools.islice(lines, _BLOCK)):
        sys.stdout.write(render(block))


def as_text(lines: Iterable[Line]) -> str:
    return "".join("".join(text for text, _ in line) + "\n" for line in lines)


def _coloured_lines(lines: Iterable[Line], *, console: Console) -> str:
    """Captured, not printed by rich itself: it ends the process when a pipe is closed."""
    with console.capture() as printed:
        for line in lines:
            console.print(Text.assemble(*line), soft_wrap=True)
    return printed.get()
