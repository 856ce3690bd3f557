"""A rank is killed, and the launcher ends the others with SIGTERM 0.1 s later: which rank went
first, by what is left."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from torchwhere.diagnose.doctor.verdict import Verdict
from torchwhere.pipeline.verdict import diagnose_folder
from torchwhere.processes.exit_waiter import ExitWaiter

WORLD = 4
WHERE = (
    "before a collective",
    "in a collective",
    "outside any collective",
    "first step",
    "SIGTERM is caught",
    "SIGTERM is caught, exit 1",
)

JOBS = """
import os, signal, sys, threading, time
from datetime import timedelta
from pathlib import Path

import torch, torch.distributed as dist, torchwhere
from torchwhere.monitor.monitor import Monitor


def fork(do, *arguments):
    pid = os.fork()
    if not pid:
        try:
            do(*arguments)
        except SystemExit as error:
            os._exit(error.code)
        finally:
            os._exit(1)
    return pid


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def exit_143(*_):
    sys.exit(143)


def exit_1(*_):
    sys.exit(1)


def is_watched(run):
    return any(text.count('"alive": true') == 4 for text in (path.read_text() for path in run.glob("monitor-*.json")))


def rank_of(where, victim, rank, folder):
    os.environ.update(RANK=str(rank), WORLD_SIZE="4", LOCAL_RANK=str(rank))
    if where == "SIGTERM is caught":
        signal.signal(signal.SIGTERM, exit_143)
    if where == "SIGTERM is caught, exit 1":
        signal.signal(signal.SIGTERM, exit_1)
    store = dist.FileStore(f"{folder}/store", 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=timedelta(seconds=300))
    with torchwhere.watch(out=f"{folder}/run"):
        while not is_watched(Path(folder, "run")):
            time.sleep(0.05)
        for step in range(6):
            is_at_fault = step == 5 or where == "first step"
            if is_at_fault and rank == victim and where == "in a collective":
                threading.Timer(0.3, die).start()
            elif is_at_fault and rank == victim:
                while where in WAITING and len([*Path(folder).glob("waits*")]) < 3:
                    time.sleep(0.01)
                die()
            if is_at_fault and where in WAITING:  # no rank is in a collective, where it would lose its peer
                Path(folder, f"waits{rank}").touch()
            if is_at_fault and (where in WAITING or (where == "in a collective" and rank == (victim + 1) % 4)):
                time.sleep(600)
            dist.all_reduce(torch.ones(4))
            torchwhere.step()


def launch(where, victim, folder):
    Path(folder).mkdir()
    ranks = [fork(rank_of, where, victim, rank, folder) for rank in range(4)]
    monitor = fork(Monitor(Path(folder, "run"), stall_s=30, launcher=ranks[0]).watch)
    left = set(ranks)
    while len(left) == 4:  # as torchrun looks
        time.sleep(0.1)
        left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
    for pid in left:
        os.kill(pid, signal.SIGTERM)
    for pid in (*left, monitor):
        os.waitpid(pid, 0)


WAITING = ("outside any collective", "SIGTERM is caught", "SIGTERM is caught, exit 1")
for line in sys.stdin:
    victim, folder, where = line.rstrip().split(maxsplit=2)
    launch(where, int(victim), folder)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, Path]]:
    """The victim and the folder of each job."""
    root = tmp_path_factory.mktemp("launched")
    found = {where: (index % WORLD, root / f"job{index}") for index, where in enumerate(WHERE)}
    lines = [f"{victim} {folder} {where}\n" for where, (victim, folder) in found.items()]
    subprocess.run(
        [sys.executable, "-c", JOBS], input="".join(lines), text=True, check=True, timeout=500
    )
    return {where: (victim, folder / "run") for where, (victim, folder) in found.items()}


def without_monitor(run: Path, folder: Path) -> Verdict:
    """The verdict without what the monitor saw."""
    left = shutil.copytree(
        run, folder / "run", ignore=shutil.ignore_patterns("monitor-*", "verdict.*")
    )
    return diagnose_folder(left)


@pytest.mark.parametrize("where", WHERE[:-1])
def test_killed_rank_is_named(where: str, runs: dict[str, tuple[int, Path]]) -> None:
    """With what the monitor saw, the killed rank is named, wherever it was, and those that SIGTERM
    ended are not."""
    victim, run = runs[where]
    verdict = diagnose_folder(run)
    assert (verdict.kind, verdict.culprits) == ("dead", (victim,)), verdict.explanation
    (kept,) = run.glob("monitor-*.json")
    codes = {
        int(rank): seen["exit_code"] for rank, seen in json.loads(kept.read_text())["ranks"].items()
    }
    if codes[victim] is not None:  # Linux 6.15, or the monitor came before the launcher
        assert codes[victim] == -signal.SIGKILL
        assert f"Rank {victim} exited: killed by SIGKILL." in verdict.explanation


def test_ranks_whose_handler_exits_with_1(runs: dict[str, tuple[int, Path]]) -> None:
    """No rank is named but the killed one. A monitor that is late, on a busy machine, does not know
    the order: then none is."""
    victim, run = runs[WHERE[-1]]
    verdict = diagnose_folder(run)
    assert verdict.kind == "dead", verdict.explanation
    assert set(verdict.culprits) <= {victim}, verdict.explanation


@pytest.mark.parametrize("where", WHERE)
def test_not_healthy_without_a_monitor(
    where: str, runs: dict[str, tuple[int, Path]], tmp_path: Path
) -> None:
    """The boxes alone may not show who went first; the job is not called healthy, and no other rank
    is named."""
    victim, run = runs[where]
    verdict = without_monitor(run, tmp_path)
    assert verdict.kind == "dead", verdict.explanation
    assert set(verdict.culprits) <= {victim}, verdict.explanation
    assert verdict.culprits or verdict.certainty == "unknown"


def test_exit_codes() -> None:
    """Exit codes of processes come once, also of those that ended between two waits, and only of
    processes that are gone."""
    line = [sys.executable, "-c", "input()"]
    processes = [subprocess.Popen(line, stdin=subprocess.PIPE) for _ in range(3)]
    with ExitWaiter() as vigil:
        vigil.keep({process.pid for process in processes})
        killed, terminated, other = processes
        killed.kill()
        terminated.terminate()
        for process in (killed, terminated):
            process.wait()
        vigil.keep({other.pid})
        codes = vigil.exit_codes()
        # {}: before Linux 6.15
        assert codes in ({}, {killed.pid: -signal.SIGKILL, terminated.pid: -signal.SIGTERM})
        assert (vigil.exit_codes(), other.pid in codes) == ({}, False)
        other.communicate(b"\n")
