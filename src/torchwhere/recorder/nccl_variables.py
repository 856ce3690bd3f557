"""Sets the variables of torch that make a failed NCCL job readable, before the script starts.

torch reads them when it creates its first process group. A variable that the user has set, by its
current name or by an older one, stays as it is. Without a GPU, nothing is set.

TORCH_NCCL_ENABLE_TIMING stays off: it made a step of FSDP2 8.6 % longer (docs/overhead.md). The
marks of torchwhere show what each device has reached.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

# of NVIDIA, of AMD, and of NVIDIA under WSL
_DEVICE_FILES = ("nvidia[0-9]*", "kfd", "dxg")
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_NO_DEVICE = ("", "-1")


# The flight recorder has these variables since torch 2.9. Earlier versions read only the older
# names, and later ones warn about them.
_RENAMED = "2.9"
_BUFFER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_DUMP_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
# for each variable its names, the current one first, and the value
_VARIABLES = (
    # newer versions of torch have these two values as defaults
    (_BUFFER, "2000"),
    (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
)
# 1: on an error NCCL aborts the collectives of a rank, which may leave no time for its dump
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_DUMP = "flight_recorder_rank_"  # torch appends the rank; the doctor finds these names in a run


def set_nccl_variables(out: str | os.PathLike[str]) -> dict[str, str]:
    """Set the variables that the user has not set, if this process may use NCCL.

    Args:
        out: The folder of the run, for the dumps of the flight recorder.

    Returns:
        The variables that were set.

    Example:
        >>> set_nccl_variables("run/")
        {}
    """
    variables = missing_variables(os.environ, out) if _may_use_nccl() else {}
    os.environ.update(variables)
    return variables


def may_lose_dumps() -> bool:
    """Whether NCCL may abort a rank before it has written its dump. torchrun sets this mode."""
    return os.environ.get(_ERROR_HANDLING) == "1" and _may_use_nccl()


def missing_variables(
    environment: Mapping[str, str],
    out: str | os.PathLike[str],
    *,
    torch_version: str = torch.__version__,
) -> dict[str, str]:
    """The variables that an environment lacks, with their values."""
    prefix = os.path.join(os.path.abspath(out), _DUMP)
    is_older = TorchVersion(torch_version) < _RENAMED
    return {
        name: value
        for names, value in (*_VARIABLES, (_DUMP_FILE, prefix))
        if not any(name in environment for name in names)
        for name in (names if is_older and names in (_BUFFER, _DUMP_FILE) else names[:1])
    }


def _may_use_nccl() -> bool:
    """Whether torch has NCCL and the machine has a GPU. Calls no driver."""
    if not dist.is_available() or not dist.is_nccl_available():
        return False
    if any(os.environ.get(name) in _NO_DEVICE for name in _VISIBLE):
        return False
    return any(path for pattern in _DEVICE_FILES for path in Path("/dev").glob(pattern))
