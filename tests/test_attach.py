"""`torchwhere attach`: a job that was started without torchwhere and hangs now.

The ranks are real gloo processes. They play one scene after the other, so that torch is imported
only once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torchwhere.cli import main
from torchwhere.core.errors import TorchwhereError
from torchwhere.processes import py_spy
from torchwhere.processes.proc_files import all_processes, process_stat
from torchwhere.processes.rank_processes import (
    RankProcess,
    all_ranks,
    jobs_of_host,
    ranks_of,
    ranks_of_torchrun,
)
from torchwhere.processes.workers import HelperKind, children_of, descendants

JOB = Path(__file__).with_name("unwatched_job.py")
needs_py_spy = pytest.mark.skipif(py_spy.program() is None, reason="py-spy is not installed")


class UnwatchedJob:
    """Three gloo ranks on this host, with the variables that torchrun sets."""

    def __init__(self, folder: Path, *, port: int) -> None:
        self.folder, self.port = folder, port
        self.scene = ""
        (folder / "train.py").write_text(JOB.read_text())
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "train.py"],
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ
                | {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": "3",
                    "LOCAL_WORLD_SIZE": "3",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "SLURM_JOB_ID": f"{port}",
                    "SECRET_TOKEN": "do-not-save-me",
                },
            )
            for rank in range(3)
        ]
        self._wait_until_ready()

    @property
    def pids(self) -> list[str]:
        return [str(process.pid) for process in self.ranks]

    def play(self, scene: str) -> None:
        """Start a scene, and wait until every rank is in it."""
        self.scene = scene
        for process in self.ranks:
            assert process.stdin is not None
            process.stdin.write(f"{scene}\n")
            process.stdin.flush()
        arrived = [self.folder / f"arrived{rank}" for rank in range(3)]
        while not all(path.exists() for path in arrived):
            time.sleep(0.01)
        time.sleep(0.5)

    def end_scene(self) -> None:
        (self.folder / "release").touch()
        for process in self.ranks:
            process.send_signal(signal.SIGCONT)
        self._wait_until_ready()
        for path in [self.folder / "release", *self.folder.glob("arrived*")]:
            path.unlink()

    def _wait_until_ready(self) -> None:
        for process in self.ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"

    def close(self) -> None:
        for process in self.ranks:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def running(*command: str, folder: Path, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A program with all processes that it starts. They are killed at the end, also if a test
    fails."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        **options,
    )
    with process:
        try:
            yield process
        finally:
            children = children_of(all_processes())
            for pid in [*descendants(process.pid, children), process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UnwatchedJob]:
    job = UnwatchedJob(tmp_path_factory.mktemp("job"), port=_free_port())
    yield job
    job.close()


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@pytest.fixture
def scene(job: UnwatchedJob, request: pytest.FixtureRequest) -> Iterator[UnwatchedJob]:
    """The job in the scene that the test names. Afterwards it continues: it was not harmed."""
    job.play(request.param)
    yield job
    job.end_scene()


def attach(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["attach", "--json", "--stall", "2", *arguments])
    return code, json.loads(capsys.readouterr().out)


# -- hangs -----------------------------------------------------------------------------------------


@needs_py_spy
@pytest.mark.parametrize(
    ("scene", "op", "detail"),
    [
        ("loader all_reduce", "all_reduce", "in data loading"),
        ("lock all_reduce", "all_reduce", "sleeping: in a blocking call"),
        ("loop all_reduce", "all_reduce", "running: an endless loop"),
        ("stop all_reduce", "all_reduce", "stopped by a signal"),
        ("lock wait", "a collective", "sleeping"),
        ("lock backward", "a collective of the backward", "sleeping"),
    ],
    indirect=["scene"],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_hang(
    scene: UnwatchedJob, op: str, detail: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rank that does not come to the collective is named, with its line and what it does, also
    if the others wait in C++. A stopped rank stays stopped; then the job goes on."""
    code, verdict = attach(capsys, *scene.pids)
    assert (code, verdict["kind"], verdict["culprits"]) == (1, "missing", [2]), verdict["text"]
    assert verdict["collective"]["op"] == op
    assert {rank: verdict["ranks"][rank]["state"] for rank in ("0", "1")} == dict.fromkeys(
        ("0", "1"), "waiting"
    )
    missing, function = verdict["ranks"]["2"], scene.scene.partition(" ")[0]
    innermost = next(frame for frame in missing["stack"] if "/train.py:" in frame)
    assert innermost.endswith(f"/{missing['line']} in {function}")
    assert missing["detail"].startswith(detail)
    assert "Not known: torchwhere was not watching" in verdict["text"]
    stat = process_stat(scene.ranks[2].pid)
    assert stat is not None
    assert (stat.state == "T") is (function == "stop")


@needs_py_spy
@pytest.mark.parametrize("scene", ["loader all_reduce"], indirect=True)
def test_the_workers_of_a_rank(scene: UnwatchedJob, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank in data loading is shown with its DataLoader worker: process, line and state."""
    worker = next(
        helper
        for process in ranks_of([scene.ranks[2].pid])
        for helper in process.helpers
        if helper.kind is HelperKind.DATA_WORKER
    )
    main(["attach", "--stall", "2", *scene.pids])
    text = capsys.readouterr().out
    line = 1 + JOB.read_text().splitlines().index("        while not RELEASE.exists():")
    lines = [
        f"    its DataLoader worker, process {worker.pid}, is at train.py:{at}: "
        for at in (line, line + 1)
    ]
    assert any(start in text for start in lines), text
    assert "(torch/utils/data/dataloader.py:" in text  # the line of the library


@needs_py_spy
@pytest.mark.parametrize("scene", ["steps", "late"], indirect=True)
def test_a_job_that_progresses(scene: UnwatchedJob, capsys: pytest.CaptureFixture[str]) -> None:
    """A job that progresses is not called a hang, nor healthy: no hang was seen in so many seconds,
    also if ranks wait in the same collective at each look, because another rank is late."""
    code, verdict = attach(capsys, *scene.pids)
    title, explanation = verdict["text"].splitlines()[:2]
    assert (code, verdict["kind"], verdict["culprits"]) == (0, "healthy", [])
    assert title.startswith("NO HANG SEEN  3 ranks")
    assert explanation.startswith("No hang seen in 2 seconds: all 3 ranks ran.")


@needs_py_spy
@pytest.mark.parametrize("scene", ["lock all_reduce"], indirect=True)
def test_what_was_seen_is_kept(
    scene: UnwatchedJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder with what was seen gives the same verdict later, and holds no other variables of the
    job."""
    _, live = attach(capsys, *scene.pids, "--out", str(tmp_path / "run"))
    saved = [path.read_text() for path in (tmp_path / "run").iterdir()]
    code, again = attach(capsys, "--read", str(tmp_path / "run"))
    assert (code, again) == (1, live)
    assert saved
    assert not any("do-not-save-me" in text for text in saved)


# -- finding the ranks -----------------------------------------------------------------------------


def processes_or_choice(find: Callable[[], list[RankProcess]]) -> tuple[list[int], str]:
    """The processes of the only job of this host, or the message if other tests run jobs too."""
    try:
        return [process.pid for process in find()], ""
    except TorchwhereError as error:
        return [], str(error)


def test_the_ranks_of_a_host(job: UnwatchedJob) -> None:
    """The ranks of one job are found together, apart from those of other jobs."""
    pids = [process.pid for process in job.ranks]
    assert pids in jobs_of_host()
    processes, choice = processes_or_choice(all_ranks)
    assert processes == pids or f"torchwhere attach {' '.join(job.pids)}" in choice
    assert [(process.pid, process.rank) for process in ranks_of(pids[::-1])] == [
        (pid, rank) for rank, pid in enumerate(pids)
    ]


def test_the_ranks_of_a_job_of_slurm(job: UnwatchedJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `srun --overlap`, only the ranks of that job count, whatever else the host runs."""
    monkeypatch.setenv("SLURM_JOB_ID", str(job.port))
    assert [str(process.pid) for process in all_ranks()] == job.pids


FORKED = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp

def work(rank):
    dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=rank, world_size=2)
    dist.barrier()
    if rank == 0:
        print("ready", flush=True)
        dist.all_reduce(torch.ones(1))
    sys.stdin = open(0)
    sys.stdin.readline()

if __name__ == "__main__":
    mp.start_processes(work, nprocs=2, start_method="fork")
"""


@needs_py_spy
def test_ranks_without_variables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Processes that got their ranks as arguments are found by their process groups, below the
    process that started them. Their ranks are assumed, and the verdict says so."""
    (tmp_path / "train.py").write_text(FORKED)
    variables = {name: value for name, value in os.environ.items() if name != "RANK"}
    with running(
        sys.executable, "train.py", folder=tmp_path, env=variables, stdin=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        ranks = ranks_of([process.pid])
        _, verdict = attach(capsys, str(process.pid))
    assert [(rank.rank, rank.is_assumed) for rank in ranks] == [(0, True), (1, True)]
    assert verdict["culprits"] == [1]
    assert "their ranks are assumed from the order in which they started" in verdict["text"]


@needs_py_spy
def test_torchrun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The process id of torchrun stands for the ranks that it started."""
    (tmp_path / "train.py").write_text(
        "import os, time, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "os.write(1, b'ready\\n')\n"
        "if dist.get_rank() == 1:\n"
        "    time.sleep(600)\n"
        "dist.barrier()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with running(*command, "--nproc-per-node", "2", "train.py", folder=tmp_path) as torchrun:
        assert torchrun.stdout is not None
        assert [torchrun.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        time.sleep(0.5)
        code, verdict = attach(capsys, str(torchrun.pid))
        ranks = [process.pid for process in ranks_of([torchrun.pid])]
        processes, choice = processes_or_choice(ranks_of_torchrun)
    assert (code, verdict["culprits"], verdict["collective"]["op"]) == (1, [1], "barrier")
    assert verdict["ranks"]["1"]["line"] == "train.py:5"
    assert processes == ranks or f"torchwhere attach {torchrun.pid}" in choice


WATCHED = """
import time, torch, torchwhere
with torchwhere.watch(torch.nn.Linear(1, 1), out="run"):
    print("ready", flush=True)
    time.sleep(600)
"""


def test_a_watched_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job that torchwhere watches gets the verdict on its folder."""
    with running(sys.executable, "-c", WATCHED, folder=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        main(["attach", str(process.pid)])
        printed = capsys.readouterr()
    assert printed.err == (
        f"torchwhere: torchwhere watches this job. This is: torchwhere doctor {tmp_path / 'run'}\n"
    )
    assert ", step 0" in printed.out.splitlines()[0]  # only a box knows the step


# -- bad input -------------------------------------------------------------------------------------


def error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["attach", "--stall", "300", *arguments]) == 2  # without looking for so long
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err


def test_wrong_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A process that does not exist or is not Python, a wrong choice, and a folder that cannot be
    read or written give one line that says what to do."""
    with running("sleep", "600", folder=tmp_path) as sleep:
        message = error(capsys, str(sleep.pid))
    assert f"process {sleep.pid} (sleep) is not a Python process" in message
    assert f"there is no process {sleep.pid}" in error(capsys, str(sleep.pid))
    assert "give process ids, --torchrun, --all or --read" in error(capsys)
    assert "and only one of them" in error(capsys, "--all", "--torchrun")
    assert "holds nothing that torchwhere attach has written" in error(
        capsys, "--read", str(tmp_path)
    )
    (tmp_path / "attach-a.json").write_text("{}")
    assert "was not written by this version" in error(capsys, "--read", str(tmp_path))


@pytest.mark.parametrize(
    ("spy", "message"),
    [
        (None, "py-spy is not installed (pip install py-spy)"),
        (
            "echo 'Error: Permission Denied: Try running again' >&2; exit 1",
            "no permission to read the process",
        ),
        (
            "echo 'Error: Failed to find python version from target process' >&2; exit 1",
            "py-spy does not read this interpreter (update it: pip install -U py-spy)",
        ),
    ],
    ids=["missing", "no permission", "unsupported"],
)
def test_without_stacks(
    spy: str | None,
    message: str,
    job: UnwatchedJob,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """If py-spy is missing or refused, one line says what to do, without a verdict."""
    program = tmp_path / "py-spy"
    program.write_text(f"#!/bin/sh\n{spy}\n")
    program.chmod(0o755)
    monkeypatch.setattr(py_spy, "program", lambda: str(program) if spy is not None else None)
    assert f"cannot read the stacks: {message}" in error(capsys, *job.pids)
