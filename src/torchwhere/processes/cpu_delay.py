"""How long this process's main thread was ready to run without a CPU to run on, by the kernel's
scheduler: another one had it, or the share that its container may use was used up."""

from __future__ import annotations

from pathlib import Path

_OF_MAIN_THREAD = Path("/proc/self/schedstat")  # whoever reads it


def cpu_delay_ns() -> int | None:
    """Since it began; None where the kernel does not tell."""
    try:
        _ran, queued, _times = _OF_MAIN_THREAD.read_bytes().split()
        return int(queued)
    except (OSError, ValueError):
        return None
