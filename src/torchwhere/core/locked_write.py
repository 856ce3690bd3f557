"""Writes text under a lock, so that the output of several processes on a host does not mix.

`write_whole(text, file)` makes one write under a lock. All processes of a user on this host share
one lock for each terminal, pipe or file. The lock is a byte in a file of the temporary folder: it
needs no write access to the installed package, and the kernel releases it when its holder exits.
Without `fcntl`, or on file systems without locks, it is still one write: complete in a file, and in
a pipe up to 4 KB.

No process waits forever: if the lock stays taken although the destination is writable (its holder
was stopped), the text is written without the lock. Safe with threads, forks, signal handlers and
finalizers that print. This file does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import TextIO

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

# after this long, with a writable destination, assume that the holder of the lock is stopped
_PATIENCE_S = 10.0
_PATIENCE_LEFT_S = 0.1  # once a holder was found stopped
_FIRST_WAIT_S, _LONGEST_WAIT_S = 20e-6, 2e-3
_OFFSETS = 1 << 62  # range of the byte offsets in the lock file


def write_whole(text: str, file: TextIO) -> None:
    """Write `text` to `file` without text of other processes in between."""
    fd = _descriptor(file)
    with _lock.held(fd):
        if fd is None:
            file.write(text)
            file.flush()
        else:
            file.flush()  # text that the program printed earlier comes first
            write_all(fd, _encoded(text, file))


def write_all(fd: int, data: bytes) -> None:
    """Write with one call if the system accepts it. Waits for a non-blocking descriptor (a pipe
    from node, ssh)."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            _is_writable(fd, wait_ms=None)


def _descriptor(file: TextIO) -> int | None:
    """The descriptor of an ordinary stream. None for other streams, which may process the text
    first (a notebook, a tee, pytest's capture)."""
    if (
        type(file) is not io.TextIOWrapper
        or type(file.buffer) is not io.BufferedWriter
        or os.linesep != "\n"
    ):
        return None
    return file.fileno()


def _encoded(text: str, file: TextIO) -> bytes:
    try:
        return text.encode(file.encoding, file.errors or "strict")
    except UnicodeEncodeError:  # on a terminal without Unicode: escapes, not a traceback
        return text.encode(file.encoding, "backslashreplace")


class _HostLock:
    """One lock per destination, for all threads and all processes of this user on this host."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        # reentrant: a signal handler may print while its own thread prints
        self._threads = threading.RLock()
        self._depth = 0
        self._fd: int | None = None
        self._cannot_lock = False
        self._patience_s = _PATIENCE_S

    @contextlib.contextmanager
    def held(self, destination: int | None) -> Iterator[None]:
        if self._pid != os.getpid():  # forked: another thread may have held the lock then
            self._reset()
        with self._threads:
            self._depth += 1
            offset = self._acquire(destination) if self._depth == 1 else None
            try:
                yield
            finally:
                self._depth -= 1
                if offset is not None:
                    self._release(offset)

    def _acquire(self, destination: int | None) -> int | None:
        """Wait for the byte of this destination and return its offset; None to write without the
        lock."""
        lock = self._lock_file()
        if lock is None:
            return None
        offset, wait_s, started = _offset(destination), _FIRST_WAIT_S, time.monotonic()
        while True:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
                self._patience_s = _PATIENCE_S
                return offset
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    # a file system without locks, or other code closed the descriptor
                    self._fd = None
                    self._cannot_lock = error.errno != errno.EBADF
                    return None
            if time.monotonic() - started > self._patience_s and _is_writable(destination):
                self._patience_s = _PATIENCE_LEFT_S
                return None
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _release(self, offset: int) -> None:
        with contextlib.suppress(OSError):
            if self._fd is not None:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, offset)

    def _lock_file(self) -> int | None:
        if self._fd is None and not self._cannot_lock and fcntl is not None:
            try:
                self._fd = os.open(
                    lock_path(), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
                )
            except OSError:  # no writable temporary folder
                self._cannot_lock = True
        return self._fd if fcntl is not None else None


def lock_path() -> str:
    """One file for each user: in a shared temporary folder, files of other users are not
    writable."""
    return os.path.join(tempfile.gettempdir(), f"torchwhere-{os.getuid()}.lock")


def _offset(destination: int | None) -> int:
    """Offset of the byte of a destination: the same in every process that writes there."""
    if destination is None:
        return 0
    stat = os.fstat(destination)
    return hash((stat.st_dev, stat.st_ino)) % _OFFSETS


def _is_writable(destination: int | None, *, wait_ms: int | None = 0) -> bool:
    """Whether a write would not block. If it would, the holder of the lock only waits for the
    reader, as this process would."""
    if destination is None:
        return True
    poll = select.poll()  # `select` fails for descriptors above 1023
    poll.register(destination, select.POLLOUT)
    return bool(poll.poll(wait_ms))


_lock = _HostLock()
