"""What every result can do: `repr`, `str`, notebook HTML, and for tables a data frame.

The classes here hold no data. How a result looks is the job of `render/reprs.py`, which lies above
this package: `torchwhere/__init__.py` connects the two with `set_renderer`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol

from torchwhere.core.errors import TorchwhereError

_NEEDS = (
    "to_pandas() needs pandas, which is not installed: pip install pandas. "
    "as_rows() returns the same rows without it"
)


class Renderer(Protocol):
    """Turns results into text. `render/reprs.py` is the only implementation."""

    def one_line(self, result: object) -> str: ...

    def text(self, result: object) -> str: ...

    def html(self, result: object) -> str: ...


_load_renderer: list[Callable[[], Renderer]] = []


def set_renderer(load: Callable[[], Renderer]) -> None:
    """Register the function that imports the renderer; results call it when they are shown."""
    _load_renderer[:] = [load]


def renderer() -> Renderer:
    return _load_renderer[0]()


class Shown:
    """A result that shows itself.

    `repr()` gives one line, `str()` the text that its command prints, and notebooks show HTML.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return renderer().one_line(self)

    def __str__(self) -> str:
        return renderer().text(self)

    def _repr_html_(self) -> str:
        return renderer().html(self)


class Fact(Shown):
    """A fact that an analysis found: data, which `str()` turns into a sentence.

    Each kind of fact is a frozen dataclass in a `facts.py` or in `dump_facts.py`;
    `render/fact_text.py` writes the sentences.
    """

    __slots__ = ()


class Tabular:
    """A result that is a table.

    Example:
        torchwhere.doctor("run/").to_pandas()
    """

    __slots__ = ()

    def as_rows(self) -> list[dict[str, Any]]:
        """Return the table as a list of dictionaries, one for each row."""
        raise NotImplementedError

    def to_pandas(self) -> Any:
        """Return the table as a `pandas.DataFrame`.

        Raises:
            TorchwhereError: pandas is not installed.
        """
        return frame(self.as_rows())


# -- values for JSON -------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Converts a nested value to values for JSON: results by `to_dict`, arrays to lists."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return [plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def plain_fields(result: Any, *names: str) -> dict[str, Any]:
    """Returns fields and properties of a result as values for JSON.

    Without names, these are all fields of a dataclass.
    """
    chosen = names or [field.name for field in fields(result)]
    return {name: plain(getattr(result, name)) for name in chosen}


# -- data frames -----------------------------------------------------------------------------------


def pandas() -> Any:
    """Import pandas, or say how to install it."""
    try:
        return importlib.import_module("pandas")
    except ModuleNotFoundError as error:
        if error.name != "pandas":
            raise
        raise TorchwhereError(_NEEDS) from None


def frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    return pandas().DataFrame(list(rows))
