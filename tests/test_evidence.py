"""Facts from outside the process: out-of-memory kills, stacks from py-spy, dumps of the flight
recorder."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from surroundings import NotHereError, enter_memory_limit, memory_limit
from test_flight_recorder import Recorder, four
from torchwhere.blackbox.summary import BoxSummary
from torchwhere.diagnose.doctor.verdict import Verdict, VerdictKind
from torchwhere.flight_recorder.evidence import with_evidence
from torchwhere.processes import cgroup, py_spy
from torchwhere.processes.look import look
from torchwhere.processes.status import ProcessStatus

HOST = socket.gethostname()


def box_summary(rank: int, folder: Path, **meta: object) -> BoxSummary:
    last_ns = time.time_ns()
    meta = {"rank": rank, "host": HOST, "started_ns": last_ns, **meta}
    return BoxSummary(folder / f"rank{rank}.box", rank, ("", 0), True, last_ns, False, 0, meta)


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "mounts", "line", "kills", "limit"),
    [
        (
            {
                "job/memory.events": "low 0\nhigh 0\nmax 41\noom 3\noom_kill 2\noom_group_kill 0\n",
                "job/memory.max": "max",
            },
            "cgroup2 {} cgroup2 rw,nosuid 0 0\n",
            "0::/job\n",
            2,
            None,
        ),
        (
            {
                "pod/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n",
                "pod/job/memory.limit_in_bytes": "9223372036854771712",
                "pod/memory.limit_in_bytes": "1000000",
            },
            "cgroup {} cgroup rw,relatime,memory 0 0\n",
            "4:memory:/pod/job\n1:cpu:/\n",
            7,
            1_000_000,
        ),
        (
            # a container whose cgroup looks like the root
            {"memory.events": "oom_kill 1\n", "memory.max": "5000"},
            "cgroup2 {} cgroup2 rw 0 0\n",
            "0::/kubepods/pod1\n",
            1,
            5000,
        ),
    ],
    ids=["version 2", "version 1", "container"],
)
def test_a_cgroup_is_read(
    files: dict[str, str], mounts: str, line: str, kills: int, limit: int | None, tmp_path: Path
) -> None:
    """The counter and limit of a process's cgroup are found in both versions, and the limit of a
    parent too."""
    root, proc = tmp_path / "cgroup", tmp_path / "proc" / "7"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
        (root / name).with_name("cgroup.procs").touch()
    proc.mkdir(parents=True)
    (proc / "mounts").write_text(mounts.format(root))
    (proc / "cgroup").write_text(line)
    counter = cgroup.oom_counter(7, proc=tmp_path / "proc")
    assert counter is not None
    assert (cgroup.oom_kills(counter), cgroup.limit_bytes(counter)) == (kills, limit)


def test_a_box_names_no_other_file(tmp_path: Path) -> None:
    """The reader opens only a counter, whatever path a box gives; a missing or empty counter counts
    nothing."""
    (tmp_path / "secret").write_text("oom_kill 5\n")
    (tmp_path / "memory.events").write_text("oom_kill many\n")
    for name in ("secret", "memory.events", "gone/memory.events"):
        assert cgroup.oom_kills(str(tmp_path / name)) is None


def test_killed_by_the_oom_killer(tmp_path: Path) -> None:
    """A process that the kernel killed at its cgroup's limit is distinguished from one that was
    killed beside it."""
    name = f"tw-{os.getpid()}"
    eats = "import sys; sys.stdin.read(1); x = b'x' * 900_000_000"
    waits = "import sys; sys.stdin.read()"
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(memory_limit(name))
        except NotHereError as error:
            pytest.skip(str(error))
        both = [
            subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                preexec_fn=lambda: enter_memory_limit(name),
            )
            for code in (waits, eats)
        ]
        counter = cgroup.oom_counter(both[0].pid)
        assert counter is not None
        meta = {"oom_counter": counter, "oom_kills": cgroup.oom_kills(counter)}
        boxes = {
            rank: box_summary(rank, tmp_path, pid=process.pid, **meta)
            for rank, process in enumerate(both)
        }
        before = look(boxes)
        both[1].communicate(b"x")
        between = {rank: seen.after(before[rank]) for rank, seen in look(boxes).items()}
        both[0].kill()
        both[0].communicate()
        after = {rank: seen.after(between[rank]) for rank, seen in look(boxes).items()}
    assert [before[rank].out_of_memory for rank in boxes] == [None, None]
    assert after[0].out_of_memory is None
    assert (
        after[1].out_of_memory
        == "killed by the system: out of memory (cgroup limit 300 MB, its oom_kill count went from"
        " 0 to 1)"
    )
    assert ProcessStatus.from_dict(after[1].to_dict()) == after[1]


# -- py-spy ----------------------------------------------------------------------------------------


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program that has stopped itself, in `stuck`, line 4."""
    program = tmp_path / "train.py"
    program.write_text(
        "import os, signal\n\ndef stuck():\n    os.kill(os.getpid(), signal.SIGSTOP)\n\nstuck()\n"
    )
    with subprocess.Popen([sys.executable, str(program)]) as process:
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        yield process
        process.send_signal(signal.SIGKILL)


@pytest.mark.skipif(py_spy.program() is None, reason="py-spy is not installed")
def test_the_stack_of_a_stopped_process(stopped: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """A process that cannot answer still has a stack, innermost line first, and stays stopped."""
    seen = look({0: box_summary(0, tmp_path, pid=stopped.pid)}, stacks=[0])[0]
    program = tmp_path / "train.py"
    assert seen.stack == (f"{program}:4 in stuck", f"{program}:6 in <module>")
    assert seen.is_stopped


@pytest.mark.parametrize("spy", [None, "exit 1", "echo '[{\"frames\": 3}]'", "sleep 60"], ids=str)
def test_without_py_spy(
    spy: str | None,
    stopped: subprocess.Popen[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If py-spy is missing, fails, prints nonsense or hangs, there is no stack, and everything else
    is as before."""
    program = tmp_path / "py-spy"
    if spy is not None:
        program.write_text(
            f"#!/bin/sh\nexec {spy}\n" if spy.startswith("sleep") else f"#!/bin/sh\n{spy}\n"
        )
        program.chmod(0o755)
    monkeypatch.setattr(py_spy, "program", lambda: str(program) if spy is not None else None)
    monkeypatch.setattr(py_spy, "_PATIENCE_S", 0.3)
    seen = look({0: box_summary(0, tmp_path, pid=stopped.pid)}, stacks=[0])[0]
    assert (seen.alive, seen.state, seen.stack) == (True, "T", ())


# -- flight recorder -------------------------------------------------------------------------------

TOGETHER = Verdict(
    VerdictKind.TOGETHER, collective={"group": "default", "number": 5}, explanation=("They wait.",)
)


def started_on(*ranks: int) -> list[Recorder]:
    return [
        recorder.call(state="started" if recorder.rank in ranks else "scheduled")
        for recorder in four()
    ]


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (
            (0, 1, 3),
            (
                (
                    'According to the flight recorder, #5 of group "default" is started on ranks 0-1, 3;'
                    " scheduled on rank 2."
                ),
                "The device of rank 2 has not reached it: look at the work queued before it.",
            ),
        ),
        (
            (0, 1, 2, 3),
            (
                'According to the flight recorder, #5 of group "default" is started on ranks 0-3.',
                "All devices have started it: look at the network between them.",
            ),
        ),
    ],
    ids=["one is not in it", "all are in it"],
)
def test_dumps_beside_the_run(
    ranks: tuple[int, ...], said: tuple[str, ...], tmp_path: Path
) -> None:
    """Dumps in the run's folder show which device has reached the collective that all hosts are
    in."""
    boxes = {rank: box_summary(rank, tmp_path) for rank in range(4)}
    for recorder in started_on(*ranks):
        recorder.write(tmp_path)
    verdict = with_evidence(TOGETHER, boxes, tmp_path, may_ask=False)
    assert verdict.explanation == ("They wait.", *said)
    assert verdict.facts["flight_recorder"][0]["group"] == "default"
    assert sum(len(each["ranks"]) for each in verdict.facts["flight_recorder"][0]["ranks"]) == 4


def test_dumps_are_asked_for_once(tmp_path: Path) -> None:
    """A rank that listens on NCCL's pipe is asked once; a rank that has dumped since it stalled is
    not asked again."""
    settings = {"dump": str(tmp_path / "nccl_trace_rank_"), "pipe": str(tmp_path / "pipe")}
    boxes = {rank: box_summary(rank, tmp_path, flight_recorder=settings) for rank in range(4)}
    os.mkfifo(tmp_path / "pipe0.pipe")
    (tmp_path / "pipe1.pipe").write_text("")  # this rank has no pipe
    os.mkfifo(tmp_path / "pipe2.pipe")  # no process listens
    heard: list[bytes] = []
    with open(
        os.open(tmp_path / "pipe0.pipe", os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0
    ) as pipe:

        def serve() -> None:
            while not (asked := pipe.read(128)):
                time.sleep(0.01)
            heard.append(asked)
            started_on(0)[0].write(tmp_path)

        listener = threading.Thread(target=serve)
        listener.start()
        first = with_evidence(TOGETHER, boxes, tmp_path, may_ask=True)
        listener.join()
        again = with_evidence(TOGETHER, boxes, tmp_path, may_ask=True)
        heard.append(pipe.read(128) or b"")
    assert heard == [b"1\n", b""]
    assert (tmp_path / "pipe1.pipe").read_text() == ""
    assert (
        first.explanation[1]
        == again.explanation[1]
        == 'According to the flight recorder, #5 of group "default" is started on rank 0.'
    )


@pytest.mark.parametrize("kind", ["healthy", "old", "hostile", "many"])
def test_dumps_that_add_nothing(kind: str, tmp_path: Path) -> None:
    """Dumps of a healthy job or of an earlier job are not read; refused dumps, and too many dumps,
    are mentioned."""
    boxes = {rank: box_summary(rank, tmp_path) for rank in range(300 if kind == "many" else 4)}
    verdict, ranks = TOGETHER, 300 if kind == "many" else 1
    for rank in range(ranks):
        path = tmp_path / f"nccl_trace_rank_{rank}"
        path.write_bytes(b"\x80\x02cos\nsystem\n(S'true'\ntR." if kind == "hostile" else b"{}")
        if kind == "old":
            os.utime(path, (1, 1))
    if kind == "healthy":
        verdict = Verdict(VerdictKind.HEALTHY)
    found = with_evidence(verdict, boxes, tmp_path, may_ask=False)
    said = " ".join(found.missing_data)
    assert (found.explanation, found.facts) == (verdict.explanation, {})
    if kind == "many":
        assert "300 dumps of the flight recorder" in said
    elif kind == "hostile":
        assert "it imports something: no dump does that, and torchwhere never executes it" in said
    else:
        assert said == ""
