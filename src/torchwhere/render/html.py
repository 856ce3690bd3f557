"""Small pieces of HTML for notebooks: a table, lines of text, facts in two columns.

Each is a fragment that stands by itself: no script, nothing loaded from elsewhere. Every text from
outside is made harmless: control characters replaced, markup escaped, and what is written from
right to left kept in its own place. Colours are those of the notebook, light or dark, and a few
that can be read on both. A table is cut after so many rows, and says so.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterable, Sequence
from html import escape

from torchwhere.render.text import Cell, Column, Line, plain

MOST_ROWS = 200
_RIGHT_TO_LEFT = frozenset({"R", "AL", "AN"})
_COLOURS = {
    "green": "#2c8a4b",
    "magenta": "#b04bb8",
    "yellow": "#9a7a0a",
    "cyan": "#1687a7",
    "red": "#d64545",
}
_STYLE = (
    ".torchwhere{font:12px/1.5"
    " ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;color:inherit;overflow-x:auto}"
    ".torchwhere"
    " table{border-collapse:collapse;margin:2px"
    " 0;font:inherit;color:inherit;background:none;border:0}.torchwhere th,.torchwhere"
    " td{padding:1px 12px 1px"
    " 0;text-align:left;white-space:pre;border:0;background:none;vertical-align:top;"
    "font:inherit;color:inherit}.torchwhere"
    " thead th{border-bottom:1px solid rgba(128,128,128,.5);font-weight:bold}.torchwhere tbody"
    " tr:nth-child(even) td{background:rgba(128,128,128,.07)}.torchwhere tbody tr:hover"
    " td{background:rgba(128,128,128,.18)}.torchwhere .n{text-align:right}.torchwhere"
    " .b{font-weight:bold}.torchwhere .d{opacity:.75}.torchwhere p{margin:2px"
    " 0;font:inherit}.torchwhere"
    " pre{margin:0;font:inherit;color:inherit;background:none;border:0;padding:0;white-space:pre}"
    ".torchwhere"
    " pre.w{white-space:pre-wrap}"
    + "".join(f".torchwhere .{name}{{color:{colour}}}" for name, colour in _COLOURS.items())
)


def escaped(text: object) -> str:
    """A text from outside, as it may stand in HTML, also in an attribute."""
    return escape(plain(text), quote=True)


def isolated(text: object) -> str:
    """The same for the text of an element: what runs from right to left changes nothing beside
    it."""
    found = escaped(text)
    runs_left = not found.isascii() and any(
        unicodedata.bidirectional(one) in _RIGHT_TO_LEFT for one in found
    )
    return f"<bdi>{found}</bdi>" if runs_left else found


def fragment(*parts: str, style: str = "", name: str = "torchwhere", inline: str = "") -> str:
    """What stands by itself; `inline` is a style of this one alone."""
    own = f' style="{inline}"' if inline else ""
    return f'<div class="{name}"{own}><style>{style or _STYLE}</style>{"".join(parts)}</div>'


def said(text: object, *, style: str = "") -> str:
    """A sentence."""
    return f"<p{_class(style)}>{isolated(text)}</p>"


def lines(found: Iterable[Line], *, wrap: bool = False) -> str:
    """Lines of text with their styles, as in a terminal; sentences may be wrapped."""
    tag = '<pre class="w">' if wrap else "<pre>"
    return f"{tag}{''.join(_parts(line) + chr(10) for line in found).rstrip()}</pre>"


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    """Names and what they are, one below the other; what is None is left out."""
    rows = "".join(
        f'<tr><th class="d">{isolated(name)}</th><td>{isolated(value)}</td></tr>'
        for name, value in pairs
        if value is not None
    )
    return f"<table><tbody>{rows}</tbody></table>"


def table(
    columns: Sequence[Column], rows: Iterable[Sequence[Cell]], *, most: int = MOST_ROWS
) -> str:
    """Rows below their headings; columns that may be left out and have nothing in them are."""
    pending = iter(rows)
    found = list(itertools.islice(pending, most))
    left = sum(1 for _ in pending)
    kept = [
        at
        for at, column in enumerate(columns)
        if not column.optional or any(row[at] for row in found)
    ]
    head = "".join(_cell("th", columns[at].heading, columns[at]) for at in kept)
    body = "".join(
        f"<tr>{''.join(_cell('td', row[at], columns[at]) for at in kept)}</tr>" for row in found
    )
    more = said(f"… and {left:,} more row{'s' * (left != 1)}", style="dim") if left else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def _cell(tag: str, cell: Cell, column: Column) -> str:
    inner = isolated(cell) if isinstance(cell, str) else _parts(cell)
    return f"<{tag}{_class('right' if column.right else '')}>{inner}</{tag}>"


def _parts(line: Line) -> str:
    return "".join(
        f"<span{found}>{isolated(text)}</span>" if (found := _class(style)) else isolated(text)
        for text, style in line
    )


def _class(style: str) -> str:
    """The classes of a style as rich names it: `bold red`."""
    known = {"bold": "b", "dim": "d", "right": "n"} | {name: name for name in _COLOURS}
    names = [known[name] for name in style.split() if name in known]
    return f' class="{" ".join(names)}"' if names else ""
