"""The names in a model as HTML for a notebook: a row for each module, parameter and buffer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torchwhere.render import html as page
from torchwhere.render.lines import Column

_RIGHT = ("numel", "id")


def names_html(title: str, headings: Sequence[str], rows: Iterable[Mapping[str, str]]) -> str:
    """Make the table. A row has texts for some headings; a heading without any text is left out."""
    columns = [Column(heading, right=heading in _RIGHT, optional=True) for heading in headings]
    cells = ([row.get(heading, "") for heading in headings] for row in rows)
    return page.fragment(page.paragraph(title, style="bold"), page.table(columns, cells))
