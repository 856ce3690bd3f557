"""Looks at the processes of a run from outside: do they exist, do they run, what are their Python
stacks.

Reads /proc and requests stacks. If a process is gone, its cgroup shows whether the kernel killed it
because memory ran out: the kernel's count of such kills has grown since the process started, or
since the last look.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchwhere.blackbox.file_names import fault_file, stall_file
from torchwhere.blackbox.summary import BoxOrSummary
from torchwhere.core.grouping import grouped
from torchwhere.processes import py_spy
from torchwhere.processes.cgroup import limit_bytes, oom_kills
from torchwhere.processes.fault_handler import (
    Stack,
    ask_rank,
    ask_worker,
    crash_stack,
    read_text,
    stall_stack,
    wait_for_stacks,
    without_own_frames,
)
from torchwhere.processes.launcher import pid_namespace
from torchwhere.processes.proc_files import ProcessStat, has_signal, process_stat
from torchwhere.processes.proc_files import read_text as proc_text
from torchwhere.processes.status import STOPPED, ProcessStatus, WorkerStatus
from torchwhere.processes.workers import workers_of

_MOST_WORKERS = 8  # of a rank
_WORKERS_S = 1.0  # to wait for the stacks of workers
SILENT_S = 60  # without a heartbeat of any rank, a job has ended


def look(
    boxes: Mapping[int, BoxOrSummary], *, stacks: Iterable[int] = (), patience_s: float = 1.0
) -> dict[int, ProcessStatus]:
    """Status of every process on this host, with the Python stacks of the ranks in `stacks`
    and of their workers."""
    host = socket.gethostname() if Path("/proc/self/stat").exists() else None
    here = {rank for rank, box in boxes.items() if _is_visible(box, host)}
    stats = {rank: _own_stat(boxes[rank]) for rank in sorted(here.intersection(stacks))}
    asked = {rank: stat for rank, stat in stats.items() if stat is not None and stat.is_running}
    rank_stacks = _stacks_of(boxes, asked, patience_s) if asked else {}
    # one time for the whole look: a process that is gone was gone while the others existed
    now_ns = time.time_ns()
    pids = {int(boxes[rank].meta["pid"]): rank for rank in asked}
    spied = py_spy.main_threads(pids) if pids else {}
    for pid, main in spied.items():
        rank_stacks.setdefault(pids[pid], without_own_frames(main.frames))
    observer = _Observer(now_ns)
    statuses = {
        rank: observer.status(box, rank_stacks.get(rank, ())) if rank in here else observer.far(box)
        for rank, box in boxes.items()
    }
    for pid, main in spied.items():
        statuses[pids[pid]] = replace(statuses[pids[pid]], holds_gil=main.holds_gil)
    return statuses | _with_workers(statuses, pids) if pids else statuses


def _stacks_of(
    boxes: Mapping[int, BoxOrSummary], stats: Mapping[int, ProcessStat], patience_s: float
) -> dict[int, Stack]:
    """Ask ranks for their stacks. A process that is stopped cannot answer."""
    asked = {
        rank: ask_rank(boxes[rank]) for rank, stat in stats.items() if stat.state not in STOPPED
    }
    return wait_for_stacks(asked, patience_s=patience_s)


def _with_workers(
    statuses: Mapping[int, ProcessStatus], pids: Mapping[int, int]
) -> dict[int, ProcessStatus]:
    """The statuses of those ranks of `pids`, which has them by process id, that have workers."""
    workers = grouped((pids[worker.rank_pid], worker) for worker in workers_of(pids))
    shown = {rank: of_rank[:_MOST_WORKERS] for rank, of_rank in workers.items()}
    stacks = _worker_stacks([worker.pid for of_rank in shown.values() for worker in of_rank])
    return {
        rank: replace(
            statuses[rank],
            workers=tuple(
                WorkerStatus(worker.pid, worker.name(), worker.state(), stacks.get(worker.pid, ()))
                for worker in of_rank
            ),
        )
        for rank, of_rank in shown.items()
    }


def _worker_stacks(pids: list[int]) -> dict[int, Stack]:
    """The stacks of the main threads of workers, which show why a rank waits for data. py-spy
    reads those that cannot answer, if it is installed."""
    stacks = wait_for_stacks({pid: ask_worker(pid) for pid in pids}, patience_s=_WORKERS_S)
    others = [pid for pid in pids if pid not in stacks]
    spied = py_spy.main_threads(others) if others else {}
    return stacks | {pid: without_own_frames(main.frames) for pid, main in spied.items()}


def merged(
    seen: Mapping[int, ProcessStatus], saved: Mapping[int, dict[str, Any]]
) -> dict[int, ProcessStatus]:
    """The current statuses. Where a process is gone or out of reach, adds what a monitor saved."""
    statuses = dict(seen)
    for rank, value in saved.items():
        now, earlier = statuses.get(rank, ProcessStatus()), ProcessStatus.from_dict(value)
        if not now.alive:
            statuses[rank] = now.after(earlier)
    return statuses


def with_silent_ended(
    statuses: dict[int, ProcessStatus], beats_ns: Collection[int]
) -> dict[int, ProcessStatus]:
    """Mark unknown processes as exited if no rank of the job has sent a heartbeat for a minute.

    `beats_ns` are the last heartbeats of all ranks; every rank must have one. One silent rank among
    others may only be stopped.
    """
    silent_ns = time.time_ns() - SILENT_S * 10**9
    is_silent = bool(beats_ns) and all(beats_ns) and max(beats_ns) < silent_ns
    if not is_silent or any(status.alive for status in statuses.values()):
        return statuses
    return {
        rank: replace(status, alive=False) if status.alive is None else status
        for rank, status in statuses.items()
    }


def is_descendant(box: BoxOrSummary, ancestor: int) -> bool:
    """Whether the process of a box runs on this host, and `ancestor` started it directly or
    indirectly."""
    if box.meta.get("host") != socket.gethostname():
        return False
    stat = _own_stat(box)
    while stat is not None:
        if stat.parent == ancestor:
            return True
        stat = process_stat(stat.parent)
    return False


class _Observer:
    """One look. Reads each OOM counter and lists each folder once: ranks share them."""

    def __init__(self, now_ns: int) -> None:
        self._now_ns = now_ns
        self._oom_kills: dict[str, int | None] = {}  # by counter file
        self._side_files: dict[str, frozenset[str]] = {}  # names by folder

    def status(self, box: BoxOrSummary, stack: Stack) -> ProcessStatus:
        """Status of a process on this host."""
        stat, now_ns = _own_stat(box), self._now_ns
        alive = stat is not None and stat.is_running
        kills = self._kills(box)
        ended, last_stack, last_ns = (None, (), None) if alive else self._last_stack(box)
        is_killed = not alive or _has_sigkill(box.meta.get("pid"))
        return ProcessStatus(
            alive=alive,
            state=stat.state if stat is not None else None,
            ended=ended,
            stack=stack or last_stack,
            alive_ns=now_ns if alive else None,
            gone_ns=None if alive else now_ns,
            stack_ns=now_ns if stack else last_ns,
            oom_kills=kills,
            out_of_memory=_out_of_memory(box, kills) if is_killed else None,
            exit_code=_zombie_exit_code(stat),
        )

    def far(self, box: BoxOrSummary) -> ProcessStatus:
        """Status of a process on another host: only its fault and stall files are known."""
        ended, stack, stack_ns = self._last_stack(box)
        return ProcessStatus(ended=ended, stack=stack, stack_ns=stack_ns if stack else None)

    def _last_stack(self, box: BoxOrSummary) -> tuple[str | None, Stack, int | None]:
        """How a rank crashed, if it did, its last stack, and the time of a stack that it saved when
        it stalled."""
        fault = self._side_file(box, fault_file)
        ended, crashed_at = crash_stack(fault) if fault else (None, ())
        stall = self._side_file(box, stall_file) if ended is None else ""
        if not stall:
            return ended, crashed_at, None
        return None, *stall_stack(stall, last_ns=box.last_ns)

    def _kills(self, box: BoxOrSummary) -> int | None:
        counter = box.meta.get("oom_counter")
        if not isinstance(counter, str):
            return None
        if counter not in self._oom_kills:
            self._oom_kills[counter] = oom_kills(counter)
        return self._oom_kills[counter]

    def _side_file(self, box: BoxOrSummary, name_of: Callable[[Path], Path]) -> str:
        """Text of a file that a rank may have written beside its box. Most ranks have none: one
        listing of the folder replaces two failing reads for each rank."""
        folder, _ = os.path.split(box.path)
        if folder not in self._side_files:
            with contextlib.suppress(OSError):
                self._side_files[folder] = frozenset(
                    name for name in os.listdir(folder or ".") if not name.endswith(".box")
                )
        names = self._side_files.get(folder)
        if not names:
            return ""
        path = name_of(box.path)
        return read_text(path) if path.name in names else ""


def _out_of_memory(box: BoxOrSummary, kills: int | None) -> str | None:
    """Sentence for a killed process, if its cgroup has seen an OOM kill since it started."""
    counter, before = box.meta.get("oom_counter"), box.meta.get("oom_kills")
    if not isinstance(counter, str) or not isinstance(before, int):
        return None
    if kills is None or kills <= before:
        return None
    limit = limit_bytes(counter)
    limited = f"cgroup limit {limit / 1e6:.0f} MB" if limit is not None else "no cgroup limit"
    return (
        f"killed by the system: out of memory ({limited}, its oom_kill count went from {before} to"
        f" {kills})"
    )


def _has_sigkill(pid: Any) -> bool:
    """Whether an existing process was already killed: the kernel counts a kill first, and a large
    process takes long to exit. SIGKILL is pending, or its memory is gone."""
    status = proc_text(pid, "status")
    return has_signal(status, "SigPnd|ShdPnd", signal.SIGKILL) or "VmSize:" not in status


def _is_visible(box: BoxOrSummary, host: str | None) -> bool:
    """Whether the writer of a box runs on this host and in this PID namespace, not in another
    container."""
    if host is None or box.meta.get("host") != host:
        return False
    namespace = box.meta.get("pid_namespace")
    return namespace is None or namespace == pid_namespace()


def _own_stat(box: BoxOrSummary) -> ProcessStat | None:
    """The process that wrote a box; None if it is gone or another process has its number now."""
    pid, started = box.meta.get("pid"), box.meta.get("pid_started")
    stat = process_stat(pid) if isinstance(pid, int) else None
    is_writer = stat is not None and started in (None, stat.started)
    return stat if is_writer else None


def _zombie_exit_code(stat: ProcessStat | None) -> int | None:
    """Exit code of a process that its parent has not collected yet. The kernel shows 0 to a user
    who may not read it, so 0 means unknown."""
    if stat is None or stat.state != "Z":
        return None
    return os.waitstatus_to_exitcode(stat.exit_status) or None
