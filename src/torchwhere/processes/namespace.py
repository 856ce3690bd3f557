"""The PID namespace: which processes this process sees, and under which ids. A container has its
own namespace."""

from __future__ import annotations

import os


def pid_namespace() -> int | None:
    """Id of the namespace, equal in all processes that share it; None where there is none."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None
