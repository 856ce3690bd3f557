"""Which ranks exited first and which exited because of them, from exit records and from the states
of the processes."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from torchwhere.blackbox.summary import BoxSummary
from torchwhere.core.events import Event
from torchwhere.core.place import Place
from torchwhere.diagnose.calls import rank_calls as by_rank
from torchwhere.diagnose.calls.encode import RankSummary
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.doctor.exit_records import interrupted
from torchwhere.diagnose.doctor.exits import Exits
from torchwhere.diagnose.doctor.verdict import NO_FAULT
from torchwhere.pipeline.verdict import diagnose_folder
from torchwhere.processes.status import ProcessStatus
from torchwhere.render.verdict_text.phrases import exit_text
from warm_python import WarmPython

HUNG_UP = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:50363"
GONE, ALIVE = ProcessStatus(alive=False), ProcessStatus(alive=True, alive_ns=9_000_000_000)


def rank_of(
    rank: int,
    *,
    end: str | None = None,
    exception: str | None = None,
    in_collective: bool = False,
    at_ns: int = 0,
    beat_ns: int = 0,
) -> by_rank.RankCalls:
    """A rank with ten records, of which an exception or its end is the last one; when that was, and
    its last heartbeat."""
    place = Place(rank=rank, step=0, pass_="outside")
    said = RankSummary(
        BoxSummary(Path(f"rank{rank}.box"), rank, ("", 0), True, at_ns, False, 0, beat_ns=beat_ns),
        records=10,
        end=Event("end", 9, at_ns, place, {"reason": end}) if end is not None else None,
        exceptions=(
            (Event("exception", 9, at_ns, place, {"text": exception}),)
            if exception is not None
            else ()
        ),
        in_collective_since_ns=1 if in_collective else None,
    )
    job_calls = JobCalls()
    return by_rank.RankCalls(rank, said, {}, {}, job_calls.shared_ids)


def exits(
    *ranks: by_rank.RankCalls,
    seen: dict[int, ProcessStatus] | None = None,
    now_ns: int | None = None,
) -> Exits:
    job_calls = JobCalls()
    job_calls.by_rank = {rank.rank: rank for rank in ranks}
    return Exits(job_calls, {rank.rank: GONE for rank in ranks} | (seen or {}), now_ns)


def test_killed_before_it_could_say_that_it_ends() -> None:
    """An exception that is the last record of a process which is gone counts as its end; one of a
    living process does not."""
    found = exits(
        rank_of(0, exception=HUNG_UP),
        rank_of(1, exception="ValueError: bad"),
        rank_of(2, exception="ValueError: bad"),
        seen={2: ALIVE},
    )
    assert [found.has_failed(rank) for rank in range(3)] == [True, True, False]
    assert [found.lost_its_peer(rank) for rank in range(3)] == [True, False, False]
    assert exit_text(found.how(1)) == "exception: ValueError: bad"
    assert found.first([]) == [1]


def test_a_worker_of_ray_whose_actor_died() -> None:
    """A worker that fails because Ray has killed the actor that it waits for is not blamed."""
    died = "ActorDiedError: The actor died unexpectedly before finishing this task."
    found = exits(rank_of(0, exception=died), rank_of(1, exception="ValueError: bad batch"))
    assert found.first([]) == [1]


def test_who_reacts_is_not_blamed() -> None:
    """Where ranks were hung up on, or crashed in a collective, the one of which nothing is known is
    the first."""
    crashed = ProcessStatus(alive=False, ended="Aborted")
    ranks = (
        rank_of(0, exception=HUNG_UP),
        rank_of(1, in_collective=True),
        rank_of(3, in_collective=True),
    )
    found = exits(*ranks, seen={1: crashed})
    assert found.first([2]) == [2]
    assert found.first([]) == [1]  # nobody is missing: the one that crashed
    assert found.first_of_awaited([0], [2]) == [2]
    assert found.first_of_awaited([0, 1], [2]) == [1]


@pytest.mark.parametrize(
    ("end", "seen", "outlived_its_watch"),
    [
        ("stop", ALIVE, True),
        ("stop", GONE, False),
        ("stop", replace(GONE, alive_ns=500_000_000), False),
        ("stop", replace(GONE, alive_ns=2_000_000_000), True),
        ("stop", replace(GONE, stack=("train.py:9 in main",), stack_ns=2_000_000_000), True),
        ("exit 0", ALIVE, False),
        (None, ALIVE, False),
    ],
)
def test_who_ended_its_watch_has_not_ended(
    end: str | None, seen: ProcessStatus, outlived_its_watch: bool
) -> None:
    """A process that was there for more than a second after its watch goes on, or did, unseen."""
    assert (
        exits(rank_of(0, end=end), rank_of(1), seen={0: seen}).outlived_its_watch(0)
        is outlived_its_watch
    )


LEAVING = """
import sys, time, torch, torch.distributed as dist, torchwhere
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
with torchwhere.watch(out=f"{folder}/run"):
    for _ in range(3):
        dist.all_reduce(torch.ones(2))
    if rank == 0:
        dist.all_reduce(torch.ones(3))
print("left", flush=True)
time.sleep(600)
"""


def test_a_rank_that_is_no_longer_watched(warm: WarmPython, tmp_path: Path) -> None:
    """One that left its watch while the others wait is missing, alive, and not dead; the same when
    all are gone."""
    reading, writing = os.pipe()
    ranks = [warm.start("-c", LEAVING, rank, tmp_path, stdout=writing) for rank in range(2)]
    os.close(writing)
    try:
        with open(reading) as printed:
            assert printed.readline() == "left\n"
        time.sleep(1.5)
        while (verdict := diagnose_folder(tmp_path / "run", stall_s=1.0)).kind in NO_FAULT:
            time.sleep(0.2)
    finally:
        for process in ranks:
            process.kill()
            process.end()
    for said in (verdict, diagnose_folder(tmp_path / "run", stall_s=1.0)):
        assert (said.kind, said.culprits) == ("missing", (1,))
        assert said.explanation[0].startswith("Rank 1 did not issue all_reduce")
        assert said.explanation[0].endswith(" while it was watched.")
        assert "its watch has ended, but its process still runs" in str(said.ranks[1].detail)


@pytest.mark.parametrize(("now_ns", "blamed"), [(None, []), (9_000_000_000, [2])])
def test_who_fell_silent(now_ns: int | None, blamed: list[int]) -> None:
    """Of several that went without a word nobody is blamed, unless somebody saw which went
    first."""
    moments = {2: 1_000_000_000, 3: 8_900_000_000}
    seen = {
        rank: ProcessStatus(alive=False, alive_ns=ns if now_ns is not None else None)
        for rank, ns in moments.items()
    }
    ranks = (
        rank_of(0, end=f"exception: {HUNG_UP}"),
        rank_of(2, in_collective=True),
        rank_of(3, in_collective=True),
    )
    found = exits(*ranks, seen=seen, now_ns=now_ns)
    assert [found.is_dead(rank) for rank in (2, 3)] == [True, True]  # a peer hung up on rank 0
    assert found.first([]) == blamed


@pytest.mark.parametrize(
    "text",
    [
        "exception: MemoryError",
        "exception: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        (
            "exception: RuntimeError: [enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator:"
            " can't allocate memory"
        ),
    ],
)
def test_out_of_memory_is_said(text: str) -> None:
    """An exception for want of memory is told as such, whoever raised it; another one is told as it
    is."""
    assert exit_text(exits(rank_of(0, end=text)).how(0)) == f"out of memory: {text}"
    assert (
        exit_text(exits(rank_of(0, end="exception: ValueError: memory")).how(0))
        == "exception: ValueError: memory"
    )


def test_who_gave_up_waited_for_another() -> None:
    """A collective that timed out is no fault of the rank that was in it."""
    text = (
        "RuntimeError: [unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to"
        " complete"
    )
    found = exits(
        rank_of(0, end=f"exception: {text}"), rank_of(1, exception=HUNG_UP), rank_of(3, end="exit")
    )
    assert [found.timed_out(rank) for rank in (0, 1, 3)] == [True, False, False]
    assert found.first([2]) == [2]
    assert found.first([]) == []
    assert not exits(rank_of(0, end="exception: TimeoutError: the disk timed out")).timed_out(0)


def test_killed_together() -> None:
    """Several that went without a word are the end of a job; who only noticed that died of it, and
    nobody is first."""
    ranks = rank_of(0, exception=HUNG_UP), rank_of(1), rank_of(2, in_collective=True), rank_of(3)
    found = exits(*ranks)
    assert found.were_killed_together
    assert [found.is_dead(rank) for rank in range(4)] == [True, False, False, False]
    assert [found.exited_with_the_job(rank) for rank in range(4)] == [True, False, False, False]


@pytest.mark.parametrize(
    ("first", "seen"),
    [
        (rank_of(0, end=f"exception: {HUNG_UP}"), {}),  # it had time to say so
        (rank_of(0, exception="ValueError: bad"), {}),  # it failed by itself
        # somebody saw one go
        (
            rank_of(0),
            {1: ProcessStatus(alive=False, gone_ns=8_000_000_000, alive_ns=7_900_000_000)},
        ),
        (rank_of(0), {1: ProcessStatus(alive=False, out_of_memory="killed by the system")}),
        (rank_of(0), {1: ALIVE}),
        (rank_of(0), {1: ProcessStatus()}),  # nobody could look
    ],
)
def test_not_killed_together(first: by_rank.RankCalls, seen: dict[int, ProcessStatus]) -> None:
    """Not where somebody failed by himself or had time to end, and not where one is there, or was
    seen to go first."""
    others = rank_of(1), rank_of(2), rank_of(3)
    assert exits(rank_of(0), *others, now_ns=9_000_000_000).were_killed_together
    assert not exits(first, *others, seen=seen, now_ns=9_000_000_000).were_killed_together


@pytest.mark.parametrize(
    ("gone_ns", "is_dead"), [(8_990_000_000, True), (9_000_000_000, True), (9_010_000_000, False)]
)
def test_gone_while_others_were_there(gone_ns: int, is_dead: bool) -> None:
    """Who was found gone by a look that found others went first; who was not found gone before the
    last such look did not."""
    gone = ProcessStatus(alive=False, alive_ns=8_800_000_000, gone_ns=gone_ns)
    last = ProcessStatus(alive=False, alive_ns=9_000_000_000, gone_ns=9_500_000_000)
    found = exits(
        *map(rank_of, range(4)), seen={0: last, 1: last, 2: gone, 3: last}, now_ns=9_000_000_000
    )
    assert [found.is_dead(rank) for rank in range(4)] == [False, False, is_dead, False]


def test_who_outlived_the_first_failure_is_not_the_first() -> None:
    """Of two ranks of which nothing is known, the one that was seen alive after somebody had failed
    is not the first to go."""
    ranks = rank_of(0, exception=HUNG_UP), rank_of(1)
    found = exits(
        *ranks,
        seen={2: ProcessStatus(alive=False, alive_ns=5), 3: ProcessStatus(alive=False)},
        now_ns=6,
    )
    assert found.first([2, 3]) == [3]


def test_stopped_to_the_end() -> None:
    """A process that was stopped when it was last seen is told as stopped after it was killed; when
    it was asked is kept."""
    before = ProcessStatus(
        alive=True, state="T", stack=("train.py:3 in f",), alive_ns=5, stack_ns=4
    )
    after = ProcessStatus(alive=False, gone_ns=9).after(before)
    assert (after.is_stopped, after.alive, after.alive_ns, after.gone_ns, after.stack_ns) == (
        True,
        False,
        5,
        9,
        4,
    )
    assert ProcessStatus.from_dict(after.to_dict()) == after
    assert ProcessStatus(alive=False, gone_ns=12).after(after).gone_ns == 9
    assert ProcessStatus(alive=True, state="S", alive_ns=12).after(after).gone_ns is None


AGAIN = (
    "exception: CheckpointException: CheckpointException ranks:dict_keys([2])\nTraceback (most"
    ' recent call last): (RANK 2)\n  File "train.py", line 9, in write_data\n    raise'
    " OSError(28)\nOSError: [Errno 28] No space left on device\n"
)


def test_raised_again_on_all() -> None:
    """A failure of one rank that a checkpoint raises on all of them is that rank's alone."""
    found = exits(*(rank_of(rank, end=AGAIN) for rank in range(4)))
    assert found.first([]) == [2]
    assert found.first_of_awaited([1, 2, 3], []) == [2]
    own = exits(
        *(rank_of(rank, end="exception: ValueError: (RANK 2) is slow") for rank in range(2))
    )
    assert own.first([]) == [0, 1]


@pytest.mark.parametrize(
    "text",
    [
        (
            "RuntimeError: Gloo connectFullMesh failed with [pair.cc:152] timed out connecting:"
            " SO_ERROR: Connection refused"
        ),
        (
            "DistNetworkError: The client socket has timed out after 60000ms while trying to"
            " connect to (127.0.0.1, 29500)"
        ),
    ],
)
def test_who_could_not_connect(text: str) -> None:
    """Who never met the others reacts to something; those that were ended with it are not to blame
    for it."""
    seen = {rank: ProcessStatus(alive=False, alive_ns=8_900_000_000) for rank in (0, 1)}
    found = exits(
        rank_of(0),
        rank_of(1),
        rank_of(2, end=f"exception: {text}"),
        seen=seen,
        now_ns=9_000_000_000,
    )
    assert found.could_not_connect([2])
    assert found.first([]) == []
    assert found.first([3]) == [3]


def test_crashed_in_a_collective() -> None:
    """A rank that crashes in C in a collective may have been given what it cannot take; one that
    raises there has not."""
    found = exits(
        rank_of(0, in_collective=True), rank_of(1), rank_of(2, end="exit 1", in_collective=True)
    )
    assert [found.crashed_in_collective(rank) for rank in range(4)] == [True, False, False, False]


def test_counted_before_it_is_gone() -> None:
    """A process that the system has killed may be there for a moment yet: it was the one, and who
    is killed later was not."""
    dying, other = (ProcessStatus(alive=True, alive_ns=0, oom_kills=0) for _ in range(2))
    dying = ProcessStatus(
        alive=True, alive_ns=10, oom_kills=1, out_of_memory="killed by the system"
    ).after(dying)
    other = ProcessStatus(alive=True, alive_ns=10, oom_kills=1).after(other)
    dying, other = (
        ProcessStatus(
            alive=False, gone_ns=20, oom_kills=1, out_of_memory="killed by the system"
        ).after(each)
        for each in (dying, other)
    )
    assert (dying.out_of_memory, other.out_of_memory) == ("killed by the system", None)


# -- SIGTERM ---------------------------------------------------------------------------------------


def ended_with(*codes: int | None, gone_ns: int = 5) -> dict[int, ProcessStatus]:
    """Ranks that are gone, with the exit codes that a monitor saw."""
    return {
        rank: ProcessStatus(alive=False, exit_code=code, gone_ns=gone_ns)
        for rank, code in enumerate(codes)
    }


@pytest.mark.parametrize(
    ("codes", "first"),
    [
        ((-15, -15, -9, -15), [2]),  # the launcher ended the others
        ((-15, None, -9, -15), [2]),
        ((-15, -15, 3, -15), [2]),  # os._exit(3)
        ((-9, -9, -9, -9), []),  # all at once
        ((-15, -15, -15, -15), []),
        ((None, None, -9, None), []),
        ((None, None, None, None), []),
    ],
)
def test_rank_that_sigterm_did_not_end(codes: tuple[int | None, ...], first: list[int]) -> None:
    """Where SIGTERM ended the others, the rank that ended otherwise went first; where the codes do
    not show it, no rank did."""
    found = exits(*map(rank_of, range(4)), seen=ended_with(*codes))
    assert found.exited_first() == first
    assert [rank for rank in range(4) if found.is_dead(rank)] == first
    assert found.were_killed_together is not bool(first)
    assert found.ended_unfinished


def test_rank_that_was_killed_after_sigterm() -> None:
    """A rank that does not obey SIGTERM is killed later: it did not go first."""
    seen = ended_with(-15, -15, -15, -15) | {2: ProcessStatus(alive=False, exit_code=-9, gone_ns=9)}
    assert exits(*map(rank_of, range(4)), seen=seen).exited_first() == []


def test_ranks_that_the_launcher_has_ended_so_far() -> None:
    """While the launcher ends the ranks one after another, only the one that went by itself is
    dead."""
    gone = ended_with(-15, -15, -9, -15)
    found = exits(
        *map(rank_of, range(4)),
        seen={0: gone[0], 1: ALIVE, 2: gone[2], 3: ALIVE},
        now_ns=9_000_000_000,
    )
    assert [found.is_dead(rank) for rank in range(4)] == [False, False, True, False]
    assert found.exited_first() == [2]
    assert not found.ended_unfinished


@pytest.mark.parametrize(
    "reason",
    [
        "exit 143",
        "exit -15",
        "exception: SystemExit: 143",
        "exception: SIGTERMException",
        "exception: got signal: 15",
    ],
)
@pytest.mark.parametrize(("beat_ns", "first"), [(90, [2]), (130, [])])
def test_ranks_that_catch_sigterm(reason: str, beat_ns: int, first: list[int]) -> None:
    """Ranks that say that SIGTERM ended them did not fail. A rank without an exit record went
    first, unless its heart beat on: then it could not obey, and was killed later."""
    others = [rank_of(rank, end=reason, at_ns=100 + rank) for rank in (0, 1, 3)]
    found = exits(*others, rank_of(2, at_ns=80, beat_ns=beat_ns))
    found = replace(found, ended_externally=interrupted(found.job_calls, waited_s=5))
    assert set(found.ended_externally) == {0, 1, 3}
    assert (found.failed(), found.exited_first()) == ([], first)
    assert found.ended_unfinished


@pytest.mark.parametrize("reason", ["exit 1", "exception: SystemExit: 1"])
@pytest.mark.parametrize(
    ("seen", "gone_ns", "first", "is_unknown"),
    [
        (-9, 90, [2], False),  # seen before the others ended themselves
        (None, 90, [2], False),  # seen too, but not how it exited
        (None, 101, [], True),  # seen after the first of them has ended itself
        (-9, 130, [], True),  # seen too late
        (None, 0, [], True),  # no monitor
        (-15, 130, [0, 1, 3], False),  # the launcher ended it
    ],
)
def test_handlers_of_sigterm_may_exit_with_any_code(
    seen: int | None, gone_ns: int, first: list[int], is_unknown: bool, reason: str
) -> None:
    """Ranks that end themselves with one exit code after another rank was killed are not blamed;
    if the order is not known, no rank is."""
    others = [rank_of(rank, end=reason, at_ns=100 + rank) for rank in (0, 1, 3)]
    status = ProcessStatus(alive=False, exit_code=seen, gone_ns=gone_ns or None)
    found = exits(*others, rank_of(2, at_ns=80), seen={2: status}, now_ns=140)
    assert found.first([]) == first
    assert found.may_have_caught_sigterm(found.failed()) is (is_unknown or first == [2])


def test_a_single_handler_of_sigterm() -> None:
    """A single rank with an exit code is blamed, unless a signal is known to have killed another
    rank at that time."""
    for code, first in ((None, [0]), (-9, []), (-15, [0]), (3, [0])):
        status = ProcessStatus(alive=False, exit_code=code, gone_ns=130)
        found = exits(rank_of(0, end="exit 1", at_ns=100), rank_of(1), seen={1: status}, now_ns=140)
        assert found.first([]) == first


def test_another_exit_code_is_a_failure() -> None:
    """An exit code or an exception that does not name SIGTERM is the rank's own."""
    found = exits(
        rank_of(0, end="exit 1"),
        rank_of(1, end="exception: ValueError: signal 150"),
        rank_of(2, end="exit 143"),
    )
    found = replace(found, ended_externally=interrupted(found.job_calls, waited_s=5))
    assert (found.failed(), found.terminated(), found.first([])) == ([0, 1, 2], [2], [0, 1])


def test_job_that_finished_is_not_killed() -> None:
    """A job whose ranks finished, or left with exit code 0, or were interrupted with Ctrl-C, was
    not killed."""
    finished = [rank_of(rank, end="exit 0") for rank in range(2)]
    assert not exits(
        *finished, rank_of(2), seen={2: ProcessStatus(alive=False, exit_code=0)}
    ).ended_unfinished
    assert not exits(*finished, seen=ended_with(-15, -15)).ended_unfinished  # while they ended
    interrupted_job = exits(
        rank_of(0, end=BY_HAND),
        rank_of(1, end=BY_HAND),
        rank_of(2),
        seen={2: ProcessStatus(alive=False, exit_code=-15)},
    )
    interrupted_job = replace(
        interrupted_job, ended_externally=interrupted(interrupted_job.job_calls, waited_s=5)
    )
    assert not interrupted_job.ended_unfinished


def test_several_may_have_hung_up() -> None:
    """Where a rank says that a peer hung up, and several left no exit record, none of them is
    certain, but the one that gave no sign of life after that."""
    ranks = (
        rank_of(0, end=f"exception: {HUNG_UP}", exception=HUNG_UP, at_ns=100),
        rank_of(1, at_ns=90),
        rank_of(2, at_ns=80),
    )
    assert [exits(*ranks).is_doubtful(rank) for rank in (1, 2)] == [True, True]
    later = exits(*ranks[:2], rank_of(2, at_ns=80, beat_ns=140))
    assert [later.is_doubtful(rank) for rank in (1, 2)] == [False, True]
    assert not exits(ranks[0], ranks[1]).is_doubtful(1)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (-9, "killed by SIGKILL"),
        (-250, "killed by signal 250"),
        (3, "exit code 3 without an exit record: os._exit(), or an exit in native code"),
    ],
)
def test_exit_code_is_said(code: int, said: str) -> None:
    """The verdict says which signal ended a rank, or with what code it left."""
    assert exit_text(exits(rank_of(0), seen=ended_with(code)).how(0)) == said


# -- Ctrl-C ----------------------------------------------------------------------------------------

BY_HAND = "exception: KeyboardInterrupt"


def test_who_was_interrupted_has_not_failed() -> None:
    """An interruption of several ranks came from outside: they, and those who noticed that they
    went, did not fail; another one did."""
    ranks = (
        rank_of(0, end=BY_HAND),
        rank_of(1, end=BY_HAND),
        rank_of(2, exception=HUNG_UP),
        rank_of(3, end="exception: ValueError"),
    )
    found = exits(*ranks)
    found = replace(found, ended_externally=interrupted(found.job_calls, waited_s=5))
    assert set(found.ended_externally) == {0, 1}
    assert [found.was_ended_externally(rank) for rank in range(4)] == [True, True, True, False]
    assert found.failed() == [3]


def test_one_interruption_is_a_failure() -> None:
    """A rank that alone was interrupted, while nobody waited for it, raised that itself; without
    one nothing was by hand."""
    assert (
        interrupted(
            exits(rank_of(0, end=BY_HAND), rank_of(1, exception=HUNG_UP)).job_calls, waited_s=5
        )
        == {}
    )
    assert interrupted(exits(rank_of(0, end="stop"), rank_of(1)).job_calls, waited_s=5) == {}


HANGING = """
import os, sys, threading
import torch, torch.distributed as dist, torchwhere

rank = int(sys.argv[1])
os.environ.update(RANK=str(rank), WORLD_SIZE="2")
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2] + "/store", 2), rank=rank, world_size=2)
with torchwhere.watch(out=sys.argv[2] + "/run"):
    dist.all_reduce(torch.ones(1))
    os.write(1, b"here\\n")
    if rank == 1:
        threading.Event().wait()  # the hang
    dist.all_reduce(torch.ones(1))
"""


def test_a_hang_that_was_ended_with_ctrl_c(warm: WarmPython, tmp_path: Path) -> None:
    """Of real ranks, one of which hangs: after Ctrl-C the verdict is the hang, with its line, and
    that it was interrupted."""
    script = tmp_path / "train.py"
    script.write_text(HANGING)
    reading, writing = os.pipe()
    ranks = [warm.start(script, rank, tmp_path, cwd=tmp_path, stdout=writing) for rank in range(2)]
    os.close(writing)
    try:
        with open(reading) as printed:
            assert [printed.readline() for _ in ranks] == ["here\n"] * 2
        time.sleep(4)
        for rank in ranks:
            rank.kill(signal.SIGINT)
        while ranks[1].runs():
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
            rank.end()
    verdict = diagnose_folder(tmp_path / "run", stall_s=4)
    assert (verdict.kind, verdict.culprits) == ("missing", (1,)), verdict.explanation
    assert (
        verdict.ranks[1].place.line
        == f"train.py:{HANGING.splitlines().index('        threading.Event().wait()  # the hang') + 1}"
    )
    assert verdict.explanation[-1] == "Then Ctrl-C interrupted the job."
