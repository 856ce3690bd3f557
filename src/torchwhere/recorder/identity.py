"""Identifies this process: rank, world size, run, host. The header of the box contains it."""

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
from torchwhere.processes.dump_paths import dump_paths
from torchwhere.processes.launcher import launch, pid_namespace


def rank_and_world() -> tuple[int, int]:
    """Return rank and world size: of the process group, otherwise from the environment that the
    launcher set, otherwise 0 and 1."""
    if _has_group():
        return dist.get_rank(), dist.get_world_size()
    launched = launch()
    rank = launched.rank or 0
    return rank, max(launched.world_size or 1, rank + 1)


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _number(variable: str, default: int) -> int:
    try:
        return int(os.environ.get(variable, default))
    except ValueError:
        return default


def run_id() -> str:
    """Return an id that all ranks of one launch share, as far as the launcher gives one."""
    elastic = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if elastic != "none":
        return elastic
    return os.environ.get("SLURM_JOB_ID") or store()


def store() -> str:
    """Return the address of the job's store, if the launcher or the script has set it."""
    return f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}".strip(":")


def _started() -> int | None:
    """Return when this process started, in ticks of the kernel. Pid and start together identify a
    process, even if another process gets the pid later."""
    try:
        return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def describe() -> dict[str, Any]:
    """Return everything about this process that a reader of the box may need, short fields
    first."""
    rank, world = rank_and_world()
    wall, monotonic = time.time_ns(), time.monotonic_ns()
    counter = oom_counter()
    return {
        "rank": rank,
        "world_size": world,
        "local_rank": launch().local_rank or 0,
        # neither a process group nor a launcher gives the rank: then it is 0 for now
        "rank_is_assumed": not _has_group() and launch().rank is None,
        "run_id": run_id(),
        "store": store(),
        "restart": _number("TORCHELASTIC_RESTART_COUNT", 0),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pid_started": _started(),
        "pid_namespace": pid_namespace(),
        "oom_counter": counter,
        "oom_kills": oom_kills(counter) if counter is not None else None,
        "flight_recorder": dump_paths(os.environ, current_folder()),
        "started_ns": wall,
        "clock_offset_ns": wall - monotonic,
        "torchwhere": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "folder": current_folder(),
        "argv": sys.argv,
    }
