"""Writes texts whole: of many processes on a host that write to one terminal, pipe or file, none
breaks into another's text.

`write_whole(text, file)` is one write, under a lock that all processes of the user on this host
share for that destination. The lock is a byte in one file of the temporary folder, so it needs no
write access to where torchwhere is installed, and it ends with the process that holds it. Without
`fcntl`, or where nothing can be locked, it is still one write: whole in a file, and in a pipe up to
4 KB.

Nobody waits for ever: who finds the lock taken for long although the destination has room (its
holder was stopped) writes without it. Safe against threads, forks, signal handlers and finalizers
that print too. Knows no torch.
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

# after this long, with room at the destination, the holder of the lock is taken to be stopped
_PATIENCE_S = 10.0
_PATIENCE_LEFT_S = 0.1  # with a holder that was waited for in vain before
_FIRST_WAIT_S, _LONGEST_WAIT_S = 20e-6, 2e-3
_OFFSETS = 1 << 62  # where in the lock file a destination's byte may be


def write_whole(text: str, file: TextIO) -> None:
    """Write `text` to `file`, and nothing of anybody else's in between."""
    fd = _descriptor(file)
    with _lock.held(fd):
        if fd is None:
            file.write(text)
            file.flush()
        else:
            file.flush()  # what the program itself has printed so far comes before it
            write_all(fd, _encoded(text, file))


def write_all(fd: int, data: bytes) -> None:
    """One write if the system takes it all at once. A descriptor that does not block (a pipe from
    node, ssh) is waited for."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            _has_room(fd, wait_ms=None)


def _descriptor(file: TextIO) -> int | None:
    """The descriptor of an ordinary stream. None for anything else, which may do more with a text
    than write it (a notebook, a tee, pytest's capture)."""
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
    except UnicodeEncodeError:  # a terminal that knows no Unicode gets escapes, not a traceback
        return text.encode(file.encoding, "backslashreplace")


class _HostLock:
    """One lock per destination, for all threads and all processes of this user on this host."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        # a signal handler may print while its own thread is printing
        self._threads = threading.RLock()
        self._depth = 0
        self._fd: int | None = None
        self._is_hopeless = False
        self._patience_s = _PATIENCE_S

    @contextlib.contextmanager
    def held(self, destination: int | None) -> Iterator[None]:
        if self._pid != os.getpid():  # forked: another thread may have held it at that moment
            self._begin()
        with self._threads:
            self._depth += 1
            at = self._take(destination) if self._depth == 1 else None
            try:
                yield
            finally:
                self._depth -= 1
                if at is not None:
                    self._let_go(at)

    def _take(self, destination: int | None) -> int | None:
        """Wait for the byte of this destination and return where it is; None if it is to be done
        without."""
        lock = self._file()
        if lock is None:
            return None
        at, wait_s, started = _offset(destination), _FIRST_WAIT_S, time.monotonic()
        while True:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)
                self._patience_s = _PATIENCE_S
                return at
            except OSError as error:
                if error.errno not in (
                    errno.EACCES,
                    errno.EAGAIN,
                ):  # a file system without locks, a descriptor closed by others
                    self._fd, self._is_hopeless = None, error.errno != errno.EBADF
                    return None
            if time.monotonic() - started > self._patience_s and _has_room(destination):
                self._patience_s = _PATIENCE_LEFT_S
                return None
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _let_go(self, at: int) -> None:
        with contextlib.suppress(OSError):
            if self._fd is not None:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, at)

    def _file(self) -> int | None:
        if self._fd is None and not self._is_hopeless and fcntl is not None:
            try:
                self._fd = os.open(
                    lock_path(), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
                )
            except OSError:  # no temporary folder that can be written
                self._is_hopeless = True
        return self._fd if fcntl is not None else None


def lock_path() -> str:
    """One file for each user; another user's would be out of reach in a shared temporary folder."""
    return os.path.join(tempfile.gettempdir(), f"torchwhere-{os.getuid()}.lock")


def _offset(destination: int | None) -> int:
    """The byte that stands for a destination: the same in every process that writes there."""
    if destination is None:
        return 0
    stat = os.fstat(destination)
    return hash((stat.st_dev, stat.st_ino)) % _OFFSETS


def _has_room(destination: int | None, *, wait_ms: int | None = 0) -> bool:
    """Whether a write would not block. If it would, whoever holds the lock is only waiting for the
    reader, as we would."""
    if destination is None:
        return True
    poll = select.poll()  # `select` knows no descriptor above 1023
    poll.register(destination, select.POLLOUT)
    return bool(poll.poll(wait_ms))


_lock = _HostLock()
