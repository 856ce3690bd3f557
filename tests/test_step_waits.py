"""The waits for other ranks in the parts of a step: each is taken from the part in which the rank
waited, and only the thread that trains waits."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch.distributed as dist

import torchwhere
from rank_pool import Pool
from test_step_parts import parts_of, slow_in

PAUSE_S = 0.2


def evaluate_and_save(folder: str) -> None:
    """Both ranks save and evaluate in each step, and rank 0 waits for rank 1 in the evaluation."""
    _, optimizer, _, _ = slow_in("none")
    with torchwhere.watch(out=folder):
        for _ in range(3):
            with torchwhere.phase("checkpoint"):
                time.sleep(PAUSE_S)
            with torchwhere.phase("evaluation"):
                if dist.get_rank() == 1:
                    time.sleep(2 * PAUSE_S)
                dist.barrier()
            optimizer.step()
    dist.barrier()


def test_a_wait_is_taken_from_its_own_part(two_ranks: Pool, tmp_path: Path) -> None:
    """A wait in an evaluation is not evaluation time, and a checkpoint in the same step keeps its
    time."""
    two_ranks.run(evaluate_and_save, str(tmp_path))
    own, slow = (parts_of(tmp_path).by_rank[rank] for rank in (0, 1))
    assert own.mean_ns("checkpoint") >= PAUSE_S * 1e9
    assert own.mean_ns("wait") > slow.mean_ns("wait")
    assert own.mean_ns("evaluation") < slow.mean_ns("evaluation")


def wait_in_the_background(folder: str) -> None:
    """Another thread of rank 0 waits for one of rank 1, while both ranks train."""
    _, optimizer, _, _ = slow_in("none")
    group = dist.new_group()
    is_over = threading.Event()

    def background() -> None:
        if dist.get_rank() == 1:
            is_over.wait()
        dist.barrier(group)

    with torchwhere.watch(out=folder):
        optimizer.step()
        thread = threading.Thread(target=background)
        thread.start()
        for _ in range(3):
            time.sleep(PAUSE_S)
            optimizer.step()
        is_over.set()
        thread.join()
        optimizer.step()
    dist.barrier()


def test_a_wait_of_another_thread_is_no_part(two_ranks: Pool, tmp_path: Path) -> None:
    """A thread that waits in the background takes nothing from the parts of a step."""
    two_ranks.run(wait_in_the_background, str(tmp_path))
    own = parts_of(tmp_path).by_rank[0]
    assert own.mean_ns("wait") == 0
