"""The heart of a watched rank: a thread that wakes once a second and writes into the box that the process is there.

When all processes of a job have been killed, the boxes alone tell whether it hung or was only passing through: by how long
the last beat came after the last thing that was recorded. A process whose main thread waits, in a collective or a lock, beats
on; one that is stopped, or holds the GIL in C, does not. A rank that has come to rest has time to do more: `on_rest`.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable

from torchwhere.blackbox.writer import BoxWriter
from torchwhere.sense.trouble import Trouble

BEAT_S = 1.0
_REST_BEATS = 2  # without anything recorded: the job may have come to rest
_JOIN_S = 5.0
_FORK_S = 2.0  # a fork is held up for at most so long
_KEPT_OPEN = {signal.SIGBUS, signal.SIGSEGV, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP}  # faults of its own


class Heart:
    """Beats from `start` to `stop`. While nothing moves, `on_rest` is called, in its thread: after 2 beats, 4, 8 and so on."""

    def __init__(self, box: BoxWriter, *, on_rest: Callable[[], None]) -> None:
        self._box = box
        self._on_rest = on_rest
        self._over = threading.Event()
        # Held while it does more than beat: it may import, and a child must not inherit half of that. A thread that has forked
        # lets go of it if it has it, which this kind of lock knows.
        self._busy = threading.RLock()
        self._thread: threading.Thread | None = None
        self.trouble = Trouble("the heartbeat", self._over.set)

    def start(self) -> None:
        """Once; a second time changes nothing."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="torchwhere", daemon=True)
            try:
                thread.start()
                self._thread = thread
            except Exception as error:  # no more threads for this process: it is watched without
                self.trouble(error)

    @property
    def is_beating(self) -> bool:
        return self._thread is not None

    def stop(self) -> None:
        self.trouble.is_over = True
        self._over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
        self._thread = None

    def before_fork(self) -> None:
        self._busy.acquire(timeout=_FORK_S)

    def after_fork(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._busy.release()

    def abandon(self) -> None:
        """In a forked child, which has no such thread."""
        self._thread = None

    def _run(self) -> None:
        # The job's signals are for the job's threads: one that waits for a signal counts on all others not to take it.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _KEPT_OPEN)
        resting, seen = 0, b""
        while True:
            try:
                self._box.beat(time.monotonic_ns())
                before, seen = seen, self._box.present()
                resting = resting + 1 if seen == before else 0
                if resting >= _REST_BEATS and resting & (resting - 1) == 0:
                    with self._busy:
                        self._on_rest()
            except Exception as error:
                self.trouble(error)
            if self._over.wait(BEAT_S):
                return
