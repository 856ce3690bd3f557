"""What NVML reports about a GPU: its identity, samples over time, and errors.

These classes are also the content of `gpu-<host>.json` (`docs/format.md`), the file in the folder
of a run in which the monitor of a host stores its samples. The file has a bounded size: the last
`KEPT` samples of each GPU, about 6 KB a GPU. It is replaced atomically. Reading a file never
raises: a damaged file is ignored, and a value of the wrong type counts as unknown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchwhere.core.atomic_file import replace_file
from torchwhere.core.records import read_record

KEPT = 24  # samples of each GPU
SAMPLE_S = 5.0
_PREFIX = "gpu-"
_MOST_BYTES = 1 << 22
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

    t_ns: int = 0  # wall clock
    sm_mhz: int | None = None
    memory_mhz: int | None = None
    reasons: tuple[str, ...] | None = None  # values of `CLOCK_REASONS`
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    used_bytes: int | None = None
    busy_percent: int | None = None  # of the time since the sample before, with a kernel running
    ecc_uncorrected: int | None = None  # volatile: since the driver was loaded


@dataclass(frozen=True, slots=True)
class Xid:
    """An error that the driver reported: its number in NVIDIA's list of Xid errors."""

    number: int = 0
    t_ns: int = 0  # wall clock


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of a host and its last samples, oldest first."""

    uuid: str = ""  # without prefix
    index: int = 0
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


@dataclass(frozen=True, slots=True)
class HostGpus:
    """The GPUs of one host, or why they are unknown."""

    host: str = ""
    problem: str | None = None  # a value of `Problem`
    problem_detail: str = ""
    driver: str = ""
    gpus: tuple[Gpu, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> HostGpus:
        """Read the content of a file. Ignores values of the wrong type."""
        return read_record(cls, value) or cls()


# -- the file of a host ----------------------------------------------------------------------------


def write_gpus(folder: Path, host_gpus: HostGpus) -> bool:
    """Replace the file of a host. Returns False if the system refuses."""
    name = re.sub(r"[^\w.-]", "_", host_gpus.host)
    content = json.dumps(host_gpus.to_dict(), separators=(",", ":"))
    return replace_file(folder / f"{_PREFIX}{name}.json", content)


def read_gpus(folder: Path) -> list[HostGpus]:
    """Read the files of all hosts."""
    hosts = []
    for path in sorted(folder.glob(f"{_PREFIX}*.json")):
        value = _json(path)
        if isinstance(value, dict):
            hosts.append(HostGpus.from_dict(value))
    return hosts


def _json(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None


# -- the GPUs of a rank ----------------------------------------------------------------------------
# A box names the devices of its process by UUID and PCI address: processes number only the devices
# that they see, so the index of a process says nothing on its host.


def devices_of(meta: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The devices that a box names."""
    devices = meta.get("devices")
    entries = devices if isinstance(devices, list) else []
    return [device for device in entries if isinstance(device, dict)]


def host_name(meta: Mapping[str, Any]) -> str:
    """The host of a box, also of one that only a snapshot of another host describes."""
    return str(meta.get("source_host") or meta.get("host") or "")


def host_of(meta: Mapping[str, Any], hosts: Sequence[HostGpus]) -> HostGpus | None:
    """The GPUs of the host of a box; None if no monitor sampled them."""
    return next((host for host in hosts if host.host == host_name(meta)), None)


def gpu_of(device: Mapping[str, Any], host: HostGpus) -> Gpu | None:
    """The GPU that a box names, by UUID or that of a MIG instance, else by PCI address."""
    uuid, pci = bare_uuid(device.get("uuid") or ""), str(device.get("pci") or "").lower()
    for gpu in host.gpus:
        if uuid and (uuid == gpu.uuid or uuid in gpu.instances):
            return gpu
    return next((gpu for gpu in host.gpus if pci and pci == gpu.pci), None)


def gpus_of(meta: Mapping[str, Any], hosts: Sequence[HostGpus]) -> list[Gpu]:
    """The GPUs of a rank, as far as they are known."""
    host = host_of(meta, hosts)
    if host is None:
        return []
    gpus = (gpu_of(device, host) for device in devices_of(meta))
    return [gpu for gpu in gpus if gpu is not None]
