"""Reads from the launcher's environment variables which process this is: rank, world size, local
rank, host.

Reads the variables of torchrun, Open MPI, MPICH and Intel MPI, and SLURM, in this order: mpirun
inside a SLURM allocation also has SLURM's variables, which describe another process. A later
launcher fills in missing values (`RANK=$SLURM_PROCID` in an srun script), unless its rank or world
size differs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

# Programs and modules that start ranks. Under Slurm, or in a pod, they have rank variables too.
LAUNCHER_PROGRAMS = frozenset(
    {
        "accelerate",
        "accelerate-launch",
        "accelerate.commands.accelerate_cli",
        "accelerate.commands.launch",
        "deepspeed",
        "deepspeed.launcher.launch",
        "deepspeed.launcher.runner",
        "deepspeed.pt",
        "ds",
        "fabric",
        "torch.distributed.launch",
        "torch.distributed.run",
        "torchrun",
    }
)
_Names = tuple[str, ...]
_IDENTITY = {"rank", "world_size"}  # launchers that differ here describe different processes


@dataclass(frozen=True, slots=True)
class Launch:
    """One process as its launcher describes it; None for unknown values."""

    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    host: int | None = None  # number of its host
    hosts: int | None = None

    @property
    def is_first_of_host(self) -> bool:
        """Whether this is local rank 0. True without a launcher."""
        return not self.local_rank

    @property
    def is_on_first_host(self) -> bool:
        return self.host == 0 if self.host is not None else not self.rank

    @property
    def has_other_hosts(self) -> bool:
        if self.rank is None or self.world_size is None:
            return False
        if self.local_world_size is not None and self.world_size <= self.local_world_size:
            return False
        return self.local_world_size is not None if self.hosts is None else self.hosts > 1


_LAUNCHERS: tuple[dict[str, _Names], ...] = (
    {
        "rank": ("RANK",),
        "world_size": ("WORLD_SIZE",),
        "local_rank": ("LOCAL_RANK",),
        "local_world_size": ("LOCAL_WORLD_SIZE",),
        "host": ("GROUP_RANK",),
        "hosts": ("GROUP_WORLD_SIZE",),
    },
    {
        "rank": ("OMPI_COMM_WORLD_RANK",),
        "world_size": ("OMPI_COMM_WORLD_SIZE",),
        "local_rank": ("OMPI_COMM_WORLD_LOCAL_RANK",),
        "local_world_size": ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    },
    {
        "rank": ("PMI_RANK",),
        "world_size": ("PMI_SIZE",),
        "local_rank": ("MPI_LOCALRANKID",),
        "local_world_size": ("MPI_LOCALNRANKS",),
    },
    {  # srun starts a step, which may have fewer tasks and nodes than the job
        "rank": ("SLURM_PROCID",),
        "world_size": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        "local_rank": ("SLURM_LOCALID",),
        "host": ("SLURM_NODEID",),
        "hosts": ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    },
)


def launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """Describe this process."""
    known: dict[str, int] = {}
    for names in _LAUNCHERS:
        values = _read(names, environment)
        same = known.keys() & values.keys() & _IDENTITY
        if all(known[name] == values[name] for name in same):
            known = values | known
    return Launch(**known)


def program() -> str:
    """The name of the script, or with `-m` of the module, that this Python process runs."""
    arguments: list[str] = getattr(sys, "argv", None) or [""]  # a program may embed Python
    if arguments[0] == "-m":  # Python has not found the module yet
        return sys.orig_argv[len(sys.orig_argv) - len(arguments)].removeprefix("-m")
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    return (
        spec.name.removesuffix(".__main__") if spec is not None else os.path.basename(arguments[0])
    )


def _read(names: Mapping[str, _Names], environment: Mapping[str, str]) -> dict[str, int]:
    """The values that one launcher has set, by field."""
    if "SLURM_PROCID" in names["rank"] and _is_batch_script(environment):
        return {}
    values = {field: _number(variables, environment) for field, variables in names.items()}
    return {field: value for field, value in values.items() if value is not None}


def _number(names: _Names, environment: Mapping[str, str]) -> int | None:
    values = (environment.get(name, "") for name in names)
    return next((int(value) for value in values if value.isdecimal()), None)


def _is_batch_script(environment: Mapping[str, str]) -> bool:
    """Whether this is the script of sbatch itself: one process with the variables of tasks that it
    has yet to start."""
    is_step = bool(environment.keys() & {"SLURM_STEP_ID", "SLURM_STEPID"})
    return environment.get("ENVIRONMENT") == "BATCH" and not is_step


def pid_namespace() -> int | None:
    """Id of the namespace, equal in all processes that share it; None where there is none."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None
