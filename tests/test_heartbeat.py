"""The heartbeat thread: each rank of a job reports that it is alive and where it stalls, and the
thread never disturbs the job."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from zlib import crc32

import pytest
import torch
import torch.distributed as dist

import torchwhere
from rank_pool import Pool
from synthetic_boxes import WALL_NS, make
from synthetic_job import Job
from torchwhere.blackbox.file_format import (
    CURSOR_HEARTBEAT,
    CURSOR_TIME,
    HEADER_BYTES,
    HEADER_COPIES,
    RECORD,
)
from torchwhere.blackbox.file_names import STALL_MARK
from torchwhere.blackbox.reader import read_box
from torchwhere.blackbox.run import read_run
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.stall import BEAT_S
from torchwhere.pipeline.verdict import diagnose_folder
from torchwhere.processes.look import look
from torchwhere.recorder.heartbeat import Heartbeat
from torchwhere.snapshots.on_stall import StallSnapshot

HEART = "torchwhere"


def heartbeats() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == HEART]


def stall_while_watched(folder: str) -> tuple[list[str], list[str], str]:
    with torchwhere.watch(out=folder):
        dist.all_reduce(torch.ones(1))
        time.sleep(3.5 * BEAT_S)  # the main thread stalls here
        during = heartbeats()
        told = Path(f"{folder}/rank{dist.get_rank()}.stall").read_text()
        dist.barrier()
    return during, heartbeats(), told


def test_a_rank_beats_and_writes_its_stall_stack(two_ranks: Pool, tmp_path: Path) -> None:
    """While the main thread waits, the box gets heartbeats and the rank writes its stack and a
    snapshot of its neighbours; after the watch, thread and stack file are gone."""
    for during, after, told in two_ranks.run(stall_while_watched, str(tmp_path)):
        assert (during, after) == ([HEART], [])
        assert told.startswith(STALL_MARK)
        assert "in stall_while_watched" in told
    for rank in (0, 1):
        box = read_box(tmp_path / f"rank{rank}.box")
        (collective, *_) = box.events(kinds={"collective"})
        assert box.beat_ns > collective.t_ns + 2 * BEAT_S * 1e9
    assert [path.name for path in tmp_path.glob("*.stall")] == []
    kept = json.loads((tmp_path / f"stall-{socket.gethostname()}.json").read_text())
    assert {rank: (seen["alive"], seen["alive_ns"]) for rank, seen in kept["ranks"].items()} == {
        "0": (True, None),
        "1": (True, None),
    }


def test_one_rank_has_no_heartbeat_thread(one_rank: None, tmp_path: Path) -> None:
    """A job of one process needs no heartbeat thread."""
    with torchwhere.watch(out=tmp_path):
        dist.all_reduce(torch.ones(1))
        assert heartbeats() == []
    assert read_box(tmp_path / "rank0.box").beat_ns == 0


def waits_for_a_signal_and_forks(folder: str) -> tuple[int, int]:
    with torchwhere.watch(out=folder):
        dist.all_reduce(torch.ones(1))
        assert heartbeats() == [HEART]
        child = os.fork()
        if child == 0:
            os._exit(len(heartbeats()))
        left = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        time.sleep(2 * BEAT_S)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        got = signal.sigwait({signal.SIGUSR1})
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return int(got), left


def test_signals_and_children_are_the_jobs(two_ranks: Pool, tmp_path: Path) -> None:
    """The heartbeat thread takes no signal that the main thread waits for, because that would end
    the process; a forked child has no heartbeat thread."""
    assert two_ranks.run(waits_for_a_signal_and_forks, str(tmp_path)) == [(signal.SIGUSR1, 0)] * 2


def test_a_fork_waits_for_a_busy_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot may import modules: a fork happens before or after it, never in the middle."""
    monkeypatch.setattr("torchwhere.recorder.heartbeat.BEAT_S", 0.01)
    box = BoxWriter(tmp_path / "rank0.box", meta={"rank": 0})
    began, done = threading.Event(), list[bool]()

    def look() -> None:
        began.set()
        time.sleep(0.3)
        done.append(True)

    heartbeat = Heartbeat(box, on_stall=look)
    heartbeat.start()
    assert began.wait(10)
    heartbeat.before_fork()
    assert done
    heartbeat.after_fork()
    heartbeat.stop()
    box.close()


def test_a_failing_heartbeat_stops(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heartbeat logs an error of its own once, and stops after a few errors."""
    monkeypatch.setattr("torchwhere.recorder.heartbeat.BEAT_S", 0.01)
    box = BoxWriter(tmp_path / "rank0.box", meta={"rank": 0})
    beats: list[int] = []

    def fail(t_ns: int, *, cpu_delay_ns: int | None = None) -> None:
        beats.append(t_ns)
        raise ValueError("no beat")

    monkeypatch.setattr(box, "beat", fail)
    heartbeat = Heartbeat(box, on_stall=lambda: None)
    heartbeat.start()
    assert heartbeat._thread is not None
    heartbeat._thread.join(10)
    assert len(beats) == 3
    heartbeat.stop()
    box.close()
    assert [record.message.partition(" failed")[0] for record in caplog.records] == [
        "torchwhere: the hook for the heartbeat"
    ]


def test_it_beats_on_a_full_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a stalled rank cannot write its stack, for example on a full disk, it tries three times
    and logs once; heartbeats need no disk space."""
    monkeypatch.setattr("torchwhere.recorder.heartbeat.BEAT_S", 0.005)
    box = BoxWriter(tmp_path / "rank0.box", meta={"rank": 0})
    rests: list[int] = []

    def fail() -> None:
        rests.append(1)
        raise OSError(28, "No space left on device")

    heartbeat = Heartbeat(box, on_stall=fail)
    heartbeat.start()
    at = box.cursor_at(0) + CURSOR_HEARTBEAT
    while len(rests) < 3:
        time.sleep(0.01)
    third = box.words[at]
    time.sleep(0.5)
    assert (len(rests), box.words[at] > third) == (3, True)
    heartbeat.stop()
    box.close()
    assert len(caplog.records) == 1


def test_a_failed_rank_takes_a_last_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing rank takes a last snapshot; a folder that does not respond delays it only for a
    short time."""
    monkeypatch.setattr("torchwhere.recorder.heartbeat._JOIN_FAILED_S", 0.2)
    for lasts_s, is_done in ((0.0, True), (1.0, False)):
        box, done = BoxWriter(tmp_path / f"rank{int(lasts_s)}.box", meta={"rank": 0}), list[bool]()
        heartbeat = Heartbeat(
            box,
            on_stall=lambda lasts_s=lasts_s, done=done: (time.sleep(lasts_s), done.append(True))[1],
        )  # type: ignore[misc]
        heartbeat.start()
        thread = heartbeat._thread
        assert thread is not None
        heartbeat.stop(failed=True)
        assert bool(done) == is_done
        thread.join(10)
        box.close()


def test_stalls_are_reported_less_and_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While nothing moves, reports come after 2 beats, 4, 8 and so on; progress starts the series
    again."""
    monkeypatch.setattr("torchwhere.recorder.heartbeat.BEAT_S", 0.002)
    box = BoxWriter(tmp_path / "rank0.box", meta={"rank": 0})
    beats, rests = 0, list[int]()
    beat = box.beat

    def counted(t_ns: int, *, cpu_delay_ns: int | None = None) -> None:
        nonlocal beats
        beats += 1
        if beats == 20:
            box.words[box.cursor_at(1)] = 7  # the rank makes progress
        beat(t_ns, cpu_delay_ns=cpu_delay_ns)

    monkeypatch.setattr(box, "beat", counted)
    heartbeat = Heartbeat(box, on_stall=lambda: rests.append(beats))
    heartbeat.start()
    deadline = time.monotonic() + 120
    while beats < 40 and time.monotonic() < deadline:
        time.sleep(0.01)
    heartbeat.stop()
    box.close()
    # the first beat has nothing to compare with; after the 20th the rank made progress
    assert rests[:7] == [3, 5, 9, 17, 22, 24, 28]


CROWDED = """
import os, sys, time
from pathlib import Path
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.stall import BEAT_S
from torchwhere.recorder.heartbeat import Heartbeat

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
hogs = [os.fork() or exec("while True: pass") for _ in range(2)]
box = BoxWriter(Path(sys.argv[1]), meta={"rank": 0})
heartbeat = Heartbeat(box, on_stall=lambda: None)
heartbeat.start()
end = time.monotonic() + 3.5 * BEAT_S
while time.monotonic() < end:
    pass
heartbeat.stop()
for hog in hogs:
    os.kill(hog, 9)
"""


def test_waiting_for_a_cpu_is_recorded(tmp_path: Path) -> None:
    """Three processes that share a core each wait most of the time, and the box records it with
    each beat."""
    path = tmp_path / "rank0.box"
    subprocess.run([sys.executable, "-c", CROWDED, str(path)], check=True, timeout=400)
    beats = read_box(path).cpu_delays()
    lasted, waited = (beats[-1][0] - beats[0][0]) / 1e9, sum(wait for _, wait in beats[1:]) / 1e9
    assert len(beats) >= 2
    assert lasted > BEAT_S
    assert 0.3 < waited / lasted < 1.0


def test_the_last_waits_are_kept(tmp_path: Path) -> None:
    """The box stores the last waits in order, as many as fit, whatever the monotonic clock shows;
    without any report it stores none."""
    box = BoxWriter(tmp_path / "rank0.box", meta={"rank": 0, "clock_offset_ns": WALL_NS})
    begin = (1 << 32) * 10**6 - 20 * 10**9  # the clock in ms wraps around meanwhile
    for beat in range(40):
        box.beat(begin + beat * 10**9, cpu_delay_ns=beat * 10**6)
    expected = [(WALL_NS + begin + beat * 10**9, beat * 10**6) for beat in range(25, 40)]
    assert read_box(tmp_path / "rank0.box").cpu_delays() == expected
    box.close()
    untold = BoxWriter(tmp_path / "rank1.box", meta={"rank": 1})
    untold.beat(10**9)
    assert read_box(tmp_path / "rank1.box").cpu_delays() == []
    untold.close()


# -- what is made of it ----------------------------------------------------------------------------

RANKS, VICTIM = 8, 5


@pytest.fixture
def afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the clock later than every record of synthetic boxes."""
    monkeypatch.setattr(time, "time_ns", lambda: WALL_NS + 10**12)


def beat_at(box: Path, t_ns: int) -> None:
    with box.open("r+b") as file:
        file.seek(HEADER_BYTES * HEADER_COPIES + 8 * CURSOR_HEARTBEAT)
        file.write(t_ns.to_bytes(8, "little"))


def killed_job(folder: Path, *, after_s: float, beat_ns: int | None = None) -> Path:
    """A job in which one rank did not reach a collective; all ranks were killed some time after the
    last record."""
    make(Job(RANKS, steps=4, records=180, fault="missing", victim=VICTIM), folder)
    boxes = read_run(folder).boxes
    last_ns = max(int(box.records["t_ns"].max()) for box in boxes.values())
    for box in boxes.values():
        beat_at(box.path, last_ns + int(after_s * 1e9) if beat_ns is None else beat_ns)
    return folder


def test_a_hang_and_a_job_that_passed_through(tmp_path: Path, afterwards: None) -> None:
    """In a killed job without a monitor, the heartbeats show how long the other ranks waited."""
    hung = diagnose_folder(killed_job(tmp_path / "hung", after_s=40))
    assert (hung.kind, hung.culprits, hung.certainty) == ("missing", (VICTIM,), "exact")
    assert hung.stalled_s is not None
    assert 40 <= hung.stalled_s < 41
    passing = diagnose_folder(killed_job(tmp_path / "passing", after_s=0.05))
    # killed, and no process recorded how
    assert (passing.kind, passing.culprits, passing.certainty) == ("dead", (), "unknown")
    assert passing.facts["may_have_gone_first"] == [VICTIM]


def test_a_beat_of_tomorrow_is_none(tmp_path: Path, afterwards: None) -> None:
    """A damaged box may contain any time: a heartbeat in the future is ignored."""
    said = diagnose_folder(killed_job(tmp_path, after_s=0, beat_ns=(1 << 63) - 1))
    assert (said.kind, said.culprits, said.certainty, said.stalled_s) == (
        "missing",
        (VICTIM,),
        "inferred",
        None,
    )


def test_the_stack_of_a_stalled_rank(tmp_path: Path, afterwards: None) -> None:
    """The stack that a rank wrote when it stalled is its place, on any machine, unless the rank has
    moved since."""
    killed_job(tmp_path, after_s=40)
    boxes = read_run(tmp_path).summaries
    frames = (
        '  File "/home/me/train.py", line 7 in load\n  File "/home/me/train.py", line 9 in main\n'
    )
    for moment, stack in (
        (boxes[VICTIM].last_ns + 1, ("/home/me/train.py:7 in load", "/home/me/train.py:9 in main")),
        (5, ()),
    ):
        text = f"{STALL_MARK}{moment}\n{frames}"
        (tmp_path / f"rank{VICTIM}.stall").write_text(text)
        assert look(boxes)[VICTIM].stack == stack
    assert diagnose_folder(tmp_path).ranks[VICTIM].place.line != "/home/me/train.py:7"
    (tmp_path / f"rank{VICTIM}.stall").write_text(
        text.replace(f"{STALL_MARK}5", f"{STALL_MARK}{boxes[VICTIM].last_ns + 1}")
    )
    assert diagnose_folder(tmp_path).ranks[VICTIM].place.line == "/home/me/train.py:7"


def test_a_stalled_rank_sees_its_neighbours(
    tmp_path: Path, afterwards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshot that a rank took of the others replaces a deleted box; after a rank exits, the
    snapshot is not overwritten."""
    killed_job(tmp_path, after_s=40)
    whole = diagnose_folder(tmp_path)
    host = str(read_run(tmp_path).summaries[0].meta["host"])
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    stall_snapshot = StallSnapshot(tmp_path / "rank0.box", rank=0)
    stall_snapshot.take()
    snapshot = tmp_path / f"stall-{host}.snapshot"
    (tmp_path / f"rank{VICTIM}.box").unlink()
    os.utime(snapshot, (0, 0))
    before = snapshot.read_bytes()
    stall_snapshot.take()
    assert snapshot.read_bytes() == before
    verdict = diagnose_folder(tmp_path)
    assert (
        (verdict.kind, verdict.culprits) == (whole.kind, whole.culprits) == ("missing", (VICTIM,))
    )
    assert f"calls of rank {VICTIM} come from a snapshot of its box" in verdict.missing_data


def test_one_stall_snapshot_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank does not write if another rank has just written, if it is alone, or if its own box is
    gone."""
    killed_job(tmp_path, after_s=40)
    host = str(read_run(tmp_path).summaries[0].meta["host"])
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    StallSnapshot(tmp_path / "rank0.box", rank=0).take()
    snapshot = tmp_path / f"stall-{host}.snapshot"
    snapshot.write_bytes(b"mine")
    StallSnapshot(tmp_path / "rank1.box", rank=1).take()
    assert snapshot.read_bytes() == b"mine"
    snapshot.unlink()
    StallSnapshot(tmp_path / "rank99.box", rank=99).take()
    assert not snapshot.exists()


def test_a_pause_that_is_usual(tmp_path: Path, afterwards: None) -> None:
    """A wait as long as an earlier one at the same place blames no rank; the verdict mentions
    it."""
    killed_job(tmp_path, after_s=8)
    assert diagnose_folder(tmp_path, stall_s=10).culprits == (VICTIM,)
    shift_times(tmp_path, by_s=7)  # the same wait one step earlier: it lasted 7 s and ended
    verdict = diagnose_folder(tmp_path, stall_s=10)
    assert (verdict.kind, verdict.culprits, verdict.certainty) == ("dead", (), "unknown")
    assert any("A normal pause looks the same." in line for line in verdict.explanation)


def shift_times(folder: Path, *, by_s: float) -> None:
    """Insert a pause in the middle of a synthetic job: the second half happens later."""
    for path in folder.glob("rank*.box"):
        box = read_box(path)
        assert box.geometry is not None
        data = bytearray(path.read_bytes())
        numbers = box.records["number"]
        for number in numbers[len(numbers) // 2 :].tolist():
            at = box.geometry.ring_at + number % box.geometry.capacity * 64
            record = list(RECORD.unpack(data[at : at + RECORD.size]))
            record[1] += int(by_s * 1e9)
            packed = RECORD.pack(*record)
            data[at : at + 64] = packed + crc32(packed).to_bytes(4, "little")
        path.write_bytes(data)
        beat_at(
            path,
            int(by_s * 1e9)
            + int.from_bytes(data[HEADER_BYTES * HEADER_COPIES + 56 :][:8], "little"),
        )


def test_a_quiet_end_is_not_called_well(tmp_path: Path, afterwards: None) -> None:
    """If no rank waits for another and none has done anything for long, the verdict says only where
    they stopped."""
    make(Job(RANKS, steps=4, records=180), tmp_path)
    for path in tmp_path.glob("rank*.box"):
        move_cursor(path)  # they have left their last collective
        beat_at(path, int(read_box(path).records["t_ns"].max()) + 40 * 10**9)
    verdict = diagnose_folder(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.certainty) == ("dead", (), "unknown")
    assert any(
        line.startswith("The job is over. No rank recorded anything in its last 40 s")
        for line in verdict.explanation
    )
    assert (
        verdict.explanation[-1]
        == "The boxes do not show whether they work there or hang. Look at: these lines."
    )


def move_cursor(box: Path) -> None:
    t_ns = int(read_box(box).records["t_ns"].max()) + 10**9
    with box.open("r+b") as file:
        file.seek(HEADER_BYTES * HEADER_COPIES + 8 * CURSOR_TIME)
        file.write(t_ns.to_bytes(8, "little"))


def test_another_container_is_not_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of another PID namespace is invisible: a missing process number does not mean that
    the process exited."""
    with torchwhere.watch(out=tmp_path):
        (box,) = read_run(tmp_path).summaries.values()
        assert look({0: box})[0].alive is True
        monkeypatch.setattr("torchwhere.processes.look.pid_namespace", lambda: -1)
        assert look({0: box})[0].alive is None


def test_a_later_heartbeat_overrides_a_saved_exit(tmp_path: Path, afterwards: None) -> None:
    """A saved status says that a process is gone; a later heartbeat proves that it was alive."""
    killed_job(tmp_path, after_s=0.05)
    box = read_run(tmp_path).summaries[VICTIM]
    seen = {"alive": False, "gone_ns": box.last_ns - 10**9, "pid": box.meta["pid"]}
    kept = tmp_path / "stall-elsewhere.json"
    kept.write_text(json.dumps({"ranks": {VICTIM: seen}}))
    assert diagnose_folder(tmp_path).culprits == ()
    kept.write_text(json.dumps({"ranks": {VICTIM: seen | {"gone_ns": box.last_ns + 10**7}}}))
    beat_at(box.path, 1)
    assert (diagnose_folder(tmp_path).kind, diagnose_folder(tmp_path).culprits) == (
        "dead",
        (VICTIM,),
    )


def test_a_quiet_end_without_a_box(tmp_path: Path, afterwards: None) -> None:
    """If a rank of a quiet job left no box, the verdict says so and blames no rank."""
    make(Job(RANKS, steps=4, records=180), tmp_path)
    (tmp_path / f"rank{VICTIM}.box").unlink()
    for path in tmp_path.glob("rank*.box"):
        move_cursor(path)  # they have left their last collective
        beat_at(path, int(read_box(path).records["t_ns"].max()) + 40 * 10**9)
    verdict = diagnose_folder(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.certainty) == ("dead", (), "unknown")
    assert any(
        line.startswith(f"The job is over, and rank {VICTIM} left no readable box.")
        for line in verdict.explanation
    )
