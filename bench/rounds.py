"""Times the contenders of one workload in rounds; in each round every contender has one turn.

So a machine that is slow for a second is slow for all of them, and the figure of a contender is
compared with the unwatched time of the same round. A contender is entered again in every round, and
first runs a few untimed steps.

On a CPU every turn runs in a fork of one process: CommDebugMode and FlopCounterMode leave so many
objects behind that later turns would be slower. CUDA and gloo do not survive a fork. With them all
turns run in one process; a turn that raises may leave hooks in the model, so the model is then
built again.

The garbage collector stays on: its time is part of the cost of watching. But objects older than the
turn are frozen: a full collection of torch's own objects takes 0.4 s and would hit a random turn.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from bench import fork
from bench.contenders import Contender
from bench.workloads import Job, Workload

MOST_ROUNDS = 25
FIRST_STEPS = 3  # of a job: they create the optimizer's state, and DDP rebuilds its buckets


@dataclass(slots=True)
class Times:
    """One contender on one workload: seconds per step, one number per round, or its error."""

    contender: str
    seconds: list[float] = field(default_factory=list)
    error: str | None = None


def run(
    workload: Workload, contenders: Sequence[Contender], *, most_rounds: int = MOST_ROUNDS
) -> list[Times]:
    """Run as many rounds as fit into the workload's time budget, and at least one."""
    times = {contender: Times(contender.name) for contender in contenders}
    with ExitStack() as stack:
        job = _make(workload, stack)
        _warm_up(contenders)
        _freeze()
        start = time.monotonic()
        for done in range(most_rounds):
            if done and (time.monotonic() - start) * (done + 1) / done > workload.budget_s:
                break
            for contender in _rotated(contenders, done):
                if times[contender].error is None and not _turn(
                    job, workload, contender, times[contender]
                ):
                    stack.close()
                    job = _make(workload, stack)
    return list(times.values())


def _make(workload: Workload, stack: ExitStack) -> Job:
    job = stack.enter_context(workload.make())
    for _ in range(FIRST_STEPS):
        job.step()
    return job


def _warm_up(contenders: Sequence[Contender]) -> None:
    """Enter each contender once, so that its imports are done. A contender that cannot be entered
    fails in its turn."""
    for contender in contenders:
        with contextlib.suppress(Exception), contender.enter(None):
            pass


def _freeze() -> None:
    gc.collect()
    gc.freeze()


def _rotated(contenders: Sequence[Contender], by: int) -> Sequence[Contender]:
    """Rotate the contenders, so that no contender is always the first one."""
    at = by % len(contenders)
    return (*contenders[at:], *contenders[:at])


def _turn(job: Job, workload: Workload, contender: Contender, times: Times) -> bool:
    """Time one contender once. Returns whether the job can be used again."""

    def measure() -> float:
        if contender.anew_each_step:
            return (
                sum(_time(job, contender, 1, workload.clock, warm=0) for _ in range(workload.steps))
                / workload.steps
            )
        return _time(job, contender, workload.steps, workload.clock, warm=workload.warm_steps)

    try:
        times.seconds.append(fork.call(measure) if workload.forks else measure())
    except Exception as error:
        text = str(error) if workload.forks else f"{type(error).__name__}: {error}"
        times.error = text.partition("\n")[0]
        return workload.forks
    return True


def _time(
    job: Job, contender: Contender, steps: int, clock: Callable[[], float], *, warm: int
) -> float:
    """Return the seconds per step under one contender."""
    _freeze()
    with contender.enter(job.model):
        for _ in range(warm):
            job.step()
        job.finish()
        start = clock()
        for _ in range(steps):
            job.step()
        job.finish()
        return (clock() - start) / steps
