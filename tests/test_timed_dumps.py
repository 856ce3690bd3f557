"""What the doctor says about flight recorder dumps with timing (TORCH_NCCL_ENABLE_TIMING=1).

`nccl_timed_dumps.txz` holds the dumps of the jobs in `nccl_jobs.py`, written on an H200 while they
ran: `all` entries, only `active` ones, and what the watchdog wrote. The fault is always on rank 2.
The times of the files are cut to full seconds, so they may be 1 s too early; times inside the dumps
are exact. The tests of ages set the times of the files.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from nccl_jobs import JOBS
from test_derived_dumps import with_completed
from test_nccl_dumps import (
    OTHERS,
    VICTIM,
    Dump,
    conclusion,
    diagnosed,
    for_each,
    read,
    recorded_folders,
)
from test_nccl_runs import unpacked
from torchwhere.diagnose.doctor.verdict import Verdict
from torchwhere.flight_recorder.verdict import consult_dumps

HEALTHY = ("healthy", (), "inferred")
PARTIAL = ("partial", (), "unknown")
UNKNOWN = ("missing", (), "unknown")
EXACT, INFERRED = ("missing", (2,), "exact"), ("missing", (2,), "inferred")
DEADLOCK = ("deadlock", (2,), "inferred")
SKIPPED, EXTRA = ("mismatch", (2,), "inferred"), ("mismatch", (2,), "exact")
Expected = tuple[str, tuple[int, ...], str]

# The verdict on each kind of dump: all, active, watchdog. None: not written.
TABLE: dict[str, tuple[Expected | None, ...]] = {
    # jobs that progress
    "healthy_ddp": (UNKNOWN, UNKNOWN, None),
    "healthy_fsdp2": (HEALTHY, HEALTHY, None),
    "healthy_far_ahead": (UNKNOWN, UNKNOWN, None),
    "healthy_long_kernels": (UNKNOWN, UNKNOWN, None),
    # active dumps do not show when the last call completed
    "slow_ddp": (UNKNOWN, INFERRED, None),
    "slow_sometimes": (UNKNOWN, UNKNOWN, None),
    "endless_ddp": (EXACT, INFERRED, None),
    "endless_fsdp2": (EXACT, INFERRED, None),
    "endless_pipeline": (EXACT, INFERRED, None),
    "endless_tensor_parallel": (INFERRED, INFERRED, None),  # ranks 0 and 1 wrote none
    "opposite_groups": (DEADLOCK, DEADLOCK, None),
    "stuck_cpu": (EXACT, EXACT, None),
    "stopped": (UNKNOWN, UNKNOWN, None),  # rank 2 wrote none
    "extra": (EXTRA, EXTRA, None),
    "skipped": (SKIPPED, SKIPPED, None),
    "timeout_cpu": (EXACT, EXACT, EXACT),
    "timeout_device": (EXACT, INFERRED, None),
    # only some ranks wrote dumps
    "killed": (UNKNOWN, UNKNOWN, UNKNOWN),
    "destroy_with_pending_work": (UNKNOWN, PARTIAL, None),
}
KINDS = ("all", "active", "watchdog")
FOLDERS = recorded_folders(TABLE, KINDS)
each_folder = for_each(FOLDERS)
NO_HANG_SHOWN = "The dumps do not show a hang: the job may be progressing."
ONLY_SLOW = (
    "If the job still progressed when the dumps were written, the device of rank 2 is only slow."
)
NOT_REACHED = "The device of rank 2 has not reached "
CONTRADICTION = re.compile(r"The dumps? of (ranks? .*?) shows? .*? as not complete\. R(ank.*?) ha")


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked("nccl_timed_dumps.txz", tmp_path_factory.mktemp("dumps"))


def of(verdict: Verdict) -> Expected:
    return *conclusion(verdict), str(verdict.certainty)


# -- the recorded dumps ----------------------------------------------------------------------------


def test_table(dumps: Path) -> None:
    """The table has a line for each folder that was recorded."""
    folders = {(path.parent.name, path.name) for path in dumps.glob("*/*")}
    assert folders == {(job, kind) for job, kind, _ in FOLDERS}


@each_folder
def test_recorded(dumps: Path, job: str, kind: str, expected: Expected) -> None:
    """The verdict names the fault and rank 2, or no rank where the dumps cannot tell; `test_gpu.py`
    accepts it."""
    verdict = consult_dumps(dumps / job / kind)
    assert of(verdict) == expected
    assert JOBS[job][1].allows(verdict.kind, verdict.culprits, verdict.certainty)


@pytest.mark.parametrize("removed", OTHERS)
@each_folder
def test_without_a_healthy_rank(
    dumps: Path, tmp_path: Path, job: str, kind: str, expected: Expected, removed: int
) -> None:
    """If the dump of a healthy rank is missing, no healthy rank is named, and no live job gets a
    verdict that is more certain."""
    ranks = read(dumps / job / kind)
    if ranks.keys() <= {removed}:
        pytest.skip("no other rank has written a dump")
    ranks.pop(removed, None)
    verdict = consult_dumps(rewritten(tmp_path, ranks, dumps / job / kind))
    assert verdict.culprits in ((), expected[1])
    assert verdict.kind != "healthy" or removed not in read(dumps / job / kind)
    assert verdict.certainty != "exact" or expected[2] == "exact"


def rewritten(folder: Path, ranks: dict[int, Dump], recorded: Path) -> Path:
    """Dumps with the times of the recorded files."""
    diagnosed(folder, ranks)
    for path in folder.iterdir():
        time_ns = (recorded / path.name).stat().st_mtime_ns
        os.utime(path, ns=(time_ns, time_ns))
    return folder


# -- calls that a CPU is just issuing --------------------------------------------------------------


@pytest.mark.parametrize("job", ["healthy_far_ahead", "endless_fsdp2", "opposite_groups"])
def test_a_cpu_in_a_launch(dumps: Path, job: str) -> None:
    """A CPU that fills the stream is blocked in a launch, and the recorder shows that call as
    completed. It is not: no sentence says that calls after the pending one are complete."""
    ranks = read(dumps / job / "all")
    last = [dump["entries"][-1] for dump in ranks.values()]
    assert any(entry["state"] == "completed" and not entry["retired"] for entry in last)
    verdict = consult_dumps(dumps / job / "all")
    number = (verdict.collective or {})["number"]
    completed = [
        reached["completed"]
        for group in verdict.facts["flight_recorder"]
        for reached in group["ranks"]
    ]
    assert max(completed) == number - 1
    assert not any(CONTRADICTION.search(line) for line in verdict.explanation)


@pytest.mark.parametrize("age_s", [0.2, 100.0], ids=["file", "copy"])
@pytest.mark.parametrize("rank", range(4))
def test_a_call_that_completed_after_the_status(
    dumps: Path, tmp_path: Path, rank: int, age_s: float
) -> None:
    """The status of a group is read before its entries. A call that was launched and completed in
    between counts as pending, but it was issued a moment before: no rank is named."""
    ranks = read(dumps / "healthy_fsdp2" / "all")
    ranks[rank]["pg_status"]["0"]["last_enqueued_collective"] -= 2
    ranks[rank]["pg_status"]["0"]["last_completed_collective"] -= 2
    for entry in ranks[rank]["entries"][-2:]:
        entry["retired"] = False
    newest_ns = max(dump["entries"][-1]["time_created_ns"] for dump in ranks.values())
    diagnosed(tmp_path, ranks)
    set_times(tmp_path, newest_ns + int(age_s * 1e9))
    verdict = consult_dumps(tmp_path)
    assert verdict.culprits == ()
    assert verdict.certainty in ("unknown", "inferred")
    assert verdict.kind in ("missing", "healthy")


@pytest.mark.parametrize("has_status", [True, False])
def test_calls_that_are_not_in_a_launch(dumps: Path, tmp_path: Path, has_status: bool) -> None:
    """Without a status, or with messages in the group, nothing shows that a call is in its
    launch."""
    ranks = read(dumps / "healthy_fsdp2" / "all")
    for dump in ranks.values():
        dump["entries"][-1]["retired"] = False
        dump["pg_status"]["0"]["last_enqueued_collective"] -= 1
        if has_status:
            dump["entries"][0] |= {"is_p2p": True, "profiling_name": "nccl:send 0->1"}
        else:
            dump["pg_status"] = {}
    assert diagnosed(tmp_path, ranks).kind in ("healthy", "partial")


def test_ranks_that_are_behind_at_different_calls(dumps: Path, tmp_path: Path) -> None:
    """No sentence names a rank both as one that has not completed a call and as one that has."""
    ranks = read(dumps / "endless_ddp" / "all")
    for rank, number in ((0, 25), (1, 25), (3, 23)):
        ranks[rank] = with_completed(ranks[rank], number)
    verdict = diagnosed(tmp_path, ranks)
    assert of(verdict) == UNKNOWN
    assert verdict.explanation[0].startswith("The dump of rank 2 shows all_reduce ")
    assert verdict.explanation[0].endswith(" as not complete. Ranks 0-1, 3 have completed it.")


# -- devices that are only slow --------------------------------------------------------------------

AHEAD_NS = 5_000_000_000  # so long before the others were its pending calls issued


def set_times(folder: Path, time_ns: int) -> None:
    for path in folder.iterdir():
        os.utime(path, ns=(time_ns, time_ns))


def last_completed_ns(dump: Dump) -> int:
    retired = [entry for entry in dump["entries"] if entry["retired"]]
    return max(entry["time_discovered_completed_ns"] for entry in retired)


def made_after(folder: Path, ranks: dict[int, Dump], age_s: float) -> Verdict:
    """The verdict on dumps that were written some seconds after rank 2 completed its last call, by
    CPUs that had issued the pending calls long before."""
    for dump in ranks.values():
        for entry in dump["entries"]:
            if entry["state"] != "completed":
                entry["time_created_ns"] -= AHEAD_NS
    diagnosed(folder, ranks)
    set_times(folder, last_completed_ns(ranks[VICTIM]) + int(age_s * 1e9))
    return consult_dumps(folder)


HANGS = [
    "endless_ddp",
    "endless_fsdp2",
    "endless_pipeline",
    "opposite_groups",
    "skipped",
    "stuck_cpu",
]


@pytest.mark.parametrize("age_s", [0.1, 0.8])
@pytest.mark.parametrize("job", HANGS)
def test_a_call_that_just_completed(dumps: Path, tmp_path: Path, job: str, age_s: float) -> None:
    """If a rank that others wait for completed a call a moment before its dump was written, the
    dumps show no hang, although the pending calls were issued seconds before."""
    verdict = made_after(tmp_path, read(dumps / job / "all"), age_s)
    assert of(verdict) == UNKNOWN
    assert " completed " in verdict.explanation[0]
    assert " s before " in verdict.explanation[0]
    assert verdict.explanation[1] == NO_HANG_SHOWN


@pytest.mark.parametrize("job", HANGS)
def test_a_call_that_completed_long_ago(dumps: Path, tmp_path: Path, job: str) -> None:
    """Some seconds later, the same dumps show the hang."""
    verdict = made_after(tmp_path, read(dumps / job / "all"), 3.0)
    assert of(verdict) == TABLE[job][0]
    assert ONLY_SLOW not in verdict.explanation


def test_slow_device(dumps: Path) -> None:
    """A device that is only slow: with all entries no hang is shown; the active ones do not show
    when its last call completed, and the verdict says so."""
    lines = consult_dumps(dumps / "slow_ddp" / "all").explanation
    assert lines[:2] == (
        "The device of rank 2 completed a call at most 0.2 s before its dump was written.",
        NO_HANG_SHOWN,
    )
    lines = consult_dumps(dumps / "slow_ddp" / "active").explanation
    assert lines[0].startswith(NOT_REACHED)
    assert ONLY_SLOW in lines


def test_a_pending_call_that_timed_out(dumps: Path, tmp_path: Path) -> None:
    """Active dumps show that the wait is long if the call of the culprit has timed out (7 s). They
    do not if calls completed that the watchdog has not seen: it may be stuck itself."""
    ranks = read(dumps / "timeout_device" / "active")
    issued_ns = ranks[VICTIM]["entries"][0]["time_created_ns"]
    for completed, age_s, expected in ((22, 6, INFERRED), (22, 8, EXACT), (19, 8, INFERRED)):
        ranks[VICTIM]["pg_status"]["0"]["last_completed_collective"] = completed
        diagnosed(tmp_path, ranks)
        set_times(tmp_path, issued_ns + age_s * 1_000_000_000)
        verdict = consult_dumps(tmp_path)
        assert of(verdict) == expected
        assert (ONLY_SLOW in verdict.explanation) == (expected == INFERRED)


def test_a_timeout_counts_more_than_progress(dumps: Path, tmp_path: Path) -> None:
    """If a pending call has timed out, the rank is named although it completes other calls."""
    ranks = read(dumps / "endless_tensor_parallel" / "all")
    other = next(entry for entry in ranks[VICTIM]["entries"] if entry["pg_id"] != 0)
    made_ns = ranks[VICTIM]["entries"][-1]["time_created_ns"] + 1_000_000_000
    other["time_discovered_completed_ns"] = made_ns - 100_000_000
    for timeout_ms, expected in ((300_000, ()), (2_000, (VICTIM,))):
        for dump in ranks.values():
            for entry in dump["entries"]:
                entry["timeout_ms"] = timeout_ms if entry["pg_id"] == 0 else 600_000
        folder = tmp_path / str(timeout_ms)
        diagnosed(folder, ranks)
        set_times(folder, made_ns)
        assert consult_dumps(folder).culprits == expected


def test_a_dump_from_the_moment_of_a_failure(dumps: Path, tmp_path: Path) -> None:
    """A process that fails may write its dump at once, a moment after its last call completed. The
    others wait for seconds then: the rank is named."""
    ranks = read(dumps / "endless_ddp" / "all")
    diagnosed(tmp_path, ranks)
    for rank in ranks:
        age_s = 0.2 if rank == VICTIM else 6.0
        time_ns = last_completed_ns(ranks[VICTIM]) + int(age_s * 1e9)
        os.utime(tmp_path / f"rank_{rank}", ns=(time_ns, time_ns))
    assert of(consult_dumps(tmp_path)) == INFERRED


def test_all_devices_in_a_call(dumps: Path, tmp_path: Path) -> None:
    """If all devices have started a call, the dumps must show a long wait before the network is
    the cause for certain."""
    ranks = {}
    for kind, expected in (("all", "exact"), ("active", "inferred")):
        ranks = read(dumps / "endless_ddp" / kind)
        ranks[VICTIM]["entries"][-3]["state"] = "started"
        verdict = consult_dumps(rewritten(tmp_path / kind, ranks, dumps / "endless_ddp" / kind))
        assert of(verdict) == ("together", (), expected)
        line = "If the job still progressed when the dumps were written, nothing is wrong."
        assert (line in verdict.explanation) == (expected == "inferred")
    assert of(made_after(tmp_path / "slow", with_all_started(dumps), 0.5)) == UNKNOWN


def with_all_started(dumps: Path) -> dict[int, Dump]:
    ranks = read(dumps / "endless_ddp" / "all")
    ranks[VICTIM]["entries"][-3]["state"] = "started"
    return ranks


def test_files_that_were_written_late(dumps: Path, tmp_path: Path) -> None:
    """The recorder may take seconds to write a dump. The times inside the dumps show how old they
    are, also in a copy with a later time."""
    folder = rewritten(tmp_path, read(dumps / "slow_ddp" / "all"), dumps / "slow_ddp" / "all")
    newest_ns = max(path.stat().st_mtime_ns for path in folder.iterdir())
    set_times(folder, newest_ns + 60_000_000_000)
    verdict = consult_dumps(folder)
    assert of(verdict) == UNKNOWN
    assert verdict.explanation[1] == NO_HANG_SHOWN
