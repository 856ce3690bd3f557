"""The monitor's snapshots of a rank whose box is deleted or cut: the doctor uses them only for this
run, and only for what they show."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from pathlib import Path

import pytest

from synthetic_boxes import WALL_NS, make
from synthetic_job import Job
from torchwhere.blackbox.file_format import pack_header
from torchwhere.blackbox.reader import read_box
from torchwhere.blackbox.run import read_run
from torchwhere.diagnose.calls.job_calls import calls_of_run, load_calls
from torchwhere.monitor.monitor import Monitor
from torchwhere.pipeline.verdict import diagnose_folder
from torchwhere.render.verdict_text.observers import snapshots_text
from torchwhere.snapshots.read import fill_from_snapshots, is_of, saved_statuses, summaries_of
from torchwhere.snapshots.write import OFTEN_S, SILENCE_S, SnapshotWriter

RANKS, VICTIM = 16, 12
LATE_NS = 1 << 61  # after every record of a box


def run_with_snapshots(folder: Path, *, read_ns: int = LATE_NS, fault: str = "missing") -> Path:
    """A job in which one rank never reaches a collective, with the monitor's snapshots."""
    make(Job(RANKS, steps=4, records=180, fault=fault, victim=VICTIM), folder)
    SnapshotWriter(folder).write(dict(read_run(folder).boxes), read_ns=read_ns, read_at=0.0)
    return folder


def damage(folder: Path, left: int | None) -> None:
    box = folder / f"rank{VICTIM}.box"
    if left is None:
        box.unlink()
    else:
        box.write_bytes(box.read_bytes()[:left])


@pytest.mark.parametrize("fault", ["missing", "shape", "deadlock"])
@pytest.mark.parametrize("left", [None, 0, 100, 30_000])
def test_a_rank_without_a_box_is_known(tmp_path: Path, fault: str, left: int | None) -> None:
    """With the culprit's box deleted or cut, the verdict is the same as with it, and lists what is
    missing."""
    whole = diagnose_folder(run_with_snapshots(tmp_path, fault=fault))
    damage(tmp_path, left)
    verdict = diagnose_folder(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.collective) == (
        whole.kind,
        whole.culprits,
        whole.collective,
    )
    assert verdict.ranks[VICTIM].place == whole.ranks[VICTIM].place
    assert f"calls of rank {VICTIM} come from a snapshot of its box" in verdict.missing_data


def test_a_snapshot_of_an_earlier_run(tmp_path: Path) -> None:
    """A snapshot from before this run belongs to another run in the same folder, with the same
    name."""
    run_with_snapshots(tmp_path, read_ns=WALL_NS - 1)
    damage(tmp_path, None)
    run = read_run(tmp_path)
    job_calls = calls_of_run(run)
    assert fill_from_snapshots(run, job_calls) is job_calls
    assert VICTIM not in job_calls.by_rank


def test_others_went_on(tmp_path: Path) -> None:
    """A snapshot from before the last records of the other ranks shows what a rank had done, but
    not that it did nothing since."""
    run_with_snapshots(tmp_path, read_ns=WALL_NS + 1)
    damage(tmp_path, None)
    run = read_run(tmp_path)
    job_calls = fill_from_snapshots(run, calls_of_run(run))
    assert (job_calls.stale, job_calls.has_data(VICTIM), VICTIM in job_calls.by_rank) == (
        {VICTIM},
        False,
        True,
    )
    assert snapshots_text(job_calls) == (
        f"calls of rank {VICTIM} come from a snapshot of its box; later calls are unknown"
    )
    verdict = diagnose_folder(tmp_path)
    assert verdict.certainty != "exact"
    assert "may never have issued" in " ".join(verdict.explanation) or not verdict.culprits


def test_whole_boxes_need_no_snapshot(tmp_path: Path) -> None:
    """If every box is readable, no snapshot is used."""
    run, job_calls = load_calls(run_with_snapshots(tmp_path))
    assert fill_from_snapshots(run, job_calls) is job_calls


@pytest.mark.parametrize("spoil", ["flipped", "cut", "empty", "other run"])
def test_an_invalid_snapshot(tmp_path: Path, spoil: str) -> None:
    """A damaged snapshot, or one of an earlier run in the folder, is ignored."""
    run_with_snapshots(tmp_path)
    path = tmp_path / f"monitor-{socket.gethostname()}.snapshot"
    data = bytearray(path.read_bytes())
    if spoil == "other run":
        boxes = dict(read_run(tmp_path).boxes)
        for box in boxes.values():
            box.meta["restart"] = 5
        SnapshotWriter(tmp_path).write(boxes, read_ns=LATE_NS, read_at=0.0)
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes({"flipped": bytes(data), "cut": bytes(data[:40]), "empty": b""}[spoil])
    damage(tmp_path, None)
    run = read_run(tmp_path)
    job_calls = calls_of_run(run)
    assert fill_from_snapshots(run, job_calls) is job_calls
    assert VICTIM not in job_calls.by_rank


def test_a_box_that_was_cut_behind_its_counts(tmp_path: Path) -> None:
    """A cut box shows whether its rank reached a collective only if all its counts agree."""
    make(Job(RANKS, steps=4, records=180), tmp_path)
    damage(tmp_path, 30_000)
    for run, job_calls in (
        load_calls(tmp_path),
        (read_run(tmp_path), calls_of_run(read_run(tmp_path))),
    ):
        counts = job_calls.unnamed_counts[VICTIM]
        key = next(
            key for key in job_calls.by_rank[0].counts if key.source == key.destination == -1
        )
        assert len(set(counts)) > 1
        assert job_calls.has_issued(VICTIM, key, min(counts) - 1) is True
        assert job_calls.has_issued(VICTIM, key, max(counts)) is False
        assert job_calls.has_issued(VICTIM, key, min(counts)) is None
        assert job_calls.has_issued(VICTIM, key._replace(source=0, destination=VICTIM), 0) is None
        assert run.world_size == RANKS


def test_statuses_of_a_rank_without_a_box(tmp_path: Path) -> None:
    """Process statuses count if they belong to this run and to one of its ranks."""
    make(Job(RANKS, steps=4, records=180), tmp_path)
    damage(tmp_path, None)
    run = read_run(tmp_path)
    own = {"alive": True, "pid": 7, "run": list(next(iter(run.summaries.values())).run)}
    assert is_of(run, VICTIM, own)
    assert not is_of(run, VICTIM, own | {"run": ["another", 0]})
    assert not is_of(run, RANKS, own)
    (summary,) = summaries_of({VICTIM: own, 0: own}, run).values()
    assert (summary.rank, summary.meta["pid"], summary.path.name) == (
        VICTIM,
        7,
        f"rank{VICTIM}.box",
    )
    (tmp_path / "monitor-a.json").write_text(json.dumps({"ranks": {"12": own, "13": 5}}))
    (tmp_path / "monitor-b.json").write_text('{"ranks": [')
    assert saved_statuses(tmp_path) == {12: own}


def test_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots are written once per stall, and every few seconds while something moves; not while
    nothing has changed."""
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    diary = SnapshotWriter(tmp_path)
    make(Job(16, steps=4, records=180), tmp_path)
    boxes = dict(read_run(tmp_path).boxes)
    assert diary.is_due(now - 2 * SILENCE_S)
    diary.write(boxes, read_ns=1, read_at=now)
    assert not diary.is_due(now - 2 * SILENCE_S)
    now += 3 * SILENCE_S
    assert not diary.is_due(now - SILENCE_S / 2)
    assert diary.is_due(now - 2 * SILENCE_S)
    now += OFTEN_S
    assert diary.is_due(now)


def test_a_process_outlives_its_box(tmp_path: Path) -> None:
    """A monitor goes on watching a process whose box is deleted: it records that the process is
    alive, and later that it exited."""
    make(Job(RANKS, steps=4, records=180), tmp_path)
    run, monitor = read_run(tmp_path), Monitor(tmp_path)
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            run.boxes[VICTIM].meta.update(pid=process.pid, host=socket.gethostname())
            monitor.host.use(run)
            damage(tmp_path, None)
            assert not monitor._look()
            kept = saved_statuses(tmp_path)[VICTIM]
            assert (kept["alive"], kept["pid"], kept["gone_ns"]) == (True, process.pid, None)
        finally:
            process.kill()
            process.wait()
    assert monitor._look()
    gone = saved_statuses(tmp_path)[VICTIM]
    assert (
        gone["alive"],
        gone["alive_ns"] == kept["alive_ns"],
        gone["gone_ns"] > kept["alive_ns"],
    ) == (False, True, True)


# -- what a doctor keeps ---------------------------------------------------------------------------


def give_process(folder: Path, pid: int) -> None:
    """All ranks are this process, on this host, started a minute ago."""
    ago_ns = WALL_NS - time.time_ns() + 60 * 10**9
    for path in folder.glob("rank*.box"):
        box, data = read_box(path), bytearray(path.read_bytes())
        assert box.geometry is not None
        moments = {name: box.meta[name] - ago_ns for name in ("started_ns", "clock_offset_ns")}
        header = pack_header(
            box.geometry,
            json.dumps(box.meta | moments | {"pid": pid, "host": socket.gethostname()}).encode(),
        )
        data[: 2 * len(header)] = 2 * header
        path.write_bytes(data)


def notes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("doctor-*")}


def test_a_doctor_saves_its_input(tmp_path: Path) -> None:
    """A doctor that finds a problem in a running job saves its input: after the job ended and a box
    is deleted, it gives the same verdict. It saves nothing once a box is deleted or the job is
    over."""
    make(Job(RANKS, steps=4, records=180, fault="shape", victim=VICTIM), tmp_path)
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            give_process(tmp_path, process.pid)
            live = diagnose_folder(tmp_path)
            kept = notes(tmp_path)
            box = tmp_path / f"rank{VICTIM}.box"
            whole = box.read_bytes()
            box.unlink()
            assert diagnose_folder(tmp_path).culprits == live.culprits == (VICTIM,)
            assert notes(tmp_path) == kept
        finally:
            process.kill()
            process.wait()
    host = socket.gethostname()
    assert sorted(kept) == [f"doctor-{host}.json", f"doctor-{host}.snapshot"]
    after = diagnose_folder(tmp_path)
    assert (after.kind, after.culprits, after.collective) == (
        live.kind,
        live.culprits,
        live.collective,
    )
    assert f"calls of rank {VICTIM} come from a snapshot of its box" in " ".join(after.missing_data)
    for name in kept:
        (tmp_path / name).unlink()
    assert diagnose_folder(tmp_path).culprits == ()
    box.write_bytes(whole)
    assert diagnose_folder(tmp_path).culprits == (VICTIM,)
    assert notes(tmp_path) == {}


def test_a_job_that_is_well_is_left_alone(tmp_path: Path) -> None:
    """A doctor that finds no problem writes nothing."""
    make(Job(RANKS, steps=4, records=180), tmp_path)
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            give_process(tmp_path, process.pid)
            assert diagnose_folder(tmp_path).kind == "healthy"
        finally:
            process.kill()
            process.wait()
    assert notes(tmp_path) == {}


def test_an_exit_that_the_doctor_saw(tmp_path: Path) -> None:
    """The monitor's last status may be older than the doctor's, which found that a process had
    exited: it counts if it is the same process."""
    whose = {"pid": 7, "host": "a", "run": ["", 0]}
    seen = {"alive": True, "alive_ns": 5, "state": "R"}
    gone = {"alive": False, "alive_ns": None, "gone_ns": 9, "ended": "signal 9"}
    (tmp_path / "monitor-a.json").write_text(
        json.dumps({"ranks": {"1": seen | whose, "2": seen | whose | {"pid": 8}}})
    )
    (tmp_path / "doctor-a.json").write_text(
        json.dumps({"ranks": {"1": gone | whose, "2": gone | whose}})
    )
    kept = saved_statuses(tmp_path)
    assert {name: kept[1][name] for name in ("alive", "alive_ns", "gone_ns", "ended", "pid")} == {
        "alive": False,
        "alive_ns": 5,
        "gone_ns": 9,
        "ended": "signal 9",
        "pid": 7,
    }
    assert kept[2]["alive"] is True
