"""Begins the watch of this process when it becomes a rank: now, or in `init_process_group`.

A process is a rank if a launcher has set its rank, or if it makes a process group. Until then it
has one wrapper around `init_process_group` and nothing else. No error here reaches the job.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist

from torchwhere.api import watch
from torchwhere.commands.arguments import print_message
from torchwhere.commands.rank_watch import begin_watch
from torchwhere.commands.watch_options import OPTIONS, OUT, WatchOptions, options_of_environment
from torchwhere.core.errors import failure
from torchwhere.hooks.shown_frames import shown_as
from torchwhere.processes.launcher import LAUNCHER_PROGRAMS, program


def torch_is_loaded(*, has_own_rank: bool) -> None:
    """Begin the watch of a rank. Any other process becomes one if it makes a process group.

    `has_own_rank` says whether this process has rank variables that it has not inherited from
    another process with a rank.
    """
    name = program()
    if watch.current() is not None:  # `torchwhere run` has begun it
        _watch_forks()
    elif name.partition(".")[0] == "torchwhere":  # not a part of the job
        return
    elif has_own_rank and name not in LAUNCHER_PROGRAMS:
        _become_rank()
    else:
        _first_group.expect()


class _FirstGroup:
    """Calls `on_group` before this process makes its first process group."""

    def __init__(self, on_group: Callable[[], None]) -> None:
        self._on_group = on_group
        self._wrapper: Any = None

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
            self._on_group()
        except Exception as error:
            print_message(f"cannot watch this process ({type(error).__name__}: {error})")
        # A function that wraps the wrapper has called it, and must not be called again.
        return dist.init_process_group if is_outermost else original


def _replace(function: Any, *, by: Any) -> None:
    modules: list[Any] = [dist, dist.distributed_c10d]
    for module in modules:
        if module.init_process_group is function:
            module.init_process_group = by


def _become_rank() -> None:
    session = watch.current()
    if session is not None and session.is_recorded:  # the script watches itself
        return
    begin_watch(os.environ[OUT], _options())
    _end_with_worker()
    _watch_forks()


_first_group = _FirstGroup(_become_rank)


def _options() -> WatchOptions:
    try:
        return options_of_environment()
    except ValueError as error:
        print_message(f"{OPTIONS} is ignored: {error}")
        del os.environ[OPTIONS]
        return options_of_environment()


# -- forked processes ------------------------------------------------------------------------------

_watches_forks = False


def _watch_forks() -> None:
    """Expect a group in each process that this one forks: there the watch of this one has ended.

    Registered after the handlers of the watch, so it runs after them.
    """
    global _watches_forks
    if not _watches_forks:
        _watches_forks = True
        os.register_at_fork(after_in_child=_first_group.expect)


def _end_with_worker() -> None:
    """End the watch with a process of `multiprocessing`: a forked one runs no exit handlers."""
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, _end_watch, exitpriority=-100)


def _end_watch() -> None:
    """End the watch; an exception that is leaving the process is the reason."""
    error = sys.exception()
    if isinstance(error, SystemExit) and isinstance(error.__context__, Exception):
        error = error.__context__  # `mp.spawn` reports an exception and exits with 1
    if error is None or (isinstance(error, SystemExit) and not error.code):
        watch.stop_all("exit 0")
    elif isinstance(error, SystemExit):
        watch.stop_all(f"exit {error.code if isinstance(error.code, int) else 1}")
    else:
        watch.record_exception(error)
        watch.stop_all(failure(error))
