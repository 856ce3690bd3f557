"""Claims a file name for a new box: what stood there is kept under another name, a live writer is
never disturbed.

A writer holds a lock on its box for as long as it lives. A box that can be locked is therefore that
of a dead writer, and is set aside. Several processes may try at once (a spawned job whose processes
do not know their ranks yet): one gets the name, the others a `TorchwhereError`.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import time
from pathlib import Path

from torchwhere.core.errors import TorchwhereError

# Lustre mounted without flock, NFS without its lock daemon
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


def lock_new_file(path: Path) -> int:
    """A new empty file at `path`, locked: its descriptor. An older box there is set aside, a live
    one is an error."""
    while True:
        _set_aside(path)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            continue  # another process was faster; the next round tells whether it lives
        try:
            _lock(fd, fcntl.LOCK_EX)
            if _is_at(path, fd):
                return fd
        except OSError:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise
        os.close(fd)  # before it was locked, another process took it for the remains of a dead one


def _set_aside(path: Path) -> None:
    """Make room for a new box at `path`: an older one keeps its evidence under another name, a live
    one is an error."""
    try:
        # For writing: NFS grants exclusive locks to nobody else. No links: a dangling one is there
        # and not there.
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        _lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(path, fd):
            return  # somebody else has set it aside meanwhile
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
    """Lock a box for its writer. On a file system without locks two writers are not noticed; the
    older keeps its file."""
    try:
        fcntl.flock(fd, operation)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _is_at(path: Path, fd: int) -> bool:
    """Whether `path` is the name of this very file. Only who holds its lock moves a box."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False


def _free_name(path: Path, changed: float) -> Path:
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(changed))
    names = (
        path.with_name(f"{path.stem}.{stamp}{f'.{attempt}' if attempt else ''}.box")
        for attempt in itertools.count()
    )
    return next(name for name in names if not name.exists())
