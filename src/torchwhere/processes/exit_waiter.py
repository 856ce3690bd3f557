"""Waits until a process ends, or some time has passed: who watches must know at once, and in which
order they went.

Takes process numbers. A launcher that finds one of its ranks dead ends the others within a tenth of
a second; whoever looks less often sees all of them dead, and cannot say who was first.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import time
from collections.abc import Set
from types import TracebackType

# From linux/pidfd.h: the size of the first version of the structure, and where it has the mask and
# the exit status.
_INFO_BYTES, _MASK_AT, _STATUS_AT = 64, 0, 60
_GET_INFO = 3 << 30 | _INFO_BYTES << 16 | 0xFF << 8 | 11
_INFO_EXIT = 1 << 3


class ExitWaiter:
    """Some processes, each by a file descriptor that can be read when it ends; before Linux 5.3
    there is none, and it waits."""

    def __init__(self) -> None:
        self._watched: dict[int, int] = {}  # descriptor of each process
        self._ended: dict[int, int] = {}  # likewise, as long as its exit code is not known; then -1

    def __enter__(self) -> ExitWaiter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.keep(set())
        for descriptor in self._ended.values():
            if descriptor >= 0:
                os.close(descriptor)
        self._ended.clear()

    def keep(self, pids: Set[int]) -> None:
        """Watch these from now on, and no others."""
        self._poll(0)
        for pid in self._watched.keys() - pids:
            os.close(self._watched.pop(pid))
        for pid in pids - self._watched.keys() - self._ended.keys():
            try:
                self._watched[pid] = os.pidfd_open(pid)
            except (OSError, AttributeError):  # gone already, or there is no such thing here
                continue

    def wait(self, seconds: float) -> bool:
        """Whether one of them has ended."""
        if not self._watched:
            time.sleep(seconds)
            return False
        return self._poll(seconds)

    def _poll(self, seconds: float) -> bool:
        poll = select.poll()
        for descriptor in self._watched.values():
            poll.register(descriptor, select.POLLIN)
        ended = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
        for pid in [pid for pid, descriptor in self._watched.items() if descriptor in ended]:
            self._ended[pid] = self._watched.pop(pid)
        return bool(ended)

    def exit_codes(self) -> dict[int, int]:
        """The exit codes, as Python says them, of processes that have ended since this was last
        asked. The kernel tells them once a parent has collected its child, from Linux 6.15 on;
        before that, processes stay unknown here."""
        found = {}
        for pid, descriptor in self._ended.items():
            if descriptor >= 0 and (code := _exit_code(descriptor)) is not None:
                found[pid] = code
        for pid in found:
            os.close(self._ended[pid])
            self._ended[pid] = -1
        return found


def _exit_code(descriptor: int) -> int | None:
    info = bytearray(_INFO_BYTES)
    struct.pack_into("=Q", info, _MASK_AT, _INFO_EXIT)
    try:
        fcntl.ioctl(descriptor, _GET_INFO, info)
    except OSError:  # an older kernel
        return None
    (mask,), (status,) = (
        struct.unpack_from("=Q", info, _MASK_AT),
        struct.unpack_from("=i", info, _STATUS_AT),
    )
    return os.waitstatus_to_exitcode(status) if mask & _INFO_EXIT else None
