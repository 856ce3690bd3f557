"""The workers of ranks: processes that they start with `multiprocessing`, for example for a
DataLoader, and the compile workers of torch.

A worker that is stuck outlives its rank: it notices the end of the rank only between two items.
Takes the process ids of ranks and reads /proc. Other programs that a rank starts are left alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

_STATE, _PARENT, _STARTED = 0, 1, 19  # fields of /proc/<pid>/stat after the name
_NAME = "pt_data_worker"  # torch gives it to the workers of a DataLoader
_SPAWNED = b"multiprocessing"  # in the command line of a spawned worker
_COMPILES = b"compile_worker"  # in the command line of a worker of torch's compiler


class Worker(NamedTuple):
    """A process that a rank has started."""

    pid: int
    started: int  # tells the process from a later one with the same number
    rank_pid: int

    def is_left_over(self) -> bool:
        """Whether it still runs although its rank has exited."""
        return _runs(self.pid) == self.started and _runs(self.rank_pid) is None

    def name(self) -> str:
        """What kind of worker it is."""
        if _read(self.pid, "comm").decode(errors="replace").strip() == _NAME:
            return "DataLoader worker"
        return "compile worker" if _COMPILES in _read(self.pid, "cmdline") else "worker"

    def state(self) -> str | None:
        """R running, S sleeping, D in the kernel, T stopped; None if it has exited."""
        fields = _stat(self.pid)
        return fields[_STATE] if fields else None

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)


def workers_of(ranks: Collection[int]) -> list[Worker]:
    """The workers of the ranks with these process ids, and the workers of workers."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc") if ranks else ():
        fields = _stat(int(entry)) if entry.isdecimal() else []
        if fields:
            children.setdefault(int(fields[_PARENT]), []).append(int(entry))
    return [
        Worker(pid, started, rank_pid)
        for rank_pid in ranks
        for pid in _descendants(rank_pid, children)
        if pid not in ranks and pid != os.getpid() and _is_worker(pid, rank_pid)
        if (started := _runs(pid)) is not None
    ]


def _descendants(pid: int, children: dict[int, list[int]]) -> Iterator[int]:
    for child in children.get(pid, ()):
        yield child
        yield from _descendants(child, children)


def _is_worker(pid: int, rank_pid: int) -> bool:
    command = _read(pid, "cmdline")
    is_forked = command == _read(rank_pid, "cmdline")  # a fork has the command line of its parent
    is_named = _read(pid, "comm").decode(errors="replace").strip() == _NAME
    return is_forked or _SPAWNED in command or _COMPILES in command or is_named


def _runs(pid: int) -> int | None:
    """When a process started, in ticks since boot; None if it has exited."""
    fields = _stat(pid)
    return int(fields[_STARTED]) if fields and fields[_STATE] not in "ZX" else None


def _stat(pid: int) -> list[str]:
    return _read(pid, "stat").decode(errors="replace").rpartition(")")[2].split()


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
