"""What a launcher says of a process: its rank, its world, its place on its host, and whether there
are other hosts."""

from __future__ import annotations

import pytest

from torchwhere.processes.launcher import Launch, launch

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
}
SLURM = {
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_STEP_ID": "0",
}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
ONE_NODE_EACH = {
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
}


@pytest.mark.parametrize(
    ("environment", "expected", "is_first_of_host", "is_on_first_host", "has_other_hosts"),
    [
        ({}, Launch(), True, True, False),
        (TORCHRUN, Launch(5, 8, 1, 4, 1, 2), False, False, True),
        (SLURM, Launch(2, 4, 0, None, 1, 2), True, False, True),
        (OMPI, Launch(3, 4, 1, 2), False, False, True),
        (
            OMPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
            Launch(0, 4, 0, 2),
            True,
            True,
            True,
        ),
        (MPICH, Launch(3, 4, 1, 4), False, False, False),
        (TORCHRUN | ONE_NODE_EACH, Launch(5, 8, 1, 4, 1, 2), False, False, True),
        (OMPI | SLURM | {"SLURM_PROCID": "0"}, Launch(3, 4, 1, 2), False, False, True),
        (SLURM | {"RANK": "2", "WORLD_SIZE": "4"}, Launch(2, 4, 0, None, 1, 2), True, False, True),
        (
            SLURM | {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "4"},
            Launch(2, 4, 0, None, 1, 2),
            True,
            False,
            True,
        ),
        (
            {"ENVIRONMENT": "BATCH", **SLURM, "SLURM_PROCID": "0"},
            Launch(0, 4, 0, None, 1, 2),
            True,
            False,
            True,
        ),
        ({"RANK": "x", "SLURM_PROCID": "", "LOCAL_RANK": "-1"}, Launch(), True, True, False),
        ({"RANK": "1", "WORLD_SIZE": "4"}, Launch(1, 4), True, False, False),
    ],
    ids=[
        *(
            "nobody",
            "torchrun",
            "srun",
            "mpirun",
            "mpirun, first",
            "MPICH on one host",
            "torchrun by srun",
            "mpirun in SLURM",
        ),
        *(
            "srun and a rank by hand",
            "a step of a job",
            "srun in sbatch",
            "no numbers",
            "rank by hand",
        ),
    ],
)
def test_launch(
    environment: dict[str, str],
    expected: Launch,
    is_first_of_host: bool,
    is_on_first_host: bool,
    has_other_hosts: bool,
) -> None:
    """One launcher is believed, the innermost; others only add to what it says."""
    found = launch(environment)
    assert found == expected
    assert (found.is_first_of_host, found.is_on_first_host) == (is_first_of_host, is_on_first_host)
    assert found.has_other_hosts == has_other_hosts


def test_batch_script() -> None:
    """What sbatch itself runs is one process, though SLURM's variables speak of all tasks to
    come."""
    batch = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"} | {
        "ENVIRONMENT": "BATCH"
    }
    assert launch(batch) == Launch()
    assert launch(batch | TORCHRUN) == Launch(5, 8, 1, 4, 1, 2)
