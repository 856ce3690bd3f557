"""Jobs of four ranks, each with one fault planted in one of them. Run by `test_doctor.py`, a process for each rank.

A fault is a function of the victim's rank. What must be found is in its `Expected`: the kind, and where the victim is if that
is in this file: the line marked `# here: <name>`, the module.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torchwhere

WORLD = 4
FAULTY_STEP = 3
STEPS = 8


@dataclass(frozen=True, slots=True)
class Expected:
    """What the doctor must find."""

    kinds: tuple[str, ...]
    culprits: Callable[[int], set[int]] = lambda victim: {victim}
    line: str | None = None  # mark of the culprit's line
    module: str | None = None
    words: str | None = None  # in the culprit's detail
    only_live: bool = False  # after everybody was killed, the boxes alone cannot tell


FAULTS: dict[str, tuple[Callable[[int], None], Expected]] = {}


def fault(*kinds: str, **expected: object) -> Callable[[Callable[[int], None]], Callable[[int], None]]:
    def register(job: Callable[[int], None]) -> Callable[[int], None]:
        FAULTS[job.__name__] = job, Expected(kinds, **expected)  # type: ignore[arg-type]
        return job

    return register


def marked(name: str) -> str:
    """The line of this file with a mark, as a place says it: `faulty_jobs.py:12`."""
    lines = Path(__file__).read_text().splitlines()
    return f"faulty_jobs.py:{next(number for number, line in enumerate(lines, 1) if line.endswith(f'# here: {name}'))}"


def run(name: str, victim: int, rank: int, folder: str) -> None:
    """One rank of a job; `folder` holds the rendezvous and the run."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_RANK=str(rank))
    os.chdir(Path(__file__).parent)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=300))
    torch.manual_seed(0)
    with torchwhere.watch(out=f"{folder}/run"):
        FAULTS[name][0](victim)


def serve() -> None:
    """Fork the ranks of each job that is asked for: `name victim folder` a line; their process numbers are the answer."""
    import torch._dynamo  # noqa: F401 - DDP imports it; here once for all

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead leave at once
    for line in sys.stdin:
        name, victim, folder = line.split(maxsplit=2)
        pids = [_fork(name, int(victim), rank, folder.strip()) for rank in range(WORLD)]
        sys.stdout.write(" ".join(map(str, pids)) + "\n")
        sys.stdout.flush()


def _fork(name: str, victim: int, rank: int, folder: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(f"{folder}/rank{rank}.log", os.O_CREAT | os.O_WRONLY)
    for descriptor in (0, 1, 2):
        os.dup2(log, descriptor)
    code = 1
    try:
        run(name, victim, rank, folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))
        self.spare = nn.Linear(8, 8)
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *, use_spare: bool = True, skip: int = -1) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index != skip:
                x = layer(x)
        return self.head(self.spare(x) if use_spare else x)


def is_faulty(victim: int, step: int) -> bool:
    return dist.get_rank() == victim and step == FAULTY_STEP


def train(victim: int, at_fault: Callable[[], None], *, model: nn.Module | None = None, instead: bool = False) -> None:
    """A DDP training in which the victim does something else at one step, after or instead of its all_reduce."""
    model = model or DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        loss = model(torch.randn(4, 8)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if is_faulty(victim, step):
            at_fault()
            if instead:
                continue
        total = loss.detach().clone()
        dist.all_reduce(total)  # here: total


# -- different programs ----------------------------------------------------------------------------------------------------


@fault("mismatch")
def branch(victim: int) -> None:
    """A branch on the rank leaves one all_reduce out: the next one, of a bucket, takes its number."""
    train(victim, lambda: None, instead=True)


@fault("mismatch")
def extra(victim: int) -> None:
    """One collective more, of another shape."""
    train(victim, lambda: dist.all_reduce(torch.ones(3)))


@fault("mismatch")
def extra_of_same_shape(victim: int) -> None:
    """One collective more, of the shape of the next: nothing fails, everything after it is shifted."""
    train(victim, lambda: dist.all_reduce(torch.tensor(1.0)))


@fault("mismatch")
def wrong_order(victim: int) -> None:
    """Two collectives of different kinds in the other order."""
    for step in range(STEPS):
        x = torch.ones(4)
        if is_faulty(victim, step):
            dist.broadcast(x, 0)
            dist.all_reduce(x)
        else:
            dist.all_reduce(x)
            dist.broadcast(x, 0)
        torchwhere.step()


@fault("mismatch")
def swapped(victim: int) -> None:
    """Two reductions of one shape in the other order: nothing fails, the sums are of different things."""
    loss, accuracy = torch.ones(1), torch.ones(1)

    def reduce_loss() -> None:
        dist.all_reduce(loss)

    def reduce_accuracy() -> None:
        dist.all_reduce(accuracy)

    for step in range(STEPS):
        both = (reduce_accuracy, reduce_loss) if is_faulty(victim, step) else (reduce_loss, reduce_accuracy)
        for reduce in both:
            reduce()
        torchwhere.step()
    time.sleep(60)


@fault("mismatch")
def wrong_shape(victim: int) -> None:
    for step in range(STEPS):
        dist.all_reduce(torch.ones(5 if is_faulty(victim, step) else 4))


@fault("mismatch")
def wrong_dtype(victim: int) -> None:
    for step in range(STEPS):
        dist.all_reduce(torch.ones(4, dtype=torch.float64 if is_faulty(victim, step) else torch.float32))


@fault("mismatch")
def wrong_root(victim: int) -> None:
    for step in range(STEPS):
        dist.broadcast(torch.ones(4), 1 if is_faulty(victim, step) else 0)


@fault("deadlock", "mismatch", "missing")
def wrong_group(victim: int) -> None:
    """One rank uses another group of the same ranks."""
    others = dist.new_group(list(range(WORLD)))
    for step in range(STEPS):
        dist.all_reduce(torch.ones(4), group=others if is_faulty(victim, step) else None)


@fault("deadlock")
def opposite_groups(victim: int) -> None:
    """Two groups, used in the other order by one rank."""
    one, other = dist.new_group(list(range(WORLD))), dist.new_group(list(range(WORLD)))
    for step in range(STEPS):
        for group in (other, one) if is_faulty(victim, step) else (one, other):
            dist.all_reduce(torch.ones(4), group=group)


@fault("mismatch", "deadlock", "missing")
def wrong_peer(victim: int) -> None:
    """A ring of messages in which one rank listens to the wrong neighbour."""
    rank = dist.get_rank()
    for step in range(STEPS):
        out, into = torch.ones(4), torch.ones(4)
        source = (rank + 1) % WORLD if is_faulty(victim, step) else (rank - 1) % WORLD
        work = dist.isend(out, (rank + 1) % WORLD)
        dist.recv(into, source)
        work.wait()


@fault("mismatch", "dead", "missing")
def uneven_data(victim: int) -> None:
    """One rank has fewer batches, and goes on to what comes after the training."""
    model = DistributedDataParallel(Net())
    for _ in range(FAULTY_STEP if dist.get_rank() == victim else STEPS):
        model(torch.randn(4, 8)).sum().backward()
    dist.barrier()


@fault("mismatch")
def swallowed_exception(victim: int) -> None:
    def fails() -> None:
        try:
            raise ValueError("a bad sample")
        except ValueError:
            pass

    train(victim, fails, instead=True)


@fault("mismatch", "missing", "dead")
def unused_branch(victim: int) -> None:
    """A branch of the model that one rank does not take: its bucket is never complete there."""
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.0001)
    for step in range(STEPS):
        model(torch.randn(4, 8), use_spare=not is_faulty(victim, step)).sum().backward()


@fault("mismatch")
def skipped_layer(victim: int) -> None:
    """FSDP2, one rank skips a layer, and so its all-gather."""
    model = Net()
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for step in range(STEPS):
        model(torch.randn(4, 8), skip=1 if is_faulty(victim, step) else -1).sum().backward()


@fault("mismatch", "missing")
def no_sync_on_one(victim: int) -> None:
    model = DistributedDataParallel(Net())
    for step in range(STEPS):
        if is_faulty(victim, step):
            with model.no_sync():
                model(torch.randn(4, 8)).sum().backward()
        else:
            model(torch.randn(4, 8)).sum().backward()
        dist.all_reduce(torch.ones(3))


@fault("dead")
def leaves_early(victim: int) -> None:
    """A rank returns from its program, all is well for it."""
    for step in range(STEPS):
        if is_faulty(victim, step):
            return
        dist.all_reduce(torch.ones(4))


@fault("missing", culprits=lambda victim: {0, 1, 2, 3} - {victim})
def barrier_on_one(victim: int) -> None:
    """A barrier that only one rank reaches: all others are missing from it."""
    for step in range(FAULTY_STEP + 1):
        dist.all_reduce(torch.ones(4))
        if is_faulty(victim, step):
            dist.barrier()
    while True:
        time.sleep(0.05)


@fault("mismatch", "missing")
def object_missed(victim: int) -> None:
    for step in range(STEPS):
        dist.all_reduce(torch.ones(3))
        if not is_faulty(victim, step):
            dist.all_gather_object([None] * WORLD, {"step": step})


# -- held ------------------------------------------------------------------------------------------------------------------


@fault("missing", line="data", words="data loading")
def data_loader(victim: int) -> None:
    class Data(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return STEPS

        def __getitem__(self, index: int) -> torch.Tensor:
            if dist.get_rank() == victim and index == FAULTY_STEP:
                time.sleep(600)  # here: data
            return torch.ones(4)

    for batch in torch.utils.data.DataLoader(Data()):
        dist.all_reduce(batch)


@fault("missing", line="lock", words="lock")
def lock(victim: int) -> None:
    held = threading.Lock()
    held.acquire()
    event = threading.Event()

    def waits() -> None:
        event.wait()  # here: lock

    train(victim, waits)


@fault("missing", line="gil")
def gil(victim: int) -> None:
    """In C, with the GIL held: no Python of this process runs any more."""
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)

    def holds() -> None:
        libc.pthread_mutex_lock(mutex)  # here: gil

    train(victim, holds)


@fault("missing", line="loop", words="running")
def endless_loop(victim: int) -> None:
    def loops() -> None:
        sum(1 for _ in itertools.count())  # here: loop

    train(victim, loops)


@fault("missing", module="head")
def loop_in_module(victim: int) -> None:
    class Endless(Net):
        def forward(self, x: torch.Tensor, **kwargs: object) -> torch.Tensor:
            return super().forward(x)

    model = DistributedDataParallel(Endless())
    steps = iter(range(STEPS + 1))

    def hook(*_: object) -> None:
        if is_faulty(victim, next(steps)):
            while True:
                time.sleep(0.01)

    model.module.head.register_forward_pre_hook(hook)
    train(-1, lambda: None, model=model)


@fault("missing", words="stopped")
def sigstop(victim: int) -> None:
    train(victim, lambda: os.kill(os.getpid(), signal.SIGSTOP))


@fault("missing")
def backward_hook(victim: int) -> None:
    """Stuck in a hook of the backward."""
    model = DistributedDataParallel(Net())
    steps = iter(range(STEPS + 1))

    def hook(_gradient: torch.Tensor) -> None:
        if is_faulty(victim, next(steps)):
            time.sleep(600)

    model.module.layers[0][0].weight.register_hook(hook)
    train(-1, lambda: None, model=model)


@fault("missing", words="compilation")
def compilation(victim: int) -> None:
    def backend(graph: torch.fx.GraphModule, _inputs: object) -> object:
        time.sleep(600)
        return graph

    train(victim, lambda: torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2)))


# -- dead ------------------------------------------------------------------------------------------------------------------


@fault("dead")
def sigkill(victim: int) -> None:
    train(victim, lambda: os.kill(os.getpid(), signal.SIGKILL))


@fault("dead", words="Segmentation fault")
def segfault(victim: int) -> None:
    train(victim, lambda: ctypes.string_at(0) and None)


@fault("dead", words="a wrong number")
def exception(victim: int) -> None:
    def fails() -> None:
        raise ArithmeticError("a wrong number")  # here: exception

    train(victim, fails)


# -- slow ------------------------------------------------------------------------------------------------------------------


@fault("straggler", only_live=True)
def straggler(victim: int) -> None:
    for _ in range(400):
        if dist.get_rank() == victim:
            time.sleep(0.05)
        dist.all_reduce(torch.ones(4))
        time.sleep(0.02)
        torchwhere.step()


@fault("healthy", culprits=lambda _victim: set())
def slow(victim: int) -> None:
    """Slow, and nothing is wrong."""
    for step in range(60):
        time.sleep(0.4)
        dist.all_reduce(torch.ones(4))
        torchwhere.step(step)


# -- nothing is wrong ------------------------------------------------------------------------------------------------------


def no_one(_victim: int) -> set[int]:
    return set()


@fault("healthy", culprits=no_one, only_live=True)
def healthy_ddp(_victim: int) -> None:
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(1000):
        loss = model(torch.randn(4, 8)).sum()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())
    time.sleep(60)


@fault("healthy", culprits=no_one, only_live=True)
def healthy_turns(_victim: int) -> None:
    """Each rank broadcasts in its turn, from another line than those who listen; messages go round; ranks wait at the end."""
    rank = dist.get_rank()
    for step in range(300):
        for turn in range(WORLD):
            if turn == rank:
                dist.broadcast(torch.ones(2), turn)
            else:
                dist.broadcast(torch.zeros(2), turn)
        work = dist.isend(torch.ones(2), (rank + 1) % WORLD)
        dist.recv(torch.ones(2), (rank - 1) % WORLD)
        work.wait()
        torchwhere.step(step)
    dist.barrier()
    time.sleep(60)


@fault("healthy", culprits=no_one, only_live=True)
def healthy_mesh(_victim: int) -> None:
    """FSDP2 over one dimension of a mesh, reductions over the other, and one rank that logs for itself between the steps."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Net()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(200):
        loss = model(torch.randn(4, 8)).sum()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach().clone(), group=mesh["tp"].get_group())
        if dist.get_rank() == 0:
            torchwhere.note("logged", step=step)
    time.sleep(60)
