"""Jobs that start their own processes, without a launcher that sets RANK: real processes, real
groups."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

import torchwhere
from job_scripts import LIGHTNING
from torchwhere.api import watch
from torchwhere.blackbox.run import BoxRun, read_run
from torchwhere.core.errors import TorchwhereError
from torchwhere.pipeline.verdict import diagnose_folder
from warm_python import Ended, Program, WarmPython

ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
} | {"OMP_NUM_THREADS": "1"}
PROVISIONAL = re.compile(r"process-.+-\d+\.box")

SPAWN = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist, torch.multiprocessing as mp
import torchwhere

def work(index, folder):
    rank = 1 - index
    with torchwhere.watch(out=folder / "run"):
        while len(list((folder / "run").glob("*.box"))) < 2:  # both watch, no rank is known
            time.sleep(0.01)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
        )
        for _ in range(3):
            dist.all_reduce(torch.ones(4))
        dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, (Path(sys.argv[1]),), nprocs=2)
    print("done")
"""

# Each process gets its rank as an argument, and waits for its turn.
RANK = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
import torchwhere

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
with torchwhere.watch(out=folder / "run"):
    while not (folder / f"go{rank}").exists():
        time.sleep(0.01)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()
"""


def run_python(
    *arguments: object, folder: Path, timeout: float = 400
) -> subprocess.CompletedProcess[str]:
    """Run a program that starts other processes, which need a real interpreter as their parent."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def wait_for_boxes(folder: Path, count: int, program: Program) -> None:
    while len([*folder.glob("*.box")]) < count:
        assert program.runs()
        time.sleep(0.01)


@contextmanager
def two_processes(warm: WarmPython, folder: Path) -> Iterator[list[Program]]:
    """Rank 1 starts first, so it gets the file name of rank 0. Neither knows its rank yet."""
    (folder / "train.py").write_text(RANK)
    programs = []
    try:
        for count, rank in enumerate((1, 0), start=1):
            program = warm.start("train.py", folder, rank, cwd=folder, env=ENVIRONMENT)
            programs.append(program)
            wait_for_boxes(folder / "run", count, program)
        yield programs
    finally:
        for program in programs:
            program.kill()
            program.end()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.box"))


def read_until(folder: Path, ranks: list[int]) -> BoxRun:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            run = read_run(folder)
        except TorchwhereError:
            continue
        if [*run.boxes] == ranks and all(
            box.meta.get("rank_is_assumed") is False for box in run.boxes.values()
        ):
            return run
        time.sleep(0.05)
    raise AssertionError(f"no run with the ranks {ranks}")


# -- names of boxes --------------------------------------------------------------------------------


def test_spawned_workers(tmp_path: Path) -> None:
    """Workers of mp.spawn that begin to watch before they have a rank run to their end, and leave
    one box for each rank."""
    (tmp_path / "train.py").write_text(SPAWN)
    done = run_python("train.py", tmp_path, folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    assert names(tmp_path / "run") == ["rank0.box", "rank1.box"]
    run = read_run(tmp_path / "run")
    assert (run.world_size, run.missing, run.caveats()) == (2, [], [])


def test_rank_of_a_waiting_process(warm: WarmPython, tmp_path: Path) -> None:
    """A process that waits in init_process_group has its rank. A process that has not called it
    counts as no rank, and the verdict blames no rank."""
    with two_processes(warm, tmp_path):
        (tmp_path / "go0").touch()
        run = read_until(tmp_path / "run", [0])
        assert (run.world_size, run.missing) == (2, [1])
        # the other process has the name of rank 0, which it only assumes
        assert PROVISIONAL.fullmatch(run.boxes[0].path.name)
        assert [path.name for path in run.unranked] == ["rank0.box"]
        assert run.caveats() == [
            "1 of 2 ranks is watched: no box of rank 1",
            "rank0.box: its process has not called init_process_group, so its rank is unknown",
        ]
        time.sleep(1)
        verdict = diagnose_folder(tmp_path / "run", stall_s=0.5)
        assert (verdict.kind, verdict.culprits, verdict.certainty) == ("missing", (), "unknown")
        assert "there is no data for rank 1" in verdict.explanation[0]


def test_names_are_settled(warm: WarmPython, tmp_path: Path) -> None:
    """Once the group exists, each box has the name of its rank, also if another process had that
    name before."""
    with two_processes(warm, tmp_path) as programs:
        (tmp_path / "go0").touch()
        read_until(tmp_path / "run", [0])
        (tmp_path / "go1").touch()
        ended = [program.end() for program in programs]
        programs.clear()
    assert [(code, errors) for code, _, errors in ended] == [(0, ""), (0, "")]
    assert names(tmp_path / "run") == ["rank0.box", "rank1.box"]


# -- the monitor -----------------------------------------------------------------------------------

# As mpirun does it: the launcher sets the rank, the script sets MASTER_ADDR. The last rank hangs in
# step `hang`.
OWN_ADDRESS = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist

port, hang = sys.argv[1:]
while not list(Path("run").glob("monitor-*.json")):  # the monitor has read the boxes
    time.sleep(0.01)
os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
rank, world = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
dist.init_process_group("gloo", rank=rank, world_size=world)
for step in range(8):
    if rank == world - 1 and step == int(hang):
        time.sleep(1000)
    dist.all_reduce(torch.ones(4))
    time.sleep(0.5)
print("done")
dist.destroy_process_group()
"""

# As Lightning does it: the first process sets the variables and starts the others as processes of
# its own, which take a while to start.
STARTS_OTHERS = """
import os, subprocess, sys, time
import torch, torch.distributed as dist

is_child = "LOCAL_RANK" in os.environ
if is_child:
    time.sleep(5)
else:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": sys.argv[1]}
    os.environ |= {"LOCAL_RANK": "0", "NODE_RANK": "0", "WORLD_SIZE": "2"}
    child = subprocess.Popen(
        [sys.executable, *sys.argv], env=os.environ | {"LOCAL_RANK": "1"}
    )
rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("gloo", rank=rank, world_size=2)
for step in range(8):
    dist.all_reduce(torch.ones(4))
    time.sleep(0.5)
dist.destroy_process_group()
if not is_child:
    print("child", child.wait())
"""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def run_with_mpi_variables(warm: WarmPython, folder: Path, *options: str, hang: int) -> list[Ended]:
    (folder / "train.py").write_text(OWN_ADDRESS)
    port = free_port()
    command = ("-m", "torchwhere", "run", "--out", "run", *options, "train.py", port, hang)
    mpi = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    programs = [
        warm.start(
            *command,
            cwd=folder,
            env=ENVIRONMENT
            | mpi
            | {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    return [program.end() for program in programs]


def test_address_set_by_the_script(warm: WarmPython, tmp_path: Path) -> None:
    """The monitor sees a hang in a job whose script sets MASTER_ADDR after the monitor has read the
    boxes."""
    ranks = run_with_mpi_variables(warm, tmp_path, "--stall", "4", "--end-with", "SIGKILL", hang=3)
    assert [rank.returncode for rank in ranks] == [-9, -9]
    saved = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert (saved["kind"], saved["culprits"], saved["certainty"]) == ("missing", [1], "exact")
    assert saved["collective"]["number"] == 3


def test_healthy_job_that_sets_the_address(warm: WarmPython, tmp_path: Path) -> None:
    """The monitor reports nothing about a healthy job whose script sets MASTER_ADDR itself."""
    ranks = run_with_mpi_variables(warm, tmp_path, "--stall", "2", "--end-with", "SIGKILL", hang=-1)
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert "torchwhere" not in ranks[0].stderr + ranks[1].stderr
    assert not (tmp_path / "run" / "verdict.json").exists()


def test_process_that_waits_for_its_children(warm: WarmPython, tmp_path: Path) -> None:
    """A process that waits in init_process_group for processes that it has started is not reported
    and not ended, although no other rank has a box."""
    (tmp_path / "train.py").write_text(STARTS_OTHERS)
    command = ("-m", "torchwhere", "run", "--out", "run", "--stall", "1", "--end-with", "SIGTERM")
    done = warm.run(*command, "train.py", free_port(), cwd=tmp_path, env=ENVIRONMENT)
    assert (done.returncode, done.stdout) == (0, "child 0\n")
    assert "HANG" not in done.stderr
    assert not (tmp_path / "run" / "verdict.json").exists()


# `torchwhere run` watches the parent, which is no rank. Rank 1 hangs.
SPAWN_AND_HANG = """
import sys, time
import torch, torch.distributed as dist, torch.multiprocessing as mp
import torchwhere

def work(rank, port):
    address = f"tcp://localhost:{port}"
    with torchwhere.watch(out="run"):
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
        if rank == 1:
            time.sleep(1000)
        dist.all_reduce(torch.ones(4))

if __name__ == "__main__":
    mp.spawn(work, (int(sys.argv[1]),), nprocs=2)
"""


def test_monitor_follows_spawned_workers(tmp_path: Path) -> None:
    """The monitor of a parent reports a hang of the workers that the parent spawns, and ends
    them. The parent, which has the file name of rank 0, causes no warning."""
    (tmp_path / "train.py").write_text(SPAWN_AND_HANG)
    command = ["-m", "torchwhere", "run", "--out", "run", "--stall", "3", "--end-with", "SIGKILL"]
    done = run_python(*command, "train.py", free_port(), folder=tmp_path)
    assert done.returncode == 1
    assert "keeps the name" not in done.stderr
    saved = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert (saved["kind"], saved["culprits"]) == ("missing", [1])


FITTED = f"""{LIGHTNING}
import torchwhere

with torchwhere.watch(out="run"):
    trainer().fit(Lit(), loader(rows=40))
print("done")
"""


@pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed")
def test_lightning_starts_its_own_processes(tmp_path: Path) -> None:
    """A healthy Lightning job that starts its second rank itself is recorded on both ranks, and the
    monitor neither reports nor ends it."""
    (tmp_path / "train.py").write_text(FITTED)
    done = run_python(
        "-m",
        "torchwhere",
        "run",
        "--out",
        "run",
        "--stall",
        "1",
        "--end-with",
        "SIGTERM",
        "train.py",
        folder=tmp_path,
    )
    assert (done.returncode, done.stdout.count("done")) == (0, 2), done.stderr
    assert "HANG" not in done.stderr
    assert names(tmp_path / "run") == ["rank0.box", "rank1.box"]
    verdict = diagnose_folder(tmp_path / "run")
    assert (verdict.kind, sorted(verdict.ranks)) == ("healthy", [0, 1])


# -- a watch that cannot begin ---------------------------------------------------------------------


def test_watch_that_cannot_begin(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If a watch cannot begin, the job goes on without it, and one warning says why."""
    monkeypatch.setattr(watch, "_has_reported_start", False)

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no memory for the hooks")

    monkeypatch.setattr(watch, "Session", fail)
    for _ in range(2):
        with torchwhere.watch():
            assert torchwhere.where().step is None
    (record,) = caplog.records
    assert (
        record.message
        == "torchwhere: cannot watch this process (RuntimeError: no memory for the hooks); the job"
        " continues without a watch"
    )
