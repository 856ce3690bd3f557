"""What the live screen shows of devices: where the GPU of each rank is, and how far it is behind."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len

from device_boxes import DeviceBox, S
from synthetic_boxes import make
from synthetic_job import Job
from test_heartbeat import beat_at
from test_nccl_runs import unpacked
from torchwhere.blackbox.live_box import LiveBox
from torchwhere.blackbox.live_names import NameReader
from torchwhere.blackbox.reader import read_box
from torchwhere.diagnose.live.ranks import LiveRanks
from torchwhere.diagnose.live.run import RunNow
from torchwhere.pipeline.verdict import diagnose_folder
from torchwhere.render.lines import as_text
from torchwhere.render.top import impression, plain_lines, screen_lines
from torchwhere.render.top_detail import detail_lines
from torchwhere.render.top_rows import Charset
from torchwhere.render.top_view import TopView
from torchwhere.top.poller import RunPoller

GPU_COLUMNS = ("GPU at", "GPU behind")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked("nccl_runs.txz", tmp_path_factory.mktemp("runs"))


def polled(folder: Path) -> RunNow:
    return RunPoller(folder).poll(most_s=60)


def painted(run: RunNow, *, width: int, height: int = 24) -> list[str]:
    lines = screen_lines(
        run, TopView(), verdict=None, width=width, height=height, charset=Charset()
    )
    return as_text(lines).splitlines()


# -- ranks that wait -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "culprits", "waiting"),
    [
        ("endless_ddp", [2], [0, 1, 3]),
        ("endless_fsdp2", [2], [0, 1, 3]),
        ("stuck_cpu", [2], [0, 1, 3]),
        ("opposite_groups", [0, 1, 2, 3], [0, 1, 2, 3]),
    ],
)
def test_ranks_wait_for_a_device(
    runs: Path, job: str, culprits: list[int], waiting: list[int]
) -> None:
    """A rank waits for the ranks whose device has not reached its collective, although all CPUs
    have issued it."""
    run = polled(runs / job)
    assert [rank.rank for rank in run.culprits] == culprits
    assert [rank.rank for rank in run.waiting] == waiting


@pytest.mark.parametrize(
    ("job", "where"),
    [
        ("endless_ddp", "all_reduce #22 default"),  # the devices that wait have reached #23 too
        ("stuck_cpu", "all_reduce #22 default"),
        ("stopped", "all_reduce #22 default"),  # long after the last look at the stopped device
        ("endless_fsdp2", "all_gather_into_tensor #77 default"),
        ("endless_pipeline", "3 collectives"),  # messages between different ranks
    ],
)
def test_the_collective_that_ranks_wait_in(runs: Path, job: str, where: str) -> None:
    """Ranks wait in the first collective that the culprit has not reached, as the doctor says."""
    run = polled(runs / job)
    assert impression(run)[0].endswith(f"; 3 ranks waited in {where}")
    verdict = diagnose_folder(runs / job, stall_s=4)
    assert verdict.collective is not None
    numbers = {call.number for call in run.waits_in}
    assert verdict.collective["number"] in numbers


@pytest.fixture
def device_box(tmp_path: Path) -> Iterator[DeviceBox]:
    made = DeviceBox(tmp_path / "rank0.box")
    made.cpu(step=7, at_s=7)
    made.lane(place=made.place(), time=6 * S, step=6, pending=2)
    yield made
    made.box.close()


def test_work_of_the_device_is_progress(device_box: DeviceBox) -> None:
    """A rank whose CPU waits for a busy device has not stalled; it has when the device stops too."""
    assert device_box.box.path is not None
    live_box, live = LiveBox(device_box.box.path, NameReader()), LiveRanks(stall_s=1.5)

    def is_stalled(at_s: float) -> bool:
        now_s, now_ns = at_s, int((1_000 + at_s) * S)
        live.update(live_box, has_moved=live_box.look(), now_s=now_s, now_ns=now_ns)
        live.add(live_box, now_s=now_s, now_ns=now_ns)
        (rank,) = live.now([0], {}, now_s=now_s)
        return rank.is_stalled

    live_box.look()
    assert not is_stalled(7.1)
    for second in range(8, 60):
        device_box.lane(time=second * S)
        device_box.look(second)
        assert not is_stalled(second + 0.1)
    for second in range(60, 120):
        device_box.look(second)  # the process still looks at the device: that is not progress
        stalled = is_stalled(second)
    assert stalled


# -- jobs that are over ----------------------------------------------------------------------------


@pytest.mark.parametrize("job", ["slow_ddp", "healthy_ddp", "healthy_far_ahead", "endless_ddp"])
def test_no_process_is_left(runs: Path, job: str) -> None:
    """If the ranks of all hosts have sent no heartbeat for a minute, all are dead, as the doctor
    says, and the first line says so instead of naming a rank that is stuck."""
    run = polled(runs / job)
    assert [str(rank.state) for rank in run.ranks] == ["dead"] * 4
    assert impression(run)[0].startswith("no process is left, and the job had not finished; ")
    assert "STUCK" not in as_text(plain_lines(run, verdict=None, width=None))


def test_a_host_whose_clock_is_behind(runs: Path, tmp_path: Path) -> None:
    """While heartbeats arrive, a rank is alive, even if they are old by the clock of this host."""
    folder = shutil.copytree(runs / "endless_ddp", tmp_path / "run")
    poller = RunPoller(folder)
    assert poller.poll(most_s=60).is_over
    box = read_box(folder / "rank1.box")
    beat_at(box.path, box.beat_ns - box.meta["clock_offset_ns"] + S)
    run = poller.poll(most_s=60)
    assert not run.is_over
    assert impression(run)[0].endswith("; 3 ranks wait in all_reduce #22 default")


# -- the table -------------------------------------------------------------------------------------


def test_table_with_a_device(runs: Path) -> None:
    """Plain text has a line on the culprit, and for each rank the place of its GPU and how far it
    is behind."""
    lines = as_text(plain_lines(polled(runs / "endless_ddp"), verdict=None, width=None))
    _, sentence, both, heading, culprit, *others = lines.splitlines()
    assert sentence.startswith("no process is left, and the job had not finished; last progress ")
    assert sentence.endswith(" ago; 3 ranks waited in all_reduce #22 default")
    assert both == (
        "rank 2: CPU: forward of <root>, nccl_jobs.py:33, step 7; GPU: after all_reduce #21 of"
        " group default, nccl_jobs.py:36, step 6 (1 step and 3 collectives behind)"
    )
    assert all(column in heading for column in GPU_COLUMNS)
    assert "after all_reduce #21  1 step, 3 coll" in culprit
    assert all("at all_reduce #23     1 step, 1 coll" in other for other in others)


def test_table_without_a_device(tmp_path: Path) -> None:
    """A job on CPUs has neither the columns nor the line."""
    make(Job(16, steps=2, records=64, fault="dead", victim=5), tmp_path)
    run = polled(tmp_path)
    plain_text = as_text(plain_lines(run, verdict=None, width=None))
    for text in (plain_text, "\n".join(painted(run, width=200))):
        assert "GPU" not in text
    assert [rank.to_dict()["device"] for rank in run.ranks] == [None] * 16


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 132, 200])
def test_screen_of_any_width(runs: Path, width: int) -> None:
    """No line is wider than the screen; from 80 cells on, both places are on it."""
    lines = painted(polled(runs / "endless_ddp"), width=width)
    assert len(lines) == 24
    assert max(map(cell_len, lines)) <= width
    if width >= 80:
        heading = next(line for line in lines if "rank state" in line)
        assert all(column in heading for column in (*GPU_COLUMNS, "line", "module", "age"))
        assert any("reduce #21" in line for line in lines if line.startswith(">!2"))


def test_device_that_is_not_behind(runs: Path) -> None:
    """A GPU that has reached everything is not behind; `?` if work was issued after the last
    look."""
    healthy, stopped = (
        as_text(plain_lines(polled(runs / job), verdict=None, width=None))
        for job in ("healthy_ddp", "stopped")
    )
    assert "after all_reduce #120  -  " in healthy
    assert "at all_reduce #11  ?  " in stopped


def test_page_of_a_rank(runs: Path) -> None:
    """The page of a rank shows what its GPU has reached, and what it has not."""
    (rank,) = (rank for rank in polled(runs / "endless_ddp").ranks if rank.rank == 2)
    box = read_box(rank.live_box.path)
    lines = as_text(detail_lines(rank, box, verdict=None, width=160, charset=Charset()))
    assert "  GPU       after all_reduce #21 of group default, nccl_jobs.py:36, step 6" in lines
    assert "  GPU next  all_reduce #22 of group default, backward of layers.2.0," in lines
    assert "reached" in lines
