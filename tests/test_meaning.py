"""One collective, two meanings: which differences between ranks are a fault, and which are a sound
program's ways."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

import torchwhere
from diagnosing import diagnose
from rank_pool import Pool
from skewed_job import BOOT_NS, WALL_NS, Act, Player, Skew, call, mark, work
from torchwhere.blackbox.run import read_run
from torchwhere.core.events import Kind
from torchwhere.diagnose.calls.job_calls import calls_of_run
from torchwhere.diagnose.doctor.verdict import Verdict

STEPS, ODD_STEP = 9, 6
WORLD = (0, 1, 2, 3)


def _job(name: str, folder: str, *args: int) -> None:
    """One rank of a job, watched."""
    torch.manual_seed(0)
    with torchwhere.watch(out=folder):
        JOBS[name](*args)
        dist.barrier()


def _reduce(value: float = 1.0, *, group: Any = None) -> None:
    dist.all_reduce(torch.tensor([value]), group=group)


# -- sound programs --------------------------------------------------------------------------------


def uneven() -> None:
    """Ranks that run out of input one after the other, in two epochs; the collectives of those are
    shadows."""
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with Join([model]):
            for _ in range(4 + 2 * dist.get_rank()):
                model(torch.randn(2, 4)).sum().backward()
                optimizer.step()


class Counter(Joinable):
    """A joinable of the user's own: what shadows it is in the user's code too."""

    def __init__(self) -> None:
        super().__init__()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD

    def join_hook(self, **_: Any) -> JoinHook:
        return _CounterHook()

    def count(self) -> None:
        Join.notify_join_context(self)
        _reduce()


class _CounterHook(JoinHook):
    def main_hook(self) -> None:
        self._shadow()

    def _shadow(self) -> None:
        dist.all_reduce(torch.zeros(1))


def uneven_by_hand() -> None:
    counter = Counter()
    for _ in range(2):
        with Join([counter]):
            for _ in range(4 + 2 * dist.get_rank()):
                counter.count()
                torchwhere.step()


def in_the_background() -> None:
    """A thread that reduces in a group of its own, at its own pace; the step is the main
    thread's."""
    group = dist.new_group()
    turns = [threading.Event() for _ in range(STEPS)]

    def reduces() -> None:
        for turn in turns:
            turn.wait()
            _reduce(group=group)

    thread = threading.Thread(target=reduces)
    thread.start()
    for step in range(STEPS):
        _reduce()
        if dist.get_rank() != 1 or step > 1:
            turns[step].set()
        if step == 2:
            turns[0].set()
            turns[1].set()
        torchwhere.step()
    thread.join()


def by_callback() -> None:
    """What runs after a collective runs on a thread of torch's or, where that is done already,
    inside the call."""
    for step in range(STEPS):
        future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
        if step == ODD_STEP and dist.get_rank() == 1:
            future.wait()
        works: list[Any] = []
        future.then(
            lambda _, works=works: works.append(dist.all_reduce(torch.ones(2), async_op=True))
        ).wait()
        works[0].wait()
        torchwhere.step()


def by_branches() -> None:
    """A branch on the rank that does the same, new to all in this step."""
    for step in range(STEPS):
        _reduce()
        if step in (ODD_STEP, ODD_STEP + 1):
            if dist.get_rank() == 0:
                dist.all_reduce(torch.tensor([1.0]))
            else:
                dist.all_reduce(torch.tensor([2.0]))
        torchwhere.step()


def written_now_and_then() -> None:
    """The first rank has a branch of its own for what it writes down."""
    for step in range(STEPS):
        if dist.get_rank() == 0 and step % 4 == 2:
            dist.all_reduce(torch.tensor([1.0]))
        else:
            dist.all_reduce(torch.tensor([1.0]))
        dist.all_reduce(torch.tensor([1.0]))
        torchwhere.step()


def in_turns() -> None:
    """In each step another rank takes the other branch; seen before all had their turn."""
    for step in range(2):
        if dist.get_rank() == step:
            dist.all_reduce(torch.tensor([1.0]))
        else:
            dist.all_reduce(torch.tensor([2.0]))
        torchwhere.step()


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, *, dropped: int) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = x if index == dropped else layer(x)
        return x


def with_dropped_layers() -> None:
    """DDP reduces a bucket when its last gradient is there: in which module that is, differs with
    the layers that are used."""
    model = DistributedDataParallel(Dropping(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        is_odd = step == ODD_STEP and dist.get_rank() == 2
        model(torch.randn(2, 4), dropped=0 if is_odd else 2).sum().backward()
        optimizer.step()


# -- silent faults ---------------------------------------------------------------------------------


def on_four_lines(victim: int, counts_steps: int) -> None:
    """Two reductions in the other order, written out twice: no line is any other rank's."""
    loss, accuracy = torch.ones(1), torch.ones(1)
    for step in range(STEPS):
        if dist.get_rank() == victim and step == ODD_STEP:
            dist.all_reduce(accuracy)
            dist.all_reduce(loss)
        else:
            dist.all_reduce(loss)
            dist.all_reduce(accuracy)
        if counts_steps:
            torchwhere.step()


def on_another_line(victim: int) -> None:
    """One reduction of another thing, once."""
    for step in range(STEPS):
        if dist.get_rank() == victim and step == ODD_STEP:
            dist.all_reduce(torch.tensor([2.0]))
        else:
            dist.all_reduce(torch.tensor([1.0]))
        torchwhere.step()


class Reducing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x


def in_another_module(victim: int) -> None:
    """Two modules in the other order: one line, two modules."""
    model = nn.ModuleDict({"one": Reducing(), "other": Reducing()})
    for step in range(STEPS):
        is_odd = dist.get_rank() == victim and step == ODD_STEP
        for name in ("other", "one") if is_odd else ("one", "other"):
            model[name](torch.ones(1))
        torchwhere.step()


def in_a_thread(victim: int) -> None:
    """Two reductions in the other order, in a thread of its own with a group of its own."""
    group = dist.new_group()

    def reduce_loss() -> None:
        dist.all_reduce(torch.ones(1), group=group)

    def reduce_accuracy() -> None:
        dist.all_reduce(torch.ones(1), group=group)

    def reduces() -> None:
        for step in range(STEPS):
            is_odd = dist.get_rank() == victim and step == ODD_STEP
            for reduce in (
                (reduce_accuracy, reduce_loss) if is_odd else (reduce_loss, reduce_accuracy)
            ):
                reduce()

    thread = threading.Thread(target=reduces)
    thread.start()
    for _ in range(STEPS):
        _reduce()
        torchwhere.step()
    thread.join()


def skips_a_step(victim: int) -> None:
    """All collectives are alike; one rank leaves out a step."""
    for step in range(STEPS):
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(2))
        if dist.get_rank() != victim or step != ODD_STEP:
            torchwhere.step()


SOUND = (
    uneven,
    uneven_by_hand,
    in_the_background,
    by_callback,
    by_branches,
    written_now_and_then,
    in_turns,
    with_dropped_layers,
)
SILENT = (on_four_lines, on_another_line, in_another_module, in_a_thread, skips_a_step)
JOBS = {job.__name__: job for job in (*SOUND, *SILENT)}


def judged(pool: Pool, folder: Path, name: str, *args: int) -> Verdict:
    pool.run(_job, name, str(folder), *args, checks_itself=True)
    return diagnose(read_run(folder))


@pytest.mark.parametrize("name", [job.__name__ for job in SOUND])
def test_sound_programs(four_ranks: Pool, tmp_path: Path, name: str) -> None:
    """Threads, callbacks, `Join`, branches that do the same: a sound program's ranks may differ,
    and nobody is blamed."""
    verdict = judged(four_ranks, tmp_path, name)
    assert (verdict.kind, verdict.culprits) == ("healthy", ()), verdict.explanation


@pytest.mark.parametrize("name", ["uneven", "uneven_by_hand"])
def test_shadows_are_marked(four_ranks: Pool, tmp_path: Path, name: str) -> None:
    """What `Join` issues for a rank that is out of input is marked; what a rank issues itself is
    not."""
    judged(four_ranks, tmp_path, name)
    shadows = {}
    for rank, said in calls_of_run(read_run(tmp_path)).by_rank.items():
        calls = max(said.calls.values(), key=len)
        shadows[rank] = [
            calls.of(number)[1].is_shadow for number in range(calls.first, calls.last + 1)
        ]
    assert {rank: any(marks) for rank, marks in shadows.items()} == {
        0: True,
        1: True,
        2: True,
        3: True,
    }
    assert not any(all(marks) for marks in shadows.values())
    assert sum(shadows[0]) > sum(shadows[1]) > sum(shadows[2]) > sum(shadows[3])


@pytest.mark.parametrize(
    ("name", "victim", "more", "differs"),
    [
        ("on_four_lines", 2, (1,), ["line"]),
        ("on_four_lines", 0, (1,), ["line"]),
        ("on_four_lines", 1, (0,), ["line"]),
        ("on_another_line", 2, (), ["line"]),
        ("in_another_module", 3, (), ["module"]),
        ("in_a_thread", 1, (), ["line"]),
        ("skips_a_step", 2, (), ["step"]),
    ],
)
def test_silent_faults(
    four_ranks: Pool,
    tmp_path: Path,
    name: str,
    victim: int,
    more: tuple[int, ...],
    differs: list[str],
) -> None:
    """The same op and shape, and another meaning on one rank: it is named, and nothing is said to
    have failed."""
    verdict = judged(four_ranks, tmp_path, name, victim, *more)
    assert (verdict.kind, verdict.culprits, verdict.certainty) == (
        "mismatch",
        (victim,),
        "inferred",
    ), verdict.explanation
    assert verdict.facts["differs_in"] == differs
    said = " ".join(verdict.explanation)
    assert ("so nothing fails" in said) == (name != "skips_a_step")
    fell = (
        f"Rank {victim} fell behind in step {ODD_STEP - 1}: it skipped a step (optimizer.step,"
        " torchwhere.step)."
    )
    assert (fell in said) == (name == "skips_a_step"), said


# -- words and states ------------------------------------------------------------------------------


def parted(folder: Path, odd: tuple[int, ...], *, waited_s: float | None) -> Verdict:
    """Of a job whose last call is another one on some ranks."""

    def program(rank: int) -> list[Act]:
        acts: list[Act] = []
        for step in range(STEPS):
            is_odd = rank in odd and step == STEPS - 1
            acts += [
                mark(Kind.STEP_BEGIN),
                work(10_000_000),
                call(WORLD, "broadcast" if is_odd else "all_reduce"),
            ]
        return acts

    played = Player([program(rank) for rank in WORLD]).play()
    played.write(folder, [Skew()] * 4, ["node0"] * 4)
    last = max(events[-1][0] for events in played.log)
    run = read_run(folder)
    assert BOOT_NS < WALL_NS
    return diagnose(
        run, now_ns=None if waited_s is None else WALL_NS + int(last + waited_s * 1e9), stall_s=5.0
    )


def test_those_who_stand_still(tmp_path: Path) -> None:
    """After ranks have parted, those who stand in a call wait, and how long is said; a moment after
    it nobody does."""
    verdict = parted(tmp_path, (2,), waited_s=20.0)
    assert (verdict.kind, verdict.culprits) == ("mismatch", (2,))
    assert {str(report.state) for report in verdict.ranks.values()} == {"waiting"}
    assert verdict.stalled_s == pytest.approx(20.0, abs=1.0)
    assert (
        "Now all 4 ranks are blocked, in calls that do not match each other." in verdict.explanation
    )
    early = diagnose(read_run(tmp_path), now_ns=WALL_NS, stall_s=5.0)
    assert (early.stalled_s, {str(report.state) for report in early.ranks.values()}) == (
        None,
        {"running"},
    )


def test_how_long_is_not_known(tmp_path: Path) -> None:
    """Of a job that nobody saw, the states are those of the last moment, and no time is told."""
    verdict = parted(tmp_path, (2,), waited_s=None)
    assert (verdict.stalled_s, {str(report.state) for report in verdict.ranks.values()}) == (
        None,
        {"waiting"},
    )


def test_several_departed(tmp_path: Path) -> None:
    """Where cohorts are of one size, those who did otherwise before are named, in the plural if
    they are several."""
    verdict = parted(tmp_path, (1, 2), waited_s=20.0)
    assert verdict.culprits == (1, 2)
    assert (
        "The cohorts have the same size, but only ranks 1-2 deviated from their own earlier calls."
        in verdict.explanation
    )
