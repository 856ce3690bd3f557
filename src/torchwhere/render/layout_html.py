"""A layout as HTML for a notebook: the same tree as in a terminal, with parts that open and close.

One self-contained fragment: no script, nothing loaded from elsewhere, every text from outside
escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torchwhere.core.model_layout import Layout
from torchwhere.render.html import escaped, fragment, isolated
from torchwhere.render.layout import HEADINGS, LayoutRow, layout_title, mesh_texts, outline

_WIDEST = 44  # characters of a column; a longer text is cut, and shown whole as a tooltip
_STYLE = (
    ".torchwhere-layout{font:12px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;"
    "overflow-x:auto}"
    # --d is the depth of a row: its name gets less room, so that the columns stay aligned
    ".torchwhere-layout .r{display:inline-grid;gap:0 1.5ch;white-space:nowrap;"
    "grid-template-columns:calc(var(--n) - var(--d)*2ch) var(--c)}"
    ".torchwhere-layout .r>*{overflow:hidden;text-overflow:ellipsis}"
    ".torchwhere-layout .u{font-weight:bold}"
    ".torchwhere-layout .c,.torchwhere-layout .m{opacity:.7;font-weight:normal}"
    ".torchwhere-layout .n{text-align:right}"
    ".torchwhere-layout details>*:not(summary){margin-left:2ch}"
    ".torchwhere-layout summary{list-style-position:inside}"
    ".torchwhere-layout .p,.torchwhere-layout .a{padding-left:2ch}"
    ".torchwhere-layout .a{color:#1687a7}"
)


def layout_html(layout: Layout) -> str:
    rows = outline(layout)
    title = layout_title(layout)
    heading = _html_cells(title, "", HEADINGS, "r u p", 0)
    tree = "".join(part for row in rows for part in _html(row, 0))
    inline = _widths(title, rows)
    return fragment(
        _texts_html(mesh_texts(layout), "m"),
        f"<div>{heading}</div>",
        tree,
        _texts_html(layout.notes, "m"),
        style=_STYLE,
        name="torchwhere-layout",
        inline=inline,
    )


def _texts_html(texts: Iterable[str], css_class: str) -> str:
    return "".join(f'<div class="{css_class}">{isolated(text)}</div>' for text in texts)


def _widths(title: str, rows: Sequence[LayoutRow]) -> str:
    """The widths of the columns, as CSS variables: as wide as their content."""
    every = list(_all(rows, 0))
    name = max([len(title), *(2 * depth + len(f"{row.label} {row.cls}") for row, depth in every)])
    widths = [
        max(map(len, cells)) for cells in zip(*(row.cells() for row, _ in every), strict=True)
    ]
    columns = [
        min(_WIDEST, max(width, len(heading))) if width else 0
        for heading, width in zip(HEADINGS, widths, strict=True)
    ]
    return f"--n:{min(2 * _WIDEST, name + 2)}ch;--c:{' '.join(f'{width}ch' for width in columns)}"


def _all(rows: Iterable[LayoutRow], depth: int) -> Iterator[tuple[LayoutRow, int]]:
    for row in rows:
        yield row, depth
        yield from _all(row.rows, depth + 1)


def _html(row: LayoutRow, depth: int) -> Iterator[str]:
    asides = _texts_html(row.asides, "a")
    if not row.rows:
        style = "r p" if row.is_param else "r u p"
        yield f"<div>{_html_cells(row.label, row.cls, row.cells(), style, depth)}{asides}</div>"
        return
    summary = _html_cells(row.label, row.cls, row.cells(), "r u", depth)
    yield f"<details open><summary>{summary}</summary>{asides}"
    for below in row.rows:
        yield from _html(below, depth + 1)
    yield "</details>"


def _html_cells(label: str, cls: str, cells: Sequence[str], style: str, depth: int) -> str:
    name = isolated(label) + (f' <span class="c">{isolated(cls)}</span>' if cls else "")
    how, *rest = cells
    spans = [f'<span>{name}</span><span title="{escaped(how)}">{isolated(how)}</span>']
    for at, cell in enumerate(rest):
        css_class = " class=n" if at > 2 else ""
        spans.append(f"<span{css_class}>{isolated(cell)}</span>")
    return f'<span class="{style}" style="--d:{depth}">{"".join(spans)}</span>'
