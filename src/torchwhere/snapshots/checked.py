"""Checks the type and range of values in a snapshot, which may come from anywhere.

Each function returns its argument or raises `InvalidError` with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from torchwhere.blackbox.device import DeviceState
from torchwhere.core.device_place import CallState, DeviceCall, DevicePlace
from torchwhere.core.place import Place, unknown_place
from torchwhere.gpus.samples import Gpu, HostGpus

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


def ints_(value: Any, *, most: int = MAX_RANKS, high: int = MAX_NUMBER) -> tuple[int, ...]:
    return tuple(int_(number, high=high) for number in list_(value, most=most))


def time_or_0(value: Any, ahead_ns: int) -> int:
    """A time by the clock of the reader; 0 stays 0: unknown."""
    t_ns = int_(value)
    return t_ns - ahead_ns if t_ns else 0


def dict_(value: Any) -> dict[str, Any]:
    need(isinstance(value, dict), "an object is missing")
    return dict(value)


def or_none(read: Callable[[Any], T], value: Any) -> T | None:
    return None if value is None else read(value)


# -- the progress of a device ----------------------------------------------------------------------
# Encoded for JSON, and checked when it is decoded.

_MOST_RECORDS = 512


def as_json(value: Place | DeviceCall | None) -> dict[str, Any] | None:
    return value.to_dict() if value is not None else None


def encode_device(state: DeviceState | None) -> dict[str, Any] | None:
    if state is None:
        return None
    device = state.device_place
    return {
        "looked_ns": device.looked_ns,
        "reached_ns": device.t_ns,
        "place": as_json(device.place),
        "next": as_json(device.next),
        "collective": as_json(device.collective),
        "next_collective": as_json(device.next_collective),
        "collectives_behind": device.collectives_behind,
        "pending": device.pending,
        "reached": list(state.reached),
        "unreached": list(state.unreached),
        "skipped": state.skipped,
    }


def decode_device(
    value: Any, ahead_ns: int, *, cpu: Place | None, place: Callable[[Any], Place]
) -> DeviceState | None:
    """The state of a device, by the clock of the reader.

    `cpu` is the place of the CPU, if it is known. `place` decodes a place.
    """
    if value is None:
        return None
    data = dict_(value)
    device_place = DevicePlace(
        cpu if cpu is not None else unknown_place(),
        place=or_none(place, data["place"]),
        collective=or_none(_call, data.get("collective")),
        next=or_none(place, data.get("next")),
        next_collective=or_none(_call, data.get("next_collective")),
        collectives_behind=int_(data.get("collectives_behind", 0)),
        pending=int_(data["pending"]),
        t_ns=time_or_0(data["reached_ns"], ahead_ns),
        looked_ns=time_or_0(data["looked_ns"], ahead_ns),
    )
    return DeviceState(
        device_place,
        reached=ints_(data["reached"], most=_MOST_RECORDS),
        unreached=ints_(data["unreached"], most=_MOST_RECORDS),
        skipped=int_(data.get("skipped", 0)),
    )


def _call(value: Any) -> DeviceCall:
    data = dict_(value)
    need(data["state"] in tuple(CallState), "the state of a collective is unknown")
    return DeviceCall(
        text_(data["op"]),
        text_(data["group"]),
        int_(data["number"]),
        CallState(data["state"]),
    )


# -- the GPUs of a host ----------------------------------------------------------------------------

_MOST_DEVICES = 16
_MOST_TEXT = 256


def decode_gpus(value: Any, ahead_ns: int) -> HostGpus | None:
    """The GPUs of a host whose clock is ahead; None if its monitor did not sample them."""
    if value is None:
        return None
    host = HostGpus.from_dict(dict_(value))
    return replace(host, gpus=tuple(_shifted(gpu, ahead_ns) for gpu in host.gpus))


def _shifted(gpu: Gpu, ahead_ns: int) -> Gpu:
    return replace(
        gpu,
        samples=tuple(replace(sample, t_ns=sample.t_ns - ahead_ns) for sample in gpu.samples),
        xids=tuple(replace(xid, t_ns=xid.t_ns - ahead_ns) for xid in gpu.xids),
    )


def decode_devices(value: Any) -> list[dict[str, Any]]:
    """The devices that a box names, as far as they are used on another host."""
    devices = map(dict_, list_(value, most=_MOST_DEVICES))
    return [
        {name: text_(device.get(name, ""), most=_MOST_TEXT) for name in ("type", "uuid", "pci")}
        | {"index": int_(device.get("index", 0)), "hip": bool_(device.get("hip", False))}
        for device in devices
    ]
