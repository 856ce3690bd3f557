"""Ranks that train in another thread than the main one, as the workers of Ray Train do: step, place
and stack of a rank are those of the thread that trains."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchwhere
from rank_pool import Pool
from torchwhere.blackbox.box import training_cursor
from torchwhere.blackbox.reader import read_box
from torchwhere.diagnose.doctor.verdict import Verdict
from torchwhere.pipeline.verdict import diagnose_folder
from torchwhere.processes.fault_handler import training_stack
from torchwhere.render.verdict import verdict_text

STEPS = 5
LATE = 1  # the rank that the other one waits for
IS_LATE = "is_late"  # the file that says that the wait has begun
SEEN = "seen"  # the file that ends it
PATIENCE_S = 90


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def wait_until_seen(folder: str) -> None:
    Path(folder, IS_LATE).touch()
    wait_for(Path(folder, SEEN))


class SlowFile:
    """A file whose first write takes long."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def write(self, data: bytes) -> int:
        wait_until_seen(self._folder)
        return len(data)

    def flush(self) -> None:
        pass


def save(folder: str) -> None:
    torch.save({"weight": torch.ones(4)}, SlowFile(folder))


def train(folder: str, be_late: Callable[[str], None]) -> None:
    for _ in range(STEPS):
        torchwhere.step()
        dist.all_reduce(torch.ones(4))
    if dist.get_rank() == LATE:
        be_late(folder)
    dist.barrier()


def first(folder: str, wanted: Callable[[Verdict], bool], stall_s: float) -> Verdict:
    """The first verdict on the running job that is wanted; the last one if none is."""
    deadline = time.monotonic() + PATIENCE_S
    while not wanted(verdict := diagnose_folder(folder, stall_s=stall_s)):
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    return verdict


def is_paused(verdict: Verdict) -> bool:
    return (verdict.facts.get("paused") or {}).get("activity") == "saving"


def is_missing(verdict: Verdict) -> bool:
    return verdict.kind == "missing"


def examine_while_late(
    folder: str,
    be_late: Callable[[str], None],
    wanted: Callable[[Verdict], bool],
    stall_s: float,
) -> Any:
    """Train in a thread. The main thread of rank 0 examines the job meanwhile."""
    with torchwhere.watch(out=folder):
        trainer = threading.Thread(target=train, args=(folder, be_late), name="Trainer")
        trainer.start()
        seen = None
        if dist.get_rank() != LATE:
            wait_for(Path(folder, IS_LATE))
            verdict = first(folder, wanted, stall_s)
            seen = verdict_text(verdict), verdict.ranks[LATE].stack
            Path(folder, SEEN).touch()
        trainer.join()
    return seen


def test_a_pause_in_a_thread(two_ranks: Pool, tmp_path: Path) -> None:
    """A rank that saves in its training thread pauses: its main thread, which only waits, says
    nothing about it."""
    text, _ = two_ranks.run(examine_while_late, str(tmp_path), save, is_paused, 30.0)[0]
    assert text.startswith(f"PAUSED: SAVING  2 ranks, step {STEPS - 1}, no progress for "), text


def test_a_hang_in_a_thread(two_ranks: Pool, tmp_path: Path) -> None:
    """The verdict on a hang has the step and the stack of the training thread."""
    text, stack = two_ranks.run(
        examine_while_late, str(tmp_path), wait_until_seen, is_missing, 6.0
    )[0]
    assert text.startswith(f"HANG  2 ranks, step {STEPS - 1}, no progress for "), text
    assert any(frame.endswith(" in wait_until_seen") for frame in stack), stack


def test_the_cursor_of_a_thread_that_has_ended(one_rank: None, tmp_path: Path) -> None:
    """The place of a rank is that of the thread that began its last step, also after that thread has
    ended; without such a thread it is that of the main thread."""

    def begin_steps() -> None:
        torchwhere.step(7)

    with torchwhere.watch(out=tmp_path):
        dist.all_reduce(torch.ones(1))
        box = read_box(tmp_path / "rank0.box")
        cursor = training_cursor(box, box.cursors())
        assert cursor is not None
        assert cursor.place.thread == "MainThread"
        trainer = threading.Thread(target=begin_steps, name="Trainer")
        trainer.start()
        trainer.join()
        dist.all_reduce(torch.ones(1))
    box = read_box(tmp_path / "rank0.box")
    cursor = training_cursor(box, box.cursors())
    assert cursor is not None
    assert (cursor.place.thread, cursor.place.step) == ("Trainer", 7)


PRINTED = """Thread 0x00007f0000000640 (most recent call first):
  File "train.py", line 7 in step
  File "train.py", line 3 in train

Current thread 0x00007f0000000740 (most recent call first):
  File "worker.py", line 9 in main
"""


@pytest.mark.parametrize(
    ("stalled", "stack"),
    [
        ("", ("worker.py:9 in main",)),
        ("Thread 0x00007f0000000740:\n", ("worker.py:9 in main",)),
        ("Thread 0x00007f0000000640:\n", ("train.py:7 in step", "train.py:3 in train")),
        ("Thread 0x00007f0000000840:\n", ("worker.py:9 in main",)),
    ],
    ids=["no stall file", "main thread", "other thread", "ended thread"],
)
def test_the_stack_that_a_process_prints(stalled: str, stack: tuple[str, ...]) -> None:
    """Of the stacks that the fault handler prints, the one of the training thread counts."""
    assert training_stack(PRINTED, f"torchwhere: stalled, 5\n{stalled}") == stack
