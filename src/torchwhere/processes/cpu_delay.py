"""How long this process's main thread was ready to run but had no CPU, from the kernel's scheduler:
another process used the CPU, or the container's CPU quota was used up."""

from __future__ import annotations

from pathlib import Path

_MAIN_THREAD = Path("/proc/self/schedstat")  # of the main thread, also for other threads


def cpu_delay_ns() -> int | None:
    """Total since the process started; None if the kernel does not report it."""
    try:
        _ran, queued, _slices = _MAIN_THREAD.read_bytes().split()
        return int(queued)
    except (OSError, ValueError):
        return None
