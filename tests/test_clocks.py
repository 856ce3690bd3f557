"""Clocks: offsets and drift between hosts are found by what ranks did together, and lateness is not taken for either."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from skewed_job import WALL_NS, Act, Player, Skew, call, mark, recv, send, work
from torchwhere.blackbox.reader import read_box
from torchwhere.diagnose.clocks import Clocks, Evidence, aligned
from torchwhere.diagnose.timeline.arrivals import arrivals
from torchwhere.events import Kind

MS = 1_000_000
OFFSETS = (0, 5_000 * MS, -5_000 * MS, 1_234_567_891)
PPM = (0.0, 100.0, -100.0, 37.0)
SKEWS = [Skew(offset, ppm) for offset, ppm in zip(OFFSETS, PPM, strict=True)]
HOSTS = ["a", "b", "c", "d"]


def clocks_of(folder: Path) -> Clocks:
    return aligned(arrivals(read_box(path)) for path in sorted(folder.glob("*.box")))


def worst_ns(player: Player, clocks: Clocks, skews: list[Skew], *, ranks: range | None = None) -> float:
    """How far what was aligned is from what the clock of the first of the ranks showed at that moment, at the worst."""
    chosen = ranks or range(len(player.log))
    reference = skews[chosen[0]]
    return max(
        abs(clocks.aligned_ns(rank, WALL_NS + skews[rank].shows(true_ns)) - WALL_NS - reference.shows(true_ns))
        for rank in chosen
        for true_ns, _, _ in player.log[rank]
    )


def steps(ranks: int, body: Callable[[int, random.Random], list[Act]], *, count: int = 60) -> list[list[Act]]:
    chances = [random.Random(rank) for rank in range(ranks)]
    step = [mark(Kind.STEP_BEGIN)]
    return [
        [act for _ in range(count) for act in [*step, *body(rank, chances[rank]), mark(Kind.STEP_END)]] for rank in range(ranks)
    ]


def jitter(chance: random.Random, ns: float) -> Act:
    return work(ns * (0.7 + 0.6 * chance.random()))


# -- what is removed -------------------------------------------------------------------------------------------------------


def test_offsets_and_drift(tmp_path: Path) -> None:
    """Offsets of 5 s and drifts of 100 ppm, one way and the other, are removed to under a millisecond over a minute."""
    world = range(4)
    programs = steps(4, lambda rank, chance: [jitter(chance, 900 * MS), call(world), jitter(chance, 100 * MS), call(world)])
    player = Player(programs).play()
    player.write(tmp_path, SKEWS, HOSTS)
    clocks = clocks_of(tmp_path)
    assert player.log[0][-1][0] > 60e9
    assert worst_ns(player, clocks, SKEWS) < 1 * MS
    assert [clock.evidence for clock in clocks.clocks] == [Evidence.REFERENCE] + 3 * [Evidence.COMPLETIONS]
    assert [round(clock.line.slope * 1e6) for clock in clocks.clocks] == [0, 100, -100, 37]


@pytest.mark.parametrize("skews", [SKEWS, [Skew()] * 4], ids=["skewed", "right"])
def test_straggler_stays_one(tmp_path: Path, skews: list[Skew]) -> None:
    """A rank that is late by 30 ms at every call, in the same place, is late by 30 ms afterwards: not aligned away."""
    world = range(4)

    def body(rank: int, chance: random.Random) -> list[Act]:
        return [work(30 * MS * (rank == 2)), jitter(chance, 5 * MS), call(world), jitter(chance, MS), mark(Kind.OPTIMIZER)]

    player = Player(steps(4, body, count=200)).play()
    player.write(tmp_path, skews, HOSTS)
    clocks = clocks_of(tmp_path)
    assert worst_ns(player, clocks, skews) < 1 * MS
    found = arrivals(read_box(tmp_path / "rank2.box")), arrivals(read_box(tmp_path / "rank0.box"))
    late, early = (clocks.aligned_ns(each.rank, next(iter(each.streams.values())).issued_ns) for each in found)
    assert 27 * MS < np.median(late - early) < 33 * MS


def test_messages_both_ways(tmp_path: Path) -> None:
    """A pipeline that only sends: forward one way, backward the other, stage by stage."""

    def body(rank: int, chance: random.Random) -> list[Act]:
        first, last, phase = rank == 0, rank == 3, mark(Kind.PHASE_BEGIN)
        forward = [*([] if first else [recv(rank - 1)]), phase, jitter(chance, 4 * MS), *([] if last else [send(rank + 1)])]
        backward = [*([] if last else [recv(rank + 1)]), phase, jitter(chance, 8 * MS), *([] if first else [send(rank - 1)])]
        return [*forward, *backward]

    player = Player(steps(4, body, count=300)).play()
    player.write(tmp_path, SKEWS, HOSTS)
    clocks = clocks_of(tmp_path)
    assert worst_ns(player, clocks, SKEWS) < 1 * MS
    assert {clock.evidence for clock in clocks.clocks[1:]} == {Evidence.MESSAGES}


def test_small_groups_only(tmp_path: Path) -> None:
    """Ranks 0 and 3 have no group in common: they are aligned over those in between."""

    def body(rank: int, chance: random.Random) -> list[Act]:
        pairs = [pair for pair in ((0, 1), (1, 2), (2, 3)) if rank in pair]
        return [act for pair in pairs for act in (jitter(chance, 10 * MS), call(pair), mark(Kind.NOTE))]

    player = Player(steps(4, body, count=300)).play()
    player.write(tmp_path, SKEWS, HOSTS)
    clocks = clocks_of(tmp_path)
    assert worst_ns(player, clocks, SKEWS) < 1 * MS
    assert Evidence.UNMATCHED not in {clock.evidence for clock in clocks.clocks}


def test_calls_that_do_not_wait(tmp_path: Path) -> None:
    """Where no call waits, seconds are removed all the same, as well as the ranks' arrivals allow."""
    world = range(4)
    programs = steps(4, lambda rank, chance: [jitter(chance, 10 * MS), call(world, is_async=True), work(MS), call(world)])
    for program in programs:
        program[:] = [act for act in program if act.what != "call" or act.is_async]
    player = Player(programs).play()
    player.write(tmp_path, SKEWS, HOSTS)
    clocks = clocks_of(tmp_path)
    assert {clock.evidence for clock in clocks.clocks[1:]} == {Evidence.ISSUES}
    drifted_apart_ns = max(log[-1][0] for log in player.log) - min(log[-1][0] for log in player.log)
    assert worst_ns(player, clocks, SKEWS) < drifted_apart_ns + 20 * MS


# -- what is not touched ---------------------------------------------------------------------------------------------------


def test_late_host_of_a_gpu_job(tmp_path: Path) -> None:
    """Calls that only go into a queue say nothing of a clock: a host that is 30 ms late on a right clock stays late."""
    world = range(4)

    def body(rank: int, chance: random.Random) -> list[Act]:
        return [jitter(chance, 20 * MS), call(world), jitter(chance, 20 * MS), call(world)]

    programs = steps(4, body)
    programs[2].insert(0, work(30 * MS))
    player = Player(programs, waits=False).play()
    player.write(tmp_path, [Skew()] * 4, HOSTS)
    clocks = clocks_of(tmp_path)
    assert [clock.evidence for clock in clocks.clocks] == [Evidence.REFERENCE] + 3 * [Evidence.WALL_CLOCK]
    assert worst_ns(player, clocks, [Skew()] * 4) == 0


def test_ranks_of_a_host_share_a_clock(tmp_path: Path) -> None:
    """Two ranks of a host are one clock, and what they took for the wall-clock time, a little apart, is made one."""
    world, hosts, skews = range(4), ["a", "a", "b", "b"], [SKEWS[0], SKEWS[0], SKEWS[1], SKEWS[1]]
    player = Player(steps(4, lambda rank, chance: [jitter(chance, 100 * MS), call(world)])).play()
    player.write(tmp_path, skews, hosts, offsets=[0, 7 * MS, 0, -3 * MS])
    clocks = clocks_of(tmp_path)
    assert [clock.ranks for clock in clocks.clocks] == [(0, 1), (2, 3)]
    for rank, offset in ((1, 7 * MS), (3, -3 * MS)):
        true_ns = player.log[rank][50][0]
        shown = WALL_NS + skews[rank].shows(true_ns)
        assert abs(clocks.aligned_ns(rank, shown + offset) - WALL_NS - SKEWS[0].shows(true_ns)) < 1 * MS


def test_hosts_of_one_name(tmp_path: Path) -> None:
    """Ranks that say they are of one host, and cannot be: each has its own clock."""
    world = range(4)
    player = Player(steps(4, lambda rank, chance: [jitter(chance, 10 * MS), call(world)], count=200)).play()
    player.write(tmp_path, SKEWS, ["localhost"] * 4)
    clocks = clocks_of(tmp_path)
    assert [clock.ranks for clock in clocks.clocks] == [(0,), (1,), (2,), (3,)]
    assert worst_ns(player, clocks, SKEWS) < 1 * MS


def test_islands(tmp_path: Path) -> None:
    """Two pairs that never meet are aligned each by itself; one that meets nobody keeps its clock. All of this is said."""

    def body(rank: int, chance: random.Random) -> list[Act]:
        return [jitter(chance, 10 * MS), *([call((0, 1) if rank < 2 else (2, 3))] if rank < 4 else [])]

    skews = [*SKEWS, Skew(77 * MS)]
    player = Player(steps(5, body, count=200)).play()
    player.write(tmp_path, skews, [*HOSTS, "e"])
    clocks = clocks_of(tmp_path)
    unmatched = 3 * [Evidence.UNMATCHED]
    assert [clock.evidence for clock in clocks.clocks] == [Evidence.REFERENCE, Evidence.COMPLETIONS, *unmatched]
    assert worst_ns(player, clocks, skews, ranks=range(2)) < 1 * MS
    assert worst_ns(player, clocks, skews, ranks=range(2, 4)) < 1 * MS
    assert clocks.offset_ns(4, WALL_NS) == 0


def test_nobody_and_strangers() -> None:
    """No ranks give no clocks; the time of a rank that nobody knows is left as it is."""
    clocks = aligned([])
    assert clocks.clocks == ()
    assert clocks.aligned_ns(3, 12345) == 12345
    assert clocks.of(3) is None
    assert clocks.aligned_ns(3, np.array([1, 2])).tolist() == [1, 2]
