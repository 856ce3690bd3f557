"""Recognizes errors of a device in the message of an exception or of an abort.

A rank with such an error failed by itself: its kernel or its device is the cause, and all other
ranks of the job only react. Out of memory is not one of them: the device works. After the errors
with a kind other than `OTHER`, and a few more, every call of CUDA or HIP in the process fails.
"""

from __future__ import annotations

import re
from enum import StrEnum

_OF_DEVICE = re.compile(
    r"(?:CUDA|HIP)(?: driver)? error: |AcceleratorError|Cuda failure|unhandled cuda error"
    r"|Triton Error \[(?:CUDA|HIP)\]"
    r"|uncorrectable ECC error|(?:CUBLAS|CUDNN|HIPBLAS)_STATUS_EXECUTION_FAILED",
    re.IGNORECASE,
)
_OUT_OF_MEMORY = re.compile(r"out of memory", re.IGNORECASE)


class DeviceError(StrEnum):
    """What failed on a device."""

    ASSERT = "device-side assert"
    ADDRESS = "illegal address"
    MEMORY = "uncorrectable memory error"
    LINK = "NVLink error"
    OTHER = "device error"


# All texts are those of CUDA. They must be specific: `is_final` looks for them in any message. Each
# message of torch advises to "enable device-side assertions": that is not an assert.
_KINDS = {
    DeviceError.ASSERT: re.compile(r"device-side assert triggered|cudaErrorAssert", re.IGNORECASE),
    DeviceError.ADDRESS: re.compile(
        r"illegal memory access|misaligned address|illegal address|invalid program counter"
        r"|unspecified launch failure|illegal instruction|hardware stack error"
        r"|global/shared address space",
        re.IGNORECASE,
    ),
    DeviceError.MEMORY: re.compile(
        r"ECC error|row remap|(?:CUDA|HIP) error: (?:un)?contained|contained memory error",
        re.IGNORECASE,
    ),
    DeviceError.LINK: re.compile(r"NVLink error|memory over NVLink", re.IGNORECASE),
}
_ALSO_FINAL = re.compile(r"launch timed out|context is destroyed", re.IGNORECASE)


def device_error(message: str) -> DeviceError | None:
    """What failed on the device, by the message; None if the message is about something else."""
    if _OF_DEVICE.search(message) is None or _OUT_OF_MEMORY.search(message):
        return None
    return _kind(message) or DeviceError.OTHER


def is_final(message: str) -> bool:
    """Whether every call of the device fails after an error with this message."""
    return _kind(message) is not None or _ALSO_FINAL.search(message) is not None


def _kind(message: str) -> DeviceError | None:
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(message)), None)
