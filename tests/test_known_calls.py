"""Collectives that the native extension records by itself, because Python has recorded the same call
before: the records are those of Python.

Each job runs twice, with the extension and without it, on a fake process group of four ranks.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import torchwhere
from models import Block, Model, batch
from torchwhere.core.events import Event
from torchwhere.native import load
from torchwhere.recorder.collectives import CollectiveRecorder

RANKS = 4
STEPS = 6
MOST_CALLS = 4096  # as in known_calls.h
MOST_SPLITS = 1024  # as in hooks/collectives.py


@pytest.fixture(scope="module", autouse=True)
def extension(library: Path) -> Iterator[Any]:
    """Let this process find the extension."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(library.parent.parent))
        patch.setenv(load.SWITCH, "1")
        yield load.native()


@pytest.fixture(scope="module", autouse=True)
def fake_group(extension: object) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    groups.append(dist.new_group([0, 1]))
    yield
    groups.clear()
    dist.destroy_process_group()
    sys.excepthook = hook  # torch installs one of its own and leaves it


groups: list[dist.ProcessGroup] = []  # of ranks 0 and 1


# -- jobs ------------------------------------------------------------------------------------------


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, steps: int = STEPS
) -> None:
    optimizer = optimizer or adamw(model)
    for step in range(steps):
        model(batch(seed=step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded(model: Model) -> Model:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: Model) -> Model:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


class Checkpointed(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


def fsdp2() -> None:
    train(sharded(Model(depth=3)))


def fsdp2_checkpointed() -> None:
    train(sharded(Checkpointed(depth=3)))


def fsdp1() -> None:
    policy = ModuleWrapPolicy({Block})
    train(FullyShardedDataParallel(Model(), auto_wrap_policy=policy, device_id=torch.device("cpu")))


def tensor_parallel_job() -> None:
    train(tensor_parallel(Model(depth=3)))


def tensor_parallel_checkpointed() -> None:
    train(tensor_parallel(Checkpointed(depth=3)))


def compiled() -> None:
    torch.compiler.reset()
    train(torch.compile(tensor_parallel(Model()), backend="aot_eager"))


def all_ops() -> None:
    """Every kind of call, from two lines, with two shapes and on two groups."""
    pair = groups[0]
    for step in range(STEPS):
        with torchwhere.phase("load"):
            dist.all_reduce(torch.ones(3))
        for size in (3, 4 + step % 2):
            x, all_of_it = torch.ones(size), torch.ones(size * RANKS)
            dist.all_reduce(x)
            dist.all_reduce(x, op=dist.ReduceOp.MAX)
            dist.all_reduce(x, async_op=True).wait()
            dist.all_reduce(x, group=pair)
            dist.all_reduce(x.long())
            dist.broadcast(x, src=step % 2)
            dist.reduce(x, dst=1)
            dist.all_gather([torch.ones(size) for _ in range(RANKS)], x)
            dist.all_gather_into_tensor(all_of_it, x)
            dist.reduce_scatter_tensor(x, all_of_it)
            dist.all_to_all_single(torch.ones(RANKS), torch.ones(RANKS))
            dist.all_to_all_single(
                torch.ones(4), torch.ones(4), [1, 1, 1, 1], [2, step % 2, 2 - step % 2, 0]
            )
            dist.barrier()
            dist.isend(x, 1).wait()
            dist.recv(x, 2 + step % 2)
            dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1), dist.P2POp(dist.irecv, x, 2)])
            dist._functional_collectives.all_reduce(x, "sum", dist.group.WORLD).sum()
        dist.all_reduce(torch.ones(3))
        torchwhere.step()


def evaluated() -> None:
    """Without gradients, in a phase of its own, and with module calls outside of the model."""
    model = tensor_parallel(Model())
    optimizer = adamw(model)
    for step in range(STEPS):
        train(model, optimizer, steps=1)
        model.eval()
        with torch.no_grad():
            model(batch(seed=step))
        model.train()


JOBS = (
    fsdp2,
    fsdp2_checkpointed,
    fsdp1,
    tensor_parallel_job,
    tensor_parallel_checkpointed,
    compiled,
    all_ops,
    evaluated,
)


# -- the same is recorded --------------------------------------------------------------------------


def events_of(
    job: Callable[[], Any], folder: Path, monkeypatch: pytest.MonkeyPatch, *, native: bool
) -> list[Event]:
    torch.manual_seed(0)
    with monkeypatch.context() as patch:
        patch.setenv(load.SWITCH, str(int(native)))
        with torchwhere.watch(out=folder, module_events=True):
            job()
    return list(torchwhere.read_run(folder).events())


def without_times(events: list[Event]) -> list[dict[str, Any]]:
    times = ("t_ns", "duration_ns")
    return [
        {key: value for key, value in event.to_dict().items() if key not in times}
        for event in events
    ]


def is_collective(event: Event) -> bool:
    return event.kind == "collective"


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_the_same_is_recorded(
    job: Callable[[], None], extension: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job records the same events with the extension and without it, and the extension records
    most collectives by itself after the first steps."""
    natively = events_of(job, tmp_path / "native", monkeypatch, native=True)
    recorded = extension.recorded()
    plainly = events_of(job, tmp_path / "python", monkeypatch, native=False)
    assert without_times(natively) == without_times(plainly)
    assert recorded > 0.4 * sum(map(is_collective, natively))


# -- what changes between equal calls --------------------------------------------------------------


def collectives_of(folder: Path) -> list[Event]:
    return [event for event in torchwhere.read_run(folder).events() if is_collective(event)]


def reduce(size: int = 3) -> None:
    dist.all_reduce(torch.ones(size))


def test_two_lines_that_call_one_function(extension: Any, tmp_path: Path) -> None:
    """The line of a call is the innermost line of the user, also if another line has led there."""

    def first() -> None:
        reduce()

    def second() -> None:
        reduce(4)

    with torchwhere.watch(out=tmp_path):
        for _ in range(4):
            first()
            second()
            dist.all_reduce(torch.ones(3))
    events = collectives_of(tmp_path)
    lines = [str(event.place.line).rpartition(":")[2] for event in events]
    assert lines == lines[:3] * 4
    assert len(set(lines[:3])) == 2
    assert [event.fields["number"] for event in events] == list(range(12))
    assert extension.recorded() >= 8


def test_the_module_is_the_one_that_runs(extension: Any, tmp_path: Path) -> None:
    """Modules that share one line of code, and calls of one module, keep their own places."""

    class Reducing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            reduce()
            return x

    model = nn.ModuleDict({name: Reducing() for name in ("a", "b")})
    with torchwhere.watch(model, out=tmp_path):
        for step in range(3):
            torchwhere.step(step)
            for name in "aba":
                model[name](torch.ones(1))
    places = [(e.place.step, e.place.module, e.place.call) for e in collectives_of(tmp_path)]
    assert places == [
        (step, module, call) for step in range(3) for module, call in (("a", 0), ("b", 0), ("a", 1))
    ]
    assert extension.recorded() == 8


def test_models_that_follow_each_other(
    extension: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An FSDP unit may get the address of one that was freed. The record names its own unit."""

    def job() -> None:
        for depth in (1, 2, 3, 2):
            train(sharded(Model(depth=depth)), steps=3)
            gc.collect()

    natively = events_of(job, tmp_path / "native", monkeypatch, native=True)
    recorded = extension.recorded()
    plainly = events_of(job, tmp_path / "python", monkeypatch, native=False)
    assert without_times(natively) == without_times(plainly)
    assert recorded > 0


def test_a_part_that_is_called_before_its_model(
    extension: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part gets its name below the model when the model is called, also in what its collectives
    serve."""

    def job() -> None:
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
        part = fully_shard(Block(), mesh=mesh)
        for _ in range(3):
            part(batch()).sum().backward()
        train(nn.Sequential(nn.Linear(8, 8), part), steps=3)

    natively = events_of(job, tmp_path / "native", monkeypatch, native=True)
    recorded = extension.recorded()
    plainly = events_of(job, tmp_path / "python", monkeypatch, native=False)
    assert without_times(natively) == without_times(plainly)
    assert recorded > 0
    assert [event.fields["for"] for event in plainly if is_collective(event)][-1] == "1"


def test_two_threads(extension: Any, tmp_path: Path) -> None:
    """Each thread records its calls with its own name, and Python knows that both issue
    collectives."""
    with torchwhere.watch(out=tmp_path):
        for _ in range(4):
            reduce()
        threads = [threading.Thread(target=reduce, name=f"side {i}") for i in range(3)]
        for thread in threads:
            thread.start()
            thread.join()
    names = [event.place.thread for event in collectives_of(tmp_path)]
    assert names == ["MainThread"] * 4 + ["side 0", "side 1", "side 2"]


def test_threads_that_issue_the_first_calls_of_a_group(extension: Any, tmp_path: Path) -> None:
    """Threads that use a new group at the same time share one count of its collectives."""

    def issue(group: dist.ProcessGroup, barrier: threading.Barrier) -> None:
        barrier.wait()
        for _ in range(3):
            dist.all_reduce(torch.ones(3), group=group)

    interval = sys.getswitchinterval()
    with torchwhere.watch(out=tmp_path):
        sys.setswitchinterval(1e-6)
        for _ in range(10):
            arguments = dist.new_group([0, 1]), threading.Barrier(4)
            threads = [threading.Thread(target=issue, args=arguments) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        sys.setswitchinterval(interval)
    numbers: dict[str, list[int]] = {}
    for event in collectives_of(tmp_path):
        numbers.setdefault(event.fields["group"], []).append(event.fields["number"])
    assert [sorted(own) for own in numbers.values()] == [list(range(12))] * 10


def test_a_backward_on_another_thread(
    extension: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective in a backward has the place of its node, also if another thread has made the
    node than the one that calls backward."""

    class Reduced(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            reduce()
            return gradient

    class Reducing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Reduced.apply(super().forward(x))

    def job() -> None:
        model = nn.Sequential(Reducing(8, 8), Reducing(8, 8))
        for _ in range(STEPS):
            thread = threading.Thread(target=model(batch()).sum().backward, name="side")
            thread.start()
            thread.join()
            torchwhere.step()

    natively = events_of(job, tmp_path / "native", monkeypatch, native=True)
    recorded = extension.recorded()
    plainly = events_of(job, tmp_path / "python", monkeypatch, native=False)
    assert without_times(natively) == without_times(plainly)
    assert recorded == STEPS  # the first call of each thread is Python's


def test_watches_that_end_while_a_thread_issues_collectives(extension: Any, tmp_path: Path) -> None:
    """A watch may begin and end at any moment of a call of another thread. No call fails, and each
    box has consecutive numbers."""
    errors: list[BaseException] = []

    def issue() -> None:
        try:
            while not is_over.is_set():
                reduce()
        except BaseException as error:
            errors.append(error)

    is_over, thread = threading.Event(), threading.Thread(target=issue)
    thread.start()
    recorded = 0
    for number in range(8):
        with torchwhere.watch(out=tmp_path / str(number)):
            time.sleep(0.05)
            recorded += extension.recorded()
    is_over.set()
    thread.join()
    with torchwhere.watch():  # removes the kernels that had to stay
        pass
    assert not errors
    assert recorded > 100
    for number in range(8):
        numbers = [event.fields["number"] for event in collectives_of(tmp_path / str(number))]
        assert numbers == list(range(len(numbers)))


def test_a_call_that_returns_in_the_next_watch(
    extension: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that Python records while its watch ends teaches the next watch nothing."""
    is_recorded, may_return = threading.Event(), threading.Event()
    record = CollectiveRecorder._record

    def record_slowly(self: CollectiveRecorder, *args: Any) -> None:
        record(self, *args)
        if threading.current_thread() is thread:
            is_recorded.set()
            may_return.wait(60)

    monkeypatch.setattr(CollectiveRecorder, "_record", record_slowly)
    thread = threading.Thread(target=lambda: reduce(5))
    with torchwhere.watch(out=tmp_path / "first"):
        thread.start()
        assert is_recorded.wait(60)
    with torchwhere.watch(out=tmp_path / "second"):
        reduce(6)
        reduce(7)
        may_return.set()
        thread.join()
        reduce(5)
    shapes = [event.fields["shapes"] for event in collectives_of(tmp_path / "second")]
    assert shapes == [[[6]], [[7]], [[5]]]


def test_shapes_that_never_repeat(extension: Any, tmp_path: Path) -> None:
    """The table of known calls is bounded, and calls that come after it was full are recorded."""
    with torchwhere.watch(out=tmp_path):
        for size in range(1, MOST_CALLS + 50):
            reduce(size)
        for _ in range(3):
            reduce(7)
    events = collectives_of(tmp_path)
    assert [event.fields["shapes"] for event in events[-5:]] == [
        [[MOST_CALLS + 48]],
        [[MOST_CALLS + 49]],
        *[[[7]]] * 3,
    ]
    assert [event.fields["number"] for event in events] == list(range(len(events)))
    assert extension.recorded() == 2


def test_even_splits_after_many_shapes(
    extension: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The even splits of an all_to_all are recorded after any number of other calls."""

    def job() -> None:
        for size in range(1, MOST_SPLITS + 10):
            reduce(size)
            if size == 1 or size > MOST_SPLITS:
                dist.all_to_all_single(torch.ones(RANKS), torch.ones(RANKS))

    natively = events_of(job, tmp_path / "native", monkeypatch, native=True)
    assert extension.recorded() == 9
    plainly = events_of(job, tmp_path / "python", monkeypatch, native=False)
    assert without_times(natively) == without_times(plainly)


def test_a_tap_gets_every_call(extension: Any) -> None:
    """`comms()` counts known calls too. After it, the extension records them again."""
    with torchwhere.watch():
        for _ in range(3):
            reduce()
        before = extension.recorded()
        with torchwhere.comms() as comms:
            for _ in range(3):
                reduce()
        assert (before, extension.recorded()) == (2, 2)
        reduce()
        assert extension.recorded() == 3
    assert comms.counts == {"all_reduce": 3}


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_collectives_in_recomputed_modules(
    is_reentrant: bool, extension: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective in a recomputed module has the number of the call that is repeated, also with a
    checkpoint inside a checkpoint."""

    class Reducing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(torch.ones(3))
            return super().forward(x)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Reducing(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.inner, x, use_reentrant=is_reentrant)
            return self.inner(x)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice, self.plain = Twice(), Reducing(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = checkpoint(self.twice, x, use_reentrant=is_reentrant)
            return self.plain(x)

    def job() -> None:
        model = Whole()
        optimizer = adamw(model)
        for step in range(STEPS):
            model(batch(seed=step).requires_grad_()).sum().backward()
            optimizer.step()

    natively = events_of(job, tmp_path / "native", monkeypatch, native=True)
    recorded = extension.recorded()
    plainly = events_of(job, tmp_path / "python", monkeypatch, native=False)
    assert without_times(natively) == without_times(plainly)
    assert recorded > 0.7 * sum(map(is_collective, natively))
    assert {event.place.pass_ for event in natively if is_collective(event)} == {
        "forward",
        "recompute",
    }


def test_a_group_that_is_destroyed(extension: Any, tmp_path: Path) -> None:
    """A new group may get the address of one that was destroyed. Its calls are its own."""
    with torchwhere.watch(out=tmp_path):
        for _ in range(6):
            group = dist.new_group([0, 1])
            for _ in range(3):
                dist.all_reduce(torch.ones(3), group=group)
            dist.destroy_process_group(group)
            del group
            gc.collect()
    events = collectives_of(tmp_path)
    assert [event.fields["number"] for event in events] == [0, 1, 2] * 6
    assert len({event.fields["group"] for event in events}) == 6
    assert extension.recorded() == 12


def test_nothing_is_kept_alive(extension: Any) -> None:
    """A watch does not hold the model of a known call."""
    model = sharded(Model(depth=1))
    ref = weakref.ref(model)
    with torchwhere.watch():
        train(model, steps=3)
        assert extension.recorded() > 0
        del model
        gc.collect()
        assert ref() is None


def test_a_group_that_a_mesh_names(extension: Any, tmp_path: Path) -> None:
    """A mesh may get a group that is older than it. Then known calls of the group have its name in
    the mesh."""
    group = dist.new_group([0, 1, 2, 3])
    meshes = []

    def job() -> None:
        for step in range(6):
            if step == 3:
                meshes.append(DeviceMesh.from_group(group, "cpu", mesh_dim_names=("inner",)))
                dist.new_group([0, 1])  # the names of groups are read when there is a new one
            dist.all_reduce(torch.ones(3), group=group)
            torchwhere.step()
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop") as raised, torchwhere.watch(out=tmp_path):
        job()
    (note,) = raised.value.__notes__
    assert note.endswith("all_reduce #4 on inner, all_reduce #5 on inner")
    assert extension.recorded() > 0


@pytest.mark.parametrize("is_reported", [True, False])
def test_a_call_in_a_compilation(
    is_reported: bool, extension: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective that a compiler issues has the graph that is compiled, if torch reports the
    compilation. Later calls from the same line do not have it."""

    def issue() -> None:
        reduce()

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        with unset_fake_temporarily():  # the compiler itself runs on fake tensors
            issue()
        return graph.forward

    def job() -> None:
        if not is_reported:
            torch.compiler.reset()  # drops the callbacks that report compilations
        for size in (2, 3):
            torch.compile(lambda x: x + 1, backend=backend)(torch.ones(size))
            for _ in range(3):
                issue()

    torch.compiler.reset()
    natively = events_of(job, tmp_path / "native", monkeypatch, native=True)
    torch.compiler.reset()
    plainly = events_of(job, tmp_path / "python", monkeypatch, native=False)
    assert without_times(natively) == without_times(plainly)
    has_graph = [event.place.graph is not None for event in natively if is_collective(event)]
    assert has_graph == [is_reported, False, False, False] * 2
