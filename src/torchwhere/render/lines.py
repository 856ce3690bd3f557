"""Lines of text with styles, and tables of them: aligned, cut to a width, printed in colour.

A line is a list of (text, style): a rich `Text` for each of a million events would take minutes. A
width of None means as wide as needed, for files and pipes. Names come from a user's program and may
hold anything: `plain` replaces control characters and cuts absurd lengths.
"""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from torchwhere.core.sanitize import printable

GAP = "  "
_BLOCK = 1000  # rows that are aligned and printed together
_LONGEST = 1000  # characters of a name

T = TypeVar("T")
Line = list[tuple[str, str]]  # texts with their styles
Cell = str | Line


def plain(text: object) -> str:
    """Any text as it may be printed on one line."""
    return printable(text, longest=_LONGEST)


# -- tables ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Column:
    """A column that grows with its cells."""

    heading: str
    right: bool = False
    keep_end: bool = False  # cut at the start, because names differ at their end
    optional: bool = False  # left out while all cells are empty
    needed: int = 0
    width: int = 0  # what fits; 0 leaves the column out

    def measure(self, cells: Iterable[Cell]) -> None:
        widest = max(map(_width, cells))
        if widest or not self.optional:
            self.needed = max(self.needed, cell_len(self.heading), widest)

    def cell(self, cell: Cell) -> Line:
        parts = [(cell, "")] if isinstance(cell, str) else cell
        room = self.width - _width(cell)
        if room < 0:
            return _cut(parts, self.width, keep_end=self.keep_end)
        space = [(" " * room, "")] if room else []
        return space + parts if self.right else parts + space


def _width(cell: Cell) -> int:
    return cell_len(cell) if isinstance(cell, str) else sum(cell_len(text) for text, _ in cell)


def cut_start(text: str, width: int, *, mark: str = "…") -> str:
    """The end of a text that is wider than `width`, with a mark before it."""
    return mark + set_cell_size(text[::-1], width - 1)[::-1]


def _cut(parts: Line, width: int, *, keep_end: bool = False) -> Line:
    """Cut the parts to `width`, with an ellipsis where something is left out."""
    if keep_end:
        text, style = "".join(text for text, _ in parts), parts[-1][1]
        return [(cut_start(text, width), style)]
    cut_parts: Line = []
    for text, style in parts:
        room = width - 1 - _width(cut_parts)
        if cell_len(text) > room:
            return [*cut_parts, (set_cell_size(text, room) + "…", style)]
        cut_parts.append((text, style))
    return cut_parts


Table = tuple[list[Column], Iterable[list[Cell]]]  # columns and rows

# Headings with widths to shrink to, one after the other until the table fits; 0 leaves one out.
Narrowing = Sequence[tuple[str, int]]


def _fit(columns: Sequence[Column], width: int | None, narrowing: Narrowing) -> None:
    by_heading = {column.heading: column for column in columns}
    for column in columns:
        column.width = column.needed
    if width is None:
        return
    for heading, least in narrowing:
        used = sum(column.width + len(GAP) for column in columns if column.width) - len(GAP)
        column = by_heading[heading]
        if used > width and least < column.width:
            column.width = max(least, column.width - (used - width)) if least else 0


def table(
    columns: Sequence[Column],
    rows: Iterable[Sequence[Cell]],
    *,
    width: int | None,
    narrowing: Narrowing = (),
) -> Iterator[Line]:
    """Yield the lines of a table, heading first.

    Rows are read in blocks: a long table starts at once and never has to fit into memory.
    """
    pending = iter(rows)
    heading: list[Cell] = [[(column.heading, "bold")] for column in columns]
    while block := list(itertools.islice(pending, _BLOCK)):
        for column, cells in zip(columns, zip(*block, strict=True), strict=True):
            column.measure(cells)
        _fit(columns, width, narrowing)
        if heading:
            yield _row_line(columns, heading, width)
            heading = []
        for row in block:
            yield _row_line(columns, row, width)


def _row_line(columns: Iterable[Column], cells: Iterable[Cell], width: int | None) -> Line:
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
    """The line, cut if it is wider than `width`."""
    return line if width is None or _width(line) <= width else _cut(line, width)


def twigs(items: Sequence[T], guide: str) -> Iterator[tuple[T, Line, str]]:
    """Each item of one level of a tree, the start of its line, and the guide of the lines below."""
    for left, item in zip(range(len(items), 0, -1), items, strict=True):
        start, below = ("├ ", "│ ") if left > 1 else ("└ ", "  ")
        yield item, [(guide + start, "dim")], guide + below


# -- output ----------------------------------------------------------------------------------------


def print_lines(make: Callable[..., Iterator[Line]]) -> None:
    """Print the lines of `make(width=...)`: in colour and cut on a terminal, whole in a pipe."""
    console = Console(highlight=False)
    lines = make(width=shutil.get_terminal_size().columns if sys.stdout.isatty() else None)
    render = as_text if console.color_system is None else partial(_coloured, console=console)
    while block := list(itertools.islice(lines, _BLOCK)):
        sys.stdout.write(render(block))


def as_text(lines: Iterable[Line]) -> str:
    return "".join("".join(text for text, _ in line) + "\n" for line in lines)


def _coloured(lines: Iterable[Line], *, console: Console) -> str:
    """Capture rich's output: if rich printed by itself, a closed pipe would end the process."""
    with console.capture() as printed:
        for line in lines:
            console.print(Text.assemble(*line), soft_wrap=True)
    return printed.get()
