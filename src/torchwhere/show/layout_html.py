"""A layout as HTML, for a notebook: the same tree as in a terminal, in parts that open and close.

One fragment that stands by itself: no script, nothing loaded from elsewhere, every text from outside escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from torchwhere.sharding import Layout
from torchwhere.show.layout import HEADINGS, Row, mesh_texts, outline
from torchwhere.show.text import plain

_STYLE = (
    ".torchwhere-layout{font:12px/1.5 ui-monospace,monospace;overflow-x:auto}"
    ".torchwhere-layout .r{display:inline-grid;grid-template-columns:26em 28em 11em 11em 6em 6em 6em;gap:0 1em}"
    ".torchwhere-layout .r{white-space:nowrap}"
    ".torchwhere-layout .r>*{overflow:hidden;text-overflow:ellipsis}.torchwhere-layout .u{font-weight:bold}"
    ".torchwhere-layout .c,.torchwhere-layout .m{color:#777;font-weight:normal}.torchwhere-layout .n{text-align:right}"
    ".torchwhere-layout details>*:not(summary){margin-left:1.2em}.torchwhere-layout .p{padding-left:1.1em}"
    ".torchwhere-layout .a{color:#07788a;padding-left:1.1em}"
)


def layout_html(layout: Layout) -> str:
    said = "".join(f'<div class="m">{_escaped(text)}</div>' for text in mesh_texts(layout))
    title = f"rank {layout.rank} of {layout.world_size}"
    heading = _html_cells(title, "", HEADINGS, "r u p")
    rows = "".join(part for row in outline(layout) for part in _html(row))
    notes = "".join(f'<div class="m">{_escaped(note)}</div>' for note in layout.notes)
    return f'<div class="torchwhere-layout"><style>{_STYLE}</style>{said}<div>{heading}</div>{rows}{notes}</div>'


def _html(row: Row) -> Iterator[str]:
    asides = "".join(f'<div class="a">{_escaped(text)}</div>' for text in row.asides)
    if not row.rows:
        yield f"<div>{_html_cells(row.label, row.cls, row.cells(), 'r p' if row.is_param else 'r u p')}{asides}</div>"
        return
    yield f"<details open><summary>{_html_cells(row.label, row.cls, row.cells(), 'r u')}</summary>{asides}"
    for below in row.rows:
        yield from _html(below)
    yield "</details>"


def _html_cells(label: str, cls: str, cells: Sequence[str], style: str) -> str:
    name = _escaped(label) + (f' <span class="c">{_escaped(cls)}</span>' if cls else "")
    how, *rest = cells
    spans = "".join(f"<span{' class=n' * (at > 2)}>{_escaped(cell)}</span>" for at, cell in enumerate(rest))
    return f'<span class="{style}"><span>{name}</span><span title="{_escaped(how)}">{_escaped(how)}</span>{spans}</span>'


def _escaped(text: str) -> str:
    return escape(plain(text), quote=True)
