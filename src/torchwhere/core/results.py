"""What every result can do: say itself on one line, as text and in a notebook; and, if it is a
table, be a data frame.

The classes here have no data and import nothing until they are asked: how a result looks is known
in `render/reprs.py` alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from torchwhere.core.errors import TorchwhereError

_NEEDS = (
    "to_pandas() needs pandas, which is not installed here: pip install pandas. as_rows() gives the"
    " same without it"
)


class Shown:
    """A result that shows itself: `repr()` on one line, `str()` as its command prints it, and HTML
    for notebooks."""

    __slots__ = ()

    def __repr__(self) -> str:
        from torchwhere.render.reprs import one_line

        return one_line(self)

    def __str__(self) -> str:
        from torchwhere.render.reprs import text

        return text(self)

    def _repr_html_(self) -> str:
        from torchwhere.render.reprs import html

        return html(self)


class Tabular:
    """A result that is a table."""

    __slots__ = ()

    def as_rows(self) -> list[dict[str, Any]]:
        """The table, a dictionary a row."""
        raise NotImplementedError

    def to_pandas(self) -> Any:
        """The table as a `pandas.DataFrame`."""
        return frame(self.as_rows())


def pandas() -> Any:
    """The library, where it is installed."""
    try:
        return importlib.import_module("pandas")
    except ModuleNotFoundError as error:
        if error.name != "pandas":
            raise
        raise TorchwhereError(_NEEDS) from None


def frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    return pandas().DataFrame(list(rows))
