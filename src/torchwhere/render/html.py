"""Pieces of HTML for notebooks: a table, lines of text, facts in two columns.

Each fragment is self-contained: no script, nothing loaded from elsewhere. Every text from outside
is sanitized: control characters replaced, markup escaped, right-to-left text isolated. Colours are
those of the notebook, light or dark, and a few that are readable on both. A long table is cut, with
a line that says so.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterable, Sequence
from html import escape

from torchwhere.core.sanitize import plural
from torchwhere.render.lines import Cell, Column, Line, plain

MOST_ROWS = 200
_RIGHT_TO_LEFT = frozenset({"R", "AL", "AN"})
_COLOURS = {
    "green": "#2c8a4b",
    "magenta": "#b04bb8",
    "yellow": "#9a7a0a",
    "cyan": "#1687a7",
    "red": "#d64545",
}
_CLASSES = {"bold": "b", "dim": "d", "right": "n"} | {name: name for name in _COLOURS}
_COLOUR_RULES = "".join(
    f".torchwhere .{name}{{color:{colour}}}" for name, colour in _COLOURS.items()
)
_STYLE = (
    ".torchwhere{font:12px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;"
    "color:inherit;overflow-x:auto}"
    ".torchwhere table{border-collapse:collapse;margin:2px 0;font:inherit;color:inherit;"
    "background:none;border:0}"
    ".torchwhere th,.torchwhere td{padding:1px 12px 1px 0;text-align:left;white-space:pre;border:0;"
    "background:none;vertical-align:top;font:inherit;color:inherit}"
    ".torchwhere thead th{border-bottom:1px solid rgba(128,128,128,.5);font-weight:bold}"
    ".torchwhere tbody tr:nth-child(even) td{background:rgba(128,128,128,.07)}"
    ".torchwhere tbody tr:hover td{background:rgba(128,128,128,.18)}"
    ".torchwhere .n{text-align:right}"
    ".torchwhere .b{font-weight:bold}"
    ".torchwhere .d{opacity:.75}"
    ".torchwhere p{margin:2px 0;font:inherit}"
    ".torchwhere pre{margin:0;font:inherit;color:inherit;background:none;border:0;padding:0;"
    "white-space:pre}"
    ".torchwhere pre.w{white-space:pre-wrap}"
) + _COLOUR_RULES


def escaped(text: object) -> str:
    """A text from outside, safe in HTML, also inside an attribute."""
    return escape(plain(text), quote=True)


def isolated(text: object) -> str:
    """The same for the text of an element. Right-to-left text does not reorder its neighbours."""
    safe = escaped(text)
    is_right_to_left = not safe.isascii() and any(
        unicodedata.bidirectional(character) in _RIGHT_TO_LEFT for character in safe
    )
    return f"<bdi>{safe}</bdi>" if is_right_to_left else safe


def fragment(*parts: str, style: str = "", name: str = "torchwhere", inline: str = "") -> str:
    """Join parts to a self-contained piece; `inline` is a style of this piece alone."""
    own = f' style="{inline}"' if inline else ""
    return f'<div class="{name}"{own}><style>{style or _STYLE}</style>{"".join(parts)}</div>'


def text_fragment(text: str) -> str:
    """A text of several lines as a piece of its own."""
    return fragment(lines([(line, "")] for line in text.splitlines()))


def paragraph(text: object, *, style: str = "") -> str:
    return f"<p{_class(style)}>{isolated(text)}</p>"


def lines(styled: Iterable[Line], *, wrap: bool = False) -> str:
    """Lines of text with their styles, as in a terminal. `wrap` wraps long ones."""
    tag = '<pre class="w">' if wrap else "<pre>"
    return f"{tag}{''.join(_parts(line) + chr(10) for line in styled).rstrip()}</pre>"


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    """A table of names and values; a value of None is left out."""
    rows = "".join(
        f'<tr><th class="d">{isolated(name)}</th><td>{isolated(value)}</td></tr>'
        for name, value in pairs
        if value is not None
    )
    return f"<table><tbody>{rows}</tbody></table>"


def table(
    columns: Sequence[Column], rows: Iterable[Sequence[Cell]], *, most: int = MOST_ROWS
) -> str:
    """A table with headings. Empty optional columns are left out, rows after `most` counted."""
    pending = iter(rows)
    shown = list(itertools.islice(pending, most))
    left = sum(1 for _ in pending)
    used = [
        at
        for at, column in enumerate(columns)
        if not column.optional or any(row[at] for row in shown)
    ]
    head = "".join(_cell("th", columns[at].heading, columns[at]) for at in used)
    body = "".join(
        f"<tr>{''.join(_cell('td', row[at], columns[at]) for at in used)}</tr>" for row in shown
    )
    rest = paragraph(f"… and {plural(left, 'more row')}", style="dim") if left else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}"


def _cell(tag: str, cell: Cell, column: Column) -> str:
    inner = isolated(cell) if isinstance(cell, str) else _parts(cell)
    return f"<{tag}{_class('right' if column.right else '')}>{inner}</{tag}>"


def _parts(line: Line) -> str:
    spans = []
    for text, style in line:
        css_class = _class(style)
        safe = isolated(text)
        spans.append(f"<span{css_class}>{safe}</span>" if css_class else safe)
    return "".join(spans)


def _class(style: str) -> str:
    """The `class` attribute of a rich style such as `bold red`."""
    names = [_CLASSES[name] for name in style.split() if name in _CLASSES]
    return f' class="{" ".join(names)}"' if names else ""
