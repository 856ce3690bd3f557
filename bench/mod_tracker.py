"""Measures what it costs to track modules: the drop-in for `ModTracker`, the original, and
`on_module`, per module call.

    python -m bench.mod_tracker

`rows()` returns name, figure and unit. A step is the forward and backward of a binary tree of 1023
modules whose leaves add one. The contenders take turns, each in its own fork; the figure is CPU
time minus that of an unwatched step in the same round. Cheap contenders run more steps in a turn:
on a busy machine, a turn of ten steps is off by 3 us per call. Garbage collection of what a tracker
leaves behind is part of its cost; the two trackers are also compared without it.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from bench import rounds
from bench.contenders import UNWATCHED, Contender
from bench.workloads import CPU

ORIGINAL = "ModTracker"
DROP_IN = "ModTracker drop-in"
ROUNDS = 5
STEPS = 10
STEPS_OF_CHEAP_ONES = 50
MOST_SHARE = 5.0  # percent of the original that the drop-in may cost, without backward hooks

Enter = Callable[[nn.Module | None], AbstractContextManager[Any]]


def _do_nothing(*_args: Any) -> None:
    """A hook or callback."""


def _original(
    _model: nn.Module | None, *, hooks: tuple[bool, ...] = ()
) -> AbstractContextManager[Any]:
    from torch.distributed._tools.mod_tracker import ModTracker

    return _with_hooks(ModTracker(), hooks)  # type: ignore[no-untyped-call]


def _drop_in(
    _model: nn.Module | None, *, hooks: tuple[bool, ...] = ()
) -> AbstractContextManager[Any]:
    from torchwhere.drop_in.mod_tracker import ModTracker

    return _with_hooks(ModTracker(), hooks)


def _with_hooks(tracker: Any, hooks: tuple[bool, ...]) -> AbstractContextManager[Any]:
    tracker.register_user_hooks(*(_do_nothing if wanted else None for wanted in hooks))
    entered: AbstractContextManager[Any] = tracker
    return entered


def _callbacks(_model: nn.Module | None, *, names: tuple[str, ...]) -> AbstractContextManager[Any]:
    from torchwhere import on_module

    return on_module(**dict.fromkeys(names, _do_nothing))


COSTLY: dict[str, Enter] = {
    ORIGINAL: _original,
    f"{ORIGINAL}, forward hooks": partial(_original, hooks=(True, True)),
    f"{ORIGINAL}, all hooks": partial(_original, hooks=(True,) * 4),
    f"{DROP_IN}, all hooks": partial(_drop_in, hooks=(True,) * 4),
    "on_module(backward_enter, backward_exit)": partial(
        _callbacks, names=("backward_enter", "backward_exit")
    ),
}
CHEAP: dict[str, Enter] = {
    DROP_IN: _drop_in,
    f"{DROP_IN}, forward hooks": partial(_drop_in, hooks=(True, True)),
    "on_module(enter, exit)": partial(_callbacks, names=("enter", "exit")),
}


def rows() -> list[tuple[str, float, str]]:
    """Return rows for the table of the bench. The share is the median over the rounds, each
    compared with the original in the same round."""
    table = []
    for suffix, collects in (("", True), (", collector off", False)):
        added = _added(collects=collects)
        table += [
            (name + suffix, statistics.median(values), "us a module call")
            for name, values in added.items()
        ]
        shares = [
            100 * ours / theirs
            for ours, theirs in zip(added[DROP_IN], added[ORIGINAL], strict=True)
        ]
        table.append((f"{DROP_IN}, of the original{suffix}", statistics.median(shares), "%"))
    return table


def _added(*, collects: bool) -> dict[str, list[float]]:
    """Return the microseconds that each adds to a module call, one number per round; without the
    garbage collector, only for the two trackers."""
    groups = ((COSTLY, STEPS), (CHEAP, STEPS_OF_CHEAP_ONES))
    added: dict[str, list[float]] = {}
    (gc.enable if collects else gc.disable)()
    try:
        for _ in range(ROUNDS):
            for entered, steps in groups:
                chosen = {
                    name: enter
                    for name, enter in entered.items()
                    if collects or name in (ORIGINAL, DROP_IN)
                }
                for name, figure in _round(chosen, steps).items():
                    added.setdefault(name, []).append(figure)
    finally:
        gc.enable()
    return added


def _round(entered: dict[str, Enter], steps: int) -> dict[str, float]:
    workload = replace(next(workload for workload in CPU if workload.key == "modules"), steps=steps)
    contenders = [
        Contender(UNWATCHED, lambda _model: nullcontext()),
        *(Contender(*item) for item in entered.items()),
    ]
    times = rounds.run(workload, contenders, most_rounds=1)
    for timed in times:
        if timed.error is not None:
            raise RuntimeError(f"{timed.contender}: {timed.error}")
    plain, *others = (timed.seconds[0] for timed in times)
    return {
        name: (took - plain) / (workload.units or 1) * 1e6
        for name, took in zip(entered, others, strict=True)
    }


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore")  # the original warns on every step
    torch.set_num_threads(1)
    for name, figure, unit in rows():
        print(f"{name:<60} {figure:8.2f} {unit}")
