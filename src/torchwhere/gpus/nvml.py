"""Reads the GPUs of this host with NVML, through the package `nvidia-ml-py` (module `pynvml`).

Only a monitor and `torchwhere attach` use it, never the training process. NVML creates no CUDA
context and does not wait for kernels, but a call may block if a GPU no longer answers:
`monitor/gpu_sampler.py` and `look_at_gpus` call it in a thread. A query that NVML does not support,
or refuses, gives None.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from enum import StrEnum
from importlib import import_module
from typing import Any, TypeVar

from torchwhere.gpus.samples import CLOCK_REASONS, Gpu, GpuSample, HostGpus, Xid, bare_uuid

T = TypeVar("T")
_NO_WAIT_MS = 0
_MOST_XIDS_AT_ONCE = 16
_PATIENCE_S = 5.0
Devices = dict[int, tuple[dict[str, str], ...]]  # the GPUs of a process, as a box names them


class Problem(StrEnum):
    """Why the GPUs of a host cannot be read."""

    NO_PACKAGE = "no_package"
    NO_LIBRARY = "no_library"  # a machine without NVIDIA driver, for example with AMD GPUs
    NO_DRIVER = "no_driver"  # the library is there, the kernel module is not loaded
    NO_PERMISSION = "no_permission"
    NO_GPU = "no_gpu"
    FAILED = "failed"


class NvmlError(Exception):
    """NVML cannot be used. `problem` says why."""

    def __init__(self, problem: Problem, detail: str = "") -> None:
        super().__init__(detail)
        self.problem = problem


def open_nvml() -> Nvml:
    """Connect to the driver.

    Raises:
        NvmlError: NVML cannot be used.
    """
    try:
        pynvml = import_module("pynvml")
    except ImportError:
        raise NvmlError(Problem.NO_PACKAGE) from None
    try:
        pynvml.nvmlInit()
    except Exception as error:
        raise NvmlError(_problem(pynvml, error), str(error)) from None
    return Nvml(pynvml)


def _problem(pynvml: Any, error: Exception) -> Problem:
    problems = {
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: Problem.NO_LIBRARY,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED: Problem.NO_DRIVER,
        pynvml.NVML_ERROR_NO_PERMISSION: Problem.NO_PERMISSION,
    }
    return problems.get(getattr(error, "value", None), Problem.FAILED)


class Nvml:
    """An open connection to the driver. One thread uses it."""

    def __init__(self, pynvml: Any) -> None:
        self._nvml = pynvml
        self._handles: dict[str, Any] = {}
        self._events: Any = None  # the event set for Xid errors

    def driver(self) -> str:
        return _text(self._ask(self._nvml.nvmlSystemGetDriverVersion) or "")

    def gpus(self) -> list[Gpu]:
        """The GPUs of this host, without samples.

        Raises:
            NvmlError: There are none, or the driver does not list them.
        """
        count = self._ask(self._nvml.nvmlDeviceGetCount)
        gpus = [gpu for index in range(count or 0) if (gpu := self._gpu(index)) is not None]
        if not gpus:
            raise NvmlError(Problem.NO_GPU)
        self._events = self._ask(self._nvml.nvmlEventSetCreate)
        return [replace(gpu, knows_xids=self._register(gpu.uuid)) for gpu in gpus]

    def sample(self, gpu: Gpu) -> GpuSample:
        """Look at a GPU now."""
        nvml, handle, ask = self._nvml, self._handles[gpu.uuid], self._ask
        memory = ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        busy = ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        return GpuSample(
            t_ns=time.time_ns(),
            sm_mhz=ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            memory_mhz=ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
            reasons=self._reasons(handle),
            temperature_c=ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            power_w=_watts(ask(nvml.nvmlDeviceGetPowerUsage, handle)),
            power_limit_w=_watts(ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
            used_bytes=memory.used if memory is not None else None,
            busy_percent=busy.gpu if busy is not None else None,
            ecc_uncorrected=self._ecc(handle),
        )

    def xids(self) -> list[tuple[str | None, Xid]]:
        """The Xid errors since the last call, with the UUID of the GPU, if known."""
        xids: list[tuple[str | None, Xid]] = []
        while self._events is not None and len(xids) < _MOST_XIDS_AT_ONCE:
            # fails with a timeout if there is no event
            event = self._ask(self._nvml.nvmlEventSetWait_v2, self._events, _NO_WAIT_MS)
            if event is None:
                break
            uuid = self._ask(self._nvml.nvmlDeviceGetUUID, event.device)
            number = int(event.eventData)
            xids.append((bare_uuid(_text(uuid)) if uuid else None, Xid(number, time.time_ns())))
        return xids

    def close(self) -> None:
        if self._events is not None:
            self._ask(self._nvml.nvmlEventSetFree, self._events)
        self._ask(self._nvml.nvmlShutdown)

    # -- one query ---------------------------------------------------------------------------------

    def _ask(self, query: Callable[..., T], *args: Any) -> T | None:
        """The answer to a query; None if this GPU or this driver does not support it."""
        try:
            return query(*args)
        except self._nvml.NVMLError:
            return None

    def _gpu(self, index: int) -> Gpu | None:
        nvml, ask = self._nvml, self._ask
        handle = ask(nvml.nvmlDeviceGetHandleByIndex, index)
        uuid = ask(nvml.nvmlDeviceGetUUID, handle) if handle is not None else None
        if uuid is None:
            return None
        uuid = bare_uuid(_text(uuid))
        self._handles[uuid] = handle
        memory = ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        pci = ask(nvml.nvmlDeviceGetPciInfo, handle)
        return Gpu(
            uuid=uuid,
            index=index,
            name=_text(ask(nvml.nvmlDeviceGetName, handle) or ""),
            pci=_text(pci.busId).lower() if pci is not None else "",
            sm_max_mhz=ask(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
            memory_max_mhz=ask(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_MEM),
            total_bytes=memory.total if memory is not None else None,
            instances=self._instances(handle),
            ecc_at_start=self._ecc(handle),
        )

    def processes(self, gpu: Gpu) -> list[int]:
        """The processes that use a GPU. In a container, NVML gives the numbers of the host."""
        listed = self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses, self._handles[gpu.uuid])
        return [int(process.pid) for process in listed or ()]

    def _instances(self, handle: Any) -> tuple[str, ...]:
        """The UUIDs of the MIG instances: CUDA gives a rank the UUID of its instance."""
        nvml, ask = self._nvml, self._ask
        modes = ask(nvml.nvmlDeviceGetMigMode, handle)
        if not modes or modes[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return ()
        uuids = []
        for index in range(ask(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            instance = ask(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
            uuid = ask(nvml.nvmlDeviceGetUUID, instance) if instance is not None else None
            if uuid:
                uuids.append(bare_uuid(_text(uuid)))
        return tuple(uuids)

    def _register(self, uuid: str) -> bool:
        """Ask for the Xid errors of a GPU. Returns False if this user may not have them."""
        if self._events is None:
            return False
        nvml = self._nvml
        try:
            nvml.nvmlDeviceRegisterEvents(
                self._handles[uuid], nvml.nvmlEventTypeXidCriticalError, self._events
            )
        except nvml.NVMLError:
            return False
        return True

    def _reasons(self, handle: Any) -> tuple[str, ...] | None:
        nvml = self._nvml
        # the newer name first: drivers before 535 have only the older one
        bits = None
        for name in ("ClocksEventReasons", "ClocksThrottleReasons"):
            query = getattr(nvml, f"nvmlDeviceGetCurrent{name}", None)
            if bits is None and query is not None:
                bits = self._ask(query, handle)
        if bits is None:
            return None
        return tuple(reason for bit, reason in CLOCK_REASONS.items() if bits & bit)

    def _ecc(self, handle: Any) -> int | None:
        nvml = self._nvml
        return self._ask(
            nvml.nvmlDeviceGetTotalEccErrors,
            handle,
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_VOLATILE_ECC,
        )


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _watts(milliwatts: int | None) -> float | None:
    return milliwatts / 1000 if milliwatts is not None else None


# -- one look --------------------------------------------------------------------------------------
# NVML may block if a GPU no longer answers, so it runs in a thread that the caller does not wait
# for. Without NVML, or without an answer, the result is empty.


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
