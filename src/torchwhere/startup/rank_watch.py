"""The watch of a process that has become a rank by itself: its start, its forks and its end."""

from __future__ import annotations

import functools
import os
import sys

from torchwhere.api import watch
from torchwhere.commands.arguments import print_message
from torchwhere.commands.begin_watch import begin_watch
from torchwhere.commands.watch_options import OPTIONS, OUT, WatchOptions, options_of_environment
from torchwhere.startup.ranks import first_group


def watch_this_rank() -> None:
    """Begin the watch of this process, with the options of the environment."""
    session = watch.current()
    if session is None or not session.is_recorded:  # else the script watches itself
        begin_watch(os.environ[OUT], _options())
    _end_with_worker()
    watch.quietly(_end_with_training)
    watch_forks()


def _options() -> WatchOptions:
    try:
        return options_of_environment()
    except ValueError as error:
        print_message(f"{OPTIONS} is ignored: {error}")
        del os.environ[OPTIONS]
        return options_of_environment()


@functools.cache
def watch_forks() -> None:
    """Expect a group in each process that this one forks: there the watch of this one has ended.

    Registered once, because Python cannot unregister it, and after the handlers of the watch, so it
    runs after them.
    """
    os.register_at_fork(after_in_child=first_group.expect)


def _end_with_worker() -> None:
    """End the watch with a process of `multiprocessing`: a forked one runs no exit handlers."""
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, _end_watch, exitpriority=-100)


def _end_with_training() -> None:
    """End the watch of a worker of Ray Train with its training function: Ray kills the worker."""
    if "ray.train" in sys.modules:
        from torchwhere.integrations.ray import end_watch_with_training

        end_watch_with_training()


def _end_watch() -> None:
    """End the watch; an exception that is leaving the process is the reason."""
    error = sys.exception()
    if isinstance(error, SystemExit) and isinstance(error.__context__, Exception):
        error = error.__context__  # `mp.spawn` reports an exception and exits with 1
    watch.end_with_process(error)
