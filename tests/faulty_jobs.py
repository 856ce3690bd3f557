"""Jobs of four ranks, each with one fault planted in one rank. `test_doctor.py` runs them, with one
process per rank.

A fault is a function of the victim's rank. What must be found is in its `Expected`: the kind, and
where the victim is if that is in this file: the line marked `# here: <name>`, the module.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import surroundings
import torchwhere
from torchwhere.monitor.monitor import Monitor
from torchwhere.native.load import SWITCH, native

WORLD = 4
FAULTY_STEP = 3
STEPS = 8
STALL_S = 5.0
BACKEND = os.environ.get("TORCHWHERE_TEST_BACKEND", "gloo")  # or nccl: all ranks on one GPU
DEVICE = "cuda" if BACKEND == "nccl" else "cpu"
MONITOR_STALL_S = 3.0  # the monitor has reported and saved its snapshot before the job is killed


@dataclass(frozen=True, slots=True)
class Expected:
    """What the doctor must find."""

    kinds: tuple[str, ...]
    culprits: Callable[[int], set[int]] = lambda victim: {victim}
    line: str | None = None  # mark of the culprit's line
    module: str | None = None
    issued: str | None = None  # mark of the line from which the culprit issued what differs
    words: str | None = None  # text in the culprit's detail
    # for jobs that do not stall: the boxes that show the fault
    needs: Callable[[int], set[int]] = lambda victim: {victim}
    spied_line: str | None = None  # like `line`, if py-spy is installed: only py-spy sees it
    spied_words: str | None = None  # like `words`, if py-spy is installed
    # context that the job needs, entered before it starts
    around: Callable[[str], AbstractContextManager[None]] | None = None
    # called in each rank before its watch with the name of that context, the victim and the rank
    enter: Callable[[str, int, int], None] | None = None


FAULTS: dict[str, tuple[Callable[[int], None], Expected]] = {}


# One fault of each sort. `make test` plants these; `make test-all` plants all of `FAULTS`.
REPRESENTATIVE = {
    "branch",  # mismatch: a collective is left out
    "wrong_order",  # mismatch: different operations
    "swapped",  # mismatch that fails nowhere
    "skipped_by_one_of_two",  # mismatch without a majority
    "skipped_layer",  # FSDP2
    "opposite_groups",  # deadlock of groups
    "wrong_peer",  # point to point
    "microbatches",  # pipeline
    "leaves_loop_early",  # mesh
    "uneven_data",
    "barrier_on_one",  # all ranks but one are missing
    "others_give_up",  # timeout
    "data_loader",  # missing: waits for data
    "lock",
    "gil",
    "sigstop",
    "sigkill",  # dead
    "exception",
    "oom_kill",
    "straggler",
    "cable_pulled",
    "healthy_ddp",
    "healthy_mesh",
}


def everyone(_victim: int) -> set[int]:
    return set(range(WORLD))


def fault(
    *kinds: str, **expected: object
) -> Callable[[Callable[[int], None]], Callable[[int], None]]:
    def register(job: Callable[[int], None]) -> Callable[[int], None]:
        FAULTS[job.__name__] = job, Expected(kinds, **expected)  # type: ignore[arg-type]
        return job

    return register


def marked(name: str) -> str:
    """The marked line of this file, in the form of a place: `faulty_jobs.py:12`."""
    lines = Path(__file__).read_text().splitlines()
    return f"faulty_jobs.py:{next(number for number, line in enumerate(lines, 1) if line.endswith(f'# here: {name}'))}"


def run(name: str, victim: int, rank: int, folder: str) -> None:
    """Runs one rank of a job; `folder` holds the rendezvous and the run."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_RANK=str(rank))
    os.chdir(Path(__file__).parent)
    torch.set_num_threads(1)
    enter = FAULTS[name][1].enter
    if enter is not None:
        enter(around_name(folder), victim, rank)
    if BACKEND == "nccl":
        share_gpu(rank, folder)
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group(
        BACKEND, store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=300)
    )
    torch.manual_seed(0)
    assert (native() is not None) == (os.environ.get(SWITCH) == "1")
    with torchwhere.watch(out=f"{folder}/run"):
        FAULTS[name][0](victim)
        if BACKEND == "nccl":
            torch.cuda.synchronize()  # as a job does that reads its loss


def share_gpu(rank: int, folder: str) -> None:
    """Let this rank use the GPU that the other ranks use, through the daemon of this job: a client
    that is killed may end the other clients of its daemon.

    NCCL refuses two ranks on one GPU of one host, and tells hosts apart by `NCCL_HOSTID`.
    """
    os.environ.update(NCCL_HOSTID=f"host-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = f"{folder}/pipe"
    torch.cuda.set_device(0)
    torch.set_default_device("cuda")


def around_name(folder: str | Path) -> str:
    """The name of a job's context, derived from its folder; unique on this machine."""
    return f"tw-{zlib.crc32(str(folder).encode()):08x}"


def serve() -> None:
    """Fork the ranks of each requested job. A request is a line `name victim folder`; the answer is
    the process ids of the ranks, then that of the monitor."""
    import torch._dynamo  # noqa: F401 - DDP imports it; here once for all

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # exited children are reaped at once
    for line in sys.stdin:
        name, victim, folder = line.split(maxsplit=2)
        pids = [
            _fork(f"rank{rank}", folder.strip(), run, name, int(victim), rank, folder.strip())
            for rank in range(WORLD)
        ]
        pids.append(_fork("monitor", folder.strip(), watch_over, folder.strip(), pids[0]))
        sys.stdout.write(" ".join(map(str, pids)) + "\n")
        sys.stdout.flush()


def watch_over(folder: str, launcher: int) -> None:
    """What `torchwhere run` starts beside a job, in its first rank."""
    Monitor(Path(folder) / "run", stall_s=MONITOR_STALL_S, launcher=launcher).watch()


def _fork(title: str, folder: str, do: Callable[..., None], *args: object) -> int:
    pid = os.fork()
    if pid:
        return pid
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(f"{folder}/{title}.log", os.O_CREAT | os.O_WRONLY)
    for descriptor in (0, 1, 2):
        os.dup2(log, descriptor)
    code = 1
    try:
        do(*args)
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


def train(
    victim: int,
    at_fault: Callable[[], None],
    *,
    model: nn.Module | None = None,
    instead: bool = False,
) -> None:
    """DDP training in which the victim does something else at one step, after or instead of its
    all_reduce."""
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


# -- different programs ----------------------------------------------------------------------------


@fault("mismatch")
def branch(victim: int) -> None:
    """A branch on the rank skips one all_reduce: the next one, of a bucket, takes its number."""
    train(victim, lambda: None, instead=True)


@fault("mismatch", issued="extra")
def extra(victim: int) -> None:
    """One additional collective, of another shape."""

    def reduces() -> None:
        dist.all_reduce(torch.ones(3))  # here: extra

    train(victim, reduces)


@fault("mismatch")
def extra_of_same_shape(victim: int) -> None:
    """One additional collective, of the shape of the next: nothing fails, everything after it is
    shifted."""
    train(victim, lambda: dist.all_reduce(torch.tensor(1.0)))


@fault("mismatch", issued="order")
def wrong_order(victim: int) -> None:
    """Two collectives of different kinds in reverse order."""
    for step in range(STEPS):
        x = torch.ones(4)
        if is_faulty(victim, step):
            dist.broadcast(x, 0)  # here: order
            dist.all_reduce(x)
        else:
            dist.all_reduce(x)
            dist.broadcast(x, 0)
        torchwhere.step()


@fault("mismatch", issued="swapped")
def swapped(victim: int) -> None:
    """Two reductions of one shape in reverse order: nothing fails, but the sums mix different
    values."""
    loss, accuracy = torch.ones(1), torch.ones(1)

    def reduce_loss() -> None:
        dist.all_reduce(loss)

    def reduce_accuracy() -> None:
        dist.all_reduce(accuracy)  # here: swapped

    for step in range(STEPS):
        both = (
            (reduce_accuracy, reduce_loss)
            if is_faulty(victim, step)
            else (reduce_loss, reduce_accuracy)
        )
        for reduce in both:
            reduce()
        torchwhere.step()
    time.sleep(60)


@fault("mismatch", issued="shape")
def wrong_shape(victim: int) -> None:
    for step in range(STEPS):
        dist.all_reduce(torch.ones(5 if is_faulty(victim, step) else 4))  # here: shape


@fault("mismatch", issued="dtype")
def wrong_dtype(victim: int) -> None:
    for step in range(STEPS):
        dtype = torch.float64 if is_faulty(victim, step) else torch.float32
        dist.all_reduce(torch.ones(4, dtype=dtype))  # here: dtype


@fault("mismatch", issued="root")
def wrong_root(victim: int) -> None:
    for step in range(STEPS):
        dist.broadcast(torch.ones(4), 1 if is_faulty(victim, step) else 0)  # here: root


@fault("deadlock", "mismatch", "missing")
def wrong_group(victim: int) -> None:
    """One rank uses another group of the same ranks."""
    others = dist.new_group(list(range(WORLD)))
    for step in range(STEPS):
        dist.all_reduce(torch.ones(4), group=others if is_faulty(victim, step) else None)


@fault("deadlock")
def opposite_groups(victim: int) -> None:
    """Two groups, used in reverse order by one rank."""
    one, other = dist.new_group(list(range(WORLD))), dist.new_group(list(range(WORLD)))
    for step in range(STEPS):
        for group in (other, one) if is_faulty(victim, step) else (one, other):
            dist.all_reduce(torch.ones(4), group=group)


@fault("mismatch", "deadlock", "missing")
def wrong_peer(victim: int) -> None:
    """A ring of messages in which one rank receives from the wrong neighbour."""
    rank = dist.get_rank()
    for step in range(STEPS):
        out, into = torch.ones(4), torch.ones(4)
        source = (rank + 1) % WORLD if is_faulty(victim, step) else (rank - 1) % WORLD
        work = dist.isend(out, (rank + 1) % WORLD)
        dist.recv(into, source)
        work.wait()


@fault("deadlock", "missing")
def microbatches(victim: int) -> None:
    """A pipeline in which one stage receives one microbatch fewer than the stage before it sends,
    or sends one fewer."""
    rank = dist.get_rank()
    for step in range(STEPS):
        for _ in range(4 - is_faulty(victim, step)):
            if rank > 0:
                dist.recv(torch.ones(4), rank - 1)
            if rank < WORLD - 1:
                dist.send(torch.ones(4), rank + 1)
        dist.barrier()


@fault("mismatch", "deadlock", line="stage")
def pipeline_peer(victim: int) -> None:
    """A pipeline in which one sending stage sends to the stage after the next, or back."""
    rank = dist.get_rank()
    for step in range(STEPS):
        if rank > 0:
            dist.recv(torch.ones(4), rank - 1)
        if rank < WORLD - 1 or is_faulty(victim, step):
            to = (rank + 2) % WORLD if is_faulty(victim, step) else rank + 1
            dist.send(torch.ones(4), to)  # here: stage
        dist.barrier()


@fault("deadlock", culprits=lambda victim: {victim if victim in (1, 2) else 1})
def shared_by_two_groups(victim: int) -> None:
    """Two groups that share two ranks; one of these ranks uses them in reverse order."""
    groups = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1, 2), (1, 2, 3))}
    own = [group for ranks, group in groups.items() if dist.get_rank() in ranks]
    culprit = victim if victim in (1, 2) else 1
    for step in range(STEPS):
        for group in reversed(own) if is_faulty(culprit, step) else own:
            dist.all_reduce(torch.ones(4), group=group)


@fault("mismatch", needs=lambda victim: {victim, victim ^ 1})
def skipped_by_one_of_two(victim: int) -> None:
    """One rank of a tensor-parallel pair skips a layer: nothing fails, and there is no majority."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    for step in range(STEPS):
        for layer in range(3):
            if layer != 1 or not is_faulty(victim, step):
                dist.all_reduce(torch.ones(4), group=mesh["tp"].get_group())
        dist.all_reduce(torch.ones(8), group=mesh["dp"].get_group())
        torchwhere.step()
    time.sleep(60)


@fault("missing", line="late")
def others_give_up(victim: int) -> None:
    """One rank blocks so long that the others' collective times out, and they exit first."""
    impatient = dist.new_group(list(range(WORLD)), timeout=timedelta(seconds=3))
    for step in range(STEPS):
        if is_faulty(victim, step):
            time.sleep(600)  # here: late
        dist.all_reduce(torch.ones(4), group=impatient)


@fault("missing", culprits=lambda victim: {victim or 1})
def recv_from_any_rank(victim: int) -> None:
    """Rank 0 receives from any source, and one rank does not send."""
    for step in range(STEPS):
        if dist.get_rank() == 0:
            for _ in range(WORLD - 1):
                dist.recv(torch.ones(2))
        else:
            if is_faulty(victim or 1, step):
                time.sleep(600)
            dist.send(torch.ones(2), 0)
        dist.barrier()


@fault("mismatch", "dead", "missing")
def uneven_data(victim: int) -> None:
    """One rank has fewer batches, and continues with the code after the training."""
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
    """One rank does not take a branch of the model: its bucket never completes there."""
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.0001)
    for step in range(STEPS):
        model(torch.randn(4, 8), use_spare=not is_faulty(victim, step)).sum().backward()


@fault("mismatch")
def skipped_layer(victim: int) -> None:
    """FSDP2 with one rank that skips a layer, and therefore its all-gather."""
    model = Net()
    mesh = init_device_mesh(DEVICE, (WORLD,))
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
    """A rank of a tensor-parallel pair returns from its program successfully."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    for step in range(STEPS):
        if is_faulty(victim, step):
            return
        dist.all_reduce(torch.ones(4), group=mesh["tp"].get_group())
        dist.all_reduce(torch.ones(4), group=mesh["dp"].get_group())


@fault("deadlock")
def leaves_loop_early(victim: int) -> None:
    """A rank of a tensor-parallel pair does one step fewer and waits in the last barrier, with the
    other pair."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    for _ in range(STEPS - (dist.get_rank() == victim)):
        dist.all_reduce(torch.ones(4), group=mesh["tp"].get_group())
        torchwhere.step()
    dist.barrier()


@fault("deadlock")
def leaves_mesh_loop_early(victim: int) -> None:
    """The same with reductions over both dimensions of the mesh: a neighbour and its neighbour wait
    too."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    for _ in range(STEPS - (dist.get_rank() == victim)):
        for name in ("tp", "dp"):
            dist.all_reduce(torch.ones(4), group=mesh[name].get_group())
        torchwhere.step()
    dist.barrier()


@fault("missing", culprits=lambda victim: everyone(victim) - {victim})
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


# -- held ------------------------------------------------------------------------------------------


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


@fault("missing", line="program", words="a subprocess")
def waits_for_a_program(victim: int) -> None:
    def copies() -> None:
        subprocess.run(["sleep", "600"], check=True)  # here: program

    train(victim, copies)


@fault("missing", line="store")
def waits_for_the_store(victim: int) -> None:
    """Waits for a key that no rank writes: no collective is involved."""

    def waits() -> None:
        dist.distributed_c10d._get_default_store().get("never")  # here: store

    train(victim, waits)


@fault("missing", line="lock", words="lock")
def lock(victim: int) -> None:
    held = threading.Lock()
    held.acquire()
    event = threading.Event()

    def waits() -> None:
        event.wait()  # here: lock

    train(victim, waits)


@fault("missing", line="gil", spied_words="holds the GIL")
def gil(victim: int) -> None:
    """Blocks in C with the GIL held: no Python code of this process runs any more."""
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


@fault("missing", line="in module", module="head")
def loop_in_module(victim: int) -> None:
    class Endless(Net):
        def forward(self, x: torch.Tensor, **kwargs: object) -> torch.Tensor:
            return super().forward(x)

    model = DistributedDataParallel(Endless())
    steps = iter(range(STEPS + 1))

    def hook(*_: object) -> None:
        if is_faulty(victim, next(steps)):
            while True:
                time.sleep(0.01)  # here: in module

    model.module.head.register_forward_pre_hook(hook)
    train(-1, lambda: None, model=model)


@fault("missing", words="stopped", spied_line="stopped")
def sigstop(victim: int) -> None:
    def stops() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)  # here: stopped

    train(victim, stops)


@fault("missing", words="stopped")
def sigstop_inside(victim: int) -> None:
    """Stopped while it waits in a collective that it issued: all ranks have reached it, and one
    cannot continue."""
    for step in range(STEPS):
        if is_faulty(victim, step):
            subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -STOP {os.getpid()}"])
        elif step == FAULTY_STEP:
            time.sleep(1.5)
        dist.all_reduce(torch.ones(4))


@fault("missing", line="hook")
def backward_hook(victim: int) -> None:
    """Blocks in a hook of the backward."""
    model = DistributedDataParallel(Net())
    steps = iter(range(STEPS + 1))

    def hook(_gradient: torch.Tensor) -> None:
        if is_faulty(victim, next(steps)):
            time.sleep(600)  # here: hook

    model.module.layers[0][0].weight.register_hook(hook)
    train(-1, lambda: None, model=model)


@fault("missing", line="compiling", words="compilation")
def compilation(victim: int) -> None:
    def backend(graph: torch.fx.GraphModule, _inputs: object) -> object:
        time.sleep(600)  # here: compiling
        return graph

    train(victim, lambda: torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2)))


# -- dead ------------------------------------------------------------------------------------------


@fault("dead")
def sigkill(victim: int) -> None:
    train(victim, lambda: os.kill(os.getpid(), signal.SIGKILL))


@fault("dead", line="segfault", words="Segmentation fault")
def segfault(victim: int) -> None:
    def crashes() -> None:
        ctypes.string_at(0)  # here: segfault

    train(victim, crashes)


@fault("dead", line="exception", words="a wrong number")
def exception(victim: int) -> None:
    def fails() -> None:
        raise ArithmeticError("a wrong number")  # here: exception

    train(victim, fails)


def enter_memory_limit(name: str, victim: int, rank: int) -> None:
    if rank == victim:
        surroundings.enter_memory_limit(name)


@fault(
    "dead",
    words="killed by the system: out of memory (cgroup limit 300 MB",
    around=surroundings.memory_limit,
    enter=enter_memory_limit,
)
def oom_kill(victim: int) -> None:
    """Uses more memory than its cgroup allows: the kernel kills it without a message."""

    def eats() -> None:
        bytearray(b"x") * 1_000_000_000

    train(victim, eats)


@fault("dead", line="allocation", words="out of memory: exception: RuntimeError")
def no_memory(victim: int) -> None:
    """Asks for more memory than the machine has: the allocator raises."""

    def allocates() -> None:
        torch.empty(1 << 55)  # here: allocation

    train(victim, allocates)


# -- slow ------------------------------------------------------------------------------------------


@fault("straggler")
def straggler(victim: int) -> None:
    for _ in range(400):
        if dist.get_rank() == victim:
            time.sleep(0.05)
        dist.all_reduce(torch.ones(4))
        time.sleep(0.02)
        torchwhere.step()


@fault("healthy", culprits=lambda _victim: set())
def slow(victim: int) -> None:
    """Slow, but healthy."""
    for step in range(60):
        time.sleep(0.4)
        dist.all_reduce(torch.ones(4))
        torchwhere.step(step)


# -- all together ----------------------------------------------------------------------------------


def no_one(_victim: int) -> set[int]:
    return set()


def enter_network(name: str, _victim: int, rank: int) -> None:
    surroundings.enter_network(name, rank % 2)
    folder = tempfile.gettempdir()
    os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = f"{folder}/{name}-rank"
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{folder}/{name}-dump"
    threading.Thread(target=dump_when_asked, args=(f"{folder}/{name}", rank), daemon=True).start()


def dump_when_asked(stem: str, rank: int) -> None:
    """Does for gloo what NCCL does on its pipe: the recorder is real, this listener is ours."""
    os.mkfifo(f"{stem}-rank{rank}.pipe")
    with open(f"{stem}-rank{rank}.pipe", "rb") as pipe:
        pipe.readline()
    Path(f"{stem}-dump{rank}").write_bytes(
        torch._C._distributed_c10d._dump_fr_trace(True, True, False)
    )


@fault("together", culprits=no_one, around=surroundings.two_networks, enter=enter_network)
def cable_pulled(victim: int) -> None:
    """The network between two halves of the job fails: all ranks wait in one collective, and none
    is missing."""
    for step in range(STEPS):
        if is_faulty(victim, step):
            surroundings.pull_cable()
        dist.all_reduce(torch.ones(4))  # here: cable
        torchwhere.step()


# -- nothing is wrong ------------------------------------------------------------------------------


@fault("healthy", culprits=no_one)
def healthy_ddp(_victim: int) -> None:
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(1000):
        loss = model(torch.randn(4, 8)).sum()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())
    time.sleep(60)


@fault("healthy", culprits=no_one)
def healthy_turns(_victim: int) -> None:
    """The ranks broadcast in turn, from another line than the receivers; messages go around; ranks
    wait at the end."""
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


@fault("healthy", culprits=no_one)
def healthy_mesh(_victim: int) -> None:
    """FSDP2 over one dimension of a mesh, reductions over the other, and one rank that logs on its
    own between the steps."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
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
