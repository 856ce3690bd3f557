"""The workers of ranks: processes that they start with `multiprocessing`, for example for a
DataLoader, and the compile workers of torch.

A worker that is stuck outlives its rank: it notices the end of the rank only between two items.
Takes the process ids of ranks and reads /proc. Other programs that a rank starts are left alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from torchwhere.core.grouping import grouped
from torchwhere.processes.proc_files import (
    ProcessStat,
    all_processes,
    name_of,
    process_stat,
    read_text,
    running,
)

_DATA_WORKER = "pt_data_worker"  # torch gives this name to the workers of a DataLoader
_SPAWNED = "multiprocessing"  # in the command line of a spawned worker
_COMPILES = "compile_worker"  # in the command line of a worker of torch's compiler


class HelperKind(StrEnum):
    """What a helper process does for its rank."""

    DATA_WORKER = "DataLoader worker"
    COMPILE_WORKER = "compile worker"
    SUBPROCESS = "subprocess"


def kind_of(pid: int) -> HelperKind:
    """What kind of helper a process is."""
    if name_of(pid) == _DATA_WORKER:
        return HelperKind.DATA_WORKER
    is_compiling = _COMPILES in read_text(pid, "cmdline")
    return HelperKind.COMPILE_WORKER if is_compiling else HelperKind.SUBPROCESS


class Worker(NamedTuple):
    """A process that a rank has started."""

    pid: int
    started: int  # tells the process from a later one with the same number
    rank_pid: int

    def is_left_over(self) -> bool:
        """Whether it still runs although its rank has exited."""
        return (
            running(self.pid, started=self.started) is not None and running(self.rank_pid) is None
        )

    def name(self) -> str:
        """What kind of worker it is."""
        kind = kind_of(self.pid)
        return "worker" if kind is HelperKind.SUBPROCESS else str(kind)

    def state(self) -> str | None:
        """R running, S sleeping, D in the kernel, T stopped; None if it has exited."""
        stat = process_stat(self.pid)
        return stat.state if stat is not None else None

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)


def workers_of(ranks: Collection[int]) -> list[Worker]:
    """The workers of the ranks with these process ids, and the workers of workers."""
    processes = all_processes() if ranks else {}
    children = children_of(processes)
    return [
        Worker(pid, processes[pid].started, rank_pid)
        for rank_pid in ranks
        for pid in descendants(rank_pid, children)
        if pid not in ranks and pid != os.getpid() and _is_worker(pid, rank_pid)
    ]


def children_of(stats: Mapping[int, ProcessStat]) -> dict[int, list[int]]:
    """The processes that each process has started."""
    return grouped((stat.parent, pid) for pid, stat in stats.items())


def descendants(pid: int, children: Mapping[int, Sequence[int]]) -> Iterator[int]:
    """The processes that a process has started, directly or indirectly."""
    for child in children.get(pid, ()):
        yield child
        yield from descendants(child, children)


def _is_worker(pid: int, rank_pid: int) -> bool:
    command = read_text(pid, "cmdline")
    is_forked = command == read_text(rank_pid, "cmdline")  # a fork has that of its parent
    return is_forked or _SPAWNED in command or kind_of(pid) is not HelperKind.SUBPROCESS
