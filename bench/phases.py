"""Measures what one phase block costs: `torchwhere.phase` with and without a watch, torch's
`SimpleProfiler.profile` and its drop-in, and `torch.profiler.record_function` (without a profiler).

The contenders take turns. Figures are CPU time minus that of an empty `with`. In a watch, a phase
writes two records with their place and updates its sums in the box.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torchwhere

BLOCKS = 10_000
ROUNDS = 15
Context = Callable[[], AbstractContextManager[Any]]


def rows() -> list[tuple[str, float, str]]:
    """Return rows for the table of the bench: name, figure, unit."""
    contenders = _contenders()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory() as folder:
        for round_ in range(ROUNDS + 1):
            empty = _timed(nullcontext)
            for name, (make, is_watched) in contenders.items():
                with torchwhere.watch(out=folder) if is_watched else nullcontext():
                    took = _timed(make) - empty
                if round_:  # the first round warms up
                    seconds[name].append(took)
    return [
        (name, statistics.median(values) / BLOCKS * 1e6, "us a block")
        for name, values in seconds.items()
    ]


def _contenders() -> dict[str, tuple[Context, bool]]:
    from torch.distributed.fsdp._debug_utils import SimpleProfiler
    from torch.profiler import record_function

    from torchwhere.drop_in import fsdp_debug

    shared = torchwhere.phase("data")
    return {
        "torchwhere.phase, watched": (lambda: torchwhere.phase("data"), True),
        "torchwhere.phase, one object for all, watched": (lambda: shared, True),
        "torchwhere.phase, not watched": (lambda: torchwhere.phase("data"), False),
        "SimpleProfiler.profile": (lambda: SimpleProfiler.profile("data"), False),
        "drop_in SimpleProfiler.profile, not watched": (
            lambda: fsdp_debug.SimpleProfiler.profile("data"),
            False,
        ),
        "drop_in SimpleProfiler.profile, watched": (
            lambda: fsdp_debug.SimpleProfiler.profile("data"),
            True,
        ),
        "record_function": (lambda: record_function("data"), False),
    }


def _timed(make: Context) -> float:
    gc.collect()
    start = time.process_time()
    for _ in range(BLOCKS):
        with make():
            pass
    return time.process_time() - start


if __name__ == "__main__":
    for name, figure, unit in rows():
        print(f"{name:<50} {figure:8.2f} {unit}")
