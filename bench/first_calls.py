"""Measures the first call of a module that is in no known model, with 1,000,000 objects alive.

    python -m bench.first_calls [ROUNDS]

Such a call names the module and looks for the model that it belongs to. The modules here return
their input and call no others, so that each time is that of one call. Prints CPU time, with the
native extension if it is built.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

import torchwhere

OBJECTS = 1_000_000
X = torch.ones(1)


class Wide(nn.Module):
    """A model with many parts. A call of it calls none of them."""

    def __init__(self, parts: int, *, is_frozen: bool = False) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(1, 1) for _ in range(parts))
        self.requires_grad_(not is_frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _pair() -> nn.Module:
    one, other = Wide(1), Wide(1)
    one.others, other.others = [other], [one]
    return one


def _called(module: nn.Module) -> nn.Module:
    module(X)
    return module


def _last_part(model: Wide, *, is_called: bool) -> nn.Module:
    """The last part of a model, before or after the first call of the model."""
    if is_called:
        model(X)
    return model.parts[-1]


def _later() -> dict[str, Callable[[], nn.Module]]:
    """Modules that appear in a watch that has begun, each new in every round."""
    small, middle, large = Wide(10), Wide(1_000), Wide(10_000)
    return {
        "a new nn.Linear": lambda: nn.Linear(1, 1),
        "a new nn.ReLU": nn.ReLU,
        "one of two modules that refer to each other": _pair,
        "a deepcopy of a model of 12 modules": lambda: copy.deepcopy(small),
        "a deepcopy of a model of 1,002 modules": lambda: copy.deepcopy(middle),
        "a deepcopy of a model of 10,002 modules": lambda: copy.deepcopy(large),
        "the last part of that copy, after the copy": lambda: _last_part(
            copy.deepcopy(large), is_called=True
        ),
        "a part of such a copy, before the copy": lambda: _last_part(
            copy.deepcopy(large), is_called=False
        ),
    }


def _in_first_step() -> dict[str, Callable[[], nn.Module]]:
    """Modules that are called first in a watch that has just begun."""
    return {
        "in the first step: a frozen model of 10,002 modules": lambda: Wide(10_000, is_frozen=True),
        "in the first step: a model of 10,002 modules, after another model": lambda: (
            _called(Wide(10)) and Wide(10_000)
        ),
        "in the first step: a model around a part of 10,002 modules that was called before": (
            lambda: Around(_called(Wide(10_000)))
        ),
    }


def _call_ms(make: Callable[[], nn.Module], watch: AbstractContextManager[object]) -> float:
    with watch:
        module = make()
        begin_ns = time.thread_time_ns()
        module(X)
        return (time.thread_time_ns() - begin_ns) / 1e6


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    alive = [[number] for number in range(OBJECTS)]
    nn.Linear(1, 1)(X)  # torch itself prepares its first one
    times_ms: dict[str, list[float]] = {}
    for name, make in _in_first_step().items():
        times_ms[name] = [_call_ms(make, torchwhere.watch()) for _ in range(rounds)]
    model = Wide(1_000)
    with torchwhere.watch(model):
        model(X)
        for name, make in _later().items():
            times_ms[name] = [_call_ms(make, nullcontext()) for _ in range(rounds)]
    for name, times in times_ms.items():
        print(
            f"{name}: {min(times):.2f} ms, median {statistics.median(times):.2f},"
            f" largest {max(times):.2f}"
        )
    del alive


if __name__ == "__main__":
    main()
