"""A stand-in for the package `pynvml`, which needs a driver: the functions that torchwhere calls.

It has two GPUs. The second one has two MIG instances and knows less than the first.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

FIRST = "GPU-AAAAAAAA-0000-0000-0000-000000000001"
SECOND = "GPU-bbbbbbbb-0000-0000-0000-000000000002"
INSTANCES = ("MIG-cccccccc-0000-0000-0000-00000000000a", "MIG-dddddddd-0000-0000-0000-00000000000b")
NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, TIMEOUT, LIBRARY_NOT_FOUND = 3, 4, 9, 10, 12


class NVMLError(Exception):
    """An error of the driver, with its number."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class FakeNvml(ModuleType):
    """The module. Tests change its attributes."""

    NVMLError = NVMLError
    NVML_ERROR_LIBRARY_NOT_FOUND = LIBRARY_NOT_FOUND
    NVML_ERROR_DRIVER_NOT_LOADED = DRIVER_NOT_LOADED
    NVML_ERROR_NO_PERMISSION = NO_PERMISSION
    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
    NVML_TEMPERATURE_GPU = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    NVML_DEVICE_MIG_ENABLE = 1
    nvmlEventTypeXidCriticalError = 8

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.init_error: int | None = None
        self.count = 2
        self.ecc = 5
        self.reasons = 0x20 | 0x40
        self.pending_xids: list[tuple[int, int]] = []  # index of the GPU, number
        self.may_register = True
        self.closed = 0
        self.pids: list[int] = []  # use the first GPU

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise NVMLError(self.init_error)

    def nvmlShutdown(self) -> None:
        self.closed += 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"570.1"

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return INSTANCES[handle[1]] if isinstance(handle, tuple) else (FIRST, SECOND)[handle]

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"00000000:{0x1A + handle:02X}:00.0")

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=3 << 30, total=141 << 30)

    def nvmlDeviceGetClockInfo(self, handle: int, clock: int) -> int:
        return {self.NVML_CLOCK_SM: 810, self.NVML_CLOCK_MEM: 3201}[clock]

    def nvmlDeviceGetMaxClockInfo(self, handle: int, clock: int) -> int:
        return {self.NVML_CLOCK_SM: 1980, self.NVML_CLOCK_MEM: 3201}[clock]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return self.reasons

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 92

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 401_500

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        self._only_on_first(handle)
        return 700_000

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self._only_on_first(handle)
        return SimpleNamespace(gpu=97, memory=40)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        self._only_on_first(handle)
        return [SimpleNamespace(pid=pid) for pid in self.pids]

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        self._only_on_first(handle)
        return self.ecc

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        return [int(handle == 1), int(handle == 1)]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, index: int) -> tuple[int, int]:
        if index >= len(INSTANCES):
            raise NVMLError(NOT_SUPPORTED)
        return handle, index

    def nvmlEventSetCreate(self) -> object:
        return object()

    def nvmlEventSetFree(self, events: object) -> None:
        self.closed += 1

    def nvmlDeviceRegisterEvents(self, handle: int, types: int, events: object) -> None:
        if not self.may_register:
            raise NVMLError(NO_PERMISSION)

    def nvmlEventSetWait_v2(self, events: object, timeout_ms: int) -> Any:
        if not self.pending_xids:
            raise NVMLError(TIMEOUT)
        handle, number = self.pending_xids.pop(0)
        return SimpleNamespace(device=handle, eventData=number)

    def _only_on_first(self, handle: int) -> None:
        if handle:
            raise NVMLError(NOT_SUPPORTED)
