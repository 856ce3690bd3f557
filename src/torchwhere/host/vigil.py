"""Waits until a process ends, or some time has passed: who watches must know at once, and in which order they went.

Takes process numbers. A launcher that finds one of its ranks dead ends the others within a tenth of a second; whoever looks
less often sees all of them dead, and cannot say who was first.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Set
from types import TracebackType


class Vigil:
    """Some processes, each by a file descriptor that can be read when it ends; before Linux 5.3 there is none, and it waits."""

    def __init__(self) -> None:
        self._watched: dict[int, int] = {}  # descriptor of each process
        self._ended: set[int] = set()

    def __enter__(self) -> Vigil:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.keep(set())

    def keep(self, pids: Set[int]) -> None:
        """Watch these from now on, and no others."""
        for pid in self._watched.keys() - pids:
            os.close(self._watched.pop(pid))
        for pid in pids - self._watched.keys() - self._ended:
            try:
                self._watched[pid] = os.pidfd_open(pid)
            except (OSError, AttributeError):  # gone already, or there is no such thing here
                continue

    def wait(self, seconds: float) -> bool:
        """Whether one of them has ended."""
        if not self._watched:
            time.sleep(seconds)
            return False
        poll = select.poll()
        for descriptor in self._watched.values():
            poll.register(descriptor, select.POLLIN)
        ended = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
        self._ended |= {pid for pid, descriptor in self._watched.items() if descriptor in ended}
        self.keep(self._watched.keys() - self._ended)
        return bool(ended)
