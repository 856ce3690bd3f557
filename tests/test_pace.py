"""Who is late, by how much, and since when."""

from __future__ import annotations

from pathlib import Path

import pytest

from skewed_job import Act, Player, Skew, call, mark, work
from torchwhere.blackbox.run import read_run
from torchwhere.diagnose.doctor.pace import Straggler, straggler
from torchwhere.diagnose.hearing.testimony import heard
from torchwhere.events import Kind

WORLD = (0, 1, 2, 3)
STEPS, SLOW_NS, USUAL_NS = 200, 15_000_000, 10_000_000


def found(folder: Path, slow: range, *, on_time: range = range(0)) -> Straggler | None:
    """Of a job whose rank 1 takes longer in some steps."""

    def program(rank: int) -> list[Act]:
        acts = []
        for step in range(STEPS):
            is_slow = rank == 1 and step in slow and step not in on_time
            acts += [mark(Kind.STEP_BEGIN), work(USUAL_NS + (SLOW_NS if is_slow else 0)), call(WORLD)]
        return acts

    Player([program(rank) for rank in WORLD]).play().write(folder, [Skew()] * 4, ["node0"] * 4)
    return straggler(heard(read_run(folder)))


@pytest.mark.parametrize("first", [3, 60, 140])
def test_since_when(tmp_path: Path, first: int) -> None:
    """The step in which it began is told, however long ago it was."""
    late = found(tmp_path, range(first, STEPS))
    assert late is not None
    assert (late.rank, late.steps, late.of_steps, late.since_step) == (1, 50, 50, first)
    assert late.late_s == pytest.approx(SLOW_NS / 1e9, rel=0.05)


def test_late_once_more(tmp_path: Path) -> None:
    """A few steps on time do not begin it anew; many do."""
    short, long = (tmp_path / name for name in ("short", "long"))
    for folder in (short, long):
        folder.mkdir()
    late = found(short, range(20, STEPS), on_time=range(100, 102))
    assert late is not None
    assert late.since_step == 20
    late = found(long, range(20, STEPS), on_time=range(100, 120))
    assert late is not None
    assert late.since_step == 120


def test_no_longer(tmp_path: Path) -> None:
    """A rank that was late and is not any more is nobody's trouble."""
    assert found(tmp_path, range(20, 150)) is None
