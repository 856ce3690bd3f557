"""A job with more ranks than boxes: every view says how many ranks are watched, and the verdict is
never `healthy`."""

from __future__ import annotations

from pathlib import Path

import pytest

from diagnosing import diagnose
from skewed_job import Player, Skew, call, mark
from torchwhere import cli
from torchwhere.blackbox.run import read_run
from torchwhere.core.events import Kind
from torchwhere.diagnose.doctor.verdict import Verdict
from torchwhere.monitor.verdict_output import is_worth_printing
from torchwhere.processes.status import ProcessStatus
from torchwhere.render.verdict import verdict_text

WORLD = tuple(range(8))
STEP = [mark(Kind.STEP_BEGIN), call(WORLD)]
WATCHED = "2 of 8 ranks are watched"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of eight ranks, two of which have a box."""
    Player([STEP * 3] * 8).play().write(tmp_path, [Skew()] * 8, ["node0"] * 8)
    for rank in WORLD[2:]:
        (tmp_path / f"rank{rank}.box").unlink()
    return tmp_path


def verdict_while_running(folder: Path) -> Verdict:
    run = read_run(folder)
    now_ns = max(box.last_ns for box in run.boxes.values()) + 1_000_000
    alive = dict.fromkeys(run.boxes, ProcessStatus(alive=True, state="S", alive_ns=now_ns))
    return diagnose(run, statuses=alive, now_ns=now_ns, stall_s=30.0)


def test_verdict_on_a_running_job(folder: Path) -> None:
    """A job that progresses on two of eight ranks is `partial`, and the monitor does not report
    it: it may be healthy."""
    verdict = verdict_while_running(folder)
    assert (verdict.kind, verdict.culprits) == ("partial", ())
    assert verdict.facts["unwatched"] == [2, 3, 4, 5, 6, 7]
    lines = verdict_text(verdict).splitlines()
    assert lines[0].startswith("NOT ALL RANKS WATCHED  2 ranks")
    assert lines[1] == f"{WATCHED}, and no fault is known. There is no data for ranks 2-7."
    assert lines[2].startswith("Progressing. ")
    assert lines[-1] == f"Not known: {WATCHED}: no box of ranks 2-7"
    assert not is_worth_printing(verdict)


def test_all_ranks_watched(tmp_path: Path) -> None:
    """With a box of each rank, the same job is healthy."""
    Player([STEP * 3] * 8).play().write(tmp_path, [Skew()] * 8, ["node0"] * 8)
    assert verdict_while_running(tmp_path).kind == "healthy"


@pytest.mark.parametrize(
    "command",
    [
        ("doctor",),
        ("top", "--count", "1"),
        ("comms",),
        ("groups",),
        ("events",),
        ("phases",),
        ("diff",),
        ("layout",),
        ("trace", "-o", "trace.json"),
        ("export", "-o", "events.jsonl"),
        ("report", "-o", "report.html"),
    ],
    ids=lambda command: command[0],
)
def test_every_view(
    folder: Path,
    command: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each command that shows a run says how many of its ranks are watched."""
    monkeypatch.chdir(folder)
    name, *options = command
    cli.main([name, str(folder), *options])
    captured = capsys.readouterr()
    page = Path("report.html").read_text() if name == "report" else ""
    assert WATCHED in captured.out + captured.err + page
