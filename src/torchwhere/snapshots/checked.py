"""Checks the type and range of values in a snapshot, which may come from anywhere.

Each function returns its argument or raises `InvalidError` with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

from torchwhere.blackbox.device import DeviceState
from torchwhere.core.place import Place

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


# -- the progress of a device ----------------------------------------------------------------------
# Encoded for JSON, and checked when it is decoded.

_MOST_RECORDS = 512


def encode_device(state: DeviceState | None) -> dict[str, Any] | None:
    if state is None:
        return None
    return state._asdict() | {"place": state.place.to_dict() if state.place is not None else None}


def decode_device(
    value: Any, ahead_ns: int, *, place: Callable[[Any], Place]
) -> DeviceState | None:
    """The state of a device, by the clock of the reader. `place` decodes a place."""
    if value is None:
        return None
    data = dict_(value)
    looked_ns, reached_ns = int_(data["looked_ns"]), int_(data["reached_ns"])
    return DeviceState(
        looked_ns=looked_ns - ahead_ns if looked_ns else 0,
        reached_ns=reached_ns - ahead_ns if reached_ns else 0,
        place=or_none(place, data["place"]),
        pending=int_(data["pending"]),
        reached=tuple(map(int_, list_(data["reached"], most=_MOST_RECORDS))),
        unreached=tuple(map(int_, list_(data["unreached"], most=_MOST_RECORDS))),
    )
