"""The file behind a box that is being written: creation, lock, memory map, and its loss.

The file may be deleted, truncated or run out of disk space at any time. Then `on_lost` gets one
sentence, the stores go to memory, and the job continues. With no path there is only memory.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

from torchwhere.blackbox import sigbus_guard
from torchwhere.blackbox.lock import lock_new_file

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
