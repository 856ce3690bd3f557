"""Numbers of collectives on ranks that began to count elsewhere: the doctor finds out which mean
the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import torchwhere
from rank_pool import Pool
from torchwhere.pipeline.verdict import diagnose_folder


def _after_messages(folder: str) -> list[int]:
    """Messages before the watch, which gloo counts on the two ranks that exchange them."""
    rank, x = dist.get_rank(), torch.ones(1)
    for _ in range(3):
        if rank == 0:
            dist.send(x, 1)
        elif rank == 1:
            dist.recv(x, 0)
    dist.barrier()
    return _reduce(folder, late=False)


def _all_alike(folder: str) -> list[int]:
    """After messages, collectives of which each looks like all others."""
    rank, x = dist.get_rank(), torch.ones(1)
    if rank == 3:
        dist.send(x, 2)
    elif rank == 2:
        dist.recv(x, 3)
    dist.barrier()
    with torchwhere.watch(out=folder):
        for _ in range(8):
            dist.all_reduce(x)
    dist.barrier()
    box = torchwhere.read_run(folder).boxes[rank]
    return [int(event.to_dict()["number"]) for event in box.events(kinds={"collective"})]


def _begun_later(folder: str) -> list[int]:
    """One rank begins to watch two collectives later than the others."""
    return _reduce(folder, late=dist.get_rank() == 2)


def _reduce(folder: str, *, late: bool) -> list[int]:
    x = torch.ones(1)
    if not late:
        torchwhere.start(out=folder)
    dist.all_reduce(x)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    if late:
        torchwhere.start(out=folder)
    for _ in range(6):
        dist.all_reduce(x)
        dist.all_reduce(x, op=dist.ReduceOp.MIN)
        dist.broadcast(x, 0)
    torchwhere.stop()
    dist.barrier()
    box = torchwhere.read_run(folder).boxes[dist.get_rank()]
    return [int(event.to_dict()["number"]) for event in box.events(kinds={"collective"})]


@pytest.mark.parametrize("job", [_after_messages, _all_alike])
def test_messages_before_the_watch(
    four_ranks: Pool, tmp_path: Path, job: Callable[[str], list[int]]
) -> None:
    """Ranks whose count began elsewhere did the same all the same: nobody is blamed."""
    numbers = four_ranks.run(job, str(tmp_path))
    assert len({tuple(own) for own in numbers}) > 1  # what gloo says
    verdict = diagnose_folder(tmp_path)
    assert (verdict.kind, verdict.culprits) == ("healthy", ()), verdict.explanation


def test_a_watch_that_began_later(four_ranks: Pool, tmp_path: Path) -> None:
    """Where the counts are right, ranks that were watched from different moments on are compared by
    them."""
    four_ranks.close()  # other tests have sent messages
    numbers = four_ranks.run(_begun_later, str(tmp_path))
    assert (len(numbers[0]), len(numbers[2])) == (20, 18)
    verdict = diagnose_folder(tmp_path)
    assert (verdict.kind, verdict.culprits) == ("healthy", ()), verdict.explanation
