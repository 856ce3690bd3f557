"""What the doctor says about runs of four NCCL ranks that were recorded on a GPU.

`nccl_jobs.py` describes the jobs and how they were recorded.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest

from nccl_jobs import JOBS
from torchwhere.blackbox.box import Box
from torchwhere.blackbox.device import device_lanes, device_source, device_state, device_times
from torchwhere.blackbox.device_place import read_progress
from torchwhere.blackbox.file_format import (
    LANE_NEXT_RECORD,
    LANE_PENDING,
    LANE_RECORD,
    PROGRESS_DONE,
    PROGRESS_REACHED,
)
from torchwhere.blackbox.reader import read_box
from torchwhere.blackbox.replays import NO_ROW, replay_rows
from torchwhere.pipeline.verdict import diagnose_folder

STALL_S = 4.0
# failures have a file of their own
EXPECTED = {name: expected for name, (_, expected) in JOBS.items() if not expected.fails}
# healthy jobs were ended from outside, which is not healthy
RECORDED = sorted(name for name, expected in EXPECTED.items() if expected.kind != "healthy")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = unpacked("nccl_runs.txz", tmp_path_factory.mktemp("runs"))
    return unpacked("nccl_graphs.txz", folder)


def unpacked(name: str, folder: Path) -> Path:
    with tarfile.open(Path(__file__).parent / name) as archive:
        archive.extractall(folder, filter="data")
    return folder


def stream_progress(box: Box) -> list[tuple[int, int]]:
    """How many collectives the device has reached and finished, of each stream with marks."""
    slots = [slot for _, slot in read_progress(device_source(box))]
    words = [(slot[PROGRESS_REACHED], slot[PROGRESS_DONE]) for slot in slots]
    return [progress for progress in words if any(progress)]


@pytest.mark.parametrize("name", RECORDED)
def test_faults(runs: Path, name: str) -> None:
    """The doctor names the fault and the rank, after the processes are gone."""
    expected = JOBS[name][1]
    verdict = diagnose_folder(runs / name, stall_s=STALL_S)
    assert (verdict.kind, verdict.culprits) == (expected.kind, expected.culprits)
    assert bool(verdict.facts.get("on_device")) == expected.on_device


@pytest.mark.parametrize("name", sorted(EXPECTED.keys() - set(RECORDED)))
def test_healthy(runs: Path, name: str) -> None:
    """A job that made progress until it was ended from outside: no rank is blamed, and none is
    suspected because its CPU had issued less than the others."""
    verdict = diagnose_folder(runs / name, stall_s=STALL_S)
    assert (verdict.kind, verdict.culprits) == ("dead", ())
    assert verdict.facts["may_have_gone_first"] == []
    assert any("the job was progressing" in line for line in verdict.explanation)


def test_cpus_that_are_far_ahead(runs: Path) -> None:
    """A rank does not wait in a collective that its own device has not reached."""
    verdict = diagnose_folder(runs / "healthy_far_ahead", stall_s=STALL_S)
    assert {str(report.state) for report in verdict.ranks.values()} == {"running"}


def test_where_a_cpu_is(runs: Path) -> None:
    """The CPU of a waiting rank is not where it issued the call that the rank waits in."""
    verdict = diagnose_folder(runs / "endless_pipeline", stall_s=STALL_S)
    device = verdict.ranks[1].device
    assert device is not None
    assert device.steps_behind > 100


def test_sentences(runs: Path) -> None:
    """The verdict on a device that hangs says where the device is, and where the CPU is."""
    verdict = diagnose_folder(runs / "endless_ddp", stall_s=STALL_S)
    assert list(verdict.explanation) == [
        (
            "The device of rank 2 has not reached all_reduce of float32 [131584], #22 of group"
            ' "default", which the CPU issued 19 s ago.'
        ),
        (
            "  waiting on the device: ranks 0-1, 3, in all_reduce of float32 [131584], #22 of group"
            ' "default"'
        ),
        (
            "Likely cause: a kernel or a copy on that device does not end. Look at: nvidia-smi and"
            " the kernel log (Xid) on the host of rank 2, and the kernels that the CPU issued"
            " between these two points:"
        ),
        "  reached: after all_reduce #21 of group default, nccl_jobs.py:36, step 6",
        (
            "  not reached: all_reduce #22 of group default, backward of layers.2.0,"
            " nccl_jobs.py:35, step 6"
        ),
    ]
    assert str(verdict).splitlines()[6] == (
        "  rank 2: CPU: forward of <root>, nccl_jobs.py:33, step 7; GPU: after all_reduce #21 of"
        " group default, nccl_jobs.py:36, step 6 (1 step and 3 collectives behind)"
    )


def test_the_points_between_which_a_device_hangs(runs: Path) -> None:
    """The verdict names the marks on both sides of the work that does not end, not only the next
    collective, which is a step later. If several streams are busy, it names no marks."""
    verdict = diagnose_folder(runs / "endless_tensor_parallel", stall_s=STALL_S)
    assert verdict.explanation[-2:] == (
        "  reached: forward of <root>, step 6",
        "  not reached: backward (no module), step 6",
    )
    device = verdict.ranks[2].device
    assert device is not None
    assert device.to_dict()["next"]["step"] == 6
    verdict = diagnose_folder(runs / "endless_fsdp2", stall_s=STALL_S)
    assert "issued before that call (backward of layers.2.1" in verdict.explanation[-1]


def test_a_straggler_on_the_device(runs: Path) -> None:
    """A slow device is late by what it was slowed by, and the verdict says that it is the
    device."""
    verdict = diagnose_folder(runs / "slow_ddp", stall_s=STALL_S)
    assert verdict.explanation[0].startswith("The device of rank 2 is late by 180 ms in 28 of")


@pytest.mark.parametrize("name", ["slow_ddp", "slow_sometimes"])
def test_a_straggler_in_a_job_that_was_killed(runs: Path, name: str) -> None:
    """The verdict names the straggler, and says that no process is left: the job is not only
    slow."""
    verdict = diagnose_folder(runs / name, stall_s=STALL_S)
    assert (verdict.kind, verdict.culprits) == ("straggler", (2,))
    assert verdict.facts["ended_unfinished"] is True
    assert (
        "No process is left, and the job had not finished. It is unknown which rank exited first."
        in verdict.explanation
    )


def test_what_a_box_holds(runs: Path) -> None:
    """Reached times follow the issue of their collectives, and done times follow reached times."""
    box = read_box(runs / "healthy_fsdp2" / "rank0.box")
    reached, done = device_times(box)
    issued = box.records["t_ns"]
    has_both = (reached > 0) & (done > 0)
    assert has_both.sum() > 400
    assert (reached[has_both] >= issued[has_both]).all()
    assert (done[has_both] > reached[has_both]).all()
    lanes = device_lanes(box)
    assert len({lane.stream for lane in lanes}) == len(lanes) == 3  # FSDP2 has streams of its own
    assert [reached for reached, _ in stream_progress(box)] == [
        int(box.records["extra"][reached > 0].max()) + 1
    ]


def test_a_device_that_hangs(runs: Path) -> None:
    """The box of the culprit lists what its device has not reached."""
    states = [device_state(read_box(runs / "endless_ddp" / f"rank{rank}.box")) for rank in range(4)]
    firsts = [min(state.unreached) for state in states if state is not None]
    assert len(firsts) == 4
    assert np.argmin(firsts) == 2


def test_replays_on_the_device(runs: Path) -> None:
    """Each replay of a CUDA graph has two collectives, which the device has reached and finished
    when it had reached and finished the replay."""
    box = read_box(runs / "replay_healthy" / "rank1.box")
    replays, (reached, done) = replay_rows(box), device_times(box)
    rows = np.flatnonzero(replays != NO_ROW)
    assert len(rows) == 2 * len(set(replays[rows].tolist())) > 100
    assert (reached[rows] == reached[replays[rows]]).all()
    assert (done[rows] >= reached[rows]).all()
    assert (reached[rows] > 0).all()
    ((reached_calls, done_calls),) = stream_progress(box)
    assert reached_calls == done_calls == box.records["extra"][rows[-1]] + 1


def test_a_skipped_replay(runs: Path) -> None:
    """The verdict names the graph's collective with the line of its capture, and the line of the
    last replay before the fault."""
    explanation = diagnose_folder(runs / "replay_skipped", stall_s=STALL_S).explanation
    assert explanation[2] == (
        "  rank 2: all_reduce of float32 [4096] in a CUDA graph, outside any module, captured at"
        " nccl_jobs.py:227, step 20"
    )
    assert explanation[-1].startswith(
        "Likely cause: rank 2 took a different code path after the replay at nccl_jobs.py:232"
    )


def test_a_device_inside_a_replay(runs: Path) -> None:
    """A device that has reached a replay, and has not finished it, is in the first collective of
    the graph; the collectives of a replay that it has not reached are unreached."""
    box = read_box(runs / "replay_healthy" / "rank1.box")
    assert box.geometry is not None
    numbers, replays = box.records["number"], replay_rows(box)
    last = int(replays[replays != NO_ROW].max())
    inside = int(replays[replays < last].max())
    device = np.frombuffer(box._device, np.uint64).copy()
    lane = device[: box.geometry.lanes * 8].reshape(-1, 8)[1]
    lane[LANE_RECORD], lane[LANE_NEXT_RECORD] = numbers[inside] + 1, numbers[last] + 1
    lane[LANE_PENDING] = 2
    times_at = (box.geometry.times_at - box.geometry.lanes_at) // 8
    times = device[times_at:].reshape(-1, 3)
    times[numbers[last] % box.geometry.capacity] = 0
    box._device = device.tobytes()
    state = device_state(box)
    assert state is not None
    assert state.reached == (int(numbers[np.flatnonzero(replays == inside)[0]]),)
    assert state.unreached == tuple(numbers[replays == last].tolist())
