"""Reads the files of one process in /proc. A process that is gone, or of another user, gives empty
values."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_STATE, _PARENT, _STARTED = 0, 1, 19  # fields of /proc/<pid>/stat after the name
EXITED = frozenset("ZX")  # zombie, dead
_SWITCHES = ("voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:")


class ProcessStat(NamedTuple):
    """The fields of /proc/<pid>/stat that torchwhere uses."""

    state: str  # R running, S sleeping, D in the kernel, T stopped, Z zombie
    parent: int
    started: int  # ticks since boot: tells the process from a later one with the same number


class ThreadClock(NamedTuple):
    """How often and how long a thread has run. If it is equal at two moments, the thread did not
    run in between."""

    switches: int
    run_ns: int


def process_stat(pid: int) -> ProcessStat | None:
    """State, parent and start of a process; None if it is gone."""
    fields = read_bytes(pid, "stat").decode(errors="replace").rpartition(")")[2].split()
    if len(fields) <= _STARTED:
        return None
    return ProcessStat(fields[_STATE], int(fields[_PARENT]), int(fields[_STARTED]))


def all_processes() -> dict[int, ProcessStat]:
    """All processes of this host that have not exited."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    stats = {pid: process_stat(pid) for pid in pids}
    return {pid: stat for pid, stat in stats.items() if stat and stat.state not in EXITED}


def started_ns(stat: ProcessStat) -> int:
    """Wall clock of the start of a process."""
    since_boot_ns = stat.started * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    boot_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return boot_ns + since_boot_ns


def environment(pid: int) -> dict[str, str]:
    """The environment that a process started with. Variables that it set later are not in it."""
    pairs = (pair.partition(b"=") for pair in read_bytes(pid, "environ").split(b"\0"))
    return {
        name.decode(errors="replace"): value.decode(errors="replace")
        for name, _, value in pairs
        if name
    }


def command_line(pid: int) -> list[str]:
    """The arguments of a process, from its program on."""
    return [part.decode(errors="replace") for part in read_bytes(pid, "cmdline").split(b"\0")[:-1]]


def name_of(pid: int) -> str:
    """The name of a process, as `ps` shows it."""
    return read_bytes(pid, "comm").decode(errors="replace").strip()


def current_folder(pid: int) -> str:
    """The current folder of a process; empty if it may not be read."""
    return _link(pid, "cwd")


def executable(pid: int) -> str:
    """The program file of a process; empty if it may not be read."""
    return _link(pid, "exe")


def mapped_files(pid: int) -> set[str]:
    """The files that a process has mapped into its memory."""
    lines = read_bytes(pid, "maps").decode(errors="replace").splitlines()
    return {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) > 5}


def thread_names(pid: int) -> set[str]:
    return {name_of_thread(pid, thread_id) for thread_id in thread_ids(pid)}


def thread_ids(pid: int) -> Iterator[int]:
    try:
        yield from map(int, os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return


def name_of_thread(pid: int, thread_id: int) -> str:
    return read_bytes(pid, f"task/{thread_id}/comm").decode(errors="replace").strip()


def thread_clock(pid: int, thread_id: int) -> ThreadClock | None:
    """How often and how long a thread has run; None if it is gone."""
    status = read_bytes(pid, f"task/{thread_id}/status").decode(errors="replace")
    switches = [line.split()[1] for line in status.splitlines() if line.startswith(_SWITCHES)]
    run = read_bytes(pid, f"task/{thread_id}/schedstat").split()
    if not switches:
        return None
    return ThreadClock(sum(map(int, switches)), int(run[0]) if run else 0)


def waits_in(pid: int) -> str:
    """The kernel function in which the main thread sleeps; empty if it runs or is not readable."""
    function = read_bytes(pid, "wchan").decode(errors="replace").strip()
    return "" if function == "0" else function


def read_bytes(pid: int, name: str) -> bytes:
    """A file of a process; empty if the process is gone or the file is not readable."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (OSError, ValueError):
        return b""


def _link(pid: int, name: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/{name}")
    except OSError:
        return ""
