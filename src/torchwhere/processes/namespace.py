"""Which processes this one can see, by their numbers: those of its PID namespace, as a container
has one of its own."""

from __future__ import annotations

import os


def pid_namespace() -> int | None:
    """A number for it, the same in all processes that see the same; None where there is no such
    thing."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None
