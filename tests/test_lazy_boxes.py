"""The boxes of a large job, read one at a time."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from synthetic_boxes import make
from synthetic_job import Job
from torchwhere.blackbox import run as runs
from torchwhere.blackbox.lazy_boxes import LazyBoxes
from torchwhere.blackbox.run import BoxRun, read_run
from torchwhere.diagnose.comms.tree import comms
from torchwhere.diagnose.groups import groups
from torchwhere.diagnose.phases import phases

RANKS = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shelf")
    make(Job(RANKS, steps=3, records=256), folder)
    return folder


@pytest.fixture
def lazy_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> BoxRun:
    """The run, read as if it were too large for memory."""
    monkeypatch.setattr(runs, "_FEW", 8)
    run = read_run(folder)
    assert isinstance(run.boxes, LazyBoxes)
    return run


def test_the_same_answers(folder: Path, lazy_run: BoxRun) -> None:
    """Boxes read one at a time give the same collectives, groups, phases, events and caveats."""
    whole = (
        read_run(folder)
        if isinstance(lazy_run.boxes, dict)
        else BoxRun(folder, dict(lazy_run.boxes))
    )
    assert comms(lazy_run).to_dict() == comms(whole).to_dict()
    assert groups(lazy_run).to_dict() == groups(whole).to_dict()
    assert phases(lazy_run).to_dict() == phases(whole).to_dict()
    assert [event.to_dict() for event in lazy_run.events(last=3)] == [
        event.to_dict() for event in whole.events(last=3)
    ]
    assert (lazy_run.world_size, lazy_run.missing, lazy_run.caveats()) == (RANKS, [], [])


def test_few_are_held(lazy_run: BoxRun) -> None:
    """A pass over all boxes keeps only the last few in memory."""
    assert sum(1 for _ in lazy_run.in_order()) == RANKS
    held = [rank for rank in lazy_run.boxes if lazy_run.boxes._kept.get(rank) is not None]  # type: ignore[attr-defined]
    assert held == list(range(RANKS - 16, RANKS))


def test_a_box_that_disappears(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A box that is deleted or replaced while a run is read becomes an empty box with a caveat."""
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    monkeypatch.setattr(runs, "_FEW", 8)
    run = read_run(copy)
    (copy / "rank5.box").unlink()
    shutil.copy(copy / "rank7.box", copy / "rank6.box")
    gone, replaced = run.boxes[5], run.boxes[6]
    assert (gone.rank, len(gone.records), gone.problems) == (
        5,
        0,
        [f"cannot read {copy / 'rank5.box'}: No such file or directory"],
    )
    assert (replaced.rank, len(replaced.records), replaced.problems) == (
        6,
        0,
        ["it was replaced while the run was read"],
    )
    assert 5 not in {event.place.rank for event in run.events(last=1)}


def test_unreadable_boxes_are_listed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A foreign file and a missing rank are reported as for a small run."""
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    (copy / "rank3.box").write_bytes(b"not a box")
    small = read_run(copy).caveats()
    monkeypatch.setattr(runs, "_FEW", 8)
    assert read_run(copy).caveats() == small
    assert small[0] == f"{RANKS - 1} of {RANKS} ranks are watched: no box of rank 3"
