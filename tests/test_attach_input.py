"""`torchwhere attach` with a launcher that has no ranks, a folder that cannot be written, and a job
that ends meanwhile."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from test_attach import error, needs_py_spy
from torchwhere.processes.observe import observe
from torchwhere.processes.rank_processes import ranks_of

WAITS = "import sys; print('ready', flush=True); sys.stdin.read()"


@contextlib.contextmanager
def waiting(script: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that waits until it is killed."""
    script.write_text(WAITS)
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | variables,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_a_launcher_without_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A launcher that has no ranks is not taken for a rank."""
    with waiting(tmp_path / "torchrun") as process:
        assert "is a launcher without ranks" in error(capsys, str(process.pid))


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that cannot be written gives one line before the looks, and not after them."""
    folder = "/proc/self/task"  # exists, and takes no file, also from root
    with waiting(tmp_path / "train.py") as process:
        message = error(capsys, str(process.pid), "--out", folder, "--stall", "600")
    assert f"cannot write {folder}" in message


@needs_py_spy
def test_a_job_that_ends(tmp_path: Path) -> None:
    """The looks end with the job, and the rank counts as exited."""
    with waiting(tmp_path / "train.py", RANK="0", WORLD_SIZE="1") as process:

        def end(_seconds: int, _stall_s: int) -> None:
            process.kill()
            process.wait()

        (rank,) = observe(ranks_of([process.pid]), stall_s=600, on_progress=end)
    assert not rank.is_alive
    assert rank.seconds < 300
