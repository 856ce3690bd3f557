"""Creates and locks the file of a new box. Renames an older box of that name, and refuses to touch
the box of a live writer.

A writer holds a lock on its box as long as it lives. If the lock is free, the writer of the box has
exited, and the box is renamed. Several processes may try at once (a spawned job whose processes do
not know their ranks yet): one gets the name, the others a `TorchwhereError`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

from torchwhere.core.errors import TorchwhereError

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
            " --out), and in processes that do not have RANK set start watching after"
            " init_process_group, when the rank is known."
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
