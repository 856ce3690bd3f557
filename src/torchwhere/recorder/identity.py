"""Who this process is: rank, world, run, host. Goes into the header of its box."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchwhere.core.version import __version__
from torchwhere.hooks.python_stack import current_folder
from torchwhere.processes.cgroup import oom_counter, oom_kills
from torchwhere.processes.launcher import launch
from torchwhere.processes.namespace import pid_namespace


def rank_and_world() -> tuple[int, int]:
    """From the process group if there is one, else from the launcher's environment, else a world of
    one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    said = launch()
    rank = said.rank or 0
    return rank, max(said.world_size or 1, rank + 1)


def _number(variable: str, default: int) -> int:
    try:
        return int(os.environ.get(variable, default))
    except ValueError:
        return default


def run_id() -> str:
    """The same on all ranks of one launch, as far as the launcher says so."""
    elastic = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if elastic != "none":
        return elastic
    return os.environ.get("SLURM_JOB_ID") or store()


def store() -> str:
    """Where the job's own store is, as far as the launcher says so, or the script has by now."""
    return f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}".strip(":")


def _started() -> int | None:
    """When this process began, in the kernel's ticks: with its number, its name for good."""
    try:
        return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _flight_recorder() -> dict[str, str]:
    """Where PyTorch's flight recorder writes its dumps (the rank follows), and the pipe on which it
    is asked for one."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(
        os.environ.get("HOME") or "/tmp", ".cache"
    )
    default = os.path.join(cache, "torch", "comm_lib_trace_rank_")
    dump = (
        os.environ.get("TORCH_FR_DUMP_TEMP_FILE")
        or os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
        or default
    )
    pipe = os.environ.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
    folder = current_folder()
    found = {"dump": os.path.join(folder, dump)}
    return found | {"pipe": os.path.join(folder, pipe)} if pipe else found


def describe() -> dict[str, Any]:
    """Everything about this process that a reader may want, short facts first."""
    rank, world = rank_and_world()
    wall, monotonic = time.time_ns(), time.monotonic_ns()
    return {
        "rank": rank,
        "world_size": world,
        "local_rank": launch().local_rank or 0,
        "run_id": run_id(),
        "store": store(),
        "restart": _number("TORCHELASTIC_RESTART_COUNT", 0),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pid_started": _started(),
        "pid_namespace": pid_namespace(),
        "oom_counter": (counter := oom_counter()),
        "oom_kills": oom_kills(counter) if counter is not None else None,
        "flight_recorder": _flight_recorder(),
        "started_ns": wall,
        "clock_offset_ns": wall - monotonic,
        "torchwhere": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "folder": current_folder(),
        "argv": sys.argv,
    }
