"""The file behind a box that is being written: creation, lock, memory map, and its loss.

The file may be deleted, truncated or run out of disk space at any time. Then `on_lost` gets one
sentence, the stores go to memory, and the job continues. With no path there is only memory.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from torchwhere.blackbox import sigbus_guard
from torchwhere.core.errors import TorchwhereError

_TRUNCATED = "was truncated by another process"


class BoxFile:
    """One file: a map of its fixed sections, and a table at its end that grows."""

    def __init__(self, path: Path | None, *, table_at: int, on_lost: Callable[[str], None]) -> None:
        self.path = path
        # Reentrant: a signal handler or finalizer of the job may run inside a call of the writer.
        self.lock = threading.RLock()
        self.table_end = table_at
        self._written_end = table_at
        self._on_lost = on_lost
        self._fd: int | None = None
        self._guard: sigbus_guard.SigbusGuard | None = None
        self.map = self._open(path, table_at) if path is not None else _memory(table_at)

    def _open(self, path: Path, table_at: int) -> mmap.mmap:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = lock_new_file(path)
        try:
            # In a sparse file, a full disk would be a SIGBUS at some later store. Allocated, it is
            # an OSError here.
            os.posix_fallocate(fd, 0, table_at)
            # A map duplicates its descriptor, also in forked children. With the locked descriptor,
            # the box would stay locked after its writer exits, until the last data loader worker
            # does.
            with path.open("r+b") as unlocked:
                mapped = mmap.mmap(unlocked.fileno(), table_at)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise
        self._fd = fd
        return mapped

    def guard(self) -> None:
        """Protect the job from a SIGBUS if another process truncates the file."""
        if self.path is not None:
            self._guard = sigbus_guard.guard_region(
                self.map, is_short=self._is_short, on_lost=lambda: self.lose(_TRUNCATED)
            )

    def rename(self, path: Path) -> None:
        """Rename the box, once the rank is known. Map and descriptor stay valid."""
        self.check()
        if self._fd is None or self.path is None or path == self.path:
            return
        # a locked file under the new name keeps other processes from taking it
        placeholder = lock_new_file(path)
        try:
            os.rename(self.path, path)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(placeholder)
        self.path = path

    def append(self, data: bytes) -> str | None:
        """Write at the end of the table, under the lock. Returns the reason if that fails. Without
        a file, only counts the bytes."""
        at = self.table_end
        end = self.table_end = at + len(data)
        try:
            if self._is_short():  # a write behind the end would hide the gap with zeros
                return _TRUNCATED
            while self._fd is not None and at < end:
                at += os.pwrite(self._fd, data[at - end :], at)
        except OSError as error:
            return f"cannot grow ({error.strerror})"
        self._written_end = max(self._written_end, end)
        return None

    def check(self) -> None:
        """Report a deleted or truncated file, once. Called rarely, never on the hot path."""
        try:
            with self.lock:
                is_deleted = self._fd is not None and os.fstat(self._fd).st_nlink == 0
                is_short = self._is_short()
        except OSError as error:  # a file server that has lost the file
            self.lose(f"is gone ({error.strerror})")
            return
        if is_deleted:
            self.lose("was deleted")
        elif is_short:
            self.lose(_TRUNCATED)

    def lose(self, why: str) -> None:
        """Report once that the file is lost. Not under the lock: `on_lost` may log, and logging has
        its own locks."""
        if self._drop():
            self._on_lost(f"{self.path} {why}; the job continues, this rank is no longer recorded")

    def abandon(self) -> None:
        """Release the file in a forked child, silently. Further stores go to the child's memory."""
        self.lock = threading.RLock()  # a thread of the parent may have held it during the fork
        self._drop()
        if self._guard is not None:
            self._guard.detach()
        self._end_guard()

    def close(self) -> None:
        self._end_guard()
        self.map.close()
        self._drop()

    def _end_guard(self) -> None:
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    def _drop(self) -> bool:
        with self.lock:  # no thread writes to the table now
            fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
        return fd is not None

    def _is_short(self) -> bool:
        # before the size: a signal handler may make both grow in between
        written_end = self._written_end
        return self._fd is not None and os.fstat(self._fd).st_size < written_end


def _memory(size: int) -> mmap.mmap:
    """A private map: by default, Python shares an anonymous map with forked children."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


# -- the lock of a new file ------------------------------------------------------------------------
# A writer holds a lock on its box as long as it lives. If the lock is free, the writer of the box
# has exited, and the box is renamed. Several processes may try at once (a spawned job whose
# processes do not know their ranks yet): one gets the name, the others a `TorchwhereError`.

# Lustre mounted without flock, NFS without its lock daemon
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


def lock_new_file(path: Path) -> int:
    """Create an empty file at `path`, lock it and return its descriptor. Renames an older box;
    raises `TorchwhereError` for one that is being written."""
    while True:
        _move_old_box(path)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            continue  # another process was faster; the next round finds out whether it lives
        try:
            _lock(fd, fcntl.LOCK_EX)
            if _is_at(path, fd):
                return fd
        except OSError:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise
        os.close(fd)  # another process renamed the file before it was locked


def _move_old_box(path: Path) -> None:
    """Rename an older box at `path`; raise `TorchwhereError` for one that is being written."""
    try:
        # For writing: NFS grants exclusive locks only on such descriptors. No symbolic links: a
        # dangling one exists for some calls and not for others.
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        _lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(path, fd):
            return  # another process has renamed it meanwhile
        if os.fstat(fd).st_size:
            os.rename(path, _free_name(path, os.fstat(fd).st_ctime))
        else:
            path.unlink()
    except BlockingIOError:
        raise TorchwhereError(
            f"{path} is being written by another process. Give every job its own folder (out=...,"
            " --out)."
        ) from None
    finally:
        os.close(fd)


def _lock(fd: int, operation: int) -> None:
    """Lock a box for its writer. On a file system without locks, two writers go unnoticed; the
    older one keeps its file."""
    try:
        fcntl.flock(fd, operation)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _is_at(path: Path, fd: int) -> bool:
    """Whether `path` names this open file. Only the holder of its lock renames a box."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False


def _free_name(path: Path, changed: float) -> Path:
    stem = f"{path.stem}.{time.strftime('%Y%m%dT%H%M%S', time.gmtime(changed))}"
    name, attempt = path.with_name(f"{stem}.box"), 0
    while name.exists():
        attempt += 1
        name = path.with_name(f"{stem}.{attempt}.box")
    return name
