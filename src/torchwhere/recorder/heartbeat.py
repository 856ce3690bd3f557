"""The heart of a watched rank: a thread that wakes once a second and writes into the box that the
process is there.

When all processes of a job have been killed, the boxes alone tell whether it hung or was only
passing through: by how long the last beat came after the last thing that was recorded. A process
whose main thread waits, in a collective or a lock, beats on; one that is stopped, or holds the GIL
in C, does not. A rank that has come to rest has time to do more: `on_stall`.

Beside each beat it writes for how long the main thread was ready to run and had no CPU: who is late
for that is not to blame.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable

from torchwhere.blackbox.writer import BoxWriter
from torchwhere.hooks.error_limiter import ErrorLimiter
from torchwhere.processes.cpu_delay import cpu_delay_ns

BEAT_S = 1.0
_REST_BEATS = 2  # without anything recorded: the job may have come to rest
_JOIN_S = 5.0
_LAST_LOOK_S = 1.0  # a folder that does not answer must not hold back an exception
_FORK_S = 2.0  # a fork is held up for at most so long
# faults of its own
_KEPT_OPEN = {
    signal.SIGBUS,
    signal.SIGSEGV,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGABRT,
    signal.SIGTRAP,
}


class Heartbeat:
    """Beats from `start` to `stop`. While nothing moves, `on_stall` is called, in its thread: after
    2 beats, 4, 8 and so on."""

    def __init__(self, box: BoxWriter, *, on_stall: Callable[[], None]) -> None:
        self._box = box
        self._on_rest = on_stall
        self._over = threading.Event()
        # Held while it does more than beat: it may import, and a child must not inherit half of
        # that. A thread that has forked lets go of it if it has it, which this kind of lock knows.
        self._busy = threading.RLock()
        self._thread: threading.Thread | None = None
        self._rests, self._looks = True, False
        self._queued_ns = 0
        self._trouble = ErrorLimiter("the heartbeat", self._over.set)
        self._trouble_at_rest = ErrorLimiter(
            "what a rank leaves that stands still", self._rest_no_more
        )

    def start(self) -> None:
        """Once; a second time changes nothing."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="torchwhere", daemon=True)
            try:
                thread.start()
                self._thread = thread
            except Exception as error:  # no more threads for this process: it is watched without
                self._trouble(error)

    def stop(self, *, looks: bool = False) -> None:
        """No beat after this. With `looks`, a last `on_stall`: a rank that has failed leaves what
        one that stands still does."""
        self._looks = looks
        self._over.set()
        if self._thread is not None:
            self._thread.join(_LAST_LOOK_S if looks else _JOIN_S)
        self._trouble.is_over = self._trouble_at_rest.is_over = True
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
        # The job's signals are for the job's threads: one that waits for a signal counts on all
        # others not to take it.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _KEPT_OPEN)
        resting, seen = 0, b""
        while True:
            try:
                self._beat()
                before, seen = seen, self._box.present()
                resting = resting + 1 if seen == before else 0
            except Exception as error:
                self._trouble(error)
            if self._rests and resting >= _REST_BEATS and resting & (resting - 1) == 0:
                self._rest()
            if self._over.wait(BEAT_S):
                break
        if self._looks:
            self._rest()

    def _beat(self) -> None:
        queued = cpu_delay_ns()
        if queued is not None:
            waited, self._queued_ns = queued - (self._queued_ns or queued), queued
            self._box.beat(time.monotonic_ns(), cpu_delay_ns=waited)
        else:
            self._box.beat(time.monotonic_ns())

    def _rest(self) -> None:
        try:
            with self._busy:
                self._on_rest()
        except Exception as error:  # as on a full disk: it beats on, which takes no room
            self._trouble_at_rest(error)

    def _rest_no_more(self) -> None:
        self._rests = False
