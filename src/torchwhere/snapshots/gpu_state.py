"""The GPUs of a host in a snapshot: decoded, by the clock of the reader."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchwhere.gpus.samples import Gpu, HostGpus
from torchwhere.snapshots.checked import bool_, dict_, int_, list_, text_

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
