"""Which Xid errors of a GPU a verdict shows: not those that a kill leaves, or another process."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from test_gpus import FAST, STALL_S, UUIDS, gpu_lines, gpu_of_rank, judged, with_devices
from test_nccl_runs import unpacked
from torchwhere.blackbox.reader import read_box
from torchwhere.gpus.samples import Xid, read_gpus, write_gpus
from torchwhere.pipeline.verdict import diagnose_folder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked("nccl_runs.txz", tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of four ranks that shared one GPU through MPS, with the samples of their monitors."""
    return unpacked("nccl_faults.txz", tmp_path_factory.mktemp("shared"))


SHARED = (
    "leaves_mesh_loop_early",
    "opposite_groups",
    "others_give_up",
    "shared_by_two_groups",
    "sigkill_shared_gpu",
    "sigstop",
    "sigstop_inside",
)


@pytest.mark.parametrize("name", SHARED)
def test_errors_of_killed_clients(shared: Path, name: str) -> None:
    """The Xid 31 of clients of MPS that were killed, here those of other jobs too, explains no
    fault of this job: the verdict does not show it."""
    verdict = diagnose_folder(shared / name, stall_s=STALL_S)
    assert [line for line in gpu_lines(verdict) if "Xid" in line] == []


def test_an_error_that_may_be_of_others(shared: Path, tmp_path: Path) -> None:
    """If an Xid 31 came within a second of the last progress, the verdict says when, and that it
    may be that of another process on the same GPU. It does not show a later one."""
    run = shutil.copytree(shared / "sigstop", tmp_path / "run")
    last_ns = max(read_box(run / f"rank{rank}.box").last_ns for rank in range(4))
    (host,) = read_gpus(run)
    xids = (Xid(31, last_ns + 700_000_000), Xid(31, last_ns + 3_000_000_000))
    write_gpus(run, replace(host, gpus=(replace(host.gpus[0], xids=xids),)))
    verdict = diagnose_folder(run, stall_s=STALL_S)
    gpu = "  GPU 0 of host vm (rank 2): "
    assert gpu_lines(verdict) == [
        gpu + "Xid 31: a page fault in a kernel, 0.7 s after the last progress of the job",
        (
            f"{gpu}shared with ranks 0-1, 3: the Xid error may be that of ranks 0-1, 3 or of"
            " another process"
        ),
    ]
    (fact,) = verdict.facts["gpus"]
    assert (fact["xids"], fact["xids_may_be_of_others"]) == ([31], True)
    assert fact["xids_after_progress_s"] == [pytest.approx(0.7, abs=0.01)]


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked("nccl_failures.txz", tmp_path_factory.mktemp("failed"))


@pytest.mark.parametrize(
    ("name", "number", "text"),
    [
        ("illegal_address", 31, "Xid 31: a page fault in a kernel"),
        ("device_assert", 43, "Xid 43: a kernel failed"),
        ("illegal_address_unexplained", 31, "Xid 31: a page fault in a kernel"),
    ],
)
@pytest.mark.parametrize("late_s", [-0.2, 0.9])
def test_an_error_of_the_culprit(
    failed: Path, tmp_path: Path, name: str, number: int, text: str, late_s: float
) -> None:
    """The Xid error of a rank that failed on its device counts, also if the monitor saw it a moment
    after the rank had failed."""
    run = with_devices(failed / name, tmp_path, UUIDS)
    box = read_box(run / "rank2.box")
    t_ns = max(box.last_ns, box.beat_ns) + int(late_s * 1e9)
    verdict = judged(run, [gpu_of_rank(run, 2, FAST, xids=(Xid(number, t_ns),))])
    assert verdict.culprits == (2,)
    assert [line.partition("(rank 2): ")[2] for line in gpu_lines(verdict)] == [text]
    assert verdict.facts["gpus"][0]["xids"] == [number]
    assert verdict.facts["gpus"][0]["xids_may_be_of_others"] is False


@pytest.mark.parametrize("number", [31, 43])
@pytest.mark.parametrize("late_s", [-3, 1])
def test_an_error_of_another_process(
    failed: Path, tmp_path: Path, number: int, late_s: float
) -> None:
    """If a rank raised an exception of its own, an error in a kernel before its last calls, or
    after its exit, is not the cause."""
    run = with_devices(failed / "raised", tmp_path, UUIDS)
    box = read_box(run / "rank2.box")
    xid = Xid(number, max(box.meta["started_ns"], box.last_ns + int(late_s * 1e9)))
    verdict = judged(run, [gpu_of_rank(run, 2, FAST, xids=(xid,))])
    assert (verdict.culprits, gpu_lines(verdict)) == ((2,), [])


def test_a_cleanup_explains_nothing(recorded: Path, tmp_path: Path) -> None:
    """Xid 45 is a consequence of a kill: it does not make the GPU of a rank worth a line, and beside
    another error the verdict calls it a consequence."""
    run = with_devices(recorded / "endless_ddp", tmp_path, UUIDS)
    t_ns = read_box(run / "rank2.box").last_ns + 500_000_000
    xids = (Xid(79, t_ns), Xid(45, t_ns))
    lines = gpu_lines(judged(run, [gpu_of_rank(run, 2, FAST, xids=xids)]))
    assert [line.partition("(rank 2): ")[2].partition(", 0.")[0] for line in lines] == [
        "Xid 79: the GPU has fallen off the bus",
        "Xid 45: cleanup after a process was ended, a consequence",
    ]
    (tmp_path / "killed").mkdir()
    alone = with_devices(recorded / "killed", tmp_path / "killed", UUIDS)
    t_ns = read_box(alone / "rank2.box").last_ns
    verdict = judged(alone, [gpu_of_rank(alone, 2, FAST, xids=(Xid(45, t_ns),))])
    assert (verdict.culprits, gpu_lines(verdict)) == ((2,), [])
