"""The parts of a step: data, forward, backward, optimizer, wait, checkpoint, evaluation, other; from
real jobs that name no phase."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

import torchwhere
from rank_pool import Pool
from torchwhere import cli
from torchwhere.blackbox.reader import read_box
from torchwhere.blackbox.step_clock import StepClock, StepPart
from torchwhere.blackbox.step_times import step_times
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.events import SideKind
from torchwhere.core.place import Pass
from torchwhere.diagnose.step_parts import PART_NAMES, JobStepParts, StepParts
from torchwhere.pipeline.report import report_on
from torchwhere.render.step_parts import step_parts_lines

MS = 1_000_000
SLEEP_S = 0.05
STEPS = 8
WIDTH = 8
_FORWARD, _BACKWARD, _OPTIMIZER = (
    int(own) << 32 for own in (Pass.FORWARD, Pass.BACKWARD, Pass.OPTIMIZER)
)


class Rows(Dataset[torch.Tensor]):
    """Rows of numbers. Each takes some time."""

    def __init__(self, *, sleep_s: float = 0.0, count: int = STEPS) -> None:
        self._sleep_s = sleep_s
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self._count:
            raise IndexError(index)
        time.sleep(self._sleep_s)
        return torch.ones(WIDTH)


class Net(nn.Module):
    """Two layers. The forward can sleep."""

    def __init__(self, *, sleep_s: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self._sleep_s = sleep_s

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self._sleep_s:
            time.sleep(self._sleep_s)
        out: torch.Tensor = self.second(self.first(rows))
        return out


class SlowSGD(torch.optim.SGD):
    """An optimizer whose step sleeps."""

    sleep_s = 0.0

    def step(self, closure: Any = None) -> Any:
        time.sleep(self.sleep_s)
        return super().step(closure)


SLOW_PARTS = ("data", "forward", "backward", "optimizer", "other")


def slow_in(part: str, *, is_slow: bool = True) -> tuple[nn.Module, SlowSGD, Rows, float]:
    """A model, an optimizer and rows, of which one part is slow, and the time to sleep outside."""
    sleep_s = SLEEP_S if is_slow else 0.0
    net = Net(sleep_s=sleep_s if part == "forward" else 0.0)
    if part == "backward" and is_slow:
        net.second.weight.register_hook(lambda gradient: time.sleep(SLEEP_S))
    optimizer = SlowSGD(net.parameters(), lr=0.01)
    optimizer.sleep_s = sleep_s if part == "optimizer" else 0.0
    rows = Rows(sleep_s=sleep_s if part == "data" else 0.0)
    return net, optimizer, rows, sleep_s if part == "other" else 0.0


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Rows, sleep_s: float) -> None:
    for batch in DataLoader(rows):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        time.sleep(sleep_s)


def parts_of(folder: Path | str) -> JobStepParts:
    parts = torchwhere.phases(folder).parts
    assert parts is not None
    for own in parts.by_rank.values():
        assert tuple(own.parts_ns) == PART_NAMES
        columns = list(zip(*own.parts_ns.values(), strict=True))
        assert tuple(map(sum, columns)) == own.step_ns
        assert min(map(min, columns)) >= 0
    return parts


def largest(parts: JobStepParts, rank: int = 0) -> str:
    """The part that takes the most time of a rank."""
    own = parts.by_rank[rank]
    return max(PART_NAMES, key=own.mean_ns)


def have_slept(own: StepParts, part: str) -> list[bool]:
    """For each step, whether this part slept."""
    return [own_ns >= SLEEP_S * 1e9 for own_ns in own.parts_ns[part]]


# -- one process -----------------------------------------------------------------------------------


@pytest.mark.parametrize("part", SLOW_PARTS)
def test_a_slow_part_has_its_own_column(tmp_path: Path, part: str) -> None:
    """The time that one part of a plain training loop sleeps is in the column of this part."""
    job = slow_in(part)
    with torchwhere.watch(out=tmp_path):
        train(*job)
    parts = parts_of(tmp_path)
    assert largest(parts) == part
    assert parts.by_rank[0].mean_ns(part) >= SLEEP_S * 1e9
    assert parts.by_rank[0].mean_ns("wait") == 0


def test_steps_follow_each_other_without_a_gap(tmp_path: Path) -> None:
    """A step begins when the one before it ends, and its parts add up to its time to the
    nanosecond."""
    with torchwhere.watch(out=tmp_path):
        train(*slow_in("none"))
    times = step_times(read_box(tmp_path / "rank0.box"))
    assert times.steps.tolist() == list(range(STEPS))
    assert (np.diff(times.end_ns) == times.total_ns[1:]).all()
    assert (times.parts_ns.sum(axis=0) == times.total_ns).all()


def test_gradient_accumulation(tmp_path: Path) -> None:
    """The micro-batches of a step count together: two forwards that sleep take twice the time."""
    net, optimizer, rows, _ = slow_in("forward")
    with torchwhere.watch(out=tmp_path):
        for number, batch in enumerate(DataLoader(rows)):
            net(batch).sum().backward()
            if number % 2:
                optimizer.step()
    own = parts_of(tmp_path).by_rank[0]
    assert len(own) == STEPS // 2 - 1
    assert own.mean_ns("forward") >= 2 * SLEEP_S * 1e9


def test_a_compiled_model(tmp_path: Path) -> None:
    """The forward and the backward of a compiled model have their own columns."""
    net, optimizer, rows, _ = slow_in("data")
    compiled = torch.compile(net, backend="aot_eager")
    train(compiled, optimizer, Rows(count=1), 0.0)
    with torchwhere.watch(out=tmp_path):
        train(compiled, optimizer, rows, 0.0)
    parts = parts_of(tmp_path)
    own = parts.by_rank[0]
    assert largest(parts) == "data"
    assert all(own.mean_ns(part) > 0 for part in ("forward", "backward", "optimizer"))
    torch._dynamo.reset()


def test_evaluation_and_checkpoint(tmp_path: Path) -> None:
    """A forward in evaluation mode without gradients, and `torch.save`, have their own columns; a
    forward in training mode without gradients is a forward."""
    net, optimizer, _, _ = slow_in("forward")
    batch = torch.ones(1, WIDTH)

    class SlowFile(io.BytesIO):
        def write(self, data: Any) -> int:
            time.sleep(SLEEP_S)
            return super().write(data)

    def step(each: Callable[[], object]) -> None:
        each()
        optimizer.step()

    def evaluate() -> None:
        net.eval()
        with torch.no_grad():
            net(batch)
        net.train()

    def without_gradients() -> None:
        with torch.no_grad():
            net(batch)

    net(batch).sum().backward()
    with torchwhere.watch(out=tmp_path):
        for each in (without_gradients, evaluate, lambda: torch.save({}, SlowFile()), evaluate):
            step(each)
    own = parts_of(tmp_path).by_rank[0]
    assert have_slept(own, "evaluation") == [True, False, True]
    assert have_slept(own, "checkpoint") == [False, True, False]
    assert have_slept(own, "forward") == [False, False, False]


def test_a_phase_with_the_name_of_a_part(tmp_path: Path) -> None:
    """What the user names comes first: a phase named `data` counts as data, whatever runs in it;
    other names change nothing."""
    net, optimizer, _, _ = slow_in("forward")
    batch = torch.ones(1, WIDTH)
    with torchwhere.watch(out=tmp_path):
        for name in ("anything", "data", "anything", "data"):
            with torchwhere.phase(name):
                out = net(batch)
            out.sum().backward()
            optimizer.step()
        phases = torchwhere.phases(tmp_path)
    own = parts_of(tmp_path).by_rank[0]
    assert have_slept(own, "data") == [True, False, True]
    assert have_slept(own, "forward") == [False, True, False]
    assert [row.name for row in phases] == ["anything", "data"]


def test_modules_inside_a_data_loader_count_as_data(tmp_path: Path) -> None:
    """A transform that is a module counts as data while a DataLoader runs it."""
    slow = Net(sleep_s=SLEEP_S)

    class Transformed(Rows):
        def __getitem__(self, index: int) -> torch.Tensor:
            row: torch.Tensor = slow(super().__getitem__(index)).detach()
            return row

    net, optimizer, _, _ = slow_in("none")
    with torchwhere.watch(out=tmp_path):
        train(net, optimizer, Transformed(), 0.0)
    assert largest(parts_of(tmp_path)) == "data"


def test_only_the_thread_that_trains_counts(tmp_path: Path) -> None:
    """A DataLoader and a model on another thread change nothing: only the thread that steps is
    timed."""
    net, optimizer, _rows, _ = slow_in("other")
    is_over = threading.Event()

    def load() -> None:
        while not is_over.is_set():
            for batch in DataLoader(Rows(sleep_s=0.005)):
                net(batch)

    thread = threading.Thread(target=load)
    with torchwhere.watch(out=tmp_path):
        thread.start()
        for _ in range(STEPS):
            time.sleep(SLEEP_S)
            optimizer.step()
        is_over.set()
        thread.join()
    own = parts_of(tmp_path).by_rank[0]
    assert own.mean_ns("data") == own.mean_ns("forward") == 0


def test_a_failing_clock_does_not_reach_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of the hook is logged, and the DataLoader works on."""

    def fails(*_: object) -> bool:
        raise RuntimeError("broken clock")

    monkeypatch.setattr(StepClock, "begin_part", fails)
    with torchwhere.watch(out=tmp_path):
        if torchwhere.api.watch.current()._box.native is not None:  # type: ignore[union-attr]
            pytest.skip("the native clock cannot be replaced")
        assert len(list(DataLoader(Rows()))) == STEPS
    assert "broken clock" in caplog.text


# -- ranks -----------------------------------------------------------------------------------------


def train_with_ddp(folder: str, part: str) -> None:
    net, optimizer, rows, sleep_s = slow_in(part, is_slow=dist.get_rank() == 1)
    model = DDP(net)
    with torchwhere.watch(out=folder):
        train(model, optimizer, rows, sleep_s)
    dist.barrier()


@pytest.mark.parametrize("part", SLOW_PARTS)
def test_ranks_wait_for_the_slow_one(two_ranks: Pool, tmp_path: Path, part: str) -> None:
    """Under DDP a slow part of one rank is in the column of that part on this rank; the other rank
    waits, and its own column is small."""
    two_ranks.run(train_with_ddp, str(tmp_path), part)
    parts = parts_of(tmp_path)
    own, slow = parts.by_rank[0], parts.by_rank[1]
    assert slow.mean_ns(part) >= SLEEP_S * 1e9
    assert own.mean_ns(part) < slow.mean_ns(part)
    assert own.mean_ns("wait") > slow.mean_ns("wait")


def train_with_fsdp(folder: str) -> None:
    net, _, rows, _ = slow_in("other")
    for layer in (net.first, net.second):
        fully_shard(layer)
    fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with torchwhere.watch(out=folder):
        train(net, optimizer, rows, SLEEP_S if dist.get_rank() == 0 else 0.0)
    dist.barrier()


def test_fsdp2(two_ranks: Pool, tmp_path: Path) -> None:
    """Under FSDP2 the ranks wait in the all-gather of the forward; the wait is not forward time."""
    two_ranks.run(train_with_fsdp, str(tmp_path))
    parts = parts_of(tmp_path)
    slow, own = parts.by_rank[0], parts.by_rank[1]
    assert slow.mean_ns("other") >= SLEEP_S * 1e9 > own.mean_ns("other")
    assert own.mean_ns("wait") > slow.mean_ns("wait")
    assert all(own.mean_ns(part) > 0 for part in ("forward", "backward", "optimizer"))


def barrier_in_parts(folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    net, optimizer, _, _ = slow_in("none")
    state = {"weight": net.first.weight.detach()}
    with torchwhere.watch(out=folder):
        for number in range(3):
            if dist.get_rank() == 0:
                time.sleep(SLEEP_S)
            dcp.save(state, checkpoint_id=f"{folder}/saved-{number}")
            optimizer.step()
    dist.barrier()


def test_distributed_checkpoint(two_ranks: Pool, tmp_path: Path) -> None:
    """The time of `torch.distributed.checkpoint` is checkpoint time; a wait in it is not."""
    two_ranks.run(barrier_in_parts, str(tmp_path))
    parts = parts_of(tmp_path)
    for rank in (0, 1):
        own = parts.by_rank[rank]
        assert own.mean_ns("checkpoint") > 0
        assert own.mean_ns("checkpoint") + own.mean_ns("wait") > own.mean_ns() / 2 or rank == 0
    assert parts.by_rank[1].mean_ns("wait") > parts.by_rank[0].mean_ns("wait")


# -- the record ------------------------------------------------------------------------------------


class Clock:
    """A clock with times that the test gives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 10**12
        self.rows: list[tuple[int, ...]] = []
        self.step = 0
        monkeypatch.setattr("torchwhere.blackbox.step_clock.monotonic_ns", lambda: self.now_ns)
        self.clock = StepClock(self._record, self)
        self.clock.start_clock(512, 0)

    def _record(self, *fields: int) -> int:
        self.rows.append(fields)
        return 0

    def after(self, ms: int) -> StepClock:
        self.now_ns += ms * MS
        return self.clock

    def move(self, ms: int, place: int, *, cursor: int = 512) -> None:
        self.after(ms).move_clock(cursor, place, self.now_ns)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_the_clock_adds_every_part(clock: Clock) -> None:
    """An explicit part comes before evaluation, and evaluation before the pass; other threads and
    inner parts change nothing."""
    assert clock.after(1).begin_part(512, StepPart.DATA)  # other: 1
    assert not clock.after(2).begin_part(512, StepPart.CHECKPOINT)
    assert not clock.clock.begin_part(520, StepPart.CHECKPOINT)
    clock.move(4, _FORWARD)
    clock.move(8, 0)
    clock.after(16).end_part()  # data: 2 + 4 + 8 + 16
    clock.move(32, _FORWARD)  # other: 1 + 32
    clock.move(64, _BACKWARD, cursor=520)
    clock.move(64, _BACKWARD)  # forward: 128
    clock.move(128, _OPTIMIZER)  # backward: 128
    clock.move(256, 0)  # optimizer: 256
    clock.clock.set_evaluation(512, True)
    clock.move(1, _FORWARD)  # other: 34
    clock.move(512, 0)  # evaluation: 512
    clock.after(1024).end_step(512, 0, 3)  # other: 34 + 1024
    ((kind, t_ns, _, _, thread, _, *us, _, total_ns),) = clock.rows
    assert (kind, thread) == (SideKind.STEP_TIMES, 3)
    assert [own / 1000 for own in us] == [30, 128, 128, 256, 0, 512]
    assert (total_ns, t_ns) == (2112 * MS, 10**12 + 2112 * MS)


def test_damaged_times_stay_within_the_step(tmp_path: Path) -> None:
    """Parts of a damaged record that exceed the time of the step are cut; nothing is negative."""
    box = BoxWriter(tmp_path / "rank0.box", meta={"rank": 0}, records=8)
    box.record(SideKind.STEP_TIMES, 5, 0, 0, 0, 1, 2**32 - 1, 7, 0, 0, 0, 0, 0, 10_000)
    box.close()
    times = step_times(read_box(tmp_path / "rank0.box"))
    assert times.parts_ns[:, 0].tolist() == [0, 10_000, 0, 0, 0, 0, 0]


def test_the_times_of_a_step_are_not_an_event(tmp_path: Path) -> None:
    """The records with the times of steps count apart, and no list of events has them."""
    with torchwhere.watch(out=tmp_path):
        train(*slow_in("none"))
    box = read_box(tmp_path / "rank0.box")
    assert len(box.side_records) == box.counts.aside == STEPS
    assert box.counts.good == len(box.records)
    assert (box.counts.torn, box.counts.unknown) == (0, 0)
    assert {event.kind for event in box.events()} == {
        "start",
        "end",
        "step_begin",
        "step_end",
        "optimizer",
    }


# -- the table -------------------------------------------------------------------------------------


def made(columns: dict[int, dict[str, list[int]]]) -> JobStepParts:
    by_rank = {}
    for rank, given in columns.items():
        parts = {name: tuple(ms * MS for ms in given.get(name, [0, 0])) for name in PART_NAMES}
        step_ns = tuple(map(sum, zip(*parts.values(), strict=True)))
        by_rank[rank] = StepParts((0, 1), step_ns, parts)
    return JobStepParts(by_rank, "the wall clock of the host", has_device_calls=False)


def shown(parts: JobStepParts) -> list[str]:
    return ["".join(text for text, _ in line) for line in step_parts_lines(parts, width=None)]


def test_the_table_of_the_parts() -> None:
    """A row has the means of a rank, which add up; rare parts have a column only if a rank has such
    time."""
    assert shown(made({0: {"data": [10, 20], "other": [1, 1]}, 1: {"wait": [4, 6]}})) == [
        "parts of a step, mean of 2 steps",
        "rank     step     data  forward  backward  optimizer    wait   other",
        "   0  16.0 ms  15.0 ms     0 ns      0 ns       0 ns    0 ns  1.0 ms",
        "   1   5.0 ms     0 ns     0 ns      0 ns       0 ns  5.0 ms    0 ns",
    ]
    assert shown(made({0: {"checkpoint": [8, 0]}}))[1:] == [
        "rank    step  data  forward  backward  optimizer  checkpoint  other",
        "   0  4.0 ms  0 ns     0 ns      0 ns       0 ns      4.0 ms   0 ns",
    ]


def test_the_table_of_many_ranks() -> None:
    """With many ranks, those that waited the least and the most have a row."""
    lines = shown(made({rank: {"wait": [rank, rank]} for rank in range(40)}))
    assert [line.split()[0] for line in lines[2:-1]] == [
        str(rank) for rank in (*range(8), *range(32, 40))
    ]
    assert lines[-1] == "and 24 ranks between them; --json has all"


def test_the_command_needs_no_phases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`torchwhere phases` shows the parts of a job that names no phase, and `--json` has every
    step."""
    with torchwhere.watch(out=tmp_path):
        train(*slow_in("data"))
    assert cli.main(["phases", str(tmp_path)]) == 0
    title, headings, _row = capsys.readouterr().out.splitlines()
    assert title == f"parts of a step, mean of {STEPS - 1} steps"
    assert headings.split() == [
        *("rank", "step", "data", "forward", "backward", "optimizer", "other"),
    ]
    assert cli.main(["phases", str(tmp_path), "--json"]) == 0
    columns = json.loads(capsys.readouterr().out)["parts"]["ranks"]["0"]
    assert columns["steps"] == list(range(1, STEPS))
    names = [f"{name}_ns" for name in PART_NAMES]
    sums = [sum(parts) for parts in zip(*(columns[name] for name in names), strict=True)]
    assert sums == columns["step_ns"]


def test_the_report_has_the_parts(tmp_path: Path) -> None:
    """The report has the mean step of each rank in its phases section."""
    with torchwhere.watch(out=tmp_path):
        train(*slow_in("data"))
    (row,) = report_on(tmp_path).to_dict()["phases"]["parts"]
    assert (row["rank"], row["steps"]) == (0, STEPS - 1)
    assert row["data"] >= SLEEP_S * 1e3
    assert abs(sum(row[name] for name in PART_NAMES) - row["step"]) < 0.1
