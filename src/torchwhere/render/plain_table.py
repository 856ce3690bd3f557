"""Tables of plain texts, for a training process: they need no rich, unlike those of `lines.py`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

_GAP = "  "


def aligned(rows: Iterable[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """The rows as lines with aligned columns. Columns without any text are left out.

    `right` has the positions of the columns that are aligned right.
    """
    columns = []
    for at, texts in enumerate(zip(*rows, strict=True)):
        width = max(map(len, texts))
        pad = str.rjust if at in right else str.ljust
        if width:
            columns.append([pad(text, width) for text in texts])
    return [_GAP.join(cells).rstrip() for cells in zip(*columns, strict=True)]


@dataclass(frozen=True, slots=True)
class PlainTable:
    """Rows of texts by heading. A heading without any text is left out."""

    headings: Sequence[str]
    rows: Sequence[Mapping[str, str]]
    right: Collection[str] = ()  # the headings of columns that are aligned right

    def text(self) -> str:
        used = [name for name in self.headings if any(row.get(name) for row in self.rows)]
        right = [at for at, name in enumerate(used) if name in self.right]
        return "\n".join(aligned([used, *self._cells(used)], right=right))

    def html(self) -> str:
        # Imported here: they load rich, which a training process does not need.
        from torchwhere.render import html as page
        from torchwhere.render.lines import Column

        columns = [Column(name, right=name in self.right, optional=True) for name in self.headings]
        return page.table(columns, self._cells(self.headings))

    def _cells(self, headings: Sequence[str]) -> list[list[str]]:
        return [[row.get(name, "") for name in headings] for row in self.rows]
