"""Measures how long it takes to name a model of 100,000 modules: with `torchwhere.names`, in a
watch, with DeepSpeed's debug names, and with torch's own lists.

The contenders take turns, each in a fork of the same process. Times are CPU times. The parameters
of the model are on the meta device.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from bench import fork

LAYERS, LINEARS = 1_000, 99  # 1,000 lists of 99 linear layers: 100,001 modules, 198,000 parameters
ROUNDS = 5


class Layer(nn.ModuleList):
    def __init__(self) -> None:
        super().__init__(nn.Linear(1, 1) for _ in range(LINEARS))


def make() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(Layer() for _ in range(LAYERS)))


def rows() -> list[tuple[str, float, str]]:
    """Return rows for the table of the bench: name, figure, unit."""
    model = make()
    modules = sum(1 for _ in model.modules())
    contenders = _contenders(model)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    gc.collect()
    gc.freeze()
    for _ in range(ROUNDS):
        for name, run in contenders.items():
            seconds[name].append(fork.call(lambda run=run: _timed(run)))  # type: ignore[misc]
    return [
        (f"{name}, {modules:,} modules", statistics.median(values) * 1e3, "ms")
        for name, values in seconds.items()
    ]


def _contenders(model: nn.Module) -> dict[str, Callable[[], object]]:
    from deepspeed.utils.debug import debug_extract_module_and_param_names

    from torchwhere import names
    from torchwhere.drop_in import deepspeed_debug
    from torchwhere.model.module_names import NameTable

    return {
        "torchwhere.names(model)": lambda: names(model),
        "torchwhere, what a watch does": lambda: NameTable().add_root(model),
        "drop_in.deepspeed_debug": lambda: deepspeed_debug.debug_extract_module_and_param_names(
            model
        ),
        "deepspeed.utils.debug": lambda: debug_extract_module_and_param_names(model),
        "torch, named_modules and named_parameters": lambda: (
            list(model.named_modules()),
            list(model.named_parameters()),
        ),
    }


def _timed(run: Callable[[], object]) -> float:
    start = time.process_time()
    result = run()  # freed after the measurement
    took = time.process_time() - start
    del result
    return took


if __name__ == "__main__":
    for name, figure, unit in rows():
        print(f"{name:<65} {figure:>10.1f} {unit}")
