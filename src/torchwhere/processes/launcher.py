"""What the launcher of this process says of it: its rank, how many there are, and its place among
those of its host.

Reads the variables of torchrun, Open MPI, MPICH and Intel MPI, and SLURM, in this order: a job that
mpirun starts inside a SLURM allocation has SLURM's too, of something else. What one of them leaves
out another one may say, unless it speaks of another rank or world; so with `RANK=$SLURM_PROCID` in
a script of srun.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

_Names = tuple[str, ...]
_WHO = ("rank", "world_size")  # who differs in these speaks of another process


@dataclass(frozen=True, slots=True)
class Launch:
    """One process, as its launcher counts; None for what nobody says."""

    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None  # among those of its host
    local_world_size: int | None = None
    host: int | None = None  # the number of its host
    hosts: int | None = None

    @property
    def is_first_of_host(self) -> bool:
        """A process that no launcher has started is the first of its host."""
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
    {  # a step, which is what srun starts, may have fewer tasks and nodes than the job
        "rank": ("SLURM_PROCID",),
        "world_size": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        "local_rank": ("SLURM_LOCALID",),
        "host": ("SLURM_NODEID",),
        "hosts": ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    },
)


def launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """Of this process."""
    known = Launch()
    for names in _LAUNCHERS:
        said = _read(names, environment)
        if all(
            getattr(known, name) in (None, getattr(said, name)) or getattr(said, name) is None
            for name in _WHO
        ):
            told = {
                name: value for name, value in asdict(said).items() if getattr(known, name) is None
            }
            known = replace(known, **told)
    return known


def _read(names: Mapping[str, _Names], environment: Mapping[str, str]) -> Launch:
    if "SLURM_PROCID" in names["rank"] and _is_batch_script(environment):
        return Launch()
    return Launch(**{field: _number(each, environment) for field, each in names.items()})


def _number(names: _Names, environment: Mapping[str, str]) -> int | None:
    return next(
        (int(value) for name in names if (value := environment.get(name, "")).isdecimal()), None
    )


def _is_batch_script(environment: Mapping[str, str]) -> bool:
    """Whether this is what sbatch itself runs: one process, with the variables of tasks that it has
    yet to start."""
    return environment.get("ENVIRONMENT") == "BATCH" and not environment.keys() & {
        "SLURM_STEP_ID",
        "SLURM_STEPID",
    }
