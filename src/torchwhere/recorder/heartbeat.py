"""The heartbeat of a watched rank: a thread that writes into the box once a second that the process
is alive.

After all processes of a job were killed, the heartbeats show whether the job hung: then the last
heartbeat is much later than the last recorded event. A process whose main thread waits, in a
collective or for a lock, still has a heartbeat; a process that is stopped, or holds the GIL in C,
has none. A stalled rank has time for more: `on_stall`.

Each heartbeat also says how long the main thread was ready to run but had no CPU. A rank that is
late for this reason is not to blame. Between heartbeats the thread takes samples of the stack of
the thread that trains, as long as events are recorded.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.stall import BEAT_S
from torchwhere.hooks.error_limiter import ErrorLimiter

SAMPLES = 4  # in each second: all of them take less than 0.1 % of a core
_STALL_BEATS = 2  # heartbeats without a recorded event, after which the job may have stalled
_JOIN_S = 5.0
_JOIN_FAILED_S = 1.0  # a slow file system must not delay an exception of the job for long
_FORK_S = 2.0  # the longest time that a fork waits for `on_stall`
# faults in the heartbeat thread itself, which must not be blocked
_NEVER_BLOCKED = {
    signal.SIGBUS,
    signal.SIGSEGV,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGABRT,
    signal.SIGTRAP,
}


class Heartbeat:
    """Writes heartbeats from `start` to `stop`. While no event is recorded, its thread calls
    `on_stall`: after 2 heartbeats, 4, 8 and so on."""

    def __init__(
        self,
        box: BoxWriter,
        *,
        on_stall: Callable[[], None],
        take_sample: Callable[[], None] | None = None,
    ) -> None:
        self._box = box
        self._on_stall = on_stall
        self._take_sample = take_sample
        self._over = threading.Event()
        # Locked while `on_stall` runs: it may import modules, and a forked child must not inherit a
        # half-finished import. Reentrant: the thread that forks releases it only if it has it.
        self._busy = threading.RLock()
        self._thread: threading.Thread | None = None
        self._calls_on_stall = True
        self._failed = False
        self._cpu_delay_ns = 0
        self._errors = ErrorLimiter("the heartbeat", self._over.set)
        self._stall_errors = ErrorLimiter("stalls", self._stop_calling_on_stall)
        self._sample_errors = ErrorLimiter("stack samples", self._stop_taking_samples)

    def start(self) -> None:
        """Start the thread, if it does not run yet."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="torchwhere", daemon=True)
            with self._errors:  # the process may have too many threads: watch without it
                thread.start()
                self._thread = thread

    def stop(self, *, failed: bool = False) -> None:
        """Stop the heartbeat. If the rank has failed, `on_stall` runs once more: a failed rank
        leaves the same files as a stalled one."""
        self._failed = failed
        self._over.set()
        if self._thread is not None:
            self._thread.join(_JOIN_FAILED_S if failed else _JOIN_S)
        for errors in (self._errors, self._stall_errors, self._sample_errors):
            errors.is_over = True
        self._thread = None

    def before_fork(self) -> None:
        """Wait until `on_stall` is not running."""
        self._busy.acquire(timeout=_FORK_S)

    def after_fork(self) -> None:
        """Let `on_stall` run again."""
        with contextlib.suppress(RuntimeError):
            self._busy.release()

    def abandon(self) -> None:
        """Forget the thread in a forked child, which does not have it."""
        self._thread = None

    def _run(self) -> None:
        # Signals of the job are for its own threads: a thread that waits for a signal relies on
        # all other threads to block it.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _NEVER_BLOCKED)
        unchanged, state = 0, b""
        while True:
            with self._errors:
                self._beat()
                before, state = state, self._box.present()
                unchanged = unchanged + 1 if state == before else 0
            is_power_of_two = unchanged & (unchanged - 1) == 0
            if self._calls_on_stall and unchanged >= _STALL_BEATS and is_power_of_two:
                self._call_on_stall()
            if self._rest(samples=unchanged < _STALL_BEATS):
                break
        if self._failed:
            self._call_on_stall()

    def _rest(self, *, samples: bool) -> bool:
        """Wait until the next heartbeat, and take samples meanwhile. Returns whether the watch is
        over."""
        if not samples or self._take_sample is None:
            return self._over.wait(BEAT_S)
        for _ in range(SAMPLES):
            if self._over.wait(BEAT_S / SAMPLES):
                return True
            with self._sample_errors:
                if self._take_sample is not None:
                    self._take_sample()
        return False

    def _beat(self) -> None:
        total_ns = cpu_delay_ns()
        if total_ns is None:
            self._box.beat(time.monotonic_ns())
        else:
            since_last_ns = total_ns - (self._cpu_delay_ns or total_ns)
            self._cpu_delay_ns = total_ns
            self._box.beat(time.monotonic_ns(), cpu_delay_ns=since_last_ns)

    def _call_on_stall(self) -> None:
        # An error is for example a full disk, which heartbeats do not need.
        with self._stall_errors, self._busy:
            self._on_stall()

    def _stop_calling_on_stall(self) -> None:
        self._calls_on_stall = False

    def _stop_taking_samples(self) -> None:
        self._take_sample = None


_MAIN_THREAD = Path("/proc/self/schedstat")  # of the main thread, also for other threads


def cpu_delay_ns() -> int | None:
    """Total since the process started; None if the kernel does not report it."""
    try:
        _ran, queued, _slices = _MAIN_THREAD.read_bytes().split()
        return int(queued)
    except (OSError, ValueError):
        return None
