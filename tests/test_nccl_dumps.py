"""What the doctor says about flight recorder dumps of four NCCL ranks, as production writes them.

`nccl_dumps.txz` holds the dumps of the jobs in `nccl_jobs.py`, recorded on an H200 without timing:
`all` entries, only `active` ones as pickle and as JSON, and what the watchdog wrote after a timeout.
The fault is always on rank 2. `nccl_failures.txz` holds dumps with timing, of jobs that failed.
`test_derived_dumps.py` reads dumps derived from these, `test_timed_dumps.py` dumps with timing.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nccl_jobs import DUMPS, JOBS, write_dumps
from test_nccl_runs import unpacked
from torchwhere.cli import main
from torchwhere.core.place import Certainty
from torchwhere.diagnose.doctor.verdict import Verdict
from torchwhere.flight_recorder.verdict import consult_dumps

Dump = dict[str, Any]
HEALTHY, TOGETHER, PARTIAL = ("healthy", ()), ("together", ()), ("partial", ())
MISSING, MISMATCH, DEADLOCK = ("missing", (2,)), ("mismatch", (2,)), ("deadlock", (2,))
UNKNOWN = ("missing", ())
NOT_KNOWN = ("missing", ())
VICTIM, OTHERS = 2, (0, 1, 3)
KINDS = ("all", "active", "active_json", "watchdog")

# The verdict on each kind of dump: all, active, active as JSON, watchdog. None: not recorded.
TABLE: dict[str, tuple[tuple[str, tuple[int, ...]] | None, ...]] = {
    # nothing is pending
    "healthy_ddp": (HEALTHY, HEALTHY, HEALTHY, None),
    "healthy_fsdp2": (HEALTHY, HEALTHY, HEALTHY, None),
    # the job progresses; without timing, dumps do not show that a device is slow
    # the status of active dumps shows calls that no watchdog has confirmed: perhaps aborted ones
    "slow_ddp": (HEALTHY, PARTIAL, PARTIAL, None),
    # replays of a graph are not recorded
    "replay_skipped": (HEALTHY, HEALTHY, HEALTHY, None),
    # the job goes on after it; active entries show only the progress
    "wrong_size": (MISMATCH, HEALTHY, HEALTHY, None),
    # all ranks have issued the same calls, and dumps without timing are equal
    "endless_ddp": (TOGETHER, TOGETHER, TOGETHER, TOGETHER),
    "endless_fsdp2": (TOGETHER, TOGETHER, TOGETHER, TOGETHER),
    # with all entries, buffered sends of rank 1 show that rank 2 has not reached its own
    "endless_pipeline": (MISSING, TOGETHER, TOGETHER, TOGETHER),
    "opposite_groups": (DEADLOCK, DEADLOCK, DEADLOCK, None),
    "stuck_cpu": (MISSING, MISSING, MISSING, MISSING),
    # rank 2 cannot write a dump; without timing, the others may be the cause as well
    "stopped": (UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN),
    "extra": (MISMATCH, MISMATCH, MISMATCH, MISMATCH),
    "skipped": (MISMATCH, MISMATCH, MISMATCH, MISMATCH),
}


def recorded_folders(
    table: Mapping[str, Sequence[Any]], kinds: Sequence[str]
) -> list[tuple[str, str, Any]]:
    """Job, kind and verdict of each folder of dumps that was recorded."""
    return [
        (job, kind, verdict)
        for job, verdicts in table.items()
        for kind, verdict in zip(kinds, verdicts, strict=True)
        if verdict is not None
    ]


def for_each(folders: Sequence[tuple[str, str, Any]]) -> pytest.MarkDecorator:
    ids = [f"{job}-{kind}" for job, kind, _ in folders]
    return pytest.mark.parametrize(("job", "kind", "expected"), folders, ids=ids)


FOLDERS = recorded_folders(TABLE, KINDS)
each_folder = for_each(FOLDERS)
each_job = pytest.mark.parametrize("job", TABLE)


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked("nccl_dumps.txz", tmp_path_factory.mktemp("dumps"))


def read(folder: Path) -> dict[int, Dump]:
    """The dumps of a folder by rank."""
    contents = {
        int(path.name.removeprefix("rank_")): path.read_bytes() for path in folder.iterdir()
    }
    return {
        rank: json.loads(data) if data[:1] == b"{" else pickle.loads(data)
        for rank, data in sorted(contents.items())
    }


def diagnosed(folder: Path, ranks: dict[int, Dump]) -> Verdict:
    folder.mkdir(exist_ok=True)
    for rank, dump in ranks.items():
        (folder / f"rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
    return consult_dumps(folder)


def conclusion(verdict: Verdict) -> tuple[str, tuple[int, ...]]:
    return str(verdict.kind), verdict.culprits


# -- the recorded dumps ----------------------------------------------------------------------------


def test_table(dumps: Path) -> None:
    """The table has a line for each folder that was recorded."""
    folders = {(path.parent.name, path.name) for path in dumps.glob("*/*")}
    assert folders == {(job, kind) for job, kind, _ in FOLDERS}


@each_folder
def test_recorded(dumps: Path, job: str, kind: str, expected: tuple[str, tuple[int, ...]]) -> None:
    """The verdict names the fault and rank 2, or no rank where the dumps cannot tell."""
    assert conclusion(consult_dumps(dumps / job / kind)) == expected


@each_folder
def test_the_rule_for_live_jobs(job: str, kind: str, expected: tuple[str, tuple[int, ...]]) -> None:
    """What `test_gpu.py` lets a verdict from dumps say: each verdict here, and never that another
    rank is the culprit or that a hang is healthy."""
    live = JOBS[job][1]
    for certainty in Certainty:
        assert live.allows(*expected, certainty)
        assert not any(live.allows(expected[0], (rank,), certainty) for rank in OTHERS)
        is_hang = live.kind in ("missing", "deadlock")
        assert not is_hang or not live.allows("healthy", (), certainty)


def test_the_rule_for_healthy_jobs() -> None:
    """Dumps may leave open whether a healthy job hangs. They never name a rank of it, and never
    say that a rank is missing."""
    healthy = JOBS["healthy_ddp"][1]
    assert healthy.allows("missing", (), Certainty.UNKNOWN)
    assert healthy.allows("partial", (), Certainty.UNKNOWN)
    assert not healthy.allows("missing", (VICTIM,), Certainty.UNKNOWN)
    assert not healthy.allows("missing", (), Certainty.INFERRED)
    assert not healthy.allows("missing", (), Certainty.EXACT)
    assert not healthy.allows("deadlock", (), Certainty.UNKNOWN)


def test_dumps_of_a_rank(one_rank: None, tmp_path: Path) -> None:
    """The dumps that the jobs write when they are asked to can be read."""
    dist.all_reduce(torch.ones(4))
    write_dumps(tmp_path, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(DUMPS)
    assert conclusion(consult_dumps(tmp_path / "all"))[1] == ()


@pytest.mark.parametrize("removed", OTHERS)
@each_folder
def test_without_a_healthy_rank(
    dumps: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    job: str,
    kind: str,
    expected: tuple[str, tuple[int, ...]],
    removed: int,
) -> None:
    """If the dump of a healthy rank is missing, no rank that has a dump is blamed for it."""
    verdict = without(dumps / job / kind, tmp_path, removed, capsys=capsys)
    culprits = tuple(verdict["culprits"])
    if job in ("endless_ddp", "endless_fsdp2"):  # as if the process of that rank was stopped
        assert (verdict["kind"], culprits) == UNKNOWN
        assert f"Look at rank {removed} first" in verdict["text"]
    elif expected[1] and culprits != expected[1]:
        # what shows the fault is lost with the dump: two ranks are missing, or no rank is left
        # that shares both groups, or shows that sends are buffered
        assert (job, removed) in {
            *(("stopped", rank) for rank in OTHERS),
            ("skipped", 3),
            ("endless_pipeline", 1),
        }
        assert culprits == ()
        assert verdict["kind"] != "healthy"
    else:
        assert culprits == expected[1]


@each_folder
def test_without_the_culprit(
    dumps: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    job: str,
    kind: str,
    expected: tuple[str, tuple[int, ...]],
) -> None:
    """If the dump of the culprit is missing, no rank that only waits is blamed, and a job without a
    hang is not called healthy: the rank may hang."""
    verdict = without(dumps / job / kind, tmp_path, VICTIM, capsys=capsys)
    assert verdict["culprits"] in ([], [VICTIM])
    is_hang = job not in ("healthy_ddp", "healthy_fsdp2", "slow_ddp", "replay_skipped")
    if is_hang and job != "wrong_size":
        assert verdict["kind"] == "missing"
    else:
        assert (verdict["kind"], verdict["certainty"]) == ("partial", "unknown")
        assert "There is no dump of rank 2: it may hang." in verdict["text"]


@pytest.mark.parametrize("kind", ["all", "active", "active_json"])
@each_job
def test_few_dumps(
    dumps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], job: str, kind: str
) -> None:
    """With the dumps of one or two ranks, there is always JSON, no rank that only waits is blamed,
    and no job is called healthy."""
    present = [int(path.name.removeprefix("rank_")) for path in (dumps / job / kind).iterdir()]
    pairs = [*combinations(present, 1), *combinations(present, 2)]
    for number, left in enumerate(pairs):
        copied = tmp_path / str(number)
        copied.mkdir()
        verdict = without(dumps / job / kind, copied, *set(present).difference(left), capsys=capsys)
        assert verdict["kind"] != "healthy"
        assert set(verdict["culprits"]) <= {VICTIM}


def without(
    folder: Path, copied: Path, *removed: int, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    """The JSON of the command on a folder without the dumps of some ranks."""
    for path in folder.iterdir():
        if path.name not in {f"rank_{rank}" for rank in removed}:
            (copied / path.name).write_bytes(path.read_bytes())
    main(["doctor", "--flight-recorder", str(copied), "--json"])
    verdict: dict[str, Any] = json.loads(capsys.readouterr().out)
    return verdict


# -- dumps of jobs that failed ---------------------------------------------------------------------

# The verdict on the dumps alone. In all but three jobs, rank 2 left none. A network that fails, and
# one dump that was not collected, would look the same.
FAILURES = {
    "device_assert": (NOT_KNOWN, "unknown"),
    "exited": (NOT_KNOWN, "unknown"),  # rank 0 left no dump either
    "illegal_address": (NOT_KNOWN, "unknown"),
    "illegal_address_unexplained": (NOT_KNOWN, "unknown"),
    "raised": (NOT_KNOWN, "unknown"),
    "timeout_cpu": (MISSING, "exact"),
    "timeout_cpu_torchrun": (MISSING, "exact"),
    "timeout_device": (MISSING, "exact"),
}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dumps of jobs that failed, with their times, without their boxes."""
    runs = unpacked("nccl_failures.txz", tmp_path_factory.mktemp("failures"))
    folder = tmp_path_factory.mktemp("dumps_of_failures")
    for path in runs.glob("*/flight_recorder_rank_*"):
        (folder / path.parent.name).mkdir(exist_ok=True)
        shutil.copy2(path, folder / path.parent.name)
    return folder


def test_failures(failures: Path) -> None:
    """The dumps of a job that failed name rank 2, or no rank where they cannot tell."""
    verdicts = {folder.name: consult_dumps(folder) for folder in failures.iterdir()}
    assert {
        name: (conclusion(verdict), verdict.certainty) for name, verdict in verdicts.items()
    } == FAILURES


@pytest.mark.parametrize("removed", range(4))
def test_failures_without_a_dump(failures: Path, tmp_path: Path, removed: int) -> None:
    """Without one more dump, a rank is named only if its own dump shows it."""
    for folder in failures.iterdir():
        (tmp_path / folder.name).mkdir()
        for path in folder.iterdir():
            if not path.name.endswith(f"_{removed}"):
                shutil.copy2(path, tmp_path / folder.name)
        verdict = consult_dumps(tmp_path / folder.name)
        has_dump = removed != VICTIM and folder.name.startswith("timeout")
        assert verdict.culprits == ((VICTIM,) if has_dump else ())
        assert verdict.kind in ("missing", "partial")


def test_which_rank_to_look_at(failures: Path) -> None:
    """A rank without a dump is not named, and the text says to look at it first."""
    for name in ("device_assert", "illegal_address", "illegal_address_unexplained", "raised"):
        lines = consult_dumps(failures / name).explanation
        assert any(line.startswith("Look at rank 2 first: ") for line in lines)
        assert (
            "The culprit is unknown. All ranks with a dump have reached this call: rank 2 has not,"
            " or it has and the network between the ranks is the cause."
        ) in lines


@pytest.mark.parametrize("uncollected", OTHERS)
def test_failures_and_a_healthy_rank_look_the_same(
    failures: Path, tmp_path: Path, uncollected: int
) -> None:
    """Four healthy ranks in a slow call, of which one dump was not collected, leave the dumps that
    the three other ranks of a failed one leave. So neither rank can be named."""
    for name in ("device_assert", "illegal_address", "illegal_address_unexplained", "raised"):
        folder = tmp_path / name
        shutil.copytree(failures / name, folder)
        dumps = {rank: folder / f"flight_recorder_rank_{rank}" for rank in range(4)}
        shutil.copy2(dumps[uncollected], dumps[VICTIM])  # rank 2 is in the call, like the others
        dumps[uncollected].unlink()
        verdicts = consult_dumps(failures / name), consult_dumps(folder)
        assert [conclusion(verdict) for verdict in verdicts] == [NOT_KNOWN, NOT_KNOWN]
        assert [verdict.certainty for verdict in verdicts] == ["unknown", "unknown"]
        assert f"Look at rank {uncollected} first" in "\n".join(verdicts[1].explanation)


def test_aborted_calls(failures: Path) -> None:
    """A call that was complete only when the dump was written, and that another rank has not
    completed, was aborted."""
    verdict = consult_dumps(failures / "exited")
    assert verdict.explanation[0] == (
        'Ranks 1, 3 issued all_reduce of float32 [131584], #20 of group "default", which is not'
        " complete."
    )
    assert verdict.facts["flight_recorder"][0]["ranks"] == [
        {"ranks": [3], "issued": 22, "started": None, "completed": 19},
        {"ranks": [1], "issued": 21, "started": 20, "completed": 19},
    ]
