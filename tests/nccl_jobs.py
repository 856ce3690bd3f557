"""Jobs of four NCCL ranks on one GPU, each with one fault on rank 2.

`test_gpu.py` runs them where there is a GPU. `nccl_runs.txz`, `nccl_dumps.txz`, `nccl_graphs.txz`,
`nccl_marks.txz`, `nccl_timed_dumps.txz` and `nccl_failures.txz` hold what they recorded on an H200 (torch 2.11, NCCL
2.28), for machines without a GPU.

NCCL refuses two ranks on one GPU of one host. It tells hosts apart by `NCCL_HOSTID`.

A file `dump` beside the folder of the run asks each rank for dumps of the flight recorder, at the
time that it contains: dumps of a running job can be compared only if they show the same moment. A
rank that is stopped or gone writes none.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

VICTIM = 2
FAULTY_STEP = 6
REPLAYED_STEP = 20  # the faulty step of jobs that replay a CUDA graph
CYCLES_PER_S = 1.8e9
ENDLESS = int(25 * CYCLES_PER_S)
SIZE = 256
FAILS_AFTER_S = 7
MEMORY_FRACTION = 0.02  # of the GPU, for the rank that runs out of memory
HELD_BYTES = 64 << 20
# for each kind of dump: collectives, stacks, only active ones
DUMPS = {"all": (True, True, False), "active": (True, True, True)}


@dataclass(frozen=True, slots=True)
class Expected:
    """What the doctor must find, and whether the device shows it."""

    kind: str
    culprits: tuple[int, ...] = (VICTIM,)
    on_device: bool = False
    fails: bool = False  # the processes end by themselves; collectives have a short timeout
    is_recorded: bool = True  # the archives have a run of it

    def allows(self, kind: str, culprits: tuple[int, ...], certainty: str) -> bool:
        """Whether a verdict from dumps alone may say this. Dumps do not show every fault, so a
        verdict may name no rank. It never names a rank that only waits, and never calls a hang
        healthy. One set of dumps may not show whether a job progresses: then the verdict is
        `unknown`, and the text says so."""
        is_hang = self.kind in ("missing", "deadlock")
        if self.kind == "healthy":
            is_open = kind in ("missing", "partial") and certainty == "unknown"
            return (kind in ("healthy", "together") or is_open) and not culprits
        return culprits in ((), self.culprits) and not (is_hang and kind == "healthy")


JOBS: dict[str, tuple[Callable[[], None], Expected]] = {}


def job(
    kind: str,
    *,
    culprits: tuple[int, ...] = (VICTIM,),
    on_device: bool = False,
    fails: bool = False,
    is_recorded: bool = True,
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(function: Callable[[], None]) -> Callable[[], None]:
        expected = Expected(kind, culprits, on_device, fails, is_recorded)
        JOBS[function.__name__] = function, expected
        return function

    return register


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU()) for _ in range(3)
        )
        self.head = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


def ddp() -> nn.Module:
    return nn.parallel.DistributedDataParallel(Net().cuda(), bucket_cap_mb=0.3)


def fsdp2() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = Net().cuda()
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def train(
    model: nn.Module,
    at_step: Callable[[int], None] = lambda step: None,
    *,
    before_step: Callable[[], None] = lambda: None,
) -> None:
    """Train; the victim calls `at_step` between forward and backward. The CPU never waits."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    rows = torch.randn(32, SIZE, device="cuda")
    for step in range(2000):
        before_step()
        loss = model(rows).sum()
        if dist.get_rank() == VICTIM:
            at_step(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if step < 4:
            torch.cuda.synchronize()
        if step >= 2 * FAULTY_STEP:
            time.sleep(0.25)


def once(fault: Callable[[], None]) -> Callable[[int], None]:
    return lambda step: fault() if step == FAULTY_STEP else None


def is_faulty(step: int) -> bool:
    return dist.get_rank() == VICTIM and step == 30


def pause() -> None:
    import torchwhere

    torchwhere.step()
    time.sleep(0.05)


# -- healthy ---------------------------------------------------------------------------------------


@job("healthy", culprits=())
def healthy_ddp() -> None:
    train(ddp())


@job("healthy", culprits=())
def healthy_fsdp2() -> None:
    train(fsdp2())


@job("healthy", culprits=())
def healthy_long_kernels() -> None:
    """Each step of every rank has a kernel of two seconds."""
    train(ddp(), lambda step: None, before_step=lambda: torch.cuda._sleep(int(2 * CYCLES_PER_S)))


@job("healthy", culprits=())
def healthy_far_ahead() -> None:
    """The CPU issues 1,000 collectives while the device is busy, again and again."""
    import torchwhere

    x = torch.ones(1 << 12, device="cuda")
    for _ in range(2000):
        torch.cuda._sleep(int(2 * CYCLES_PER_S))
        for _ in range(1000):
            dist.all_reduce(x)
        torchwhere.step()
        torch.cuda.synchronize()


# -- on the device ---------------------------------------------------------------------------------


@job("missing", on_device=True)
def endless_ddp() -> None:
    """A kernel that does not end; the CPU goes on."""
    train(ddp(), once(lambda: torch.cuda._sleep(ENDLESS)))


@job("missing", on_device=True)
def endless_fsdp2() -> None:
    train(fsdp2(), once(lambda: torch.cuda._sleep(ENDLESS)))


@job("missing", on_device=True)
def endless_pipeline() -> None:
    """Messages from rank to rank; one device never gets to its next send."""
    rank, x = dist.get_rank(), torch.ones(1 << 12, device="cuda")
    for step in range(2000):
        if rank > 0:
            dist.recv(x, rank - 1)
        if is_faulty(step):
            torch.cuda._sleep(ENDLESS)
        if rank < dist.get_world_size() - 1:
            dist.send(x, rank + 1)
        pause()


@job("missing", on_device=True)
def endless_tensor_parallel() -> None:
    """A pair of ranks shares each layer, beside another pair. One device hangs in a forward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE)).cuda()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(model, once(lambda: torch.cuda._sleep(ENDLESS)))


@job("deadlock", on_device=True)
def opposite_groups() -> None:
    """Two groups on one stream, used in the other order by one rank."""
    ranks = list(range(dist.get_world_size()))
    one, other = dist.new_group(ranks), dist.new_group(ranks)
    x = torch.ones(1 << 16, device="cuda")
    for step in range(2000):
        is_swapped = dist.get_rank() == VICTIM and step == FAULTY_STEP
        for group in (other, one) if is_swapped else (one, other):
            dist.all_reduce(x, group=group)
        pause()


@job("straggler", on_device=True)
def slow_ddp() -> None:
    """A device that is slow in each step; its CPU is not."""
    train(ddp(), lambda step: torch.cuda._sleep(int(0.2 * CYCLES_PER_S)))


@job("straggler", on_device=True)
def slow_sometimes() -> None:
    """A device that is slow in every third step."""
    pause_kernel = int(0.3 * CYCLES_PER_S)
    train(ddp(), lambda step: torch.cuda._sleep(pause_kernel) if step % 3 == 0 else None)


# -- on the CPU ------------------------------------------------------------------------------------


@job("missing")
def stuck_cpu() -> None:
    train(ddp(), once(lambda: time.sleep(600)))


@job("missing")
def stopped() -> None:
    train(ddp(), once(lambda: os.kill(os.getpid(), signal.SIGSTOP)))


@job("dead")
def killed() -> None:
    train(ddp(), once(lambda: os.kill(os.getpid(), signal.SIGKILL)))


@job("mismatch")
def extra() -> None:
    """One collective more, of another shape."""
    train(ddp(), once(lambda: dist.all_reduce(torch.ones(3, device="cuda"))))


@job("mismatch")
def wrong_size() -> None:
    """One collective of half the size."""
    x = torch.ones(1 << 20, device="cuda")
    for step in range(2000):
        dist.all_reduce(x[: 1 << 19] if is_faulty(step) else x)
        pause()


@job("mismatch")
def skipped() -> None:
    """One collective fewer, beside a group of half the ranks, with a CPU that runs far ahead."""
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    x = torch.ones(1 << 12, device="cuda")
    for step in range(2000):
        dist.all_reduce(x, group=halves[rank // 2])
        if not is_faulty(step):
            dist.all_reduce(x)
        pause()


# -- CUDA graphs -----------------------------------------------------------------------------------


def replay(before_replay: Callable[[int], bool] = lambda step: True) -> None:
    """A CUDA graph with two all-reduces, replayed once a step unless `before_replay` is false on
    one rank."""
    x = torch.ones(1 << 12, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):  # NCCL connects outside a capture
        dist.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 0.5
        dist.all_reduce(y)
        dist.all_reduce(y, op=dist.ReduceOp.MAX)
        x.copy_(y * 0.5)
    for step in range(2000):
        if dist.get_rank() != VICTIM or before_replay(step):
            graph.replay()
        if step % 10 == 9:
            x.sum().item()
        pause()


@job("healthy", culprits=())
def replay_healthy() -> None:
    replay()


@job("mismatch")
def replay_skipped() -> None:
    """One replay fewer."""
    replay(lambda step: step != REPLAYED_STEP)


# -- failures: the processes end by themselves -----------------------------------------------------


def read_beyond_the_end() -> None:
    """Index a tensor out of its bounds: a device-side assert."""
    rows = torch.zeros(4, SIZE, device="cuda")
    rows[torch.full((1,), 9, device="cuda")]


def write_to_a_wrong_address() -> None:
    storage = torch._C._construct_storage_from_data_pointer(64, torch.device("cuda", 0), 4096)
    torch.empty(0, device="cuda").set_(storage, 0, (1024,), (1,)).fill_(1)


def fill_memory() -> None:
    """Hold more and more tensors, until a part of the GPU's memory is full."""
    torch.cuda.set_per_process_memory_fraction(MEMORY_FRACTION)
    held = []
    while True:
        held.append(torch.ones(HELD_BYTES, dtype=torch.uint8, device="cuda"))


def reject_batch() -> None:
    raise ValueError("bad batch")


@job("dead", fails=True)
def device_assert() -> None:
    train(ddp(), once(read_beyond_the_end))


@job("dead", fails=True)
def illegal_address() -> None:
    train(ddp(), once(write_to_a_wrong_address))


@job("dead", fails=True, is_recorded=False)
def out_of_memory() -> None:
    train(ddp(), once(fill_memory))


@job("missing", fails=True)
def timeout_cpu() -> None:
    """A CPU that sleeps longer than the timeout of the collectives."""
    train(ddp(), once(lambda: time.sleep(600)))


@job("missing", on_device=True, fails=True)
def timeout_device() -> None:
    """A kernel that takes longer than the timeout of the collectives."""
    train(ddp(), once(lambda: torch.cuda._sleep(ENDLESS)))


@job("dead", fails=True)
def raised() -> None:
    train(ddp(), once(reject_batch))


@job("dead", fails=True)
def exited() -> None:
    train(ddp(), once(lambda: os._exit(1)))


@job("mismatch", fails=True)
def destroy_with_pending_work() -> None:
    """One rank issues a collective that the others never issue: they destroy the group."""
    x = torch.ones(1 << 12, device="cuda")
    for _ in range(FAULTY_STEP):
        dist.all_reduce(x)
        pause()
    if dist.get_rank() == VICTIM:
        dist.all_reduce(torch.ones(3, device="cuda"))
    dist.destroy_process_group()


# -- dumps -----------------------------------------------------------------------------------------


def write_dumps(folder: Path, rank: int) -> None:
    """Write one dump of each kind."""
    name = "_dump_nccl_trace" if dist.get_backend() == "nccl" else "_dump_fr_trace"
    dump = getattr(torch._C._distributed_c10d, name)
    for kind, options in DUMPS.items():
        (folder / kind).mkdir(parents=True, exist_ok=True)
        half_written = folder / f".{kind}-{rank}"
        half_written.write_bytes(dump(*options))
        os.replace(half_written, folder / kind / f"rank_{rank}")


def _dump_when_asked(folder: Path, rank: int) -> None:
    while not (folder / "dump").exists():
        time.sleep(0.1)
    time.sleep(max(0.0, float((folder / "dump").read_text()) - time.time()))
    write_dumps(folder / "dumps", rank)


# -- one rank --------------------------------------------------------------------------------------


def main(name: str, folder: str, seconds: float) -> None:
    """Run a job on this rank and exit after some seconds, if it has not ended by then."""
    os.environ["NCCL_HOSTID"] = f"host-{os.environ['RANK']}"
    os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    import torchwhere

    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    timeout = timedelta(seconds=FAILS_AFTER_S if JOBS[name][1].fails else 300)
    dist.init_process_group("nccl", device_id=device, timeout=timeout)
    asked = Path(folder).parent, dist.get_rank()
    threading.Thread(target=_dump_when_asked, args=asked, daemon=True).start()
    threading.Thread(target=_exit_after, args=(seconds,), daemon=True).start()
    torchwhere.start(out=Path(folder))
    JOBS[name][0]()


def _exit_after(seconds: float) -> None:
    time.sleep(seconds)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
