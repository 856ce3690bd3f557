"""A rank of a mesh that leaves its loop early, or late: the ranks that run the same program show
which one is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from diagnosing import diagnose
from skewed_job import Act, Player, Skew, call, recv, send
from torchwhere.blackbox.run import read_run
from torchwhere.core.place import Certainty
from torchwhere.diagnose.calls.job_calls import calls_of_run
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.doctor.call_patterns import Roles
from torchwhere.diagnose.doctor.majority import Majority
from torchwhere.diagnose.doctor.verdict import Verdict, VerdictKind
from torchwhere.diagnose.doctor.waits import waits

WORLD = 8
PAIRS = [(first, first + 1) for first in range(0, WORLD, 2)]


def judged(programs: list[list[Act]], folder: Path) -> Verdict:
    """The verdict on a job of these programs, which all hang or have ended."""
    Player(programs).play().write(folder, [Skew()] * len(programs), ["a"] * len(programs))
    return diagnose(read_run(folder))


def in_pairs(victim: int, *, steps: int, more: int) -> list[list[Act]]:
    """Pairs that reduce twice a step and meet in one barrier at the end; the victim takes another
    number of steps."""
    counts = [steps + more * (rank == victim) for rank in range(WORLD)]
    return [
        [*(call(PAIRS[rank // 2]) for _ in range(2 * count)), call(range(WORLD), "barrier")]
        for rank, count in enumerate(counts)
    ]


@pytest.mark.parametrize("victim", [0, 1, 5, 7])
@pytest.mark.parametrize(("steps", "more"), [(8, -1), (8, -2), (8, 1), (2, -1), (1, -1), (1, 1)])
def test_neighbour_is_not_blamed(victim: int, steps: int, more: int, tmp_path: Path) -> None:
    """The rank with another number of steps is named, and not the rank that waits for it, from the
    first step on."""
    verdict = judged(in_pairs(victim, steps=steps, more=more), tmp_path)
    assert (verdict.kind, verdict.culprits) == (
        VerdictKind.DEADLOCK,
        (victim,),
    ), verdict.explanation
    assert verdict.certainty is Certainty.INFERRED


def test_reason_without_a_habit(tmp_path: Path) -> None:
    """In a first step, where no rank has habits, the verdict says that the others went another
    way."""
    why = judged(in_pairs(3, steps=1, more=-1), tmp_path).explanation[-2]
    assert (
        why
        == "Likely culprit: rank 3, because most ranks with the same earlier calls took a different"
        " path. This is not proof."
    )


def test_tie_names_both(tmp_path: Path) -> None:
    """A single pair is one vote each: both ranks are named, and the verdict says that the boxes do
    not show which one it is."""
    pair = [[*(call((0, 1)) for _ in range(count)), call((1, 0), "barrier")] for count in (1, 2)]
    verdict = judged(pair, tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.certainty) == (
        VerdictKind.DEADLOCK,
        (0, 1),
        Certainty.INFERRED,
    )


def test_ranks_with_another_program_do_not_vote(tmp_path: Path) -> None:
    """Ranks outside the pair come to the barrier in any case: that they are there does not make the
    waiting rank wrong."""
    pair = [
        [*(call((0, 1)) for _ in range(count)), call(range(WORLD), "barrier")] for count in (1, 2)
    ]
    others: list[list[Act]] = [[call(range(WORLD), "barrier")] for _ in range(2, WORLD)]
    verdict = judged([*pair, *others], tmp_path)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEADLOCK, (0, 1)), verdict.explanation


def test_stages_of_a_pipeline_are_not_compared(tmp_path: Path) -> None:
    """A first and a last stage differ from the middle ones in each round; no healthy one is
    outvoted."""
    programs: list[list[Act]] = []
    for rank in range(4):
        acts: list[Act] = []
        for turn in range(6):
            acts += [recv(rank - 1)] if rank and (rank, turn) != (2, 5) else []
            acts += [send(rank + 1)] if rank < 3 else []
            acts += [call(range(4))]
        programs.append(acts)
    Player(programs).play().write(tmp_path, [Skew()] * 4, ["a"] * 4)
    job_calls = calls_of_run(read_run(tmp_path))
    healthy = [wait for wait in waits(job_calls).values() if wait.rank != 2]
    assert healthy
    majority = Majority(job_calls, Roles(job_calls), ranks=range(4))
    assert not any(majority.is_outvoted(wait) for wait in healthy)
    assert diagnose(read_run(tmp_path)).culprits == (2,)


def test_parallel_groups_have_one_role(tmp_path: Path) -> None:
    """The pairs of a mesh have one role, the group of all ranks has another, and so has each end of
    a message."""
    programs = in_pairs(0, steps=1, more=0)
    programs[0].append(send(2))
    programs[2].append(recv(0))
    Player(programs).play().write(tmp_path, [Skew()] * WORLD, ["a"] * WORLD)
    job_calls = calls_of_run(read_run(tmp_path))
    roles = Roles(job_calls)
    keys = {rank: said.counts for rank, said in job_calls.by_rank.items()}
    of_pair = {
        roles.of(rank, key)
        for rank in keys
        for key in keys[rank]
        if len(job_calls.group(key).ranks) == 2
    }
    of_all = {
        roles.of(rank, key)
        for rank in keys
        for key in keys[rank]
        if is_of_all(key, len(job_calls.group(key).ranks))
    }
    assert (len(of_pair), len(of_all)) == (1, 1)
    assert of_pair != of_all
    assert [len(roles.of_messages(rank)) for rank in range(4)] == [1, 0, 1, 0]
    assert roles.of_messages(0) != roles.of_messages(2)


def is_of_all(key: StreamKey, size: int) -> bool:
    return key.source == key.destination and size == WORLD
