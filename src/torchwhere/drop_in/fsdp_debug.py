"""Drop-in for `torch.distributed.fsdp._debug_utils`, with the same names.

`_get_sharded_module_tree_with_module_name_to_fqns(model)` returns a text tree with `FULLY SHARDED`
after every module that is an FSDP unit, and the names of the parameters of each unit. It works for
FSDP1 and FSDP2 (`fully_shard`); the original finds neither in torch 2.13.
`torchwhere.layout(model)` shows more.

`SimpleProfiler` measures seconds per phase. In a watch, each block is a `torchwhere.phase` too: in
the table of phases and in the box. Two threads may profile the same phase at a time, which the
original mixes up, and `reset` inside a block does not break the block.
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
from torchwhere.model.module_walk import check_module
from torchwhere.recorder.identity import rank_and_world

__all__ = ["SimpleProfiler", "_get_sharded_module_tree_with_module_name_to_fqns", "logger"]

# the logger of the original, so that its handlers still work
logger = logging.getLogger("torch.distributed.fsdp._debug_utils")
_lock = threading.RLock()


class _Running(threading.local):
    """Returns, as a class attribute, the set of phases that the calling thread profiles."""

    def __init__(self) -> None:
        self.types: set[str] = set()

    def __get__(self, _instance: object, _owner: type) -> set[str]:
        return self.types


class SimpleProfiler:
    """Adds up seconds per phase in `results`. Use the class itself, without an instance.

    Example:
        >>> with SimpleProfiler.profile(SimpleProfiler.Type.ALLGATHER):
        ...     gather()
        >>> SimpleProfiler.results["all_gather"]
    """

    class Type(str, Enum):  # noqa: UP042 - a StrEnum prints otherwise
        """The phases of FSDP's `state_dict`; any other string works too."""

        ALL = "all"
        ALLGATHER = "all_gather"
        ALLGATHER_OBJ = "all_gather_object"
        RESHARDING = "resharding"
        H2D = "H2D"
        D2H = "D2H"

    results: dict[str, float] = defaultdict(float)  # noqa: RUF012 - shared, as in the original
    profiling = _Running()  # a set: the phases that this thread profiles

    @classmethod
    def reset(cls) -> None:
        """Clear all results, and the phases that this thread profiles."""
        with _lock:
            cls.results.clear()
        cls.profiling.clear()

    @classmethod
    @contextmanager
    def profile(cls, profile_type: str) -> Iterator[None]:
        """Add the seconds of the block to the result of `profile_type`.

        Raises:
            AssertionError: If this thread profiles `profile_type` already.
        """
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
            running.discard(profile_type)  # `reset` may have removed it

    @classmethod
    def dump_and_reset(cls, msg: str) -> None:
        """Reset the results on every rank. Rank 0 logs them first if TORCH_DISTRIBUTED_DEBUG is
        INFO."""
        if rank_and_world()[0] == 0 and dist.get_debug_level() == dist.DebugLevel.INFO:  # type: ignore[attr-defined]
            with _lock:
                results = cls.results.copy()  # a handler may format the message after the reset
            logger.info("%s %s", msg, results)
        cls.reset()


def _name(profile_type: str) -> str:
    return (
        str(profile_type.value if isinstance(profile_type, Enum) else profile_type) or "<unnamed>"
    )


def _get_sharded_module_tree_with_module_name_to_fqns(
    model: nn.Module,
) -> tuple[str, dict[str, list[str]]]:
    """Return the module tree as text, and the parameters of each FSDP unit.

    Returns:
        The tree, and a dict from `fqn[Class]` of each unit to the names of its parameters.

    Raises:
        TypeError: If `model` is not a module.

    Example:
        >>> tree, params = _get_sharded_module_tree_with_module_name_to_fqns(fully_shard(model))
        >>> print(tree)
    """
    check_module(model, "_get_sharded_module_tree_with_module_name_to_fqns(model)")
    lines = sharded_tree(model)
    managed: dict[str, list[str]] = {}
    for line in lines:
        if line.is_sharded:
            managed.setdefault(line.name, []).extend(line.params)
    tree = [
        f"{' ' * 4 * line.level}{line.name}{' FULLY SHARDED' * line.is_sharded}\n" for line in lines
    ]
    return "".join(tree), managed
