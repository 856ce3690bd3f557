"""What the doctor says about faults of `faulty_jobs.py` that were recorded on NCCL.

Four ranks on one GPU, after their processes were killed. `test_gpu_faults.py` runs all faults where
there is a GPU; these are the ones in which the device decides, or hides the fault.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from faulty_jobs import FAULTS, STALL_S
from test_gpu_faults import KINDS_ON_NCCL, VICTIM
from test_nccl_runs import unpacked
from torchwhere.pipeline.verdict import diagnose_folder

ON_DEVICE = ("opposite_groups", "shared_by_two_groups")
STOPPED = ("sigstop", "sigstop_inside")
FAULTY = (
    *ON_DEVICE,
    *STOPPED,
    "leaves_mesh_loop_early",
    "microbatches",
    "others_give_up",
    "skipped_by_one_of_two",
    "straggler",
    "wrong_group",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked("nccl_faults.txz", tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("name", FAULTY)
def test_faults(runs: Path, name: str) -> None:
    """The doctor finds on NCCL the fault and the rank that it finds on gloo."""
    expected = FAULTS[name][1]
    verdict = diagnose_folder(runs / name, stall_s=STALL_S)
    assert verdict.kind in (*expected.kinds, *KINDS_ON_NCCL.get(name, ())), verdict
    assert set(verdict.culprits) == expected.culprits(VICTIM), verdict
    assert bool(verdict.facts.get("on_device")) == (name in ON_DEVICE), verdict


@pytest.mark.parametrize("name", STOPPED)
def test_a_stopped_process(runs: Path, name: str) -> None:
    """A stopped process holds up a collective that its device has reached: the verdict says that it
    was stopped, and does not name the devices that wait for it."""
    verdict = diagnose_folder(runs / name, stall_s=STALL_S)
    assert "stopped by a signal" in "\n".join(verdict.explanation)
    assert verdict.explanation[1].startswith("  waiting: ranks 0-1, 3, ")


def test_a_job_that_is_bound_by_its_cpus(runs: Path) -> None:
    """In a healthy job all devices wait for the rank with the slowest CPU, which is hardly slower
    than the others: it is not a straggler, and it did not exit first."""
    verdict = diagnose_folder(runs / "healthy_mesh", stall_s=STALL_S)
    assert (verdict.kind, verdict.culprits) == ("dead", ())
    assert verdict.facts["may_have_gone_first"] == []
    assert any("the job was progressing" in line for line in verdict.explanation)


def test_a_long_kernel_on_all_devices(runs: Path) -> None:
    """All devices were in a kernel of some seconds when a healthy job was killed: this is not a
    hang. (A job of `nccl_jobs.py`.)"""
    verdict = diagnose_folder(runs / "healthy_far_ahead", stall_s=STALL_S)
    assert (verdict.kind, verdict.culprits) == ("dead", ())


def test_a_straggler_on_the_cpu(runs: Path) -> None:
    """If the CPU of a rank issues late, the verdict does not blame its device, and counts only the
    time that the CPU lost."""
    verdict = diagnose_folder(runs / "straggler", stall_s=STALL_S)
    assert verdict.explanation[0].startswith("Rank 2 is late by 49.3 ms in 47 of the last 47 steps")


@pytest.mark.parametrize("has_monitor", [True, False])
def test_a_killed_process_on_a_shared_device(runs: Path, tmp_path: Path, has_monitor: bool) -> None:
    """Four ranks shared one GPU through MPS, and one of them was killed. Two others then failed with
    an illegal memory access, before the driver let go of the killed process: they are not named."""
    run = shutil.copytree(runs / "sigkill_shared_gpu", tmp_path / "run")
    if not has_monitor:
        (run / "monitor-vm.json").unlink()
    verdict = diagnose_folder(run, stall_s=STALL_S)
    assert (verdict.kind, verdict.culprits) == ("dead", (VICTIM,)), verdict
    assert verdict.facts["failed_because_of_it"] == {"lost peer": [0], "shared device": [1, 3]}
    assert (
        "Because of it, ranks 1, 3 failed: a process that shared its device was gone."
        in verdict.explanation
    )


def test_a_deadlock_of_all(runs: Path) -> None:
    """If all ranks send before they receive, no rank did anything that the others did not."""
    verdict = diagnose_folder(runs / "healthy_turns", stall_s=STALL_S)
    assert (verdict.kind, verdict.culprits) == ("deadlock", ())
