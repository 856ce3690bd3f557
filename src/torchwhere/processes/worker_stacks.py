"""The workers of ranks and their Python stacks, which show why a rank waits for data.

Takes the ranks whose stacks are wanted. A worker that a watched rank has forked, such as a
DataLoader worker, answers a signal: its fault handler writes into a file in memory, which is read
through /proc (`hooks/stack_files.py`). py-spy reads the others, if it is installed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torchwhere.blackbox.file_names import STACK_IN_MEMORY
from torchwhere.blackbox.summary import BoxOrSummary
from torchwhere.processes import py_spy
from torchwhere.processes.look import (
    Stack,
    catches,
    main_thread_stack,
    read_text,
    without_own_frames,
)
from torchwhere.processes.status import ProcessStatus, WorkerStatus
from torchwhere.processes.workers import Worker, workers_of

_MOST_WORKERS = 8  # of a rank
_PATIENCE_S = 1.0


def with_workers(
    statuses: dict[int, ProcessStatus],
    boxes: Mapping[int, BoxOrSummary],
    *,
    ranks: Iterable[int],
) -> dict[int, ProcessStatus]:
    """The statuses, with the workers of these ranks, as far as they run on this host."""
    pids = {
        boxes[rank].meta.get("pid"): rank
        for rank in ranks
        if rank in boxes and statuses[rank].alive
    }
    workers: dict[int, list[Worker]] = {}
    for worker in workers_of({pid for pid in pids if isinstance(pid, int)}):
        of_rank = workers.setdefault(pids[worker.rank_pid], [])
        if len(of_rank) < _MOST_WORKERS:
            of_rank.append(worker)
    stacks = _stacks([worker.pid for of_rank in workers.values() for worker in of_rank])
    return statuses | {
        rank: replace(
            statuses[rank],
            workers=tuple(
                WorkerStatus(worker.pid, worker.name(), worker.state(), stacks.get(worker.pid, ()))
                for worker in of_rank
            ),
        )
        for rank, of_rank in workers.items()
    }


def _stacks(pids: list[int]) -> dict[int, Stack]:
    """The stacks of the main threads, innermost line first."""
    stacks = _requested_stacks(pids)
    others = [pid for pid in pids if pid not in stacks]
    for pid, main in py_spy.main_threads(others).items() if others else ():
        stacks[pid] = without_own_frames(main.frames)
    return stacks


class _Answer(NamedTuple):
    file: Path
    size: int  # before the request


def _requested_stacks(pids: list[int]) -> dict[int, Stack]:
    answers = {pid: _request(pid) for pid in pids}
    pending = {pid: answer for pid, answer in answers.items() if answer is not None}
    stacks: dict[int, Stack] = {}
    deadline = time.monotonic() + _PATIENCE_S
    while pending and time.monotonic() < deadline:
        time.sleep(0.02)
        for pid, answer in list(pending.items()):
            stack = main_thread_stack(read_text(answer.file, start=answer.size))
            if stack:
                stacks[pid] = stack
                del pending[pid]
    return stacks


def _request(pid: int) -> _Answer | None:
    """Signal a worker to write its stack; None if it has no file for it."""
    folder = Path(f"/proc/{pid}/fd")
    try:
        for file in folder.iterdir():
            _, is_ours, number = (
                os.readlink(file).removesuffix(" (deleted)").rpartition(STACK_IN_MEMORY)
            )
            if is_ours and number.isdecimal() and catches(pid, int(number)):
                answer = _Answer(file, file.stat().st_size)
                os.kill(pid, int(number))
                return answer
    except OSError:  # gone, or of another user
        pass
    return None
