"""Runs a test file of a PyTorch checkout with pytest, in its own process group, in one of three
modes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from upstream import case_log, cases, startup
from upstream.cases import Outcome

PLAIN = "plain"
MODES = (PLAIN, startup.WATCHED, startup.DROP_INS)
# Without PyTorch's conftest.py, which is for its CI, and without pytest's log handlers, which tests
# of torch's logging count.
_PYTEST = ("-q", "--noconftest", "-c", os.devnull, "-p", "no:cacheprovider", "-p", "no:logging")
_GRACE_S = 20  # between SIGINT, after which tests may end their processes, and SIGKILL


@dataclass(frozen=True, slots=True)
class FileRun:
    """One run of a test file: the outcome of each case, and how the process ended."""

    outcomes: dict[str, Outcome] = field(repr=False)
    seconds: float
    timed_out: bool
    exit_code: int
    tail: str = field(repr=False)  # the end of its output


class Checkout:
    """The tests of a PyTorch checkout, given by the path of the checkout or of its `test`
    folder."""

    def __init__(self, path: Path, *, limit_s: float, forks: bool = False) -> None:
        self.tests = path / "test" if (path / "test").is_dir() else path
        self._limit_s = limit_s
        self._forks = forks

    def has(self, file: str) -> bool:
        return (self.tests / file).is_file()

    def run(self, file: str, mode: str, *, only: Sequence[str] = (), keyword: str = "") -> FileRun:
        """Run a file, or `only` some of its cases, until it ends or reaches the time limit."""
        with tempfile.TemporaryDirectory(prefix="upstream-") as folder:
            log, output = Path(folder, "cases.jsonl"), Path(folder, "output.txt")
            command = [
                sys.executable,
                "-m",
                "pytest",
                *_PYTEST,
                "-p",
                Path(case_log.__file__).stem,
                f"--rootdir={self.tests}",
            ]
            command += only or [file]
            command += ["-k", keyword] if keyword else []
            with output.open("wb") as out:
                begin = time.monotonic()
                process = subprocess.Popen(
                    command,
                    cwd=self.tests,
                    env=environment(
                        mode,
                        Path(folder),
                        beside=(self.tests / file).parent,
                        log=log,
                        forks=self._forks,
                    ),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                timed_out = _wait(process, self._limit_s)
            tail = output.read_text(errors="replace")[-4000:]
            seconds = time.monotonic() - begin
            return FileRun(cases.read(log), seconds, timed_out, process.returncode, tail)


def environment(
    mode: str, folder: Path, *, beside: Path, log: Path, forks: bool = False
) -> dict[str, str]:
    """Return the environment of a run. `folder` gets our plugin of pytest, and our
    `sitecustomize.py`, which spawned processes find too. Tests import modules `beside` them, as
    PyTorch runs its test files as scripts."""
    variables = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        startup.VARIABLE: mode,
        case_log.VARIABLE: str(log),
    }
    variables.pop("PYTEST_ADDOPTS", None)
    shutil.copy(case_log.__file__, folder)
    inherited = [variables["PYTHONPATH"]] if variables.get("PYTHONPATH") else []
    variables["PYTHONPATH"] = os.pathsep.join([str(folder), *inherited, str(beside)])
    if forks:
        variables[startup.FORK_VARIABLE] = "1"
    if mode != PLAIN or forks:
        shutil.copy(startup.__file__, folder / "sitecustomize.py")
    return variables


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Wait for a process, and kill the processes that it leaves. Returns True after a timeout."""
    timed_out = False
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        timed_out = True
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    finally:
        _kill_group(process.pid)
    return timed_out


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
