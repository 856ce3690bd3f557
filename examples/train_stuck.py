"""A training job with a planted bug: after step 14, one rank gets no more data.

    torchrun --standalone --nproc-per-node 4 -m torchwhere run --stall 5 examples/train_stuck.py

The other ranks then wait in an all-reduce. The monitor reports which rank is stuck, and where.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Batches(torch.utils.data.IterableDataset[torch.Tensor]):
    """Random batches. On rank 2 the disk stops responding after batch 14."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(100):
            if dist.get_rank() == 2 and number == 14:
                self.wait_for_disk()
            yield torch.randn(16)

    def wait_for_disk(self) -> None:
        while True:
            time.sleep(0.1)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(Block(16) for _ in range(4)), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in torch.utils.data.DataLoader(Batches(), batch_size=None):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
