"""What is timed on a CPU: modules that do nothing, a small GPT-2, and collectives that go
nowhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from bench.contenders import AGAIN, COMM_DEBUG, MODULE_EVENTS, PYTHON, TORCHWHERE, UNWATCHED
from bench.gpt2 import GPT2, Size

DEPTH = 10  # of the tree of modules
COLLECTIVES = 500  # per step
SMALL = Size(layers=6, heads=4, width=192, local_ids=2048, sequence=128, batch=2)


@dataclass(frozen=True, slots=True)
class Job:
    """A workload ready to run. `step` may return before its work is done; `finish` waits for it."""

    step: Callable[[], object]
    model: nn.Module | None = None
    finish: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Workload:
    """What is timed, and how its cost is told: per unit in microseconds, or as a share of the
    step."""

    key: str
    title: str
    make: Callable[[], AbstractContextManager[Job]]
    steps: int  # timed in one go
    warm_steps: int = 2  # before them, untimed
    # of which the cost is told, in one step; None: tell the added share of a step
    units: int | None = None
    contenders: tuple[str, ...] | None = None  # None: all
    # all the work is one thread's: leave out what others take from it
    clock: Callable[[], float] = time.process_time
    forks: bool = True  # whether each turn gets a process of its own
    budget_s: float = 30.0

    @property
    def unit(self) -> str:
        return "%" if self.units is None else "us"


class Tree(nn.Module):
    """A binary tree of modules whose leaves add one."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.children_ = nn.ModuleList(Tree(depth - 1) for _ in range(2)) if depth > 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.children_ is None:
            return x + 1
        for child in self.children_:
            x = child(x)
        return x


@contextmanager
def _modules() -> Iterator[Job]:
    model = Tree(DEPTH)  # its input is new in each step, or ModTracker's hooks on it would pile up
    yield Job(lambda: model(torch.zeros(1, requires_grad=True)).backward(), model)


@contextmanager
def _gpt2() -> Iterator[Job]:
    torch.manual_seed(0)
    model = GPT2(SMALL)
    yield Job(training_step(model, SMALL, torch.optim.AdamW(model.parameters())), model)


def training_step(
    model: nn.Module, size: Size, optimizer: torch.optim.Optimizer, device: str = "cpu"
) -> Callable[[], None]:
    tokens = torch.randint(size.local_ids, (size.batch, size.sequence), device=device)

    def step() -> None:
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@contextmanager
def _collectives() -> Iterator[Job]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    tensor = torch.ones(1)

    def step() -> None:
        for _ in range(COLLECTIVES):
            dist.all_reduce(tensor)

    try:
        yield Job(step)
    finally:
        dist.destroy_process_group()


CPU = (
    Workload(
        "modules",
        "modules, us a call",
        _modules,
        steps=10,
        warm_steps=5,
        units=2**DEPTH - 1,
        budget_s=50,
    ),
    Workload("gpt2", "GPT-2, % of a step", _gpt2, steps=4, budget_s=50),
    Workload(
        "collectives",
        "all_reduce, us each",
        _collectives,
        steps=3,
        units=COLLECTIVES,
        contenders=(UNWATCHED, TORCHWHERE, MODULE_EVENTS, PYTHON, COMM_DEBUG, AGAIN),
    ),
)
