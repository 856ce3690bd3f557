"""Reads the files of one process in /proc. A process that is gone, or of another user, gives empty
values."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# fields of /proc/<pid>/stat after the name
_STATE, _PARENT, _STARTED, _EXIT_STATUS = 0, 1, 19, 49
_EXITED = frozenset("ZX")  # zombie, dead
_SWITCHES = ("voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:")


class ProcessStat(NamedTuple):
    """The fields of /proc/<pid>/stat that torchwhere uses."""

    state: str  # R running, S sleeping, D in the kernel, T stopped, Z zombie
    parent: int
    started: int  # ticks since boot: tells the process from a later one with the same number
    exit_status: int  # of a zombie; 0 also for a user who may not read it

    @property
    def is_running(self) -> bool:
        return self.state not in _EXITED


class ThreadClock(NamedTuple):
    """How often and how long a thread has run. If it is equal at two moments, the thread did not
    run in between."""

    switches: int
    run_ns: int


def process_stat(pid: int) -> ProcessStat | None:
    """State, parent and start of a process; None if it is gone."""
    fields = read_text(pid, "stat").rpartition(")")[2].split()
    if len(fields) <= _EXIT_STATUS:
        return None
    numbers = (int(fields[index]) for index in (_PARENT, _STARTED, _EXIT_STATUS))
    return ProcessStat(fields[_STATE], *numbers)


def running(pid: int, *, started: int | None = None) -> ProcessStat | None:
    """The same; None also if the process has exited, or is not the one that started then."""
    stat = process_stat(pid)
    is_same = stat is not None and stat.is_running and started in (None, stat.started)
    return stat if is_same else None


def all_processes() -> dict[int, ProcessStat]:
    """All processes of this host that have not exited."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    stats = {pid: running(pid) for pid in pids}
    return {pid: stat for pid, stat in stats.items() if stat is not None}


def started_ns(stat: ProcessStat) -> int:
    """Wall clock of the start of a process."""
    since_boot_ns = stat.started * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    boot_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return boot_ns + since_boot_ns


def environment(pid: int) -> dict[str, str]:
    """The environment that a process started with. Variables that it set later are not in it."""
    pairs = (pair.partition("=") for pair in read_text(pid, "environ").split("\0"))
    return {name: value for name, _, value in pairs if name}


def command_line(pid: int) -> list[str]:
    """The arguments of a process, from its program on."""
    return read_text(pid, "cmdline").split("\0")[:-1]


def name_of(pid: int) -> str:
    """The name of a process, as `ps` shows it."""
    return read_text(pid, "comm").strip()


def current_folder(pid: int) -> str:
    """The current folder of a process; empty if it may not be read."""
    return _link(pid, "cwd")


def executable(pid: int) -> str:
    """The program file of a process; empty if it may not be read."""
    return _link(pid, "exe")


def mapped_files(pid: int) -> set[str]:
    """The files that a process has mapped into its memory."""
    lines = read_text(pid, "maps").splitlines()
    return {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) > 5}


def thread_names(pid: int) -> set[str]:
    return {name_of_thread(pid, thread_id) for thread_id in thread_ids(pid)}


def thread_ids(pid: int) -> Iterator[int]:
    try:
        yield from map(int, os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return


def name_of_thread(pid: int, thread_id: int) -> str:
    return read_text(pid, f"task/{thread_id}/comm").strip()


def thread_clock(pid: int, thread_id: int) -> ThreadClock | None:
    """How often and how long a thread has run; None if it is gone."""
    status = read_text(pid, f"task/{thread_id}/status")
    switches = [line.split()[1] for line in status.splitlines() if line.startswith(_SWITCHES)]
    run = read_text(pid, f"task/{thread_id}/schedstat").split()
    if not switches:
        return None
    return ThreadClock(sum(map(int, switches)), int(run[0]) if run else 0)


def waits_in(pid: int) -> str:
    """The kernel function in which the main thread sleeps; empty if it runs or is not readable."""
    function = read_text(pid, "wchan").strip()
    return "" if function == "0" else function


def has_signal(status: str, fields: str, number: int) -> bool:
    """Whether a signal is in one of these fields of /proc/<pid>/status, as in `SigPnd|ShdPnd`."""
    masks = re.findall(rf"^(?:{fields}):\s*([0-9a-f]+)", status, re.MULTILINE)
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def read_text(pid: int, name: str) -> str:
    """A file of a process; empty if the process is gone or the file is not readable."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except (OSError, ValueError):
        return ""


def _link(pid: int, name: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/{name}")
    except OSError:
        return ""
