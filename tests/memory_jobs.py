"""A job of two NCCL ranks on one GPU: rank 1 holds a tensor of each step until memory runs out.

`test_gpu_facts.py` runs it where there is a GPU. `gpu_runs.txz` holds what it recorded on an H200,
for machines without a GPU.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch import nn

VICTIM = 1
FRACTION = 0.02  # of the memory of the GPU that a rank may use
HELD_BYTES = 64 << 20  # of each step
PEAK_BYTES = 256 << 20
SIZE = 256


class Wide(nn.Module):
    """A module that needs much memory for a moment: the peak of each step is here."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.ones(PEAK_BYTES, dtype=torch.uint8, device=x.device)
        return x * wide[0].clone()  # autograd does not save `wide`


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.wide = Wide()
        self.last = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.wide(self.first(x)))
        return out


def train(model: nn.Module, *, steps: int, pause_s: float = 0.0, leaks: bool = False) -> None:
    """Train. A rank that leaks holds one tensor more in each step."""
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    rows = torch.randn(32, SIZE, device="cuda")
    held = []
    for _ in range(steps):
        model(rows).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if leaks:
            held.append(torch.ones(HELD_BYTES, dtype=torch.uint8, device="cuda"))
        time.sleep(pause_s)


def main() -> None:
    """Train on this rank until its memory is full."""
    os.environ["NCCL_HOSTID"] = f"host-{os.environ['RANK']}"
    os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    torch.cuda.set_per_process_memory_fraction(FRACTION)
    model = nn.parallel.DistributedDataParallel(Net().cuda())
    train(model, steps=400, pause_s=0.2, leaks=dist.get_rank() == VICTIM)


if __name__ == "__main__":
    main()
