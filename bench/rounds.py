"""Times the contenders of one workload in turns: one round after another, in each round everyone
once.

A machine that is slow for a second is then slow for all of them, and what is told is each contender
against the unwatched time of the same round. A contender is entered anew in every round and does a
few untimed steps first.

On a CPU every turn is a fork of one process, since CommDebugMode and FlopCounterMode leave so many
objects behind that all who come after them are slower. CUDA and gloo do not survive a fork: with
them all turns are in one process, and one that raises may have left hooks in the model, which is
then built anew.

The cycle collector stays on: what it costs is part of what watching costs. But objects older than
the turn are frozen out of it: a full collection of torch's own takes 0.4 s and would fall on
anyone.
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
FIRST_STEPS = 3  # of a job: they make the optimizer's state and let DDP settle its buckets


@dataclass(slots=True)
class Times:
    """One contender on one workload: seconds a step, one number per round, or the error that ended
    it."""

    contender: str
    seconds: list[float] = field(default_factory=list)
    error: str | None = None


def run(
    workload: Workload, contenders: Sequence[Contender], *, most_rounds: int = MOST_ROUNDS
) -> list[Times]:
    """As many rounds as fit into the workload's budget, and at least one."""
    times = {contender: Times(contender.name) for contender in contenders}
    with ExitStack() as stack:
        job = _make(workload, stack)
        _rehearse(contenders)
        _freeze()
        start = time.monotonic()
        for done in range(most_rounds):
            if done and (time.monotonic() - start) * (done + 1) / done > workload.budget_s:
                break
            for contender in _turned(contenders, done):
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


def _rehearse(contenders: Sequence[Contender]) -> None:
    """Import what they import. One that cannot be entered says so in its turn."""
    for contender in contenders:
        with contextlib.suppress(Exception), contender.enter(None):
            pass


def _freeze() -> None:
    gc.collect()
    gc.freeze()


def _turned(contenders: Sequence[Contender], by: int) -> Sequence[Contender]:
    """Nobody always follows the same one, nor always comes first."""
    at = by % len(contenders)
    return (*contenders[at:], *contenders[:at])


def _turn(job: Job, workload: Workload, contender: Contender, times: Times) -> bool:
    """Time one contender once; whether the job is as it was."""

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
    """Seconds a step under one contender."""
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
