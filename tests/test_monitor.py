"""The monitor beside real jobs: it prints and saves what goes wrong; healthy jobs get no output."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diagnosing import diagnose
from synthetic_boxes import make
from synthetic_job import Job
from torchwhere.blackbox.run import read_run
from torchwhere.cli import main
from torchwhere.monitor.host import HostView
from torchwhere.pipeline.verdict import diagnose_folder, diagnose_run
from torchwhere.processes.exit_waiter import ExitWaiter
from torchwhere.processes.status import ProcessStatus
from torchwhere.snapshots.read import saved_statuses
from warm_python import Ended, Program, WarmPython

SCRIPT = """
import sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
for step in range(6):
    if dist.get_rank() == int(sys.argv[1]) and step == 3:
        for _ in range(10 * int(sys.argv[2])):
            time.sleep(0.1)
    dist.all_reduce(torch.ones(4))
print("done")
dist.destroy_process_group()
"""


def launch(folder: Path, victim: int, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    return subprocess.run(
        [
            *torchrun,
            "-m",
            "torchwhere",
            "run",
            "--out",
            "run",
            *options,
            "train.py",
            str(victim),
            "1000",
        ],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def launch_ranks(
    warm: WarmPython,
    folder: Path,
    victim: int,
    *options: str,
    late_s: int = 1000,
    script: str = SCRIPT,
) -> Ended:
    """The same job without torchrun, whose ranks need not import torch. Returns the largest exit
    code and all that the ranks printed."""
    (folder / "train.py").write_text(script)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    command = ("-m", "torchwhere", "run", "--out", "run", *options, "train.py", victim, late_s)
    ranks = [
        warm.start(
            *command,
            cwd=folder,
            env=os.environ | address | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    codes, outs, errors = zip(*(rank.end(timeout=120) for rank in ranks), strict=True)
    return Ended(max(codes), "".join(outs), "".join(errors))


def test_hang_is_printed_and_ended(tmp_path: Path) -> None:
    """The monitor prints a hang, saves it and, if asked to, ends the job; afterwards the doctor
    gives the same verdict."""
    done = launch(tmp_path, 1, "--stall", "6", "--end-with", "SIGKILL")
    assert done.returncode != 0
    assert 'Rank 1 never issued all_reduce of float32 [4], #3 of group "default".' in done.stderr
    assert "ending rank 1" in done.stderr
    kept = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert (kept["kind"], kept["culprits"], kept["certainty"]) == ("missing", [1], "exact")
    assert kept["text"] == (tmp_path / "run" / "verdict.txt").read_text().rstrip("\n")
    assert kept["ranks"]["1"]["line"] == "train.py:9"
    assert kept["ranks"]["0"]["state"] == "waiting"
    verdict = diagnose_folder(tmp_path / "run", stall_s=2.0)
    assert (verdict.kind, verdict.culprits) == ("missing", (1,))


STUCK_WORKER = """
import os, sys, time
import torch, torch.distributed as dist

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, at):
        if dist.get_rank() == 1 and at == 4:
            open("worker.tmp", "w").write(str(os.getpid()))
            os.rename("worker.tmp", "worker")
            while True:
                time.sleep(0.1)
        return torch.ones(4)

dist.init_process_group("gloo")
for item in torch.utils.data.DataLoader(Data(), num_workers=1, prefetch_factor=1):
    dist.all_reduce(item)
"""


def runs(pid: int) -> bool:
    """Whether a process runs. In a container, nothing may collect one that has been killed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_stuck_workers_are_ended(warm: WarmPython, tmp_path: Path) -> None:
    """`--end-with` also ends a DataLoader worker that is stuck and outlives its rank."""
    try:
        done = launch_ranks(
            warm, tmp_path, 1, "--stall", "4", "--end-with", "SIGKILL", script=STUCK_WORKER
        )
        worker = int((tmp_path / "worker").read_text())
        assert f"ending process {worker}, a worker that outlived its rank" in done.stderr
        assert not runs(worker)
    finally:
        if (tmp_path / "worker").exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int((tmp_path / "worker").read_text()), signal.SIGKILL)


BARRIER = """
import sys
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
layers = nn.Linear(8, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 8)  # more than one bucket
model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    if dist.get_rank() == 0 and step == STEP:
        dist.barrier()
"""


@pytest.mark.parametrize("step", [0, 1])
def test_a_new_op_of_one_rank(warm: WarmPython, tmp_path: Path, step: int) -> None:
    """Of two ranks that differ while DDP rebuilds its buckets, only the one with a new op is
    blamed."""
    script = BARRIER.replace("STEP", str(step))
    launch_ranks(warm, tmp_path, 1, "--stall", "4", "--end-with", "SIGKILL", script=script)
    verdict = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert (verdict["kind"], verdict["culprits"]) == ("mismatch", [0])
    assert (
        "but only rank 0 issued an op that it had not issued in this group before."
        in verdict["text"]
    )


# Rank 1 comes when the monitor has reported it: on a busy machine, a fixed time may be too short.
LATE = """
import os, sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
for step in range(6):
    if dist.get_rank() == 1 and step == 3:
        end = time.monotonic() + float(sys.argv[2])
        while not os.path.exists("run/verdict.json") and time.monotonic() < end:
            time.sleep(0.1)
    dist.all_reduce(torch.ones(4))
print("done")
dist.destroy_process_group()
"""


def test_a_wait_that_passes(warm: WarmPython, tmp_path: Path) -> None:
    """A printed wait that then passes is taken back, on the screen and in the saved files."""
    done = launch_ranks(warm, tmp_path, 1, "--stall", "2", late_s=100, script=LATE)
    assert (done.returncode, done.stdout.count("done")) == (0, 2)
    assert "HANG  2 ranks" in done.stderr
    assert "torchwhere: the wait is over, and the job continues." in done.stderr
    kept = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert (kept["kind"], kept["culprits"], kept["passed"]) == ("missing", [1], True)
    assert "The wait is over: the job continued." in (tmp_path / "run" / "verdict.txt").read_text()
    seen = (tmp_path / "run").glob("monitor-*.json")
    before = [path.read_text() for path in seen]
    # a monitor of a job that is over sees nothing, and keeps what was saved
    main(["monitor", str(tmp_path / "run")])
    assert [path.read_text() for path in (tmp_path / "run").glob("monitor-*.json")] == before


HANGS = """
import time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
for step in range(4):
    if dist.get_rank() == 1 and step == 3:
        time.sleep(1000)
    dist.all_reduce(torch.ones(4))
"""


def start_hang(warm: WarmPython, folder: Path) -> list[Program]:
    """Start three ranks with a monitor, and wait until it has reported that rank 1 is missing."""
    (folder / "train.py").write_text(HANGS)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    job = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "OMP_NUM_THREADS": "1"} | address
    command = ("-m", "torchwhere", "run", "--out", "run", "--stall", "3", "train.py")
    ranks = [
        warm.start(
            *command,
            cwd=folder,
            env=os.environ | job | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(3)
    ]
    while not (folder / "run" / "verdict.json").exists():
        assert ranks[1].runs()
        time.sleep(0.1)
    return ranks


@pytest.mark.parametrize(("order", "verb"), [((1, 0, 2), "was"), ((0, 2, 1), "is")])
def test_hang_that_ends_rank_by_rank(
    warm: WarmPython, tmp_path: Path, order: tuple[int, ...], verb: str
) -> None:
    """A reported hang stays the verdict after the ranks are killed one after the other: the rank
    that was missing before it was killed is missing."""
    ranks = start_hang(warm, tmp_path)
    for rank in order:
        ranks[rank].kill()
        time.sleep(3)  # the monitor examines the run after each exit
    errors = "".join(rank.end().stderr for rank in ranks)
    folder = tmp_path / "run"
    saved = json.loads((folder / "verdict.json").read_text())
    assert (saved["kind"], saved["culprits"]) == ("missing", [1])
    history = [json.loads(line) for line in (folder / "verdicts.jsonl").read_text().splitlines()]
    assert [(verdict["kind"], verdict["culprits"]) for verdict in history] == [("missing", [1])]
    assert "DEAD" not in errors
    after = diagnose_folder(folder, stall_s=3)
    assert (after.kind, after.culprits) == ("missing", (1,))
    assert any(f"rank 1 {verb} instead" in line for line in after.explanation)


def test_verdict_of_an_earlier_run(warm: WarmPython, tmp_path: Path) -> None:
    """A new run in the folder renames the verdict of the earlier run, and keeps it."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("verdict.txt", "verdict.json", "verdicts.jsonl"):
        (folder / name).write_text("of an earlier run")
    done = launch_ranks(warm, tmp_path, -1, "--stall", "5")
    assert (done.returncode, done.stdout.count("done")) == (0, 2)
    names = sorted(re.sub(r"\d{8}T\d{6}", "TIME", path.name) for path in folder.glob("verdict*"))
    assert names == ["verdict.TIME.json", "verdict.TIME.txt", "verdicts.TIME.jsonl"]
    assert all(path.read_text() == "of an earlier run" for path in folder.glob("verdict*"))


def test_healthy_job_gets_no_output(warm: WarmPython, tmp_path: Path) -> None:
    """For a healthy job the monitor prints nothing and exits with it, and the doctor calls it
    healthy."""
    done = launch_ranks(warm, tmp_path, -1, "--stall", "5")
    assert (done.returncode, done.stdout.count("done")) == (0, 2)
    assert "torchwhere" not in done.stderr
    assert not (tmp_path / "run" / "verdict.json").exists()
    verdict = diagnose_folder(tmp_path / "run")
    assert (verdict.kind, verdict.culprits) == ("healthy", ())
    assert verdict.explanation[0].startswith("All 2 ranks have finished.")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["monitor", "nowhere"],
            "there is no folder nowhere. Record one with: torchwhere run --out nowhere train.py",
        ),
        (
            ["doctor", "nowhere"],
            "there is no folder nowhere. Record one with: torchwhere run --out nowhere train.py",
        ),
    ],
)
def test_bad_folder(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing folder is an error with advice and exit code 2."""
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_bad_signal(capsys: pytest.CaptureFixture[str]) -> None:
    """A text that is not a signal name is refused before anything starts."""
    with pytest.raises(SystemExit):
        main(["monitor", ".", "--end-with", "SIGNOTHING"])
    assert "'SIGNOTHING' is not a signal name (example: SIGTERM)" in capsys.readouterr().err


# -- how long a wait lasts -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_running", "waited_s", "kind"),
    [
        (True, 12, "healthy"),
        (True, 40, "missing"),
        (False, 3, "dead"),
        (False, 6, "missing"),
    ],
)
def test_a_wait_becomes_a_hang(tmp_path: Path, is_running: bool, waited_s: int, kind: str) -> None:
    """By default, a wait is a hang after 30 s in a running job, and after 5 s in a job that has
    ended and cannot wait any longer. A job that ended earlier, unfinished, is dead."""
    make(Job(16, steps=4, records=180, fault="missing", victim=5), tmp_path)
    run = read_run(tmp_path)
    now_ns = max(box.last_ns for box in run.boxes.values()) + waited_s * 10**9
    status = ProcessStatus(alive=is_running, alive_ns=now_ns)
    verdict = diagnose(run, statuses=dict.fromkeys(run.boxes, status), now_ns=now_ns)
    assert verdict.kind == kind


# -- whose processes -------------------------------------------------------------------------------


def test_saved_status_of_another_process(tmp_path: Path) -> None:
    """A saved exit names its process: one of an earlier run in the same folder does not count for
    this run."""
    make(Job(16, steps=4, records=180, fault="deadlock", victim=12), tmp_path)
    run = read_run(tmp_path)
    for box in run.boxes.values():
        box.meta["pid"], box.meta["host"] = 100 + box.rank, "elsewhere"
    alive = {"alive": True, "alive_ns": max(box.last_ns for box in run.boxes.values()) + 10**10}
    found = {}
    for pid in (102, 7):
        kept = {str(rank): {**alive, "pid": 100 + rank} for rank in range(16) if rank != 2} | {
            "2": {"alive": False, "pid": pid}
        }
        (tmp_path / "monitor-elsewhere.json").write_text(json.dumps({"ranks": kept}))
        found[pid] = diagnose_run(run, saved_statuses(tmp_path), stall_s=30.0).ranks[2].state
    assert (found[102], found[7]) == ("dead", "waiting")


def test_a_restart_has_its_own_monitor(tmp_path: Path) -> None:
    """A monitor that a rank started keeps its run when a restart writes boxes; one started by hand
    follows the restart."""
    make(Job(16, steps=4, records=180, fault="deadlock", victim=12), tmp_path)
    started, by_hand = HostView(tmp_path, launcher=os.getpid()), HostView(tmp_path)
    for host in (started, by_hand):
        host.started_ns = 0
        host.run = read_run(tmp_path)
        for box in host.run.boxes.values():
            box.meta["pid"] += 1000
    assert started.read() is None
    assert by_hand.read() is not None


def test_exit_waiter() -> None:
    """It reports the exit of a watched process at once, and only once; without any it waits."""
    with ExitWaiter() as exits:
        assert not exits.wait(0.01)
        one, other = (
            subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
            for _ in range(2)
        )
        exits.keep({one.pid, other.pid, 2**22 + 1})
        assert not exits.wait(0.01)
        one.kill()
        start = time.monotonic()
        assert exits.wait(600)
        assert time.monotonic() - start < 500
        exits.keep({one.pid, other.pid})  # a zombie, which is still there
        assert not exits.wait(0.01)
        other.kill()
        assert exits.wait(600)
        for process in (one, other):
            process.communicate()
