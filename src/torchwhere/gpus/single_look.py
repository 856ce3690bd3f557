"""Looks once at the GPUs of this host, and at the processes that use them.

NVML may block if a GPU no longer answers, so it runs in a thread that the caller does not wait for.
Without NVML, or without an answer, the result is empty.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Collection
from dataclasses import replace

from torchwhere.gpus.nvml import NvmlError, open_nvml
from torchwhere.gpus.samples import Gpu, HostGpus

Devices = dict[int, tuple[dict[str, str], ...]]  # the GPUs of a process, as a box names them
_PATIENCE_S = 5.0


def look_at_gpus(pids: Collection[int]) -> tuple[HostGpus | None, Devices]:
    """The GPUs of this host, and those that each of these processes uses.

    Example:
        host_gpus, devices = look_at_gpus([4711])
    """
    answers: list[tuple[HostGpus, Devices]] = []
    thread = threading.Thread(target=_look, args=(set(pids), answers), daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    return answers[0] if answers else (None, {})


def _look(pids: set[int], answers: list[tuple[HostGpus, Devices]]) -> None:
    try:
        nvml = open_nvml()
    except NvmlError:
        return
    try:
        gpus = nvml.gpus()
        devices: Devices = {}
        for gpu in gpus:
            for pid in pids.intersection(nvml.processes(gpu)):
                devices[pid] = (*devices.get(pid, ()), _device(gpu))
        samples = tuple(replace(gpu, samples=(nvml.sample(gpu),)) for gpu in gpus)
        host = HostGpus(socket.gethostname(), driver=nvml.driver(), gpus=samples)
        answers.append((host, devices))
    except Exception:  # a driver may fail in ways that NVML does not name
        return
    finally:
        nvml.close()


def _device(gpu: Gpu) -> dict[str, str]:
    return {"type": "cuda", "uuid": gpu.uuid, "pci": gpu.pci}
