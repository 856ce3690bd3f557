"""What marks at waits show, in runs of four NCCL ranks that were recorded on a GPU.

`nccl_marks.txz` holds runs of the jobs in `nccl_jobs.py`. Their boxes have the waits for asynchronous
collectives and for the streams of FSDP, which those of `test_nccl_runs.py` lack; the collectives
of FSDP have no exact end.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nccl_jobs import JOBS, VICTIM
from test_nccl_runs import stream_progress, unpacked
from torchwhere.blackbox.box import Box
from torchwhere.blackbox.device import (
    device_lane_numbers,
    device_lanes,
    device_times,
    device_waits,
    ends_are_bounds,
)
from torchwhere.blackbox.reader import read_box
from torchwhere.blackbox.run import read_run
from torchwhere.core.events import Kind
from torchwhere.diagnose.device_time.calls import on_job_stream
from torchwhere.diagnose.phases import phases
from torchwhere.pipeline.verdict import diagnose_folder

STALL_S = 5.0
WORLD = 4
HEALTHY = ("healthy_ddp", "healthy_fsdp2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked("nccl_marks.txz", tmp_path_factory.mktemp("runs"))


def collectives_in(box: Box) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.flatnonzero(box.records["kind"] == int(Kind.COLLECTIVE))


@pytest.mark.parametrize("name", ["endless_fsdp2", "slow_ddp", "out_of_memory"])
def test_faults(runs: Path, name: str) -> None:
    """The doctor names the fault and the rank, after the processes are gone."""
    expected = JOBS[name][1]
    verdict = diagnose_folder(runs / name, stall_s=STALL_S)
    assert (verdict.kind, verdict.culprits) == (expected.kind, expected.culprits), verdict
    assert bool(verdict.facts.get("on_device")) == expected.on_device


def test_out_of_memory(runs: Path) -> None:
    """The verdict has what the allocator of the rank held, and where it held most."""
    verdict = diagnose_folder(runs / "out_of_memory", stall_s=STALL_S)
    (fact,) = verdict.facts["out_of_memory"]
    assert fact["rank"] == VICTIM
    assert fact["report"]["tried_bytes"] == 64 << 20
    assert fact["peak"]["peak_bytes"] > 40 * (64 << 20)


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy(runs: Path, name: str) -> None:
    """A job that made progress until it was ended from outside: no rank is blamed."""
    verdict = diagnose_folder(runs / name, stall_s=STALL_S)
    assert (verdict.kind, verdict.culprits) == ("dead", ())
    assert any("the job was progressing" in line for line in verdict.explanation)


def test_ends_on_streams_of_fsdp(runs: Path) -> None:
    """All collectives of FSDP2 are done, on streams of its own. Their ends are upper bounds: at the
    latest, the stream of the job had passed the wait for them."""
    for rank in range(WORLD):
        box = read_box(runs / "healthy_fsdp2" / f"rank{rank}.box")
        at = collectives_in(box)[:-10]  # the last ones may be in flight
        is_on_job = on_job_stream(box, device_lane_numbers(box))[at]
        (reached, done), (waited, _) = device_times(box), device_waits(box)
        assert len(device_lanes(box)) == 3
        assert 0 < is_on_job.sum() < len(at) / 4  # the all_reduce of the loss
        assert (ends_are_bounds(box)[at] == ~is_on_job).all()
        assert (done[at] >= reached[at]).all()
        assert (reached[at] > 0).all()
        assert (waited[at] > 0).sum() > len(at) / 2
        ((reached_calls, done_calls),) = stream_progress(box)
        assert 0 <= reached_calls - done_calls <= 1


@pytest.mark.parametrize("name", HEALTHY)
def test_exposed_time(runs: Path, name: str) -> None:
    """The time of a step is compute, hidden or exposed, and never unclear: the waits of the job show
    which. Ranks wait for the slowest one, and it waits least."""
    device = phases(read_run(runs / name)).device
    assert device is not None
    steps = [device.usual(rank) for rank in range(WORLD)]
    assert all(own.unclear_ns == 0 for own in steps)
    assert all(own.hidden_ns > 0 for own in steps)
    assert all(own.exposed_ns > own.waited_ns > 0 for own in steps)


def test_a_slow_device(runs: Path) -> None:
    """In nearly each step all devices wait for the one that is slow, for as long as it computes."""
    device = phases(read_run(runs / "slow_ddp")).device
    assert device is not None
    others = [device.usual(rank) for rank in range(WORLD) if rank != VICTIM]
    assert {own.waited_for for own in others} == {VICTIM}
    slow = device.usual(VICTIM)
    assert slow.compute_ns > 0.15e9
    assert all(abs(own.exposed_ns - slow.compute_ns) < 0.01e9 for own in others)
