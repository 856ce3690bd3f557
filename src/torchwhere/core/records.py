"""Reads records that torchwhere has written as JSON: dataclasses of plain values.

Takes a dataclass and a value that `dataclasses.asdict` gave, directly or through a file. Reading
never raises. A value of the wrong type counts as unknown: its field keeps its default. A record
that lacks a value without a default is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

R = TypeVar("R")
Reader = Callable[[Any], Any]
_LARGEST = 1 << 63  # of a number; files may contain any
_MOST_TEXTS = 4096  # of a list: the first ones
_MOST_RECORDS = 256  # of a list: the last ones


def read_record(kind: type[R], value: Any) -> R | None:
    """The record of a dictionary; None if there is none.

    Example:
        read_record(Xid, {"number": 79, "t_ns": "unknown"})
    """
    if not isinstance(value, dict):
        return None
    contents = {}
    hashable: Any = kind  # for mypy, a type variable is not
    for name, read, is_required in _fields(hashable):
        content = read(value.get(name))
        if content is not None:
            contents[name] = content
        elif is_required:
            return None
    return kind(**contents)


@cache
def _fields(kind: Any) -> list[tuple[str, Reader, bool]]:
    """Name and reader of each field, and whether it has no default."""
    hints = get_type_hints(kind)
    return [
        (
            field.name,
            _reader(hints[field.name]),
            field.default is MISSING and field.default_factory is MISSING,
        )
        for field in fields(kind)
    ]


def _reader(kind: Any) -> Reader:
    """What reads the values of a type: it returns None for a value of another type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if NoneType in arguments:
        return _reader(arguments[0])
    if origin is tuple:
        return partial(_read_entries, _reader(arguments[0]))
    if isinstance(kind, type) and is_dataclass(kind):
        return partial(read_record, kind)
    readers: dict[Any, Reader] = {int: _read_int, float: _read_float, dict: _read_texts}
    return readers.get(origin or kind) or partial(_read_instance, kind)


def _read_int(value: Any) -> int | None:
    return value if type(value) is int and abs(value) < _LARGEST else None


def _read_float(value: Any) -> float | None:
    is_number = type(value) in (int, float) and 0 <= value < _LARGEST
    return float(value) if is_number else None


def _read_texts(value: Any) -> dict[str, str] | None:
    if not isinstance(value, dict):
        return None
    return {name: text for name, text in value.items() if isinstance(text, str)}


def _read_entries(read: Reader, value: Any) -> tuple[Any, ...] | None:
    if not isinstance(value, (list, tuple)):
        return None
    if not value:
        return ()
    kept = value[:_MOST_TEXTS] if isinstance(value[0], str) else value[-_MOST_RECORDS:]
    return tuple(entry for entry in map(read, kept) if entry is not None)


def _read_instance(kind: type, value: Any) -> Any:
    return value if isinstance(value, kind) else None
