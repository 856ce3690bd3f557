"""Which role a monitor has, by what a launcher's environment says: torchrun's variables, or those of SLURM and Open MPI."""

from __future__ import annotations

import os
from pathlib import Path

from torchwhere.monitor.correspondence import Rendezvous
from torchwhere.monitor.deputy import Deputy
from torchwhere.monitor.lead import Lead
from torchwhere.monitor.role import Alone


def role(folder: Path, *, stall_s: float) -> Alone:
    """What a launcher's environment makes of the monitor that was started in it."""
    rank = _number("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
    world = _number("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
    hosts, local = _number("GROUP_WORLD_SIZE", "SLURM_NNODES"), _number("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    is_one = hosts == 1 or world is None or rank is None or (hosts is None and (local is None or world <= local))
    if is_one or (local is not None and world is not None and world <= local):
        return Alone()
    number = _number("GROUP_RANK", "SLURM_NODEID")
    is_first = rank == 0 if number is None else number == 0
    rendezvous = Rendezvous.from_environment()
    return Lead(folder, stall_s=stall_s, rendezvous=rendezvous) if is_first else Deputy(folder, rendezvous=rendezvous)


def _number(*names: str) -> int | None:
    return next((int(value) for name in names if (value := os.environ.get(name, "")).isdecimal()), None)
