"""Finds the GPU that a rank uses among the GPUs that NVML lists.

A box names the devices of its process by UUID and PCI address: processes number only the devices
that they see, so the index of a process says nothing on its host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchwhere.gpus.samples import Gpu, HostGpus, bare_uuid


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
