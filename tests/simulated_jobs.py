"""Jobs of four ranks on an accelerator in software (`simulated_device.cpp`), each with one fault on
rank 2.

They are the jobs of `nccl_jobs.py` that need no CUDA: the CPU issues work and continues, a stream
executes it in order, and a collective ends when all ranks have reached it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from nccl_jobs import FAULTY_STEP, VICTIM, Expected
from simulated_streams import DEVICE, device_module

KERNEL_S = 0.002
SIZE = 32
GROUP_STREAM = 1  # of the asynchronous collectives of the first group
JOBS: dict[str, tuple[Callable[[], None], Expected]] = {}


def job(
    kind: str, *, culprits: tuple[int, ...] = (VICTIM,), on_device: bool = False
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(function: Callable[[], None]) -> Callable[[], None]:
        JOBS[function.__name__] = function, Expected(kind, culprits, on_device)
        return function

    return register


def load_device(library: Path) -> Any:
    """Make the accelerator known to torch. Returns the functions that control it."""
    # In a forked process torch makes its thread pool anew. Two threads of the autograd engine that
    # do so at the same time fail, so this thread does it first.
    torch.set_num_threads(1)
    torch.utils.rename_privateuse1_backend(DEVICE)
    sys.path.insert(0, str(library.parent))
    import simulated_device

    torch._register_device_module(DEVICE, device_module(simulated_device))
    return simulated_device


def join_group(device: Any, folder: Path) -> None:
    """Join the process group of the job. Its ranks meet in files in this folder."""

    def create(options: Any, _: object) -> Any:
        path = folder / f"group-{options.group_id}"
        return device.collectives(options.group_rank, options.group_size, str(path))

    dist.Backend.register_backend(DEVICE, create, extended_api=True, devices=[DEVICE])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(DEVICE, store=store, rank=rank, world_size=world_size)


class Block(nn.Module):
    """Launches a kernel that takes a while."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        accelerator().kernel(KERNEL_S)
        out: torch.Tensor = self.linear(x)
        return out


def accelerator() -> Any:
    return sys.modules["simulated_device"]


def buffer(size: int = 1 << 12) -> torch.Tensor:
    return torch.empty(size, device=DEVICE)


def ddp() -> nn.Module:
    """A model with a bucket for each block. Its collectives transfer nothing, so DDP must not
    compare the parameters of the ranks at the start."""
    model = nn.Sequential(Block(), Block()).to(DEVICE)
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.004, init_sync=False)


def fsdp(blocks: int = 2) -> nn.Module:
    """A model with FSDP2, whose collectives run on streams of its own."""
    os.environ["LOCAL_RANK"] = "0"  # of the device
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    model = nn.Sequential(*(Block() for _ in range(blocks))).to(DEVICE)
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(
    at_step: Callable[[int], None] = lambda step: None, make_model: Callable[[], nn.Module] = ddp
) -> None:
    """Train; the victim calls `at_step` between forward and backward. The CPU waits for the device
    only in the first steps."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    rows, total = torch.ones(2, SIZE, device=DEVICE), buffer(1)
    for step in range(5000):
        loss = model(rows).sum()
        if dist.get_rank() == VICTIM:
            at_step(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        if step < 4:
            accelerator().synchronize()
        time.sleep(0.05)


def once(fault: Callable[[], None]) -> Callable[[int], None]:
    return lambda step: fault() if step == FAULTY_STEP else None


def is_faulty(step: int) -> bool:
    return dist.get_rank() == VICTIM and step == FAULTY_STEP


def train_mesh(at_step: Callable[[], None]) -> None:
    """Two groups for each rank: its pair, and the rank at its place in the other pair. The victim
    calls `at_step` between two collectives of its pair. The CPU waits for the device only in the
    first steps, so the CPUs of the other ranks may run far ahead."""
    rank, x = dist.get_rank(), buffer()
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    across = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    for step in range(4000):
        accelerator().kernel(KERNEL_S)
        dist.all_reduce(x, group=pairs[rank // 2])
        if rank == VICTIM:
            at_step()
        dist.all_reduce(x, group=pairs[rank // 2])
        dist.all_reduce(x, group=across[rank % 2])
        if step < 4:
            accelerator().synchronize()
        pause()


def pause() -> None:
    import torchwhere

    torchwhere.step()
    time.sleep(0.05)


# -- healthy ---------------------------------------------------------------------------------------


@job("healthy", culprits=())
def healthy() -> None:
    train()


@job("healthy", culprits=())
def healthy_fsdp() -> None:
    train(make_model=fsdp)


@job("healthy", culprits=())
def healthy_far_ahead() -> None:
    """The CPU issues 1,000 collectives while the device is busy, again and again."""
    x = buffer()
    for _ in range(1000):
        accelerator().kernel(1.0)
        for _ in range(1000):
            dist.all_reduce(x)
        pause()
        accelerator().synchronize()


# -- on the device ---------------------------------------------------------------------------------


@job("missing", on_device=True)
def endless_kernel() -> None:
    """A kernel that does not end; the CPU goes on."""
    train(once(lambda: accelerator().endless_kernel()))


@job("missing", on_device=True)
def endless_kernel_fsdp() -> None:
    """The same, while the streams of the other ranks wait for collectives on the streams of FSDP2."""
    train(once(lambda: accelerator().endless_kernel()), fsdp)


@job("missing", on_device=True)
def full_queue() -> None:
    """A kernel that does not end. The CPU goes on until the stream takes no more work."""

    def fault() -> None:
        accelerator().limit_queue(24)
        accelerator().endless_kernel()

    train(once(fault))


@job("missing", on_device=True)
def endless_pipeline() -> None:
    """Messages from rank to rank; one device never gets to its next send."""
    rank, x = dist.get_rank(), buffer()
    for step in range(2000):
        if rank > 0:
            dist.recv(x, rank - 1)
        if is_faulty(step):
            accelerator().endless_kernel()
        if rank < dist.get_world_size() - 1:
            dist.send(x, rank + 1)
        pause()


@job("together", culprits=(), on_device=True)
def stuck_transfer() -> None:
    """All devices reach a bucket and wait for it, and it does not end: the stream of the group is
    stuck on one rank, which no mark shows."""

    def fault() -> None:
        accelerator().set_stream(GROUP_STREAM)
        accelerator().endless_kernel()
        accelerator().set_stream(0)

    train(once(fault))


@job("deadlock", on_device=True)
def opposite_groups() -> None:
    """Two groups on one stream, used in the other order by one rank."""
    ranks = list(range(dist.get_world_size()))
    one, other = dist.new_group(ranks), dist.new_group(ranks)
    x = buffer()
    for step in range(2000):
        for group in (other, one) if is_faulty(step) else (one, other):
            dist.all_reduce(x, group=group)
        pause()


@job("straggler", on_device=True)
def slow_device() -> None:
    """A device that is slow in each step; its CPU is not."""
    train(lambda step: accelerator().kernel(0.2))


@job("straggler", on_device=True)
def slow_device_fsdp() -> None:
    """The same with FSDP2."""
    train(lambda step: accelerator().kernel(0.2), fsdp)


@job("straggler", on_device=True)
def slow_device_mesh() -> None:
    """A slow device holds up its pair, and so the rank beside it is late for another group."""
    train_mesh(lambda: accelerator().kernel(0.2))


@job("straggler", on_device=True)
def slow_device_async() -> None:
    """A slow device that has been behind its CPU from its first kernel on. The job waits for all of
    its collectives later."""
    x = buffer()
    for _ in range(2000):
        accelerator().kernel(0.1 if dist.get_rank() == VICTIM else KERNEL_S)
        works = [dist.all_reduce(x, async_op=True) for _ in range(2)]
        for work in works:
            work.wait()
        pause()


# -- on the CPU ------------------------------------------------------------------------------------


@job("straggler")
def slow_cpu() -> None:
    """A slow CPU. Those of the other ranks wait for their devices in each step, and so they take as
    long from one collective to the next."""
    x = buffer()
    for _ in range(2000):
        if dist.get_rank() == VICTIM:
            time.sleep(0.2)
        dist.all_reduce(x)
        accelerator().synchronize()
        pause()


@job("straggler")
def slow_cpu_mesh() -> None:
    """A slow CPU: those of the other ranks have soon issued what their devices reach much later."""
    train_mesh(lambda: time.sleep(0.2))


@job("missing")
def stuck_cpu() -> None:
    train(once(lambda: time.sleep(600)))


@job("missing")
def stopped() -> None:
    train(once(lambda: os.kill(os.getpid(), signal.SIGSTOP)))


@job("dead")
def killed() -> None:
    train(once(lambda: os.kill(os.getpid(), signal.SIGKILL)))


@job("dead")
def raised() -> None:
    """An exception after the CPUs have issued all their work. The other CPUs wait for their devices,
    which wait for a device that is gone."""
    x = buffer()
    for _ in range(60):
        accelerator().kernel(0.1)
        dist.all_reduce(x)
        pause()
    if dist.get_rank() == VICTIM:
        raise ValueError("bad metric")
    accelerator().synchronize()


@job("mismatch")
def wrong_size() -> None:
    """One collective of half the size."""
    whole, half = buffer(1 << 12), buffer(1 << 11)
    for step in range(2000):
        dist.all_reduce(half if is_faulty(step) else whole)
        pause()


@job("mismatch")
def skipped() -> None:
    """One collective fewer, beside a group of half the ranks, with a CPU that runs far ahead."""
    rank, x = dist.get_rank(), buffer()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for step in range(2000):
        dist.all_reduce(x, group=halves[rank // 2])
        if not is_faulty(step):
            dist.all_reduce(x)
        pause()


# -- one rank --------------------------------------------------------------------------------------


def main(name: str, library: str, folder: str, seconds: float) -> None:
    """Run a job on this rank and exit after some seconds, if it has not ended by then."""
    import torchwhere

    device = load_device(Path(library))
    join_group(device, Path(folder))
    threading.Thread(target=_exit_after, args=(seconds,), daemon=True).start()
    torchwhere.start(out=Path(folder) / "run")
    JOBS[name][0]()


def _exit_after(seconds: float) -> None:
    time.sleep(seconds)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]))
