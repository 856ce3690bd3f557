"""`torch.distributed.fsdp._debug_utils`, by its own names.

`_get_sharded_module_tree_with_module_name_to_fqns(model)`: a text tree with `FULLY SHARDED` behind
every module that FSDP manages as a unit, and the names of the parameters of each unit. For FSDP1
and FSDP2 (`fully_shard`) alike: the original finds neither in torch 2.13.
`torchwhere.layout(model)` says more.

`SimpleProfiler`: seconds per phase. Each block is a `torchwhere.phase` too, in the table and in the
black box while somebody watches. Each thread may profile what another one does, where the original
mixes them up; `reset` inside a block does not break it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import torch.distributed as dist
from torch import nn

from torchwhere.api.annotate import phase
from torchwhere.model.fsdp import sharded_tree
from torchwhere.recorder.identity import rank_and_world

__all__ = ["SimpleProfiler", "_get_sharded_module_tree_with_module_name_to_fqns", "logger"]

# the original's: who listens there goes on doing so
logger = logging.getLogger("torch.distributed.fsdp._debug_utils")
_lock = threading.RLock()


class _Running(threading.local):
    """Gives the set of what the calling thread is profiling."""

    def __init__(self) -> None:
        self.types: set[str] = set()

    def __get__(self, _instance: object, _owner: type) -> set[str]:
        return self.types


class SimpleProfiler:
    """Seconds per phase, added up in `results` until they are reset. Nothing to be made: everything
    is on the class."""

    class Type(str, Enum):  # noqa: UP042 - a StrEnum prints otherwise
        """The phases of FSDP's `state_dict`; any other name does as well."""

        ALL = "all"
        ALLGATHER = "all_gather"
        ALLGATHER_OBJ = "all_gather_object"
        RESHARDING = "resharding"
        H2D = "H2D"
        D2H = "D2H"

    results: dict[str, float] = defaultdict(float)  # noqa: RUF012 - one for the process, as ever
    profiling = _Running()  # a set: what this thread is profiling

    @classmethod
    def reset(cls) -> None:
        """Forget all results, and what this thread is profiling."""
        with _lock:
            cls.results.clear()
        cls.profiling.clear()

    @classmethod
    @contextmanager
    def profile(cls, profile_type: str) -> Iterator[None]:
        """Add the seconds of this block to the results of `profile_type`."""
        running = cls.profiling
        if profile_type in running:
            raise AssertionError(
                f"{profile_type} is already being profiled. SimpleProfiler does not support"
                " profiling multiple instances at the same time. "
            )
        running.add(profile_type)
        begin = time.monotonic()
        try:
            with phase(_name(profile_type)):
                yield
        finally:
            seconds = time.monotonic() - begin
            with _lock:
                cls.results[profile_type] += seconds
            running.discard(profile_type)  # a reset may have taken it out

    @classmethod
    def dump_and_reset(cls, msg: str) -> None:
        """Log the results on rank 0 at the debug level INFO (TORCH_DISTRIBUTED_DEBUG), and reset
        them on every rank."""
        if _rank() == 0 and dist.get_debug_level() == dist.DebugLevel.INFO:  # type: ignore[attr-defined]
            with _lock:
                results = cls.results.copy()  # a handler may write it when it has long been reset
            logger.info("%s %s", msg, results)
        cls.reset()


def _name(profile_type: str) -> str:
    return (
        str(profile_type.value if isinstance(profile_type, Enum) else profile_type) or "<unnamed>"
    )


def _rank() -> int:
    try:
        return dist.get_rank()
    except (ValueError, RuntimeError):  # no process group: the original raises
        return rank_and_world()[0]


def _get_sharded_module_tree_with_module_name_to_fqns(
    model: nn.Module,
) -> tuple[str, dict[str, list[str]]]:
    """The tree as text, and `fqn[Class]` of each sharded module to the names of the parameters it
    manages."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            "_get_sharded_module_tree_with_module_name_to_fqns(model): expected a torch.nn.Module,"
            f" got {type(model).__name__}"
        )
    lines = sharded_tree(model)
    managed: dict[str, list[str]] = {}
    for line in lines:
        if line.is_sharded:
            managed.setdefault(line.name, []).extend(line.params)
    tree = [
        f"{' ' * 4 * line.level}{line.name}{' FULLY SHARDED' * line.is_sharded}\n" for line in lines
    ]
    return "".join(tree), managed
