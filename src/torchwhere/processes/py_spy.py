"""Python stacks of processes that do not answer: read out of their memory by `py-spy`, if it is
installed.

Never a dependency. It is asked not to pause what it looks at, so that it works on a stopped process
and changes nothing. Where it is missing, is not allowed to look (ptrace_scope, containers) or takes
too long, there is no stack, and that is all.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

_PATIENCE_S = 5.0
_MOST_BYTES = 4 << 20


class PySpyFrame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str


def program() -> str | None:
    """Where py-spy is: beside this Python, or on the path."""
    beside = Path(sys.executable or ".").with_name("py-spy")
    return (
        str(beside) if os.access(beside, os.X_OK) and beside.is_file() else shutil.which("py-spy")
    )


class MainThread(NamedTuple):
    """Its frames, innermost first."""

    frames: list[PySpyFrame]
    holds_gil: bool


def main_threads(pids: Iterable[int]) -> dict[int, MainThread]:
    """The main threads of some processes; without those that cannot be had."""
    spy = program()
    if spy is None:
        return {}
    started: dict[int, subprocess.Popen[bytes]] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            command = [spy, "dump", "--nonblocking", "--json", "--pid", str(pid)]
            started[pid] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
    deadline = time.monotonic() + _PATIENCE_S
    said = {pid: _said(process, deadline) for pid, process in started.items()}
    return {
        pid: found for pid, text in said.items() if (found := _main_thread(text, pid)) is not None
    }


def _said(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    try:
        return process.communicate(timeout=max(0.1, deadline - time.monotonic()))[0][:_MOST_BYTES]
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return b""


def _main_thread(text: bytes, pid: int) -> MainThread | None:
    try:
        threads = json.loads(text)
        main = next(
            thread
            for thread in threads
            if thread["os_thread_id"] == pid or thread["thread_name"] == "MainThread"
        )
        return MainThread([_frame(frame) for frame in main["frames"]], main["owns_gil"] is True)
    except (ValueError, KeyError, TypeError, StopIteration, RecursionError):
        return None


def _frame(value: dict[str, Any]) -> PySpyFrame:
    return PySpyFrame(str(value["filename"]), int(value["line"]), str(value["name"]))
