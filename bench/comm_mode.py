"""Compares the drop-in for `CommDebugMode` with the original: the time that each adds to a module
call, an op, a collective and a small GPT-2 step.

    python -m bench.comm_mode

`columns()` returns one column for each. Each mode is entered again for every step, untimed, because
the original fails in a second forward. So the drop-in looks up the names of modules in each step,
which it would otherwise do once.
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
from bench.figures import Column, Figure, added
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
    by_key = {workload.key: workload for workload in CPU}
    chosen = (by_key["modules"], ops, by_key["collectives"], by_key["gpt2"])
    return [
        Workload(
            f"comm_mode_{workload.key}",
            workload.title,
            workload.make,
            steps=min(workload.steps, 4),
            units=workload.units,
            budget_s=BUDGET_S,
        )
        for workload in chosen
    ]


def columns() -> list[Column]:
    """Measure the original, the drop-in, and the drop-in with noise level 0, alternating."""
    unwatched = next(contender for contender in CONTENDERS if contender.name == UNWATCHED)
    contenders = (
        Contender(UNWATCHED, unwatched.enter, anew_each_step=True),
        Contender(ORIGINAL, _original, anew_each_step=True),
        Contender(DROP_IN, _drop_in, anew_each_step=True),
        Contender(LEVEL_0, _level_0, anew_each_step=True),
    )
    return [_column(workload, rounds.run(workload, contenders)) for workload in _workloads()]


def rows() -> list[tuple[str, float, str]]:
    """Return rows for the table of the bench: name, figure, unit."""
    return [
        (f"{column.title}: {figure.contender}", figure.median, column.unit)
        for column in columns()
        for figure in column.figures
        if figure.median is not None
    ]


def _column(workload: Workload, times: list[Times]) -> Column:
    plain = next(timed.seconds for timed in times if timed.contender == UNWATCHED)
    figures = tuple(
        Figure(timed.contender, added(timed.seconds, plain, workload.units), error=timed.error)
        for timed in times
        if timed.contender != UNWATCHED
    )
    medians = {figure.contender: figure.median for figure in figures}
    original = medians[ORIGINAL]
    shares = [
        f"{name} {100 * median / original:.0f} %"
        for name, median in medians.items()
        if name != ORIGINAL and original and median is not None
    ]
    return Column(
        key=workload.key,
        title=workload.title,
        unit=workload.unit,
        unwatched_ms=statistics.median(plain) * 1e3,
        figures=figures,
        rounds=len(plain),
        remark=f"{workload.key}, share of what the original adds: {', '.join(shares)}",
    )


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore")  # the original's hooks warn
    torch.set_num_threads(1)
    print(table.render(f"cpu, one thread, torch {torch.__version__}", columns()))
