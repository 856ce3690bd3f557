"""Checks the type and range of values in a snapshot, which may come from anywhere.

Each function returns its argument or raises `InvalidError` with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

MAX_NUMBER = 1 << 62
MAX_RANKS = 1 << 20  # as many as a counter can distinguish
MAX_TEXT = 1 << 20

T = TypeVar("T")


class InvalidError(Exception):
    """The reason why a snapshot is invalid."""


def need(is_valid: bool, reason: str) -> None:
    if not is_valid:
        raise InvalidError(reason)


def int_(value: Any, *, low: int = 0, high: int = MAX_NUMBER) -> int:
    need(type(value) is int and low <= value < high, "a number is missing or out of range")
    return int(value)


def float_(value: Any) -> float:
    is_valid = type(value) in (int, float) and math.isfinite(value)
    need(is_valid, "a number is missing or out of range")
    return float(value)


def bool_(value: Any) -> bool:
    need(type(value) is bool, "a value is not true or false")
    return bool(value)


def text_(value: Any, *, most: int = MAX_TEXT) -> str:
    need(isinstance(value, str) and len(value) <= most, "a text is missing or too long")
    return str(value)


def text_or_none(value: Any) -> str | None:
    return or_none(text_, value)


def list_(value: Any, *, most: int = MAX_RANKS) -> list[Any]:
    need(isinstance(value, list) and len(value) <= most, "a list is missing or too long")
    return list(value)


def dict_(value: Any) -> dict[str, Any]:
    need(isinstance(value, dict), "an object is missing")
    return dict(value)


def or_none(read: Callable[[Any], T], value: Any) -> T | None:
    return None if value is None else read(value)
