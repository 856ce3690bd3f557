"""Reads Python stacks with `py-spy`, if it is installed, from processes that cannot answer.

py-spy is not a dependency. It runs without pausing the process, so it also works on a stopped
process and changes nothing. If it is missing, lacks permission (ptrace_scope, containers) or takes
too long, there is no stack.
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
_MAX_BYTES = 4 << 20


class PythonFrame(NamedTuple):
    """One frame of a Python stack."""

    file: str
    line: int
    function: str


def program() -> str | None:
    """Path of py-spy: beside this Python, or on the PATH."""
    beside = Path(sys.executable or ".").with_name("py-spy")
    if os.access(beside, os.X_OK) and beside.is_file():
        return str(beside)
    return shutil.which("py-spy")


class MainThread(NamedTuple):
    """The main thread of a process."""

    frames: list[PythonFrame]  # innermost first
    holds_gil: bool


def main_threads(pids: Iterable[int]) -> dict[int, MainThread]:
    """The main threads of those processes that py-spy can read."""
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
    outputs = {pid: _output(process, deadline) for pid, process in started.items()}
    threads = {pid: _main_thread(output, pid) for pid, output in outputs.items()}
    return {pid: thread for pid, thread in threads.items() if thread is not None}


def _output(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    try:
        return process.communicate(timeout=max(0.1, deadline - time.monotonic()))[0][:_MAX_BYTES]
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


def _frame(value: dict[str, Any]) -> PythonFrame:
    return PythonFrame(str(value["filename"]), int(value["line"]), str(value["name"]))
