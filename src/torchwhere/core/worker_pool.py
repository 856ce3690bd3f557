"""Runs long tasks: jobs in worker processes, reports of progress, pauses of garbage collection.

A worker is a new Python interpreter that shares only `sys.path` with this process. It is not
forked, because this process may have threads, and it needs no main module to import, because this
process may have none.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")

HERE = -1  # the number of this process among the workers
_MOST_WORKERS = 8
_PIPE_BYTES = 1 << 20  # large enough for the result of one job of `load_calls`
_PROGRAM = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from torchwhere.core.worker_pool import serve; serve()"
)


def default_workers() -> int:
    """Returns how many workers this machine can use; 0 if Python does not know its own path."""
    return min(len(os.sched_getaffinity(0)), _MOST_WORKERS) if sys.executable else 0


def run_jobs(
    make_task: Callable[[], Callable[[Job], Result]], jobs: Iterable[Job], *, workers: int
) -> Iterator[tuple[int, Result]]:
    """Runs a task on every job.

    Every worker creates one task and runs its jobs one after another, so a task may keep state
    from job to job. Jobs that no worker finished, because it did not start or was killed, run in
    this process at the end.

    Args:
        make_task: Creates the task. Workers unpickle it, so it must be importable by name.
        jobs: The arguments of the task; picklable.
        workers: How many processes to start. With 0 all jobs run in this process.

    Yields:
        The number of the worker (`HERE` for this process) and a result. The results of one worker
        come in the order in which it made them.
    """
    waiting = deque(jobs)
    results = queue.SimpleQueue[Any]()
    with contextlib.ExitStack() as stack:
        for number in range(workers):
            stack.enter_context(_Worker(number, waiting, results, make_task))
        for _ in range(workers):  # each worker ends with a None
            yield from iter(results.get, None)
    task = make_task()
    while waiting:
        yield HERE, task(waiting.popleft())


class _Worker:
    """A worker process, and the thread that sends it jobs and receives the results."""

    def __init__(
        self,
        number: int,
        waiting: deque[Any],
        results: queue.SimpleQueue[Any],
        make_task: Callable[[], Any],
    ) -> None:
        self._number = number
        self._waiting = waiting
        self._results = results
        self._make_task = make_task
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(
            target=self._feed, name=f"torchwhere-worker-{number}", daemon=True
        )

    def __enter__(self) -> _Worker:
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=_PIPE_BYTES,
                pipesize=_PIPE_BYTES,
            )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            self._thread.join()
            return
        self._process.kill()
        self._process.wait()
        self._thread.join()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # unsent data is lost with the process
                if pipe is not None:
                    pipe.close()

    def _feed(self) -> None:
        unfinished: list[Any] = []
        try:
            if self._process is None or self._process.stdin is None or self._process.stdout is None:
                return
            _send(self._process.stdin, sys.path)
            _send(self._process.stdin, self._make_task)
            while self._waiting:
                unfinished = [self._waiting.popleft()]
                _send(self._process.stdin, unfinished[0])
                self._results.put((self._number, pickle.load(self._process.stdout)))
                unfinished = []
        except (IndexError, OSError, EOFError, ValueError, pickle.UnpicklingError):
            # IndexError: another worker took the last job. All others: the worker has died.
            self._waiting.extend(unfinished)
        finally:
            self._results.put(None)


def _send(pipe: IO[bytes], value: Any) -> None:
    pickle.dump(value, pipe, protocol=5)
    pipe.flush()


def serve() -> None:
    """The main loop of a worker: reads jobs from stdin and writes results to stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started it ends it
    gc.disable()  # results hold no cycles, and most objects live only until they are sent
    with contextlib.suppress(EOFError, OSError):
        task = pickle.load(sys.stdin.buffer)()
        while True:
            _send(sys.stdout.buffer, task(pickle.load(sys.stdin.buffer)))


# -- garbage collection ----------------------------------------------------------------------------


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Disable the cycle collector in this block: it would traverse millions of new objects without
    cycles in vain. Restores the setting found at the start."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# -- progress --------------------------------------------------------------------------------------


Progress = Callable[[int, int], None]  # gets the number of items done so far, and of all items


class ProgressCounter:
    """Counts the items that are done, and reports each new count."""

    def __init__(self, total: int, on_progress: Progress | None) -> None:
        self._done, self._total, self._on_progress = 0, total, on_progress

    def add(self, items: int = 1) -> None:
        self._done = min(self._done + items, self._total)
        if self._on_progress is not None:
            self._on_progress(self._done, self._total)
