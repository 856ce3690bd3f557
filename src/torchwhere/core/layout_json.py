"""Converts the flat classes of a model layout (meshes, parameters, units) to JSON and back.

A field name has the same JSON type in every class, so one table of readers serves all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

Facts = tuple[tuple[str, Any], ...]  # a dictionary that is hashable

T = TypeVar("T")
_DICTIONARIES = ("dtypes", "settings")


class JsonFields:
    """A dataclass whose fields are JSON: tuples become lists, facts dictionaries."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        cls: Any = type(self)
        return {name: _plain(name, getattr(self, name)) for name in _field_names(cls)}


def read_fields(cls: Callable[..., T], data: Any) -> T:
    """Create an object from the result of `to_dict`. Skips unknown keys."""
    names = [name for name in _field_names(cls) if name in data]
    return cls(**{name: _reader(name)(data[name]) for name in names})


def text_or_none(value: Any) -> str | None:
    return None if value is None else str(value)


def _plain(name: str, value: Any) -> Any:
    if name in _DICTIONARIES:
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


@functools.cache
def _field_names(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls))


def _reader(name: str) -> Callable[[Any], Any]:
    return _READERS.get(name, text_or_none)


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value))


def _ints(value: Any) -> tuple[int, ...]:
    return tuple(map(int, value))


def _facts(value: Any) -> Facts:
    return tuple((str(key), fact) for key, fact in value.items())


def _int_or_none(value: Any) -> int | None:
    return None if value is None else int(value)


# All other fields are a text or None.
_READERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("shape", "local_shape"), _ints),
    **dict.fromkeys(("dims", "groups", "placements", "also"), _texts),
    **dict.fromkeys(_DICTIONARIES, _facts),
    **dict.fromkeys(("bytes", "local_bytes", "padding_bytes", "state_bytes"), _int_or_none),
    **dict.fromkeys(("params", "mesh", "unit"), _int_or_none),
    **dict.fromkeys(("requires_grad", "is_gone"), bool),
}
