"""The flight recorder, both ways: the doctor on dumps, made up as of NCCL and real ones of gloo;
its own tool on ours."""

from __future__ import annotations

import gc
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchwhere
from faulty_jobs import FAULTS, WORLD
from rank_pool import Pool
from test_doctor import Nursery, kill, wait_for_verdict
from torchwhere.cli import main
from torchwhere.core import worker_pool
from torchwhere.core.errors import TorchwhereError
from torchwhere.diagnose.doctor.verdict import Verdict
from torchwhere.flight_recorder.dump_entry import user_line
from torchwhere.flight_recorder.dumps import read_dumps
from torchwhere.flight_recorder.verdict import consult_dumps
from torchwhere.flight_recorder.write import write_dumps
from torchwhere.render.verdict import verdict_text

VICTIM = 2
DEFAULT = ("0", "default_pg")
MOMENT_NS = 1_700_000_000_000_000_000


class Recorder:
    """What one rank of NCCL records, in the words of a dump."""

    def __init__(
        self,
        rank: int,
        *,
        version: str = "2.10",
        groups: dict[tuple[str, str], list[int]] | None = None,
    ) -> None:
        self.rank, self.version = rank, version
        self.groups = groups or {DEFAULT: list(range(WORLD))}
        self.entries: list[dict[str, Any]] = []
        self._numbers: dict[tuple[str, bool], int] = {}

    def call(
        self,
        op: str = "all_reduce",
        *,
        group: tuple[str, str] = DEFAULT,
        shape: tuple[int, ...] = (4,),
        dtype: str = "Float",
        line: int = 9,
        state: str = "completed",
        again: bool = False,
        backend: str = "nccl",
    ) -> Recorder:
        is_p2p = op.startswith(("send", "recv")) or (
            op == "coalesced" and self.entries[-1]["is_p2p"]
        )
        number = self._numbers[group[0], is_p2p] = self._numbers.get((group[0], is_p2p), 0) + (
            not again
        )
        sizes = [list(shape)] if "barrier" not in op and op != "coalesced" else []
        self.entries.append(
            {
                "frames": [
                    {
                        "name": "all_reduce",
                        "filename": "/usr/lib/python3.12/site-packages/torch/distributed/c10d.py",
                        "line": 1,
                    },
                    {"name": "step", "filename": "/home/user/project/train.py", "line": line},
                    {"name": "<module>", "filename": "/home/user/project/main.py", "line": 1},
                ],
                "record_id": len(self.entries),
                "pg_id": list(self.groups).index(group),
                "process_group": group,
                "collective_seq_id": self._numbers.get((group[0], False), 0),
                "p2p_seq_id": number if is_p2p else 0,
                "op_id": len(self.entries) * (self.rank + 1),  # differs between ranks
                "profiling_name": f"{backend}:{op}",
                "time_created_ns": MOMENT_NS + len(self.entries),
                "input_sizes": sizes,
                "input_dtypes": [dtype] * len(sizes),
                "output_sizes": sizes,
                "output_dtypes": [dtype] * len(sizes),
                "state": state,
                "time_discovered_started_ns": None,
                "time_discovered_completed_ns": None,
                "retired": state == "completed",
                "timeout_ms": 600_000,
                "is_p2p": is_p2p,
            }
        )
        return self

    def calls(self, count: int, **call: Any) -> Recorder:
        for _ in range(count):
            self.call(**call)
        return self

    def forget(self, count: int) -> Recorder:
        """The ring goes on: the oldest are lost."""
        self.entries = self.entries[count:]
        return self

    def dump(self) -> dict[str, Any]:
        config = {
            name: {"name": name, "desc": desc, "ranks": str(ranks)}
            for (name, desc), ranks in self.groups.items()
        }
        status: dict[str, dict[str, int]] = {}
        for entry in self.entries:
            group = status.setdefault(str(entry["pg_id"]), {"started": -1, "completed": -1})
            group["enqueued"] = number = entry["p2p_seq_id"] or entry["collective_seq_id"]
            group["started"] = number if entry["state"] != "scheduled" else group["started"]
            group["completed"] = number if entry["state"] == "completed" else group["completed"]
        library = {
            (
                "nccl_version"
                if self.version < "2.9" and self.version != "2.10"
                else "comm_lib_version"
            ): "2.21.5"
        }
        return {
            "version": self.version,
            "pg_config": config,
            "pg_status": {
                pg_id: {f"last_{state}_collective": number for state, number in group.items()}
                for pg_id, group in status.items()
            },
            **library,
            "entries": self.entries,
        }

    def write(
        self, folder: Path, *, name: str = "nccl_trace_rank_{}", as_json: bool = False
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        dump = self.dump()
        if as_json:  # no stacks, and the status as texts
            status = {
                pg_id: {word: str(number) for word, number in each.items()}
                for pg_id, each in dump["pg_status"].items()
            }
            entries = [
                {key: value for key, value in entry.items() if key != "frames"}
                for entry in self.entries
            ]
            (folder / name.format(self.rank)).write_text(
                json.dumps({**dump, "pg_status": status, "entries": entries})
            )
        else:
            (folder / name.format(self.rank)).write_bytes(pickle.dumps(dump, protocol=2))


def diagnose_folder(folder: Path, recorders: list[Recorder]) -> Verdict:
    for recorder in recorders:
        recorder.write(folder)
    return consult_dumps(folder)


def four(**recorder: Any) -> list[Recorder]:
    """Four ranks that have done five things together."""
    return [Recorder(rank, **recorder).calls(5) for rank in range(WORLD)]


# -- dumps as NCCL writes them ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "as_json"),
    [("2.4", False), ("2.5", False), ("2.9", False), ("2.10", False), ("2.10", True)],
)
def test_missing_in_every_version(version: str, as_json: bool, tmp_path: Path) -> None:
    """The rank that never came is named in dumps of every version, as pickle and as JSON; lines
    where there are stacks."""
    for recorder in four(version=version):
        if recorder.rank != VICTIM:
            recorder.call(line=12, state="started")
        recorder.write(tmp_path, as_json=as_json)
    verdict = consult_dumps(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.certainty) == ("missing", (VICTIM,), "exact")
    assert verdict.collective is not None
    assert {
        key: verdict.collective[key]
        for key in ("op", "number", "group", "dtype", "shapes", "bytes")
    } == {
        "op": "all_reduce",
        "number": 5,
        "group": "default",
        "dtype": "float32",
        "shapes": [[4]],
        "bytes": 16,
    }
    assert [verdict.ranks[rank].place.line for rank in (0, VICTIM)] == (
        [None] * 2 if as_json else ["train.py:12", "train.py:9"]
    )
    assert [str(verdict.ranks[rank].state) for rank in (0, VICTIM)] == ["waiting", "running"]
    assert (
        'Completed in group "default", according to the flight recorder: up to #4 on ranks 0-3.'
        in verdict.explanation
    )


def test_text_of_a_verdict(tmp_path: Path) -> None:
    """The text says what is known, and claims nothing that a dump does not have."""
    recorders = four()
    for recorder in recorders[:VICTIM] + recorders[VICTIM + 1 :]:
        recorder.call(line=12, state="started")
    likely = "rank 2 took a different code path, or is blocked, after train.py:9."
    not_known = (
        "not the current place of a rank; they have no modules, passes, steps, roots and reduce ops"
    )
    text = verdict_text(diagnose_folder(tmp_path, recorders))
    assert (
        f"```text\n{text}\n```"
        in (Path(__file__).parent.parent / "docs" / "flight-recorder.md").read_text()
    )
    assert text.splitlines() == [
        "HANG  4 ranks",
        'Rank 2 never issued all_reduce of float32 [4], #5 of group "default".',
        "  waiting: ranks 0-1, 3, at train.py:12",
        "  rank 2 was last seen at train.py:9; its dump does not show where it is now",
        f"Likely cause: {likely} Look at: conditions on rank, step or data before train.py:12.",
        'Completed in group "default", according to the flight recorder: up to #4 on ranks 0-3.',
        "  last in common: all_reduce #4, train.py:9",
        f"Not known: dumps contain the issued collectives, {not_known}",
    ]


@pytest.mark.parametrize(
    "program", [None, "", "import sys; sys.stdout.write('nonsense')"], ids=["well", "silent", "mad"]
)
def test_many_dumps(program: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many dumps are read by several processes: nothing is lost or mixed up, also where such a
    process fails."""
    count = 30
    for rank in range(count):
        Recorder(rank, groups={DEFAULT: list(range(count))}).calls(3 + rank).write(tmp_path)
    (tmp_path / "nccl_trace_rank_7").write_bytes(b"\x80\x02cos\nsystem\n.")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2})
    if program is not None:
        monkeypatch.setattr(worker_pool, "_PROGRAM", program)
    told: list[tuple[int, int]] = []
    run = read_dumps(tmp_path, on_progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1] == (count, count)
    assert {rank: len(box.records) for rank, box in run.boxes.items()} == {
        n: 3 + n for n in range(count) if n != 7
    }
    assert [box.path.name for box in run.unreadable] == ["nccl_trace_rank_7"]


@pytest.mark.parametrize(
    ("other", "differs_in"),
    [
        ({"op": "broadcast"}, ["op"]),
        ({"shape": (5,)}, ["shape"]),
        ({"dtype": "BFloat16"}, ["dtype"]),
    ],
    ids=["op", "shape", "dtype"],
)
def test_mismatch(other: dict[str, Any], differs_in: list[str], tmp_path: Path) -> None:
    """Ranks that issued different calls at one number: the ranks, the number, and the
    difference."""
    recorders = [
        r.call(**(other if r.rank == VICTIM else {}), line=20 + r.rank, state="scheduled")
        for r in four()
    ]
    verdict = diagnose_folder(tmp_path, recorders)
    assert (verdict.kind, verdict.culprits, verdict.certainty) == ("mismatch", (VICTIM,), "exact")
    assert verdict.facts["differs_in"] == differs_in
    assert verdict.ranks[VICTIM].place.line == "train.py:22"


def test_silent_mismatch(tmp_path: Path) -> None:
    """Two reductions of one shape in the other order: nothing fails, and the lines in the dumps
    show it."""
    recorders = [Recorder(rank) for rank in range(WORLD)]
    for step in range(5):
        for recorder in recorders:
            lines = (8, 7) if (recorder.rank, step) == (VICTIM, 3) else (7, 8)
            recorder.call(line=lines[0]).call(line=lines[1])
    verdict = diagnose_folder(tmp_path, recorders)
    assert (verdict.kind, verdict.culprits) == ("mismatch", (VICTIM,))
    assert verdict.collective is not None
    assert verdict.collective["number"] == 6


def test_together(tmp_path: Path) -> None:
    """All ranks are in one collective and none is missing: no rank is blamed."""
    verdict = diagnose_folder(tmp_path, [recorder.call(state="started") for recorder in four()])
    assert (verdict.kind, verdict.culprits, verdict.certainty) == ("together", (), "exact")
    assert "No rank is missing from any collective." in verdict.explanation[0]


def test_healthy(tmp_path: Path) -> None:
    """All ranks have completed everything: healthy, as far as dumps show."""
    verdict = diagnose_folder(tmp_path, four())
    assert (verdict.kind, verdict.certainty) == ("healthy", "inferred")
    assert verdict.explanation == ("The dumps of 4 ranks agree, and nothing in them is pending.",)


def test_deadlock(tmp_path: Path) -> None:
    """Two groups in opposite order are a circle of waits."""
    one, other = ("1", "one"), ("2", "other")
    groups = {DEFAULT: [0, 1, 2, 3], one: [0, 1, 2, 3], other: [0, 1, 2, 3]}
    recorders = [
        r.call(group=other if r.rank == VICTIM else one, state="started")
        for r in four(groups=groups)
    ]
    verdict = diagnose_folder(tmp_path, recorders)
    assert (verdict.kind, verdict.culprits) == ("deadlock", (VICTIM,))
    assert {link["rank"] for link in verdict.facts["circle"]} >= {VICTIM}


def test_dumps_of_different_moments(tmp_path: Path) -> None:
    """What others have completed, a rank must have issued after its dump was made: it is not blamed
    for it."""
    recorders = [r.calls(0 if r.rank == VICTIM else 3) for r in four()]
    assert diagnose_folder(tmp_path, recorders).kind == "healthy"


def test_completion_of_a_broadcast_proves_nothing(tmp_path: Path) -> None:
    """The root of a broadcast may complete it before any other rank arrives: ranks behind it are
    still missing."""
    recorders = four()
    recorders[0].call("broadcast").call("broadcast", state="started")
    for recorder in (recorders[1], recorders[3]):
        recorder.call("broadcast", state="started")
    verdict = diagnose_folder(tmp_path, recorders)
    assert (verdict.kind, verdict.culprits) == ("missing", (VICTIM,))


def test_held_ranks_are_not_blamed(tmp_path: Path) -> None:
    """A rank that is still in a collective which all ranks have issued is not missing from the next
    one."""
    recorders = four()
    for recorder in recorders:
        recorder.call(
            "broadcast", state="started" if recorder.rank in (0, VICTIM) else "completed", line=11
        )
        if recorder.rank not in (0, VICTIM):
            recorder.call("broadcast", state="started", line=12)
    verdict = diagnose_folder(tmp_path, recorders)
    assert (verdict.kind, verdict.culprits, verdict.certainty) == ("together", (), "inferred")
    assert (
        verdict.explanation[0]
        == 'Ranks 0, 2 are still in #5 of group "default", which all ranks have issued; ranks 1, 3'
        " continued. No rank is missing from it."
    )
    assert verdict.collective is not None
    assert verdict.collective["number"] == 5


def test_only_missing_ranks_without_a_wait_are_blamed(tmp_path: Path) -> None:
    """Of two missing ranks, the one that is still in a collective which all ranks have issued is
    not a culprit."""
    recorders = four()
    for recorder in recorders:
        recorder.call("broadcast", state="started" if recorder.rank == 0 else "completed")
        recorder.calls(recorder.rank not in (0, VICTIM), state="started")
    verdict = diagnose_folder(tmp_path, recorders)
    assert (verdict.kind, verdict.culprits) == ("missing", (VICTIM,))
    assert "Rank 0 did not reach it either: it still waits in another call." in verdict.explanation


# -- messages and batches --------------------------------------------------------------------------


def ring(rank: int, rounds: int, *, wrong: int | None = None) -> Recorder:
    """Messages around a ring; in the last round one rank may listen to the wrong one. Those after
    it go on till they wait."""
    recorder, after, before = Recorder(rank), (rank + 1) % WORLD, (rank - 1) % WORLD
    goes_on = 0 if wrong is None else {wrong: 0, (wrong - 1) % WORLD: 0}.get(rank, 1)
    for number in range(rounds + goes_on):
        state = "completed" if number < rounds - 1 else "started"
        source = after if number == rounds - 1 and rank == wrong else before
        recorder.call(f"send {rank}->{after}", state=state).call(
            f"recv {rank}<-{source}", state=state
        )
    return recorder


def test_messages(tmp_path: Path) -> None:
    """Messages are matched by pair: a rank that listens to the wrong one is found."""
    verdict = diagnose_folder(tmp_path, [ring(rank, 4, wrong=VICTIM) for rank in range(WORLD)])
    assert (verdict.kind, verdict.culprits) == ("mismatch", (VICTIM,))
    assert verdict.facts["differs_in"] == ["peer"]


def test_messages_whose_beginning_is_lost(tmp_path: Path) -> None:
    """Messages are not matched if rings have lost different numbers of them; this is reported, and
    no rank is blamed."""
    verdict = diagnose_folder(tmp_path, [ring(rank, 9).forget(3 + rank) for rank in range(WORLD)])
    assert verdict.culprits == ()
    assert any(
        "the ring has lost the first sends and receives" in said for said in verdict.missing_data
    )


def test_batch_of_messages(tmp_path: Path) -> None:
    """A batch of messages is matched message by message; the entry that ends it is not a
    message."""
    recorders = [Recorder(rank) for rank in (0, 1)]
    for here, there in ((0, 1), (1, 0)):
        for _ in range(3):
            recorders[here].call(f"send {here}->{there}", state="scheduled")
            recorders[here].call(f"recv {here}<-{there}", state="scheduled", again=True).call(
                "coalesced", again=True
            )
    for recorder in recorders:
        recorder.groups = {DEFAULT: [0, 1]}
    assert diagnose_folder(tmp_path, recorders).kind == "healthy"
    assert [event.fields["op"] for event in read_dumps(tmp_path).boxes[0].events()] == [
        "send",
        "recv",
    ] * 3


def test_batch_of_collectives(tmp_path: Path) -> None:
    """The collectives of a batch are one call with one number; a rank whose batch is another one is
    found."""
    recorders = four()
    for recorder in recorders:
        for part in range(3):
            shape = (7,) if (recorder.rank, part) == (VICTIM, 1) else (4,)
            recorder.call("_all_gather_base", shape=shape, state="scheduled", again=part > 0)
        recorder.call("ALLGATHER_coalesced", again=True).call()
    verdict = diagnose_folder(tmp_path, recorders)
    assert (verdict.kind, verdict.culprits) == ("mismatch", (VICTIM,))
    assert verdict.collective is not None
    assert (verdict.collective["op"], verdict.collective["number"]) == (
        "all_gather_into_tensor_coalesced",
        5,
    )
    assert verdict.collective["shapes"] == [[4], [4], [4]]


# -- what is not there -----------------------------------------------------------------------------


def test_rank_without_a_dump(tmp_path: Path) -> None:
    """Where all others wait, the rank that left no dump is not named: the network may be the
    cause. The text says to look at it first."""
    verdict = diagnose_folder(
        tmp_path, [r.call(state="started") for r in four() if r.rank != VICTIM]
    )
    assert (verdict.kind, verdict.culprits, verdict.certainty) == ("missing", (), "unknown")
    assert "3 of 4 ranks: no dump of rank 2" in verdict.missing_data
    assert any(line.startswith("Look at rank 2 first") for line in verdict.explanation)


def test_half_written_dump(tmp_path: Path) -> None:
    """A cut dump does not prove that its rank is behind; it still proves that ranks differ."""
    recorders = [r.call(state="started") for r in four()]
    diagnose_folder(tmp_path, recorders)
    path = tmp_path / f"nccl_trace_rank_{VICTIM}"
    path.write_bytes(path.read_bytes()[:-700])
    verdict = consult_dumps(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.certainty) == ("missing", (), "unknown")
    assert any(
        "cut short: it ends at byte" in said and "its newest entries are lost" in said
        for said in verdict.missing_data
    )

    recorders[VICTIM].entries[1]["profiling_name"] = "nccl:broadcast"
    diagnose_folder(tmp_path, recorders)
    path.write_bytes(path.read_bytes()[:-700])
    verdict = consult_dumps(tmp_path)
    assert (verdict.kind, verdict.culprits) == ("mismatch", (VICTIM,))


def test_wrapped_rings(tmp_path: Path) -> None:
    """Rings that begin at different numbers are compared where they overlap; numbers are those of
    the job."""
    recorders = [r.calls(20) for r in four()]
    for recorder in recorders:
        recorder.call(shape=(5,) if recorder.rank == VICTIM else (4,), state="started").forget(
            3 * recorder.rank
        )
    verdict = diagnose_folder(tmp_path, recorders)
    assert (verdict.kind, verdict.culprits) == ("mismatch", (VICTIM,))
    assert verdict.collective is not None
    assert verdict.collective["number"] == 25
    assert (
        "the rings of 3 ranks have wrapped: only calls that all rings still hold were compared"
        in verdict.missing_data
    )


def test_group_that_left_the_ring(tmp_path: Path) -> None:
    """A rank whose ring holds nothing of a group any more is not blamed there; this is reported."""
    busy = ("1", "busy")
    groups = {DEFAULT: [0, 1, 2, 3], busy: [0, 1, 2, 3]}
    recorders = [Recorder(rank, groups=groups).calls(2, op="broadcast") for rank in range(WORLD)]
    for recorder in recorders:
        recorder.calls(9, group=busy)
    recorders[VICTIM].forget(2)
    verdict = diagnose_folder(tmp_path, recorders)
    assert (verdict.kind, verdict.culprits) == ("healthy", ())
    said = (
        'rank 2: the ring no longer holds calls of group "0"; it is unknown whether it reached #1'
    )
    assert said in verdict.missing_data


def test_numbers_that_no_rank_records(tmp_path: Path) -> None:
    """gloo counts calls that it does not record (a monitored barrier): such gaps do not prevent the
    comparison."""
    recorders = four()
    for recorder in recorders:
        recorder._numbers["0", False] += 2
        recorder.call(shape=(5,) if recorder.rank == VICTIM else (4,), backend="gloo")
    verdict = diagnose_folder(tmp_path, recorders)
    assert (verdict.kind, verdict.culprits) == ("mismatch", (VICTIM,))
    assert verdict.collective is not None
    assert verdict.collective["number"] == 5


# -- folders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["{}", "rank{}.json", "host/deep/trace-v2_{}", "comm_lib_trace_rank_{}.pickle"]
)
def test_any_name(name: str, tmp_path: Path) -> None:
    """A rank is the number at the end of a file's name, in any folder below; other files, and
    pipes, are not read."""
    (tmp_path / "README").write_text("dumps of Tuesday")
    os.mkfifo(tmp_path / "pipe_0")
    for recorder in four():
        (tmp_path / name.format(recorder.rank)).parent.mkdir(parents=True, exist_ok=True)
        recorder.write(tmp_path, name=name)
    assert sorted(read_dumps(tmp_path).boxes) == [0, 1, 2, 3]


def test_dumps_of_another_time(tmp_path: Path) -> None:
    """Of two sets of dumps in one folder the newer one is read; the other one is reported."""
    for recorder in four():
        recorder.write(tmp_path, name="old_{}")
        for entry in recorder.call(state="started").entries:
            entry["time_created_ns"] += 10**12
        recorder.write(tmp_path, name="new_{}")
    verdict = consult_dumps(tmp_path)
    assert verdict.kind == "together"
    assert (
        "left out 4 other dumps in the folder: older, or with another name" in verdict.missing_data
    )


def test_lines_of_the_user() -> None:
    """What is of Python, torch, another package, a compiler or torchwhere is not the user's line;
    all else is."""
    others = (
        "/usr/lib/python3.11/threading.py",
        "/home/user/venv/lib/python3.12/site-packages/lightning/trainer.py",
        "/home/user/pytorch/torch/distributed/distributed_c10d.py",
        "/home/user/pytorch/torch/_tensor.py",
        "/tmp/torchinductor_root/ab/cab.py",
        "<frozen runpy>",
        "/src/torchwhere/hooks/collectives.py",
    )
    assert {user_line({"filename": file, "line": 1}) for file in others} == {None}
    assert (
        user_line({"filename": "/home/user/torch/train.py", "line": 7})
        == "/home/user/torch/train.py:7"
    )


def test_dump_of_nccl(tmp_path: Path) -> None:
    """What NCCL's own recorder wrote on an H200, asked for through its pipe: ops, groups, numbers,
    sizes and lines are read."""
    shutil.copy(Path(__file__).parent / "golden/nccl-2.28.9-rank_0", tmp_path / "nccl_trace_rank_0")
    dumps = read_dumps(tmp_path)
    events = [event.to_dict() for event in dumps.events()]
    assert (list(dumps.boxes), dumps.boxes[0].has_states) == ([0], True)
    assert [event["number"] for event in events] == list(range(26))
    assert Counter(event["op"] for event in events) == {
        "all_reduce": 21,
        "broadcast": 4,
        "all_gather": 1,
    }
    assert {event["group_desc"] for event in events} == {"default_pg"}
    assert {event["dtype"] for event in events} == {"float32", "int32", "int64"}
    assert (events[-1]["line"], events[-1]["shapes"], events[-1]["bytes"]) == (
        "nccl.py:24",
        [[4]],
        16,
    )
    # DDP's: no frame of the user's
    assert [event["shapes"] for event in events if event["line"] is None][-1] == [[65792]]
    assert consult_dumps(tmp_path).kind == "healthy"


def test_nothing_to_read(tmp_path: Path) -> None:
    """Without a dump, the error says what was looked for."""
    how_to = "Flight recorder dumps are files whose names end in a rank, such as nccl_trace_rank_0"
    with pytest.raises(TorchwhereError, match=rf"^there is no folder {tmp_path}/none\. {how_to}$"):
        consult_dumps(tmp_path / "none")
    with pytest.raises(TorchwhereError, match=rf"^{tmp_path} holds no dump\. {how_to}$"):
        consult_dumps(tmp_path)
    (tmp_path / "trace_0").write_bytes(b"?")
    with pytest.raises(
        TorchwhereError, match=r"can be read\. trace_0: refused: neither a pickle nor JSON$"
    ):
        consult_dumps(tmp_path)
    (tmp_path / "trace_0").write_text('{"version": "2.10", "entries": null}')
    with pytest.raises(TorchwhereError, match=r"refused: .*: its entries are null, not a list$"):
        consult_dumps(tmp_path)


def test_empty_dumps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Dumps without entries and status show nothing. This is a verdict, also as JSON."""
    for rank in range(WORLD):
        Recorder(rank).write(tmp_path)
    assert main(["doctor", "--flight-recorder", str(tmp_path), "--json"]) == 1
    verdict = json.loads(capsys.readouterr().out)
    assert (verdict["kind"], verdict["certainty"]) == ("partial", "unknown")
    lines = verdict["text"].splitlines()
    assert lines[0] == "NOT KNOWN  4 ranks"
    assert lines[1].startswith("The dumps have no entries. Is the recorder on (TORCH_FR_BUFFER")


def test_one_empty_dump(tmp_path: Path) -> None:
    """A rank whose dump shows nothing may hang."""
    recorders = [*four()[:VICTIM], Recorder(VICTIM), *four()[VICTIM + 1 :]]
    verdict = diagnose_folder(tmp_path, recorders)
    assert (verdict.kind, verdict.certainty) == ("partial", "unknown")
    assert verdict.explanation[-1] == "The dump of rank 2 is empty."


# -- the command -----------------------------------------------------------------------------------


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`torchwhere doctor --flight-recorder` gives the verdict as text and as JSON; the exit code
    says sick or healthy."""
    for recorder in four():
        recorder.write(tmp_path / "well")
        recorder.calls(recorder.rank != VICTIM, state="started")
        recorder.write(tmp_path / "sick")
    assert main(["doctor", "--flight-recorder", str(tmp_path / "well")]) == 0
    assert main(["doctor", "--flight-recorder", str(tmp_path / "sick"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["kind"], found["culprits"]) == ("missing", [VICTIM])
    assert found["facts"]["flight_recorder"][0]["ranks"] == [
        {"ranks": [0, 1, 3], "issued": 5, "started": 5, "completed": 4},
        {"ranks": [2], "issued": 4, "started": 4, "completed": 4},
    ]
    assert main(["doctor"]) == 2
    assert (
        capsys.readouterr().err
        == "torchwhere: give the folder of a run, or --flight-recorder and a folder of dumps\n"
    )


def test_command_needs_no_torch(tmp_path: Path) -> None:
    """Dumps are read without torch."""
    for recorder in four():
        recorder.write(tmp_path)
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from torchwhere.cli import main; main(['doctor', '--flight-recorder', sys.argv[1]])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.splitlines()[0], done.stderr) == ("HEALTHY  4 ranks, (inferred)", "")


# -- the other way ---------------------------------------------------------------------------------


def torchfrtrace(folder: Path, *arguments: str) -> list[str]:
    """What PyTorch's own tool says about dumps."""
    from torch.distributed.flight_recorder.fr_trace import main as fr_trace

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("Flight Recorder")
    logger.addHandler(handler)
    try:
        fr_trace([str(folder), *arguments])
    finally:
        logger.removeHandler(handler)
        gc.enable()  # it turns the garbage collector off, and leaves it so
    return said


def work(folder: str) -> None:
    """A sound program with every kind of collective, on every rank."""
    rank = dist.get_rank()
    pair = dist.new_group([rank & ~1, rank | 1], group_desc="pair", use_local_synchronization=True)
    with torchwhere.watch(out=folder):
        model = DistributedDataParallel(nn.Linear(4, 4))
        for step in range(2):
            model(torch.ones(2, 4)).sum().backward()
            torchwhere.step(step)
        one, many = torch.ones(4), [torch.ones(4) for _ in range(WORLD)]
        dist.all_gather(many, one)
        dist.all_gather_into_tensor(torch.ones(16), one)
        dist.reduce_scatter(one, many)
        dist.reduce_scatter_tensor(torch.ones(1), one)
        dist.all_to_all_single(torch.ones(4), one)
        dist.gather(one, many if rank == 1 else None, dst=1)
        dist.scatter(one, many if rank == 1 else None, src=1)
        dist.broadcast(one, 3)
        dist.reduce(one, 3)
        dist.barrier()
        dist.all_gather_object([None] * WORLD, {"rank": rank})
        dist.all_reduce(one, group=pair)
        for peer in (rank ^ 1, 3 - rank):
            work = dist.isend(one, peer)
            dist.recv(one.clone(), peer)
            work.wait()
    dist.destroy_process_group(pair)


@pytest.fixture(scope="module")
def fresh_ranks() -> Iterator[Pool]:
    """Ranks of their own: in those that all tests share, a planted fault may have left the ranks'
    numbers apart."""
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def sound_run(fresh_ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "run"
    fresh_ranks.run(work, str(folder))
    return folder


def test_sound_run_is_sound_for_torchfrtrace(sound_run: Path, tmp_path: Path) -> None:
    """Every kind of collective of a sound run is written, and PyTorch's own tool finds no fault in
    it."""
    written = write_dumps(torchwhere.read_run(sound_run), folder=tmp_path / "dumps")
    assert written.left_out == {}
    assert written.ranks == (0, 1, 2, 3)
    assert torchfrtrace(tmp_path / "dumps") == []


def test_place_rides_along(sound_run: Path, tmp_path: Path) -> None:
    """What was written is read back as it was: what was issued, on which groups, and where."""
    run = torchwhere.read_run(sound_run)
    write_dumps(run, folder=tmp_path / "dumps")
    dumps = read_dumps(tmp_path / "dumps")
    places = ("step", "pass_", "module", "call", "line")
    fields = (
        "op",
        "group",
        "number",
        "dtype",
        "shapes",
        "out_shapes",
        "bytes",
        "peer",
        "reduce_op",
        "for",
        "async",
        "mesh_dim",
    )
    for rank, box in run.boxes.items():
        one, other = (
            [
                [getattr(event.place, name) for name in places]
                + [event.fields[name] for name in fields]
                for event in found.events(kinds={"collective"})
            ]
            for found in (box, dumps.boxes[rank])
        )
        assert one == other
        assert len(one) > 20
    assert consult_dumps(tmp_path / "dumps").kind == "healthy"


def test_dumps_hold_plain_data(sound_run: Path, tmp_path: Path) -> None:
    """What is written has no globals either, and the frame that torchfrtrace prints says the
    place."""
    write_dumps(torchwhere.read_run(sound_run), folder=tmp_path / "dumps")
    data = (tmp_path / "dumps" / "torchwhere_rank_0").read_bytes()
    assert data[:2] == b"\x80\x02"
    frames = [entry["frames"][0] for entry in pickle.loads(data)["entries"]]
    assert any(frame["name"].startswith("backward of ") for frame in frames)
    assert {Path(frame["filename"]).name for frame in frames} == {"test_flight_recorder.py"}


def test_rings_are_written_from_where_all_have_them(fresh_ranks: Pool, tmp_path: Path) -> None:
    """Of rings that begin at different numbers only the common part is written; PyTorch's tool
    finds no fault in it."""
    fresh_ranks.run(overflow, str(tmp_path / "run"))
    run = torchwhere.read_run(tmp_path / "run")
    firsts = {next(box.events(kinds={"collective"})).fields["number"] for box in run.boxes.values()}
    assert len(firsts) > 1
    written = write_dumps(run, folder=tmp_path / "dumps")
    assert list(written.left_out) == ["that not all ranks of their group still hold"]
    assert "left out:" in str(written)
    assert torchfrtrace(tmp_path / "dumps") == []


def overflow(folder: str) -> None:
    """More than a ring holds, with notes on some ranks."""
    with torchwhere.watch(out=folder, records=64):
        for _ in range(80):
            dist.all_reduce(torch.ones(1))
            if dist.get_rank() == VICTIM:
                torchwhere.note("one record more")


def test_write_command(sound_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`torchwhere flight-recorder` writes dumps and says how to read them; it writes into no folder
    that holds something."""
    assert main(["flight-recorder", str(sound_run), "-o", str(tmp_path / "dumps")]) == 0
    said = capsys.readouterr().out
    assert said.startswith("4 dumps with ")
    assert said.endswith(
        f" entries in {tmp_path}/dumps. Read them with: torchfrtrace {tmp_path}/dumps\n"
    )
    assert main(["flight-recorder", str(sound_run), "-o", str(tmp_path / "dumps")]) == 2
    reason = (
        "is not an empty folder: torchfrtrace would read the files in it. Choose another folder"
    )
    assert capsys.readouterr().err == f"torchwhere: {tmp_path}/dumps {reason}\n"
    assert main(["flight-recorder", str(sound_run), "-o", str(tmp_path / "more"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == [0, 1, 2, 3]


def test_verdict_with_both(
    sound_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a run and dumps, the verdict is the run's, with what the dumps add."""
    for recorder in four():
        recorder.write(tmp_path)
    assert main(["doctor", str(sound_run), "--flight-recorder", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [group["group"] for group in found["facts"]["flight_recorder"]] == ["default"]
    assert any(said.startswith("flight recorder: ") for said in found["missing_data"])


# -- real faults -----------------------------------------------------------------------------------

# What torchfrtrace must say of the dumps that are written from the boxes. It sees no silent
# mismatch, and matches no roots.
NAMED = {
    "wrong_order": "Culprit rank 2; Error type: COLLECTIVE_TYPE_MISMATCH",
    "opposite_groups": "missing ranks: {2}",
    "barrier_on_one": "missing ranks: {0, 1, 3}",
    "lock": "missing ranks: {2}",
    "sigstop": "missing ranks: {2}",
    "swapped": None,
}
if os.environ.get("TORCHWHERE_ALL_VICTIMS"):
    NAMED |= {
        "extra": "Culprit rank 2; Error type: SIZE_OR_SYNTAX_MISMATCH",
        "wrong_shape": "Culprit rank 2; Error type: SIZE_OR_SYNTAX_MISMATCH",
        "skipped_layer": "Culprit rank 2; Error type: COLLECTIVE_TYPE_MISMATCH",
        "object_missed": "Culprit rank 2; Error type: COLLECTIVE_TYPE_MISMATCH",
        "data_loader": "missing ranks: {2}",
        "gil": "missing ranks: {2}",
        "endless_loop": "missing ranks: {2}",
    }


class DumpingNursery(Nursery):
    """The doctor's jobs, whose ranks dump when they are asked to."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", "import dumping_jobs; dumping_jobs.serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Verdict, Path]]:
    """All jobs at once, till each has its verdict and its dumps: the verdict from its boxes, and
    its folder."""
    folders = {name: tmp_path_factory.mktemp(name) for name in NAMED}
    nursery, verdicts = DumpingNursery(), {}
    jobs = {name: nursery.start(name, VICTIM, folder) for name, folder in folders.items()}
    try:
        for name, folder in folders.items():
            verdicts[name] = wait_for_verdict(folder / "run", FAULTS[name][1]), folder
            (folder / "dump").touch()
        deadline = time.monotonic() + 30
        while not all(map(has_dumps, folders, folders.values())) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        for pids in jobs.values():
            kill(pids)
        nursery.close()
    for folder in folders.values():
        write_dumps(torchwhere.read_run(folder / "run"), folder=folder / "written")
    return verdicts


UNNAMED = {("barrier_on_one", "pickle"), ("barrier_on_one", "json")}


def has_dumps(name: str, folder: Path) -> bool:
    return len(list(folder.glob("json/trace_rank_*"))) == WORLD - (name in ("sigstop", "gil"))


def has_dump(verdict: Verdict, ranks: tuple[int, ...]) -> bool:
    return set(ranks) <= verdict.ranks.keys()


@pytest.mark.parametrize("name", NAMED)
def test_real_fault(name: str, faults: dict[str, tuple[Verdict, Path]]) -> None:
    """Boxes, gloo's own dumps and the dumps that we write of the boxes give one verdict; PyTorch's
    tool agrees on the last. A rank that could not write a dump is not named by those of others, and
    of a barrier on one rank, gloo's dumps do not show where the others are."""
    live, folder = faults[name]
    assert has_dumps(name, folder)
    verdicts = {kind: consult_dumps(folder / kind) for kind in ("pickle", "json", "written")}
    for kind, verdict in verdicts.items():
        if (name, kind) != ("swapped", "json"):  # without stacks there is nothing to see
            is_named = has_dump(verdict, live.culprits) and (name, kind) not in UNNAMED
            culprits = live.culprits if is_named else ()
            assert (kind, verdict.kind, verdict.culprits) == (
                kind,
                live.kind,
                culprits,
            ), verdict.explanation
    assert any("gloo's recorder keeps no sends" in said for said in verdicts["pickle"].missing_data)
    said, named = torchfrtrace(folder / "written"), NAMED[name]
    assert any(named in line for line in said) if named is not None else not said


def test_torchfrtrace_as_a_command(faults: dict[str, tuple[Verdict, Path]]) -> None:
    """The command that comes with torch reads what we write, ends well, and prints our place as a
    stack."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.flight_recorder.fr_trace",
        str(faults["lock"][1] / "written"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0
    assert "Not all ranks joining collective, sequence number: 13" in done.stderr
    assert "missing ranks: {2}" in done.stderr
    assert "outside, step 4 at faulty_jobs.py:" in done.stderr
