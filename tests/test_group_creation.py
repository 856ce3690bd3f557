"""Creation of process groups: what is recorded, and what the doctor says about ranks that wait
there."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import torchwhere
from diagnosing import diagnose
from rank_pool import Pool
from torchwhere.blackbox.file_format import EntryType
from torchwhere.blackbox.file_names import box_name
from torchwhere.blackbox.run import read_run
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.errors import TorchwhereError
from torchwhere.core.events import Kind
from torchwhere.diagnose.doctor.verdict import NO_FAULT, Verdict
from torchwhere.pipeline.verdict import diagnose_folder
from torchwhere.processes.status import ProcessStatus
from warm_python import WarmPython

S = 1_000_000_000
NOW_S = 100
INIT = ("init_process_group", None)


def new(*ranks: int) -> tuple[str, list[int]]:
    return "new_group", list(ranks)


def write(
    folder: Path,
    rank: int,
    world: int,
    group_creations: list[tuple[str, list[int] | None]],
    *,
    waits: bool,
    calls: int = 0,
) -> None:
    """Write a box: groups created one after another, the last one perhaps unfinished; then
    all_reduces, the last one unfinished."""
    meta = {
        "rank": rank,
        "world_size": world,
        "run_id": "made",
        "host": "here",
        "started_ns": S,
        "clock_offset_ns": 0,
    }
    box = BoxWriter(folder / box_name(rank), meta=meta, records=64)
    box.intern(EntryType.THREAD, "0\tMainThread")
    line = box.intern(EntryType.LINE, f"train.py:{rank}")
    for number, (op, ranks) in enumerate(group_creations):
        text = box.text(json.dumps({"op": op, "number": number, "ranks": ranks}))
        box.record(Kind.GROUP_BEGIN, (number + 1) * S, 0, 0, 0, 0, 0, 0, line, 0, 0, 0, 0, text)
        if number < len(group_creations) - 1 or not waits:
            box.record(Kind.GROUP_END, (number + 1) * S + 1, 0, 0, 0, 0, 0, 0, line)
    box.intern(
        EntryType.GROUP,
        json.dumps(
            {"name": "0", "desc": "default_pg", "ranks": list(range(world)), "backend": "gloo"}
        ),
    )
    what = box.intern(
        EntryType.COLLECTIVE,
        json.dumps({"op": "all_reduce", "group": "0", "dtype": "float32", "shapes": [[1]]}),
    )
    for number in range(calls):
        box.record(Kind.COLLECTIVE, 20 * S + number, 0, 0, 0, 0, 0, 0, line, 0, what, 0, 0, number)
    box.close()


def verdict_on(folder: Path, *, now_s: float = NOW_S) -> Verdict:
    run = read_run(folder)
    now_ns = int(now_s * S)
    seen = dict.fromkeys(run.boxes, ProcessStatus(alive=True, state="S", alive_ns=now_ns))
    return diagnose(run, statuses=seen, now_ns=now_ns, stall_s=10)


# -- the doctor ------------------------------------------------------------------------------------


def test_one_never_comes(tmp_path: Path) -> None:
    """A rank that has not begun to create the group in which the others wait is missing; after the
    job was killed that is inferred."""
    for rank in range(4):
        write(tmp_path, rank, 4, [] if rank == 2 else [INIT], waits=True)
    verdict = verdict_on(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.certainty) == ("missing", (2,), "exact")
    assert verdict.explanation[:2] == (
        "Rank 2 never called init_process_group, where ranks 0-1, 3 wait.",
        "  waiting: ranks 0-1, 3, outside any module, train.py:0, step 0",
    )
    assert verdict.stalled_s == pytest.approx(NOW_S - 1)
    assert verdict.facts["gathering"]["absent"] == [2]
    after = diagnose_folder(tmp_path)
    assert (after.kind, after.culprits, after.certainty) == ("missing", (2,), "inferred")


def test_it_may_take_a_while(tmp_path: Path) -> None:
    """Ranks that have waited for less than a stall are not reported."""
    for rank in range(2):
        write(tmp_path, rank, 2, [INIT] if rank else [], waits=True)
    assert verdict_on(tmp_path, now_s=8).kind == "healthy"


def test_all_are_there(tmp_path: Path) -> None:
    """If all ranks wait for each other, no rank is to blame: it is the network."""
    for rank in range(4):
        write(tmp_path, rank, 4, [INIT, new(0, 1)], waits=True)
    verdict = verdict_on(tmp_path)
    assert (verdict.kind, verdict.culprits) == ("together", ())
    assert (
        verdict.explanation[0]
        == "All 4 ranks wait in new_group of ranks 0-1, and no rank is missing."
    )


def test_a_rank_without_a_box(tmp_path: Path) -> None:
    """A rank that was never started leaves no box: the verdict says that there is no data for it,
    and does not blame it."""
    for rank in (0, 1, 3):
        write(tmp_path, rank, 4, [INIT], waits=True)
    verdict = verdict_on(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.certainty) == ("missing", (), "unknown")
    assert (
        verdict.explanation[0]
        == "Ranks 0-1, 3 wait in init_process_group, and there is no data for rank 2."
    )


def test_a_rank_alone(tmp_path: Path) -> None:
    """A single rank in init_process_group waits for others, also if it does not know how many: the
    verdict never says that no rank is missing."""
    write(tmp_path, 0, 1, [INIT], waits=True)
    verdict = verdict_on(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.certainty) == ("missing", (), "unknown")
    assert (
        verdict.explanation[0]
        == "Rank 0 waits in init_process_group for other ranks, and no other rank has a box."
    )


def test_groups_in_another_order(tmp_path: Path) -> None:
    """A rank that creates the same groups in another order is named."""
    for rank in range(4):
        pairs = [new(2, 3), new(0, 1)] if rank == 3 else [new(0, 1), new(2, 3)]
        write(tmp_path, rank, 4, [INIT, *pairs[: 1 if rank in (0, 3) else 2]], waits=True)
    verdict = verdict_on(tmp_path)
    assert (verdict.kind, verdict.culprits) == ("mismatch", (3,))
    assert (
        "  rank 3: new_group of ranks 2-3, outside any module, train.py:3, step 0"
        in verdict.explanation
    )


def test_made_by_its_members_alone(tmp_path: Path) -> None:
    """Half of the ranks skipped a group that they are not in: they create the groups that the
    others create later."""
    for rank in range(4):
        group_creations = [INIT, new(0, 1), new(0, 3)] if rank < 2 else [INIT, new(0, 3)]
        write(
            tmp_path,
            rank,
            4,
            group_creations,
            waits=rank in (0, 3),
            calls=0 if rank in (0, 3) else 1,
        )
    verdict = verdict_on(tmp_path)
    assert (verdict.kind, verdict.culprits) == ("mismatch", (2, 3))
    assert verdict.explanation[-1].startswith("All ranks must create all groups in the same order")


def test_others_went_on(tmp_path: Path) -> None:
    """If some ranks create a group and others went on to a collective with them, both wait, and the
    smaller side is named."""
    for rank in range(4):
        write(
            tmp_path,
            rank,
            4,
            [INIT, new(0)] if rank == 0 else [INIT],
            waits=rank == 0,
            calls=0 if rank == 0 else 1,
        )
    verdict = verdict_on(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.certainty) == ("mismatch", (0,), "inferred")


def test_groups_that_were_made(tmp_path: Path) -> None:
    """A job that has created its groups is not reported as waiting for them, also if some ranks
    were watched later."""
    for rank in range(4):
        write(tmp_path, rank, 4, [INIT, new(0, 1)] if rank else [], waits=False, calls=3)
    verdict = verdict_on(tmp_path)
    assert (verdict.culprits, "gathering" in verdict.facts) == ((), False)


# -- what is recorded ------------------------------------------------------------------------------


def _make_groups(folder: str) -> tuple[list[dict[str, object]], bool]:
    makers = dist.init_process_group, dist.distributed_c10d._new_group_with_tag
    with torchwhere.watch(out=folder):
        groups = [dist.new_group([0]), dist.new_group([0, 1])]
        if dist.get_rank() == 0:
            groups.append(dist.new_group([0], use_local_synchronization=True))
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    rank = dist.get_rank()
    events = [
        event.to_dict()
        for event in torchwhere.read_run(folder).events()
        if event.kind.startswith("group_")
    ]
    is_restored = makers == (dist.init_process_group, dist.distributed_c10d._new_group_with_tag)
    return [event for event in events if event["rank"] == rank], is_restored


def test_what_is_recorded(two_ranks: Pool, tmp_path: Path) -> None:
    """Each group that all ranks create is recorded on all of them, with its ranks and its line; a
    group that only its members create is not."""
    for events, is_restored in two_ranks.run(_make_groups, str(tmp_path)):
        assert is_restored
        assert [event["kind"] for event in events] == ["group_begin", "group_end"] * 2
        begun = events[::2]
        assert [(event["op"], event["ranks"]) for event in begun] == [
            ("new_group", [0]),
            ("new_group", [0, 1]),
        ]
        assert begun[1]["number"] == begun[0]["number"] + 1
        assert all("test_group_creation.py:" in event["line"] for event in begun)


def test_a_name_that_somebody_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that was imported by name during a watch works as usual after the watch."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch leaves one of its own
    with torchwhere.watch():
        from torch.distributed import init_process_group
    init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.get_world_size() == 1
    dist.destroy_process_group()


_HALF_A_JOB = """
import sys, time, torchwhere, torch.distributed as dist
rank, folder = int(sys.argv[1]), sys.argv[2]
with torchwhere.watch(out=f"{folder}/run"):
    if rank == 1:
        time.sleep(100)  # a long download
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
"""


def test_real_start(warm: WarmPython, tmp_path: Path) -> None:
    """Of two processes one never creates the group: the verdict says so while the other waits, and
    where that rank is."""
    script = tmp_path / "half.py"
    script.write_text(_HALF_A_JOB)
    environment = os.environ | {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    jobs = [
        warm.start(script, rank, tmp_path, cwd=tmp_path, env=environment | {"RANK": str(rank)})
        for rank in range(2)
    ]
    try:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            time.sleep(0.3)
            try:
                verdict = diagnose_folder(tmp_path / "run", stall_s=1)
            except TorchwhereError:  # no box yet
                continue
            if verdict.kind not in NO_FAULT:
                break
        assert (verdict.kind, verdict.culprits, verdict.certainty) == ("missing", (1,), "exact")
        assert verdict.ranks[1].place.line == "half.py:6"
        assert verdict.ranks[0].place.line == "half.py:7"
    finally:
        for job in jobs:
            job.kill()
            job.end()


# -- threads ---------------------------------------------------------------------------------------


def test_a_thread_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that ends a thread of the user is an event, and still reaches the
    `threading.excepthook` of the job."""
    told: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(str(args.exc_value)))

    def load() -> None:
        raise IndexError("no such row")

    with torchwhere.watch(out=tmp_path):
        thread = threading.Thread(target=load, name="loader")
        thread.start()
        thread.join()
    (event,) = [
        event.to_dict() for event in torchwhere.read_run(tmp_path).events(kinds={"exception"})
    ]
    assert (event["text"], event["thread"]) == ("IndexError: no such row", "loader")
    assert "test_group_creation.py:" in event["line"]
    assert told == ["no such row"]
