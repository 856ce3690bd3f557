"""Which ranks are late, by how much, and since when."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from skewed_job import Act, Player, Skew, call, mark, work
from torchwhere.blackbox.run import read_run
from torchwhere.core.events import Kind
from torchwhere.diagnose.calls.job_calls import calls_of_run
from torchwhere.diagnose.doctor.pace import pace_of
from torchwhere.diagnose.doctor.stragglers import Straggler, straggler
from torchwhere.render.verdict_text.no_fault import pace_text
from torchwhere.render.verdict_text.straggler import straggler_text

WORLD = (0, 1, 2, 3)
STEPS, SLOW_NS, USUAL_NS = 200, 15_000_000, 10_000_000


def straggler_of(folder: Path, slow: range, *, on_time: range = range(0)) -> Straggler | None:
    """The straggler of a job whose rank 1 takes longer in some steps."""

    def program(rank: int) -> list[Act]:
        acts = []
        for step in range(STEPS):
            is_slow = rank == 1 and step in slow and step not in on_time
            acts += [
                mark(Kind.STEP_BEGIN),
                work(USUAL_NS + (SLOW_NS if is_slow else 0)),
                call(WORLD),
            ]
        return acts

    Player([program(rank) for rank in WORLD]).play().write(folder, [Skew()] * 4, ["node0"] * 4)
    return straggler(calls_of_run(read_run(folder)))


@pytest.mark.parametrize("first", [3, 60, 140])
def test_since_when(tmp_path: Path, first: int) -> None:
    """The verdict names the step in which a rank became late, however long ago."""
    late = straggler_of(tmp_path, range(first, STEPS))
    assert late is not None
    assert (late.rank, late.ranks, late.steps, late.of_steps, late.since_step) == (
        1,
        (1,),
        50,
        50,
        first,
    )
    assert late.late_s == pytest.approx(SLOW_NS / 1e9, rel=0.05)


def test_late_once_more(tmp_path: Path) -> None:
    """A few steps on time do not restart the count; many do."""
    short, long = (tmp_path / name for name in ("short", "long"))
    for folder in (short, long):
        folder.mkdir()
    late = straggler_of(short, range(20, STEPS), on_time=range(100, 102))
    assert late is not None
    assert late.since_step == 20
    late = straggler_of(long, range(20, STEPS), on_time=range(100, 120))
    assert late is not None
    assert late.since_step == 120


def test_no_longer(tmp_path: Path) -> None:
    """A rank that is no longer late is not reported."""
    assert straggler_of(tmp_path, range(20, 150)) is None


# -- by time, whoever and however often ------------------------------------------------------------


def played(
    folder: Path,
    takes_ns: Callable[[int, int], float],
    *,
    ranks: int = 4,
    rounds: int = STEPS,
    has_steps: bool = True,
) -> Straggler | None:
    """A job in which each rank works for a given time in each round, and then meets the others."""
    world = range(ranks)

    def program(rank: int) -> list[Act]:
        steps = [
            [mark(Kind.STEP_BEGIN)] * has_steps + [work(takes_ns(rank, at)), call(world)]
            for at in range(rounds)
        ]
        return [act for acts in steps for act in acts]

    Player([program(rank) for rank in world]).play().write(
        folder, [Skew()] * ranks, ["node0"] * ranks
    )
    return straggler(calls_of_run(read_run(folder)))


def test_several_stragglers(tmp_path: Path) -> None:
    """All ranks of a slow host are named, and no others."""
    late = played(tmp_path, lambda rank, _: USUAL_NS + SLOW_NS * (rank in (1, 4)), ranks=6)
    assert late is not None
    assert late.ranks == (1, 4)
    assert late.share == pytest.approx(SLOW_NS / (SLOW_NS + USUAL_NS), rel=0.05)
    said = straggler_text(late)
    assert said[0].startswith("Ranks 1, 4 are late by 15")
    assert said[0].endswith(
        " ms in 50 of the last 50 steps, since step 1: this costs the job 60% of its time."
    )


def test_half_of_all_are_no_stragglers(tmp_path: Path) -> None:
    """If half of the ranks are slower, that is the usual pace: no rank is late."""
    assert played(tmp_path, lambda rank, _: USUAL_NS + SLOW_NS * (rank < 2)) is None


def test_late_now_and_then(tmp_path: Path) -> None:
    """Time lost in every tenth round counts as much as time lost in each; without steps,
    collectives are counted."""
    often, seldom = (tmp_path / name for name in ("often", "seldom"))
    often.mkdir()
    seldom.mkdir()
    late = played(
        often,
        lambda rank, at: USUAL_NS + 30 * SLOW_NS * (rank == 2 and at % 10 == 5),
        rounds=400,
        has_steps=False,
    )
    assert late is not None
    assert (late.ranks, late.since_step, late.since_number, late.group) == (
        (2,),
        None,
        5,
        "0-1-2-3",
    )
    assert late.late_s == pytest.approx(30 * SLOW_NS / 1e9, rel=0.05)
    assert (
        'of the last 200 collectives of group "0-1-2-3", since #5: this costs the job'
        in straggler_text(late)[0]
    )
    assert (
        played(
            seldom, lambda rank, at: USUAL_NS + 300 * SLOW_NS * (rank == 2 and at in (50, 120, 180))
        )
        is None
    )


def write_pairs_and_rows(folder: Path) -> None:
    """Write a job in which rank 3 is slow, rank 2 waits for it, and rank 0 waits for rank 2 in
    another group."""

    def program(rank: int) -> list[Act]:
        pair, row = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
        slow = SLOW_NS * (rank == 3)
        step = [
            mark(Kind.STEP_BEGIN),
            work(USUAL_NS / 2 + slow),
            call(pair),
            work(USUAL_NS / 2),
            call(row),
        ]
        return step * STEPS

    Player([program(rank) for rank in WORLD]).play().write(folder, [Skew()] * 4, ["node0"] * 4)


def test_dragged_along(tmp_path: Path) -> None:
    """A rank that waits for a slow rank in one group, and is therefore late in another, is not
    blamed."""
    write_pairs_and_rows(tmp_path)
    late = straggler(calls_of_run(read_run(tmp_path)))
    assert late is not None
    assert late.ranks == (3,)


@pytest.mark.parametrize(("lost", "ranks"), [(0, (3,)), (1, (3,)), (3, ())])
def test_a_lost_box(tmp_path: Path, lost: int, ranks: tuple[int, ...]) -> None:
    """A rank that may have waited for a rank without a box in another group is not blamed; the slow
    rank is, if its own groups show that it was late."""
    write_pairs_and_rows(tmp_path)
    (tmp_path / f"rank{lost}.box").unlink()
    late = straggler(calls_of_run(read_run(tmp_path)))
    assert (late.ranks if late is not None else ()) == ranks


def test_a_lost_box_of_a_group_of_both(tmp_path: Path) -> None:
    """A call with a rank without a box is no excuse if a rank that came in time was in it too."""

    def program(rank: int) -> list[Act]:
        pair, slow = (rank // 2 * 2, rank // 2 * 2 + 1), SLOW_NS * (rank == 3)
        return [mark(Kind.STEP_BEGIN), call(WORLD), work(USUAL_NS + slow), call(pair)] * STEPS

    Player([program(rank) for rank in WORLD]).play().write(tmp_path, [Skew()] * 4, ["node0"] * 4)
    (tmp_path / "rank0.box").unlink()
    late = straggler(calls_of_run(read_run(tmp_path)))
    assert late is not None
    assert late.ranks == (3,)


def test_lost_once_at_calls_that_do_not_wait(tmp_path: Path) -> None:
    """A rank that is late at the first of several asynchronous calls is equally late at the others,
    and has lost that time once."""

    def program(rank: int) -> list[Act]:
        some = [work(100_000), call(WORLD, is_async=True)] * 5
        slow = SLOW_NS * (rank == 1)
        return [
            mark(Kind.STEP_BEGIN),
            work(USUAL_NS + slow),
            *some,
            work(100_000),
            call(WORLD),
        ] * STEPS

    Player([program(rank) for rank in WORLD]).play().write(tmp_path, [Skew()] * 4, ["node0"] * 4)
    late = straggler(calls_of_run(read_run(tmp_path)))
    assert late is not None
    assert late.ranks == (1,)
    assert late.late_s == pytest.approx(SLOW_NS / 1e9, rel=0.1)
    assert late.share < 0.65


NOISE: dict[str, Callable[[random.Random, int, int], float]] = {
    "uneven": lambda chance, rank, at: USUAL_NS * chance.expovariate(1),
    "pauses": lambda chance, rank, at: (
        USUAL_NS * chance.gauss(1, 0.05) + 100 * USUAL_NS * (chance.random() < 0.01)
    ),
    "warm-up": lambda chance, rank, at: (
        USUAL_NS * (chance.gauss(1, 0.05) + 50 * chance.random() * (at < 10))
    ),
    "one slow step": lambda chance, rank, at: (
        USUAL_NS * (chance.gauss(1, 0.05) + 1000 * (rank == 2 and at == 700))
    ),
    "rank 0 writes": lambda chance, rank, at: (
        USUAL_NS * (chance.gauss(1, 0.05) + 10 * (rank == 0 and at % 100 == 99))
    ),
}


@pytest.mark.parametrize("noise", NOISE)
def test_no_false_alarm(tmp_path: Path, noise: str) -> None:
    """In a thousand steps of jobs that are uneven in other ways, checked again and again, no rank
    is late."""
    chance = random.Random(noise)
    for rounds in (60, 250, 1000):
        folder = tmp_path / str(rounds)
        folder.mkdir()
        assert (
            played(folder, lambda rank, at: max(1e6, NOISE[noise](chance, rank, at)), rounds=rounds)
            is None
        )


# -- for want of a CPU -----------------------------------------------------------------------------


def crowded(folder: Path, queued: list[float], *, rounds: int) -> Straggler | None:
    """Rank 1 takes longer in each step, and each rank waits for a CPU for a given share of the
    time."""

    def program(rank: int) -> list[Act]:
        return [mark(Kind.STEP_BEGIN), work(USUAL_NS + SLOW_NS * (rank == 1)), call(WORLD)] * rounds

    folder.mkdir()
    Player([program(rank) for rank in WORLD]).play().write(
        folder, [Skew()] * 4, ["node0"] * 4, queued=queued
    )
    return straggler(calls_of_run(read_run(folder)))


def test_crowded_cores(tmp_path: Path) -> None:
    """If all ranks of a host wait for CPUs, a rank that is late for some seconds is not named;
    after half a minute it is."""
    everybody = [0.4, 0.6, 0.4, 0.4]
    assert crowded(tmp_path / "short", everybody, rounds=400) is None
    late = crowded(tmp_path / "long", everybody, rounds=2600)
    assert late is not None
    assert (late.ranks, late.lacks_cpu) == ((1,), True)


def test_a_crowded_core(tmp_path: Path) -> None:
    """If one rank waits for a CPU and its neighbours do not, it is named after five seconds, with
    the reason."""
    assert crowded(tmp_path / "short", [0.0, 0.6, 0.0, 0.0], rounds=120) is None
    late = crowded(tmp_path / "long", [0.0, 0.6, 0.0, 0.0], rounds=400)
    assert late is not None
    assert late.queued == pytest.approx(0.6, abs=0.01)
    assert (
        "It waited for a CPU 60% of the time: something else runs on the CPUs it may use."
        in straggler_text(late)[0]
    )


def test_late_for_another_reason(tmp_path: Path) -> None:
    """A rank that loses more time than CPU contention explains is named at once, on a crowded host
    too."""
    late = crowded(tmp_path / "run", [0.2] * 4, rounds=60)
    assert late is not None
    assert (late.ranks, late.lacks_cpu) == ((1,), False)
    assert "CPU" not in straggler_text(late)[0]


def test_pace_without_steps(tmp_path: Path) -> None:
    """A job without steps has a pace too: collectives per second."""
    played(tmp_path, lambda _, __: USUAL_NS, has_steps=False)
    found = pace_of(calls_of_run(read_run(tmp_path)))
    assert (found.steps_per_s, found.last_step) == (None, None)
    assert (
        pace_text(found)
        == f"No step has been counted; {found.collectives_per_s:.3g} collectives/s."
    )
    assert found.collectives_per_s == pytest.approx(1e9 / USUAL_NS, rel=0.1)
