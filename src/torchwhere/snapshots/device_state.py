"""The progress of a device in a snapshot: encoded for JSON, and checked when it is decoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchwhere.blackbox.device import DeviceState
from torchwhere.core.place import Place
from torchwhere.snapshots.checked import dict_, int_, list_, or_none

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
