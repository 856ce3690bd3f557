"""Decides whether this process is a rank: now, or when it creates a process group.

A process is a rank if a launcher has set its rank, or if it calls `init_process_group`. Until then
it has one wrapper around that function and nothing else: it may be a worker, which should not pay
for the import of a watch. No error here reaches the job.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch.distributed as dist

from torchwhere.hooks.shown_frames import shown_as
from torchwhere.processes.launcher import LAUNCHER_PROGRAMS, launch, program
from torchwhere_startup import report_failure


def torch_is_loaded(*, has_own_rank: bool) -> None:
    """Begin the watch of a rank. Any other process becomes one if it makes a process group.

    `has_own_rank` says whether this process has rank variables that it has not inherited from
    another process with a rank.
    """
    name = program()
    if name.partition(".")[0] == "torchwhere":  # not a part of the job
        return
    # the batch script of Slurm has the variables of a task, and no rank
    if has_own_rank and name not in LAUNCHER_PROGRAMS and launch().rank is not None:
        _become_rank()
    else:
        first_group.expect()


class FirstGroup:
    """Begins the watch before this process makes its first process group."""

    _wrapper: Any = None

    def expect(self) -> None:
        """Wrap `init_process_group` until its first call."""
        if not dist.is_available() or self._wrapper is not None:
            return
        original = dist.init_process_group

        @wraps(original)
        @shown_as(original, calling="func")
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            return self._function(original)(*args, **kwargs)

        self._wrapper = init_process_group
        _replace(original, by=init_process_group)

    def _function(self, original: Any) -> Any:
        """The function to call now: the watch that has just begun has its own wrapper."""
        wrapper, self._wrapper = self._wrapper, None
        if wrapper is None:  # code that imported the wrapper by name keeps it
            return original
        is_outermost = dist.init_process_group is wrapper
        _replace(wrapper, by=original)
        try:
            _become_rank()
        except Exception as error:
            report_failure(error)
        # A function that wraps the wrapper has called it, and must not be called again.
        return dist.init_process_group if is_outermost else original


def _replace(function: Any, *, by: Any) -> None:
    modules: list[Any] = [dist, dist.distributed_c10d]
    for module in modules:
        if module.init_process_group is function:
            module.init_process_group = by


def _become_rank() -> None:
    from torchwhere.startup.rank_watch import watch_this_rank

    watch_this_rank()


first_group = FirstGroup()
