"""The names in a model as HTML, for a notebook: a row for each module, parameter and buffer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torchwhere.render import html as page
from torchwhere.render.text import Column

_RIGHT = ("numel", "id")


def names_html(title: str, headings: Sequence[str], rows: Iterable[Mapping[str, str]]) -> str:
    """`rows` have a text for some of the headings; a heading that no row has a text for is left
    out."""
    columns = [Column(heading, right=heading in _RIGHT, optional=True) for heading in headings]
    cells = ([row.get(heading, "") for heading in headings] for row in rows)
    return page.fragment(page.said(title, style="bold"), page.table(columns, cells))
