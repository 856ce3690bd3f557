"""Waits until a process exits or a time has passed, so that a monitor learns at once which process
exited first.

Takes process ids. A launcher that finds one dead rank terminates the others within a tenth of a
second: a monitor that polls less often sees all of them gone and cannot tell which was first.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import time
from collections.abc import Set

# From linux/pidfd.h: the size of the first version of struct pidfd_info, and the offsets of its
# mask and exit status.
_INFO_BYTES = 64
_MASK_AT = 0
_STATUS_AT = 60
_GET_INFO = 3 << 30 | _INFO_BYTES << 16 | 0xFF << 8 | 11
_INFO_EXIT = 1 << 3


class ExitWaiter:
    """Watches processes by their pidfds, which become readable on exit. Before Linux 5.3 there are
    no pidfds: it only sleeps."""

    def __init__(self) -> None:
        self._pidfds: dict[int, int] = {}  # by pid
        self._exited: dict[int, int | None] = {}  # likewise; None once the exit code is read

    def __enter__(self) -> ExitWaiter:
        return self

    def __exit__(self, *_: object) -> None:
        self.keep(set())
        for pidfd in self._exited.values():
            if pidfd is not None:
                os.close(pidfd)
        self._exited.clear()

    def keep(self, pids: Set[int]) -> None:
        """Watch exactly these processes from now on."""
        self._poll(0)
        for pid in self._pidfds.keys() - pids:
            os.close(self._pidfds.pop(pid))
        for pid in pids - self._pidfds.keys() - self._exited.keys():
            try:
                self._pidfds[pid] = os.pidfd_open(pid)
            except (OSError, AttributeError):  # already gone, or no pidfds on this system
                continue

    def wait(self, seconds: float) -> bool:
        """Wait at most this long. Returns True if one of the processes has exited."""
        if not self._pidfds:
            time.sleep(seconds)
            return False
        return self._poll(seconds)

    def _poll(self, seconds: float) -> bool:
        poll = select.poll()
        for pidfd in self._pidfds.values():
            poll.register(pidfd, select.POLLIN)
        readable = {pidfd for pidfd, _ in poll.poll(seconds * 1000)}
        for pid in [pid for pid, pidfd in self._pidfds.items() if pidfd in readable]:
            self._exited[pid] = self._pidfds.pop(pid)
        return bool(readable)

    def exit_codes(self) -> dict[int, int]:
        """Exit codes, as Python reports them, of processes that exited since the last call.

        The kernel provides them from Linux 6.15 on, once the parent has collected its child. On
        older kernels the result is empty.
        """
        codes = {}
        for pid, pidfd in self._exited.items():
            code = _exit_code(pidfd) if pidfd is not None else None
            if pidfd is not None and code is not None:
                codes[pid] = code
                os.close(pidfd)
                self._exited[pid] = None
        return codes


def _exit_code(pidfd: int) -> int | None:
    info = bytearray(_INFO_BYTES)
    struct.pack_into("=Q", info, _MASK_AT, _INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _GET_INFO, info)
    except OSError:  # an older kernel
        return None
    (mask,) = struct.unpack_from("=Q", info, _MASK_AT)
    (status,) = struct.unpack_from("=i", info, _STATUS_AT)
    return os.waitstatus_to_exitcode(status) if mask & _INFO_EXIT else None
