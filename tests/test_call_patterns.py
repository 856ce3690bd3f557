"""Each rank's own habit, and who is to blame for a circle by it: jobs that never ran, of which all
is known."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diagnosing import diagnose
from skewed_job import Act, Player, Skew, call, recv, send
from torchwhere.blackbox.run import read_run
from torchwhere.core.place import Certainty
from torchwhere.diagnose.calls.job_calls import calls_of_run
from torchwhere.diagnose.doctor.call_patterns import Patterns, Unexpected, _Past, unexpected_tokens
from torchwhere.diagnose.doctor.verdict import Verdict, VerdictKind

ROUNDS, BROKEN = 15, 7


def judged(programs: list[list[Act]], folder: Path) -> Verdict:
    """The verdict on a job of these programs, all of which hang or have ended."""
    Player(programs).play().write(folder, [Skew()] * len(programs), ["a"] * len(programs))
    return diagnose(read_run(folder))


def rounds(
    ranks: int, body: Callable[[int, int], Iterator[Act]], *, count: int = ROUNDS
) -> list[list[Act]]:
    """The program of each rank: what it does in each round."""
    return [[act for turn in range(count) for act in body(rank, turn)] for rank in range(ranks)]


# -- surprises -------------------------------------------------------------------------------------


def naive(tokens: list[int]) -> tuple[list[Unexpected], set[int]]:
    """The same, by going through all stretches."""
    found, expected = [], set()
    for at in range(len(tokens)):
        before = tokens[:at]
        for length in range(at - 1, 0, -1):
            after = {
                before[i + length]
                for i in range(at - length)
                if before[i : i + length] == before[at - length :]
            }
            if after and tokens[at] in after:
                expected.add(at)
            elif 0 < len(after) <= 4:
                found.append(Unexpected(at, tuple(sorted(after)), length))
            if after:
                break
    return found, expected


def test_surprises_are_those_of_all_stretches() -> None:
    """Whatever a sequence is, its surprises are those that a search through all its stretches
    finds."""
    chance = random.Random(4)
    for _ in range(200):
        round_of = [chance.randrange(4) for _ in range(chance.randrange(1, 6))]
        tokens = [
            token if chance.random() > 0.1 else chance.randrange(5)
            for _ in range(8)
            for token in round_of
        ]
        assert unexpected_tokens(tokens) == naive(tokens)


def test_time_is_linear() -> None:
    """What is kept of a sequence grows with its length and no faster."""
    past = _Past()
    for token in [0, *(1 for _ in range(3000)), *(token % 7 for token in range(3000))]:
        past.add(token)
    assert len(past.length) <= 2 * 6001
    assert sum(map(len, past.following)) <= 3 * 6001


def test_what_is_done_again_is_a_habit(tmp_path: Path) -> None:
    """What a rank does every third round is no departure, but where it does not."""

    def body(rank: int, turn: int) -> Iterator[Act]:
        yield call([0, 1])
        if turn % 3 == 2 and turn != 26:
            yield send(1 - rank)
            yield recv(1 - rank)

    Player(rounds(2, body, count=30)).play().write(tmp_path, [Skew()] * 2, ["a"] * 2)
    deviations = Patterns(calls_of_run(read_run(tmp_path)), ranks=2).of(0).deviations
    late = min(
        (deviation for deviation in deviations if deviation.record > 3 * 5),
        key=lambda deviation: deviation.record,
    )
    assert (late.due[0][0].destination, late.due[0][1], late.is_new) == (1, 8, False)


# -- circles ---------------------------------------------------------------------------------------


def left_out(rank: int, turn: int) -> Iterator[Act]:
    """A pipeline with a barrier; rank 2 takes one microbatch too few, once."""
    for _ in range(3 if (rank, turn) == (2, BROKEN) else 4):
        if rank:
            yield recv(rank - 1)
        if rank < 3:
            yield send(rank + 1)
    yield call(range(4), "barrier")


def backward_left_out(rank: int, turn: int) -> Iterator[Act]:
    """Forward and back; rank 2 does not send its last gradient back, once."""
    for _ in range(4):
        if rank:
            yield recv(rank - 1)
        if rank < 3:
            yield send(rank + 1)
    for batch in range(4):
        if rank < 3:
            yield recv(rank + 1)
        if rank and (rank, turn, batch) != (2, BROKEN, 3):
            yield send(rank - 1)


def other_order(rank: int, turn: int) -> Iterator[Act]:
    """Two groups that share ranks 1 and 2; rank 2 takes them in the other order, once."""
    groups = [group for group in ((0, 1, 2), (1, 2, 3)) if rank in group]
    for group in groups[::-1] if (rank, turn) == (2, BROKEN) else groups:
        yield call(group)


def noticed_late(rank: int, turn: int) -> Iterator[Act]:
    """Neighbours exchange, and all meet every fifth round; rank 2 does not write to rank 1 in one
    round, and goes on."""
    if rank:
        if (rank, turn) != (2, BROKEN - 1):
            yield send(rank - 1)
        yield recv(rank - 1)
    if rank < 3:
        yield send(rank + 1)
        yield recv(rank + 1)
    if turn % 5 == 4:
        yield call(range(4))


def wrong_peer(rank: int, turn: int) -> Iterator[Act]:
    """A ring in which rank 2 listens to the wrong side, once."""
    yield send((rank + 1) % 4)
    yield recv((rank + 1) % 4 if (rank, turn) == (2, BROKEN) else (rank - 1) % 4)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (left_out, VerdictKind.DEADLOCK),
        (backward_left_out, VerdictKind.DEADLOCK),
        (other_order, VerdictKind.DEADLOCK),
        (noticed_late, VerdictKind.DEADLOCK),
        (wrong_peer, VerdictKind.MISMATCH),
    ],
)
def test_who_departed_is_blamed(
    body: Callable[[int, int], Iterator[Act]], kind: VerdictKind, tmp_path: Path
) -> None:
    """Of ranks that wait for each other, the one that alone did otherwise than it always had."""
    verdict = judged(rounds(4, body), tmp_path)
    assert (verdict.kind, verdict.culprits) == (kind, (2,)), verdict.explanation


def test_sure_where_all_others_do_as_ever(tmp_path: Path) -> None:
    """A rank that left a round it knows for another part of it, while all others stand where they
    were due, is to blame."""
    verdict = judged(rounds(4, backward_left_out), tmp_path)
    assert verdict.certainty is Certainty.EXACT
    why, others = verdict.explanation[-2:]
    assert (
        why == "Likely cause: rank 2 skipped send of float32 [4] with peer 1, which it had always"
        " issued there (at least 28 times), and continued with recv of float32 [4] with peer 1."
        " Look at: conditions on rank, step or data around the skipped call."
    )
    assert others == "The others followed their usual call pattern."


def test_one_message_too_many(tmp_path: Path) -> None:
    """A worker that asks once more than its server answers is to blame, though the server is the
    one it waits for."""

    def body(rank: int, turn: int) -> Iterator[Act]:
        for worker in range(1, 4) if rank == 0 else ():
            yield send(worker)
        for worker in range(1, 4) if rank == 0 else ():
            yield recv(worker)
        if rank:
            yield recv(0)
            yield send(0)
            if (rank, turn) == (2, BROKEN):
                yield call([0, 2])

    verdict = judged(rounds(4, body), tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.certainty) == (
        VerdictKind.DEADLOCK,
        (2,),
        Certainty.INFERRED,
    )
    assert (
        verdict.explanation[-1]
        == 'Likely cause: rank 2 issued all_reduce of float32 [4] of group "0-2" where it had always'
        ' issued recv of float32 [4] with peer 0 of group "0-1-2-3" (at least 8 times). Look at:'
        " the code path that leads there."
    )


def test_who_stayed_behind(tmp_path: Path) -> None:
    """Where most went on to something new together, the one that did not come along is the odd one;
    that is no proof."""
    programs = [
        [
            act
            for _ in range(11 if rank == 1 else 10)
            for act in (send((rank + 1) % 4), recv((rank - 1) % 4))
        ]
        for rank in range(4)
    ]
    verdict = judged([[*acts, call(range(4), "barrier")] for acts in programs], tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.certainty) == (
        VerdictKind.DEADLOCK,
        (1,),
        Certainty.INFERRED,
    )


def test_several_that_go_together(tmp_path: Path) -> None:
    """A row of a mesh that leaves its loop early is named whole."""
    rows, columns = (
        [tuple(range(row, row + 2)) for row in (0, 2, 4, 6)],
        [tuple(range(at, 8, 2)) for at in (0, 1)],
    )

    def body(rank: int, turn: int) -> Iterator[Act]:
        if rank not in (4, 5) or turn < BROKEN:
            yield call(rows[rank // 2])
            yield call(columns[rank % 2])
        elif turn == BROKEN:
            yield call(range(8), "barrier")

    verdict = judged(rounds(8, body), tmp_path)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEADLOCK, (4, 5)), verdict.explanation


@pytest.mark.parametrize("first", [0, BROKEN])
def test_in_a_first_round_nobody_is_sure(first: int, tmp_path: Path) -> None:
    """Two ranks that wait for each other where they never were before: it is one of them, and that
    is said."""

    def body(rank: int, turn: int) -> Iterator[Act]:
        if turn == first:
            yield recv(1 - rank)
        elif turn < first:
            yield call([0, 1])

    verdict = judged(rounds(2, body), tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.certainty) == (
        VerdictKind.DEADLOCK,
        (0, 1),
        Certainty.INFERRED,
    )
    assert "the boxes do not show which one" in verdict.explanation[-2]


def test_fewest_in_a_first_round(tmp_path: Path) -> None:
    """Where habits say nothing and a circle is over groups, the smaller side is likely, and no
    more."""
    both = (0, 1, 2, 3), (3, 2, 1, 0)
    verdict = judged(
        [[call(group) for group in (both[::-1] if rank == 1 else both)] for rank in range(4)],
        tmp_path,
    )
    assert (verdict.kind, verdict.culprits, verdict.certainty) == (
        VerdictKind.DEADLOCK,
        (1,),
        Certainty.INFERRED,
    )


def test_equal_sides_of_several_ranks(tmp_path: Path) -> None:
    """If half of the ranks use two groups in the other order in a first round, no rank is named."""
    both = (0, 1, 2, 3), (3, 2, 1, 0)
    verdict = judged(
        [[call(group) for group in (both[::-1] if rank > 1 else both)] for rank in range(4)],
        tmp_path,
    )
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEADLOCK, ()), verdict.explanation


def test_a_long_circle(tmp_path: Path) -> None:
    """A token goes round 100 ranks; the first of them once waits for it before it has sent it."""

    def body(rank: int, turn: int) -> Iterator[Act]:
        acts = [recv((rank - 1) % 100), send((rank + 1) % 100)]
        yield from acts if rank or turn == BROKEN else acts[::-1]

    verdict = judged(rounds(100, body, count=10), tmp_path)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEADLOCK, (0,)), verdict.explanation
    assert (len(verdict.facts["circle"]), verdict.certainty) == (16, Certainty.EXACT)


def test_a_new_line_is_not_a_skipped_call(tmp_path: Path) -> None:
    """Ranks that issue the same messages from another line have skipped nothing. If all ranks of a
    ring begin to receive first, no rank is named."""

    def body(rank: int, turn: int) -> Iterator[Act]:
        line = "train.py:9" if turn == BROKEN else "train.py:5"
        acts = [recv((rank - 1) % 4, line=line), send((rank + 1) % 4, line=line)]
        yield from acts if rank % 2 or turn == BROKEN else acts[::-1]

    verdict = judged(rounds(4, body), tmp_path)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEADLOCK, ()), verdict.explanation


def test_a_deadlock_of_others(tmp_path: Path) -> None:
    """If two ranks block each other, a rank that has not come to a barrier yet, and for which
    neither of the two waits, is not named."""
    reduces, last = [call((0, 1))] * ROUNDS, [call(range(4), "barrier")]
    other = [*reduces[:BROKEN], recv(0), *reduces[BROKEN:]]
    verdict = judged([[*reduces, *last], [*other, *last], [call((2,))], last], tmp_path)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEADLOCK, (1,)), verdict.explanation


def test_a_rank_that_others_of_a_cycle_wait_for(tmp_path: Path) -> None:
    """If a rank of a cycle also waits for a rank that does not come, that rank is named."""
    programs = [
        [*(call((0, 1, 2)) for _ in range(ROUNDS)), *more]
        for more in ([call((0, 1, 2))], [recv(0)], [])
    ]
    verdict = judged(programs, tmp_path)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.MISSING, (2,)), verdict.explanation
