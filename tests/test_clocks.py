"""Clocks: offsets and drifts between hosts are found from calls, and lateness is not mistaken for
either."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from skewed_job import WALL_NS, Act, Player, Skew, call, mark, recv, send, work
from torchwhere.blackbox.reader import read_box
from torchwhere.cli import main
from torchwhere.core.events import Kind
from torchwhere.diagnose.clocks.arrivals import arrivals
from torchwhere.diagnose.clocks.clocks import Clocks, Evidence, aligned

MS = 1_000_000
OFFSETS = (0, 5_000 * MS, -5_000 * MS, 1_234_567_891)
PPM = (0.0, 100.0, -100.0, 37.0)
SKEWS = [Skew(offset, ppm) for offset, ppm in zip(OFFSETS, PPM, strict=True)]
HOSTS = ["a", "b", "c", "d"]
Body = Callable[[int, random.Random], list[Act]]


def clocks_of(folder: Path) -> Clocks:
    return aligned(arrivals(read_box(path)) for path in sorted(folder.glob("*.box")))


def worst_ns(
    player: Player, clocks: Clocks, skews: list[Skew], *, ranks: range | None = None
) -> float:
    """Returns the largest difference between an aligned time and the reference clock at that
    moment."""
    chosen = ranks or range(len(player.log))
    reference = skews[chosen[0]]
    return max(
        abs(
            clocks.aligned_ns(rank, WALL_NS + skews[rank].shows(true_ns))
            - WALL_NS
            - reference.shows(true_ns)
        )
        for rank in chosen
        for true_ns, _, _ in player.log[rank]
    )


def steps(ranks: int, body: Body, *, count: int = 60, seed: int = 0) -> list[list[Act]]:
    chances = [random.Random(1000 * seed + rank) for rank in range(ranks)]
    step = [mark(Kind.STEP_BEGIN)]
    return [
        [
            act
            for _ in range(count)
            for act in [*step, *body(rank, chances[rank]), mark(Kind.STEP_END)]
        ]
        for rank in range(ranks)
    ]


def pipeline(forward: tuple[float, float], backward: tuple[float, float], *, last: int = 3) -> Body:
    """Computes for so many milliseconds, from .. to."""

    def body(rank: int, chance: random.Random) -> list[Act]:
        there = [
            *([recv(rank - 1)] if rank else []),
            spread(chance, *forward),
            *([send(rank + 1)] if rank < last else []),
        ]
        back = [
            *([recv(rank + 1)] if rank < last else []),
            spread(chance, *backward),
            *([send(rank - 1)] if rank else []),
        ]
        return [*there, *back]

    return body


def spread(chance: random.Random, least_ms: float, most_ms: float) -> Act:
    return work(chance.uniform(least_ms, most_ms) * MS)


def jitter(chance: random.Random, ns: float) -> Act:
    return work(ns * (0.7 + 0.6 * chance.random()))


# -- what is corrected -----------------------------------------------------------------------------


def test_offsets_and_drift(tmp_path: Path) -> None:
    """Offsets of 5 s and drifts of 100 ppm are corrected to below a millisecond over a minute."""
    world = range(4)
    programs = steps(
        4,
        lambda rank, chance: [
            jitter(chance, 900 * MS),
            call(world),
            jitter(chance, 100 * MS),
            call(world),
        ],
    )
    player = Player(programs).play()
    player.write(tmp_path, SKEWS, HOSTS)
    clocks = clocks_of(tmp_path)
    assert player.log[0][-1][0] > 60e9
    assert worst_ns(player, clocks, SKEWS) < 1 * MS
    assert [clock.evidence for clock in clocks.clocks] == [Evidence.REFERENCE] + 3 * [
        Evidence.COMPLETIONS
    ]
    assert [round(clock.line.slope * 1e6) for clock in clocks.clocks] == [0, 100, -100, 37]


@pytest.mark.parametrize("skews", [SKEWS, [Skew()] * 4], ids=["skewed", "right"])
def test_straggler_stays_late(tmp_path: Path, skews: list[Skew]) -> None:
    """A rank that is 30 ms late at every call is still 30 ms late after the alignment."""
    world = range(4)

    def body(rank: int, chance: random.Random) -> list[Act]:
        return [
            work(30 * MS * (rank == 2)),
            jitter(chance, 5 * MS),
            call(world),
            jitter(chance, MS),
            mark(Kind.OPTIMIZER),
        ]

    player = Player(steps(4, body, count=200)).play()
    player.write(tmp_path, skews, HOSTS)
    clocks = clocks_of(tmp_path)
    assert worst_ns(player, clocks, skews) < 1 * MS
    found = arrivals(read_box(tmp_path / "rank2.box")), arrivals(read_box(tmp_path / "rank0.box"))
    late, early = (
        clocks.aligned_ns(each.rank, next(iter(each.streams.values())).issued_ns) for each in found
    )
    assert 27 * MS < np.median(late - early) < 33 * MS


def test_messages_both_ways(tmp_path: Path) -> None:
    """A pipeline that only sends, forward and backward, is aligned by its messages."""
    player = Player(steps(4, pipeline((0, 20), (0, 20)), count=400)).play()
    player.write(tmp_path, SKEWS, HOSTS)
    clocks = clocks_of(tmp_path)
    assert worst_ns(player, clocks, SKEWS) < 1 * MS
    assert {clock.evidence for clock in clocks.clocks[1:]} == {Evidence.MESSAGES}


def test_small_groups_only(tmp_path: Path) -> None:
    """Ranks 0 and 3 have no group in common: the ranks in between connect them."""

    def body(rank: int, chance: random.Random) -> list[Act]:
        pairs = [pair for pair in ((0, 1), (1, 2), (2, 3)) if rank in pair]
        return [act for pair in pairs for act in (jitter(chance, 10 * MS), call(pair))]

    player = Player(steps(4, body, count=300)).play()
    player.write(tmp_path, SKEWS, HOSTS)
    clocks = clocks_of(tmp_path)
    assert worst_ns(player, clocks, SKEWS) < 1 * MS
    assert Evidence.UNMATCHED not in {clock.evidence for clock in clocks.clocks}


def test_calls_that_do_not_wait(tmp_path: Path) -> None:
    """If no call waits, offsets of seconds are still corrected, as far as arrivals allow."""
    world = range(4)
    programs = steps(
        4,
        lambda rank, chance: [
            jitter(chance, 10 * MS),
            call(world, is_async=True),
            work(MS),
            call(world),
        ],
    )
    for program in programs:
        program[:] = [act for act in program if act.action != "call" or act.is_async]
    player = Player(programs).play()
    player.write(tmp_path, SKEWS, HOSTS)
    clocks = clocks_of(tmp_path)
    assert {clock.evidence for clock in clocks.clocks[1:]} == {Evidence.ISSUES}
    drifted_apart_ns = max(log[-1][0] for log in player.log) - min(log[-1][0] for log in player.log)
    assert worst_ns(player, clocks, SKEWS) < drifted_apart_ns + 20 * MS


# -- programs of many kinds: ranks compute after each call, and record nothing until then ----------


def straggler(rank: int, chance: random.Random) -> list[Act]:
    """Rank 2 is 30 ms slower than others, before each call and so also after one."""
    slower = [work(30 * MS)] if rank == 2 else []
    return [act for _ in range(2) for act in (spread(chance, 0, 20), *slower, call(range(4)))] + [
        spread(chance, 0, 20)
    ]


def mesh(rank: int, chance: random.Random) -> list[Act]:
    """Groups of four along the rows of a mesh, of four along its columns: 16 ranks."""
    row, column = range(rank // 4 * 4, rank // 4 * 4 + 4), range(rank % 4, 16, 4)
    return [
        spread(chance, 0, 20),
        call(row),
        spread(chance, 0, 20),
        call(column),
        spread(chance, 0, 20),
    ]


def microbatches(rank: int, chance: random.Random) -> list[Act]:
    """One forward, one backward: a pipeline of four stages that keeps all of them busy."""

    def part(of: int, to: int, most_ms: float) -> list[Act]:
        begin, end = [recv(of)] if 0 <= of < 4 else [], [send(to)] if 0 <= to < 4 else []
        return [*begin, spread(chance, 0, most_ms), *end]

    def forward() -> list[Act]:
        return part(rank - 1, rank + 1, 5)

    def backward() -> list[Act]:
        return part(rank + 1, rank - 1, 10)

    early = 3 - rank
    acts = [act for _ in range(early) for act in forward()]
    acts += [act for _ in range(8 - early) for act in (*forward(), *backward())]
    return acts + [act for _ in range(early) for act in backward()]


def in_a_ring(rank: int, chance: random.Random) -> list[Act]:
    """Each rank sends to the next one, in one direction only."""
    return [send((rank + 1) % 5), recv((rank - 1) % 5), spread(chance, 0, 20)]


def scheduled_badly(rank: int, chance: random.Random) -> list[Act]:
    """Ranks are mostly quick after a call, and sometimes very slow."""

    def noise() -> Act:
        return work(MS * (chance.expovariate(0.5) + (chance.random() < 0.1) * 50 * chance.random()))

    return [noise(), call(range(4)), noise(), call(range(4)), noise()]


def with_async(rank: int, chance: random.Random) -> list[Act]:
    """Calls that wait among calls that do not."""
    acts = [
        spread(chance, 0, 10),
        call(range(4), is_async=True),
        spread(chance, 0, 10),
        call(range(4), is_async=True),
    ]
    return [*acts, spread(chance, 0, 10), call(range(4)), spread(chance, 0, 20)]


def an_hour(rank: int, chance: random.Random) -> list[Act]:
    return [work(3_600 * MS), spread(chance, 0, 60), call(range(4)), spread(chance, 0, 60)]


def alike(rank: int, chance: random.Random) -> list[Act]:
    """No rank is ever quick after a call, but all take equally long."""
    return [
        spread(chance, 7, 13),
        call(range(8)),
        spread(chance, 7, 13),
        call(range(8)),
        spread(chance, 7, 13),
    ]


PROGRAMS: list[tuple[Body, int, int]] = [  # with how many ranks, how many steps
    (straggler, 4, 250),
    (mesh, 16, 250),
    (microbatches, 4, 100),
    (in_a_ring, 5, 400),
    (scheduled_badly, 4, 200),
    (with_async, 4, 400),
    (an_hour, 4, 1000),
    (alike, 8, 150),
]


def skewed(ranks: int, seed: int) -> list[Skew]:
    """Clocks up to 5 s and 100 ppm off."""
    chance = random.Random(seed)
    return [
        Skew(),
        *(
            Skew(int(chance.uniform(-5e9, 5e9)), chance.choice((-100, 100, 37)))
            for _ in range(ranks - 1)
        ),
    ]


def uncertainties_hold(player: Player, clocks: Clocks, skews: list[Skew]) -> bool:
    """Whether no clock is further off than its uncertainty. (A call is recorded 3 us late.)"""
    said = [clocks.of(rank) for rank in range(len(player.log))]
    return all(
        clock is not None
        and clock.uncertainty_ns is not None
        and abs(
            clocks.aligned_ns(rank, WALL_NS + skews[rank].shows(true_ns))
            - WALL_NS
            - skews[0].shows(true_ns)
        )
        <= clock.uncertainty_ns + 20_000
        for rank, clock in enumerate(said[1:], 1)
        for true_ns, _, _ in player.log[rank]
    )


@pytest.mark.parametrize(
    ("body", "ranks", "count"), PROGRAMS, ids=[body.__name__ for body, _, _ in PROGRAMS]
)
def test_programs(tmp_path: Path, body: Body, ranks: int, count: int) -> None:
    """Errors are below a millisecond, and no clock is further off than its uncertainty."""
    skews = skewed(ranks, seed=1)
    player = Player(steps(ranks, body, count=count, seed=1)).play()
    player.write(tmp_path, skews, [f"host{rank}" for rank in range(ranks)])
    clocks = clocks_of(tmp_path)
    assert worst_ns(player, clocks, skews) < 1 * MS
    assert uncertainties_hold(player, clocks, skews)


def test_rank_that_stops_early(tmp_path: Path) -> None:
    """A rank that stops early is aligned until then, and the others until the end."""
    everyone, rest = range(4), range(3)
    programs = steps(
        4,
        lambda rank, chance: [spread(chance, 0, 20), call(everyone), spread(chance, 0, 20)],
        count=200,
    )
    later = steps(
        3,
        lambda rank, chance: [spread(chance, 0, 20), call(rest), spread(chance, 0, 20)],
        count=200,
    )
    player = Player(
        [*(first + then for first, then in zip(programs, later, strict=False)), programs[3]]
    ).play()
    player.write(tmp_path, SKEWS, HOSTS)
    clocks = clocks_of(tmp_path)
    assert player.log[3][-1][0] < 0.6 * player.log[0][-1][0]
    assert worst_ns(player, clocks, SKEWS) < 1 * MS
    assert uncertainties_hold(player, clocks, SKEWS)


def test_ring_that_wrapped(tmp_path: Path) -> None:
    """Clocks are aligned by the calls that rings still hold, which differ between ranks."""

    def body(rank: int, chance: random.Random) -> list[Act]:
        notes = [mark(Kind.NOTE)] * rank
        return [spread(chance, 0, 20), *notes, call(range(4)), spread(chance, 0, 20)]

    player = Player(steps(4, body, count=600)).play()
    player.write(tmp_path, SKEWS, HOSTS, records=1500)
    clocks = clocks_of(tmp_path)
    player.log = [log[-1400:] for log in player.log]
    assert worst_ns(player, clocks, SKEWS) < 1 * MS
    assert uncertainties_hold(player, clocks, SKEWS)


# -- what cannot be known --------------------------------------------------------------------------


def slower_by_rank(rank: int, chance: random.Random) -> list[Act]:
    return [call(range(4)), spread(chance, 10 * rank + 10, 10 * rank + 15)]


@pytest.mark.parametrize(
    "body", [slower_by_rank, pipeline((3, 5), (6, 10))], ids=["calls", "messages"]
)
def test_uncertainty_is_printed(
    tmp_path: Path, body: Body, capsys: pytest.CaptureFixture[str]
) -> None:
    """If each rank takes its own time after every call, many offsets explain all records. The
    uncertainty covers them and is printed."""
    player = Player(steps(4, body, count=200)).play()
    player.write(tmp_path, SKEWS, HOSTS)
    clocks = clocks_of(tmp_path)
    assert worst_ns(player, clocks, SKEWS) > 1 * MS
    assert uncertainties_hold(player, clocks, SKEWS)
    doubts = [clock.uncertainty_ns or 0 for clock in clocks.clocks[1:]]
    assert all(1 * MS < doubt < 100 * MS for doubt in doubts)
    assert main(["trace", str(tmp_path), "-o", str(tmp_path / "trace.json")]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("clock of")]
    assert [
        f", at most {doubt / MS:,.1f} ms off" in line
        for doubt, line in zip(doubts, said, strict=True)
    ] == [True] * 3
    kept = json.loads((tmp_path / "trace.json").read_text())["otherData"]["clocks"]
    assert [clock["uncertainty_ns"] for clock in kept[1:]] == [round(doubt) for doubt in doubts]


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_no_bound_without_waiting(tmp_path: Path, backend: str) -> None:
    """Calls that may only be queued align clocks if they fit, but give no uncertainty."""
    player = Player(
        steps(4, lambda rank, chance: [spread(chance, 0, 20), call(range(4))], count=100)
    ).play()
    player.write(tmp_path, SKEWS, HOSTS, backend=backend)
    clocks = clocks_of(tmp_path)
    assert worst_ns(player, clocks, SKEWS) < 1 * MS
    assert [clock.uncertainty_ns for clock in clocks.clocks] == [None] * 4


def test_slow_calls_do_not_move_a_clock(tmp_path: Path) -> None:
    """A few calls that are issued very late do not move a clock that only asynchronous calls
    align."""

    def body(rank: int, chance: random.Random) -> list[Act]:
        slow_ms = 200 if rank else 20
        noise_ms = [
            chance.expovariate(0.5) + (chance.random() < 0.1) * slow_ms * chance.random()
            for _ in range(2)
        ]
        return [act for ms in noise_ms for act in (work(ms * MS), call(range(4)))]

    player = Player(steps(4, body, count=300)).play()
    for log in player.log:
        log[:] = [
            (true_ns, replace(act, is_async=act.action == "call"), number)
            for true_ns, act, number in log
        ]
    player.write(tmp_path, SKEWS, HOSTS)
    clocks = clocks_of(tmp_path)
    assert {clock.evidence for clock in clocks.clocks[1:]} == {Evidence.ISSUES}
    assert worst_ns(player, clocks, SKEWS) < 2 * MS


def queued(player: Player) -> Player:
    """Makes asynchronous calls look like calls that go into the queue of a GPU: they do not wait,
    and no flag says so."""
    for log in player.log:
        log[:] = [(true_ns, replace(act, is_async=False), number) for true_ns, act, number in log]
    return player


def test_messages_that_do_not_wait(tmp_path: Path) -> None:
    """Messages that return before they have arrived do not mislead clocks that collectives
    connect."""

    def body(rank: int, chance: random.Random) -> list[Act]:
        if rank % 2:
            message = [recv(rank - 1, is_async=True)]
        else:
            message = [work(25 * MS), send(rank + 1, is_async=True)]
        after = [mark(Kind.NOTE), spread(chance, 0, 20)]
        return [spread(chance, 0, 20), call(range(4)), *after, *message, *after]

    player = queued(Player(steps(4, body, count=200)).play())
    player.write(tmp_path, SKEWS, HOSTS)
    clocks = clocks_of(tmp_path)
    assert worst_ns(player, clocks, SKEWS) < 1 * MS
    assert uncertainties_hold(player, clocks, SKEWS)


def test_queued_and_asynchronous_groups(tmp_path: Path) -> None:
    """Two hosts may share a group whose calls turn out not to wait and one with asynchronous calls
    only."""
    pairs = (range(4), range(3, -1, -1))

    def body(rank: int, chance: random.Random) -> list[Act]:
        return [
            act
            for ranks, is_async in zip(pairs, (False, True), strict=True)
            for act in (jitter(chance, 20 * MS), call(ranks, is_async=is_async))
        ]

    player = Player(steps(4, body), waits=False).play()
    player.write(tmp_path, SKEWS, HOSTS)
    clocks = clocks_of(tmp_path)
    assert {clock.evidence for clock in clocks.clocks[1:]} == {Evidence.ISSUES}


# -- what is not corrected -------------------------------------------------------------------------


def test_late_host_of_a_gpu_job(tmp_path: Path) -> None:
    """Calls that are only queued say nothing about a clock: a host with a right clock that is 30 ms
    late stays late."""
    world = range(4)

    def body(rank: int, chance: random.Random) -> list[Act]:
        return [jitter(chance, 20 * MS), call(world), jitter(chance, 20 * MS), call(world)]

    programs = steps(4, body)
    programs[2].insert(0, work(30 * MS))
    player = Player(programs, waits=False).play()
    player.write(tmp_path, [Skew()] * 4, HOSTS)
    clocks = clocks_of(tmp_path)
    assert [clock.evidence for clock in clocks.clocks] == [Evidence.REFERENCE] + 3 * [
        Evidence.WALL_CLOCK
    ]
    assert worst_ns(player, clocks, [Skew()] * 4) == 0


def test_ranks_of_a_host_share_a_clock(tmp_path: Path) -> None:
    """Two ranks of a host share a clock, although their wall-clock offsets differ a little."""
    world, hosts, skews = range(4), ["a", "a", "b", "b"], [SKEWS[0], SKEWS[0], SKEWS[1], SKEWS[1]]
    player = Player(steps(4, lambda rank, chance: [jitter(chance, 100 * MS), call(world)])).play()
    player.write(tmp_path, skews, hosts, offsets=[0, 7 * MS, 0, -3 * MS])
    clocks = clocks_of(tmp_path)
    assert [clock.ranks for clock in clocks.clocks] == [(0, 1), (2, 3)]
    for rank, offset in ((1, 7 * MS), (3, -3 * MS)):
        true_ns = player.log[rank][50][0]
        shown = WALL_NS + skews[rank].shows(true_ns)
        assert (
            abs(clocks.aligned_ns(rank, shown + offset) - WALL_NS - SKEWS[0].shows(true_ns))
            < 1 * MS
        )


def test_hosts_of_one_name(tmp_path: Path) -> None:
    """Ranks with one host name that cannot be on one host have their own clocks."""
    world = range(4)
    player = Player(
        steps(4, lambda rank, chance: [jitter(chance, 10 * MS), call(world)], count=200)
    ).play()
    player.write(tmp_path, SKEWS, ["localhost"] * 4)
    clocks = clocks_of(tmp_path)
    assert [clock.ranks for clock in clocks.clocks] == [(0,), (1,), (2,), (3,)]
    assert worst_ns(player, clocks, SKEWS) < 1 * MS


def test_islands(tmp_path: Path) -> None:
    """Two pairs without a common call are aligned separately, and a rank without any call keeps its
    clock; the evidence says so."""

    def body(rank: int, chance: random.Random) -> list[Act]:
        calls = [call((0, 1))] * (rank < 2) + [call((2, 3))] * (rank in (2, 3))
        return [jitter(chance, 10 * MS), *calls]

    skews = [*SKEWS, Skew(77 * MS)]
    player = Player(steps(5, body, count=200)).play()
    player.write(tmp_path, skews, [*HOSTS, "e"])
    clocks = clocks_of(tmp_path)
    unmatched = 3 * [Evidence.UNMATCHED]
    assert [clock.evidence for clock in clocks.clocks] == [
        Evidence.REFERENCE,
        Evidence.COMPLETIONS,
        *unmatched,
    ]
    assert worst_ns(player, clocks, skews, ranks=range(2)) < 1 * MS
    assert worst_ns(player, clocks, skews, ranks=range(2, 4)) < 1 * MS
    assert clocks.offset_ns(4, WALL_NS) == 0


def test_no_ranks_and_unknown_ranks() -> None:
    """No ranks give no clocks, and times of an unknown rank stay as they are."""
    clocks = aligned([])
    assert clocks.clocks == ()
    assert clocks.aligned_ns(3, 12345) == 12345
    assert clocks.of(3) is None
    assert clocks.aligned_ns(3, np.array([1, 2])).tolist() == [1, 2]
