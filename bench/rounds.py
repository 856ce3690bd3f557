"""Times the contenders of one workload in turns: one round after another, in each round everyone once.

A machine that is slow for a second is then slow for all of them, and what is told is each contender against the unwatched
time of the same round. A contender is entered anew in every round and does one untimed step first. One that raises is left
out from there on, and the workload is built anew, for it may have left hooks behind.

The cycle collector stays on: what it costs is part of what watching costs. But all objects there are when a contender's turn
comes are frozen out of it. A full collection of torch's own takes 0.4 s and would fall on anyone, and CommDebugMode and
FlopCounterMode leave so many behind that it takes 0.2 s longer after each round.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from bench.contenders import Contender
from bench.workloads import Job, Workload

MOST_ROUNDS = 25
FIRST_STEPS = 3


@dataclass(slots=True)
class Times:
    """One contender on one workload: seconds a step, one number per round, or the error that ended it."""

    contender: str
    seconds: list[float] = field(default_factory=list)
    error: str | None = None


def run(workload: Workload, contenders: Sequence[Contender], *, most_rounds: int = MOST_ROUNDS) -> list[Times]:
    """As many rounds as fit into the workload's budget, and at least one."""
    times = {contender: Times(contender.name) for contender in contenders}
    with ExitStack() as stack:
        job = _make(workload, stack)
        job = _round(job, workload, times, stack, by=0, steps=1)
        for found in times.values():
            found.seconds.clear()
        start = time.monotonic()
        for done in range(most_rounds):
            if done and (time.monotonic() - start) * (done + 1) / done > workload.budget_s:
                break
            job = _round(job, workload, times, stack, by=done, steps=workload.steps)
    return list(times.values())


def _round(job: Job, workload: Workload, times: dict[Contender, Times], stack: ExitStack, *, by: int, steps: int) -> Job:
    """Everyone once; gives the job for the next round."""
    for contender in _turned(list(times), by):
        found = times[contender]
        if found.error is not None:
            continue
        try:
            found.seconds.append(_time(job, contender, steps, workload.clock))
        except Exception as error:
            found.error = f"{type(error).__name__}: {error}".partition("\n")[0]
            stack.close()
            job = _make(workload, stack)
    return job


def _make(workload: Workload, stack: ExitStack) -> Job:
    """A job past its first steps, which make the optimizer's state and let DDP settle its buckets."""
    job = stack.enter_context(workload.make())
    for _ in range(FIRST_STEPS):
        job.step()
    return job


def _turned(contenders: Sequence[Contender], by: int) -> Sequence[Contender]:
    """Nobody always follows the same one, nor always comes first."""
    at = by % len(contenders)
    return (*contenders[at:], *contenders[:at])


def _time(job: Job, contender: Contender, steps: int, clock: Callable[[], float]) -> float:
    """Seconds a step under one contender."""
    if contender.anew_each_step:
        return sum(_time_inside(job, contender, 1, clock, warm=False) for _ in range(steps)) / steps
    return _time_inside(job, contender, steps, clock, warm=True)


def _time_inside(job: Job, contender: Contender, steps: int, clock: Callable[[], float], *, warm: bool) -> float:
    gc.collect()
    gc.freeze()
    with contender.enter(job.model):
        if warm:
            job.step()
        job.finish()
        start = clock()
        for _ in range(steps):
            job.step()
        job.finish()
        return (clock() - start) / steps
