"""Reads Python stacks with `py-spy`, if it is installed, from processes that cannot answer.

py-spy is not a dependency. Without native frames it runs without pausing the process, so it also
works on a stopped process and changes nothing. For native frames it stops the process with ptrace
while it reads the stack. If it is missing, lacks permission (ptrace_scope, containers) or takes too
long, there is no stack.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from torchwhere.processes.proc_files import process_stat
from torchwhere.processes.status import STOPPED

_PATIENCE_S = 5.0
_NATIVE_PATIENCE_S = 60.0  # py-spy reads the symbols of libtorch
_MAX_BYTES = 4 << 20
_MAX_FRAMES = 128


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


class SpiedThread(NamedTuple):
    """One Python thread of a process."""

    thread_id: int  # of the kernel; 0 if py-spy does not know it
    name: str
    frames: list[PythonFrame]  # innermost first, without native frames
    holds_gil: bool
    native: tuple[str, ...] = ()  # native functions inside the innermost Python frame


class Refusal(StrEnum):
    """Why py-spy could not read a process."""

    NOT_INSTALLED = "not_installed"
    NO_PERMISSION = "no_permission"
    UNSUPPORTED = "unsupported"  # not an interpreter that this py-spy knows
    TIMEOUT = "timeout"
    STOPPED = "stopped"  # native frames of a stopped process are not read


def main_thread(threads: list[SpiedThread] | Refusal | None, pid: int) -> SpiedThread | None:
    """The main thread of a process among its threads; None if they could not be read."""
    for thread in threads if isinstance(threads, list) else ():
        if thread.thread_id == pid or thread.name == "MainThread":
            return thread
    return None


def main_threads(pids: Iterable[int]) -> dict[int, SpiedThread]:
    """The main threads of those processes that py-spy can read."""
    mains = {pid: main_thread(threads, pid) for pid, threads in read_threads(pids).items()}
    return {pid: main for pid, main in mains.items() if main is not None}


def read_threads(
    pids: Iterable[int], *, native: bool = False
) -> dict[int, list[SpiedThread] | Refusal]:
    """The Python threads of each process, or why they are unknown.

    Args:
        pids: The processes.
        native: Also read the native frames. This pauses each process while py-spy reads it.
    """
    processes, spy = list(pids), program()
    if spy is None:
        return dict.fromkeys(processes, Refusal.NOT_INSTALLED)
    if native:
        # Each py-spy needs a core and much memory to read the symbols of libtorch.
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
            outputs = pool.map(lambda pid: _read_native(spy, pid), processes)
            return dict(zip(processes, outputs, strict=True))
    started = {pid: _start(spy, pid, "--nonblocking") for pid in processes}
    deadline = time.monotonic() + _PATIENCE_S
    return {pid: _threads(process, deadline) for pid, process in started.items()}


def _read_native(spy: str, pid: int) -> list[SpiedThread] | Refusal:
    if _is_stopped(pid):  # a detach could continue it
        return Refusal.STOPPED
    process = _start(spy, pid, "--native")
    threads = _threads(process, time.monotonic() + _NATIVE_PATIENCE_S)
    # a py-spy that was killed between attach and detach may leave the process stopped
    if threads is Refusal.TIMEOUT and _is_stopped(pid):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)
    return threads


def _is_stopped(pid: int) -> bool:
    stat = process_stat(pid)
    return stat is not None and stat.state in STOPPED


def _start(spy: str, pid: int, option: str) -> subprocess.Popen[bytes] | None:
    with contextlib.suppress(OSError):
        return subprocess.Popen(
            [spy, "dump", option, "--json", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C must not end it while it has stopped a process
        )
    return None


def _threads(
    process: subprocess.Popen[bytes] | None, deadline: float
) -> list[SpiedThread] | Refusal:
    if process is None:
        return Refusal.NOT_INSTALLED
    try:
        output, errors = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Refusal.TIMEOUT
    try:
        threads = [_thread(value) for value in json.loads(output[:_MAX_BYTES])]
    except (ValueError, KeyError, TypeError, RecursionError):
        is_denied = b"ermission" in errors or b"ptrace" in errors
        return Refusal.NO_PERMISSION if is_denied else Refusal.UNSUPPORTED
    return threads or Refusal.UNSUPPORTED


def _thread(value: dict[str, Any]) -> SpiedThread:
    python = [frame for frame in value["frames"] if not frame.get("module")]
    first = value["frames"].index(python[0]) if python else len(value["frames"])
    return SpiedThread(
        thread_id=int(value["os_thread_id"] or 0),
        name=str(value["thread_name"] or ""),
        frames=[_frame(frame) for frame in python[:_MAX_FRAMES]],
        holds_gil=value["owns_gil"] is True,
        native=tuple(str(frame["name"]) for frame in value["frames"][:first][:_MAX_FRAMES]),
    )


def _frame(value: dict[str, Any]) -> PythonFrame:
    return PythonFrame(str(value["filename"]), int(value["line"]), str(value["name"]))
