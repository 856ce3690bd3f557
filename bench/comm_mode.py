"""What the drop-in for `CommDebugMode` adds, against the original: for a module call, an op, a
collective, a small GPT-2 step.

    python -m bench.comm_mode

`columns()` gives one column for each. Everyone is entered anew for every step, which is not timed,
as the original survives no second forward; the drop-in therefore pays in each step for names that
it would otherwise find once.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from bench import rounds, table
from bench.contenders import CONTENDERS, UNWATCHED, Contender
from bench.figures import Column, Figure
from bench.rounds import Times
from bench.workloads import CPU, Job, Workload

ORIGINAL = "CommDebugMode"
DROP_IN = "drop-in"
LEVEL_0 = "drop-in, noise_level=0"
OPS = 500  # per step
BUDGET_S = 25.0


def _original(_model: nn.Module | None) -> AbstractContextManager[Any]:
    from torch.distributed.tensor.debug import CommDebugMode

    return CommDebugMode()  # type: ignore[no-untyped-call]


def _drop_in(_model: nn.Module | None) -> AbstractContextManager[Any]:
    from torchwhere.drop_in.comm_mode import CommDebugMode

    return CommDebugMode()


def _level_0(_model: nn.Module | None) -> AbstractContextManager[Any]:
    from torchwhere.drop_in.comm_mode import CommDebugMode

    return CommDebugMode(noise_level=0)


@contextmanager
def _ops() -> Iterator[Job]:
    tensor = torch.ones(8)

    def step() -> None:
        for _ in range(OPS):
            torch.add(tensor, 1)

    yield Job(step)


def _workloads() -> list[Workload]:
    ops = Workload("ops", "ops, us each", _ops, steps=4, units=OPS)
    known = {workload.key: workload for workload in CPU}
    chosen = (known["modules"], ops, known["collectives"], known["gpt2"])
    return [
        Workload(
            f"comm_mode_{one.key}",
            one.title,
            one.make,
            steps=min(one.steps, 4),
            units=one.units,
            budget_s=BUDGET_S,
        )
        for one in chosen
    ]


def columns() -> list[Column]:
    """The original, the drop-in, and the drop-in told that no operations will be asked for; in
    turns."""
    unwatched = next(contender for contender in CONTENDERS if contender.name == UNWATCHED)
    contenders = (
        Contender(UNWATCHED, unwatched.enter, anew_each_step=True),
        Contender(ORIGINAL, _original, anew_each_step=True),
        Contender(DROP_IN, _drop_in, anew_each_step=True),
        Contender(LEVEL_0, _level_0, anew_each_step=True),
    )
    return [_column(workload, rounds.run(workload, contenders)) for workload in _workloads()]


def rows() -> list[tuple[str, float, str]]:
    """For the table of the bench: name, figure, unit."""
    return [
        (f"{column.title}: {figure.contender}", figure.median, column.unit)
        for column in columns()
        for figure in column.figures
        if figure.median is not None
    ]


def _column(workload: Workload, times: list[Times]) -> Column:
    plain = next(found.seconds for found in times if found.contender == UNWATCHED)
    figures = tuple(
        Figure(found.contender, _added(workload, found, plain), error=found.error)
        for found in times
        if found.contender != UNWATCHED
    )
    medians = {figure.contender: figure.median for figure in figures}
    original = medians[ORIGINAL]
    shares = [
        f"{name} {100 * found / original:.0f} %"
        for name in (DROP_IN, LEVEL_0)
        if original and (found := medians[name]) is not None
    ]
    return Column(
        key=workload.key,
        title=workload.title,
        unit=workload.unit,
        unwatched_ms=statistics.median(plain) * 1e3,
        figures=figures,
        rounds=len(plain),
        remark=f"{workload.key}, of what the original adds: {', '.join(shares)}",
    )


def _added(workload: Workload, found: Times, plain: list[float]) -> tuple[float, ...]:
    pairs = list(zip(found.seconds, plain, strict=False))  # one that failed has fewer rounds
    if workload.units is None:
        return tuple((watched / alone - 1) * 100 for watched, alone in pairs)
    return tuple((watched - alone) / workload.units * 1e6 for watched, alone in pairs)


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore")  # the original's hooks warn
    torch.set_num_threads(1)
    print(table.render(f"cpu, one thread, torch {torch.__version__}", columns()))
