"""What NVML reports about a GPU: its identity, samples over time, and errors.

These classes are also the content of `gpu-<host>.json` (`docs/format.md`). Reading a file never
raises: a value of the wrong type counts as unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

_MOST_GPUS = 64
_MOST_SAMPLES = 256
_MOST_XIDS = 16
_PREFIXES = ("GPU-", "MIG-")

# Why a GPU does not run at its highest clock: the bits of NVML.
CLOCK_REASONS = {
    0x001: "gpu_idle",
    0x002: "applications_clocks",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clocks",
}


def bare_uuid(uuid: object) -> str:
    """A UUID without the prefix that NVML writes and CUDA does not."""
    text = str(uuid).strip()
    for prefix in _PREFIXES:
        text = text.removeprefix(prefix)
    return text.lower()


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One look at a GPU. None: NVML does not know it, or refuses to say it."""

    t_ns: int  # wall clock
    sm_mhz: int | None = None
    memory_mhz: int | None = None
    reasons: tuple[str, ...] | None = None  # values of `CLOCK_REASONS`
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    used_bytes: int | None = None
    busy_percent: int | None = None  # of the time since the sample before, with a kernel running
    ecc_uncorrected: int | None = None  # volatile: since the driver was loaded

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> GpuSample:
        reasons = value.get("reasons")
        names = CLOCK_REASONS.values()
        return cls(
            t_ns=_int(value.get("t_ns")) or 0,
            reasons=tuple(name for name in reasons if name in names)
            if isinstance(reasons, list)
            else None,
            sm_mhz=_int(value.get("sm_mhz")),
            memory_mhz=_int(value.get("memory_mhz")),
            temperature_c=_int(value.get("temperature_c")),
            power_w=_float(value.get("power_w")),
            power_limit_w=_float(value.get("power_limit_w")),
            used_bytes=_int(value.get("used_bytes")),
            busy_percent=_int(value.get("busy_percent")),
            ecc_uncorrected=_int(value.get("ecc_uncorrected")),
        )


@dataclass(frozen=True, slots=True)
class Xid:
    """An error that the driver reported: its number in NVIDIA's list of Xid errors."""

    number: int
    t_ns: int  # wall clock


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of a host and its last samples, oldest first."""

    uuid: str  # without prefix
    index: int
    name: str = ""
    pci: str = ""
    sm_max_mhz: int | None = None
    memory_max_mhz: int | None = None
    total_bytes: int | None = None
    instances: tuple[str, ...] = ()  # UUIDs of its MIG instances
    ecc_at_start: int | None = None  # uncorrected errors before the first sample
    knows_xids: bool = False  # whether NVML reports Xid errors to this user
    xids: tuple[Xid, ...] = ()
    samples: tuple[GpuSample, ...] = ()

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Gpu:
        return cls(
            uuid=bare_uuid(value.get("uuid", "")),
            index=_int(value.get("index")) or 0,
            name=str(value.get("name", "")),
            pci=str(value.get("pci", "")),
            sm_max_mhz=_int(value.get("sm_max_mhz")),
            memory_max_mhz=_int(value.get("memory_max_mhz")),
            total_bytes=_int(value.get("total_bytes")),
            instances=tuple(map(bare_uuid, _list(value.get("instances"), most=_MOST_GPUS))),
            ecc_at_start=_int(value.get("ecc_at_start")),
            knows_xids=value.get("knows_xids") is True,
            xids=tuple(
                Xid(_int(xid.get("number")) or 0, _int(xid.get("t_ns")) or 0)
                for xid in _dicts(value.get("xids"), most=_MOST_XIDS)
            ),
            samples=tuple(
                map(GpuSample.from_dict, _dicts(value.get("samples"), most=_MOST_SAMPLES))
            ),
        )


@dataclass(frozen=True, slots=True)
class HostGpus:
    """The GPUs of one host, or why they are unknown."""

    host: str
    problem: str | None = None  # a value of `Problem`
    problem_detail: str = ""
    driver: str = ""
    gpus: tuple[Gpu, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> HostGpus:
        problem = value.get("problem")
        return cls(
            host=str(value.get("host", "")),
            problem=problem if isinstance(problem, str) else None,
            problem_detail=str(value.get("problem_detail", "")),
            driver=str(value.get("driver", "")),
            gpus=tuple(map(Gpu.from_dict, _dicts(value.get("gpus"), most=_MOST_GPUS))),
        )


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _float(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else None


def _list(value: Any, *, most: int) -> list[Any]:
    return value[-most:] if isinstance(value, list) else []


def _dicts(value: Any, *, most: int) -> list[dict[str, Any]]:
    return [entry for entry in _list(value, most=most) if isinstance(entry, dict)]
