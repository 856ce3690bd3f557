"""Builds the native extension before the first job on a machine: `torchwhere run` calls this.

The build runs before a job and never during one: a compiler takes a core and 0.9 GB of memory,
which a running job needs itself. One process builds for a host, and for all hosts that share a
cache; the others wait for it. A failed build is recorded, and not repeated automatically. No error
here reaches the job: it then runs without the extension.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path

import torch

from torchwhere.core.errors import TorchwhereError
from torchwhere.native.build import build, check_tools
from torchwhere.native.load import BUILDING, SWITCH, failure_file, library, log

_MAX_WAIT_S = 120  # of a job, whether it builds or another process does
_POLL_S = 0.2
_OTHERS_POLL_S = 2.0  # the folder may be on another machine, and thousands of ranks poll it
_STALE_S = 3600  # a build folder that is older belongs to a process that was killed


def prepare(*, is_first_of_host: bool = True) -> None:
    """Build the native extension, if that is possible and not done yet.

    Logs a warning that the script starts later. Logs no warning if there is no compiler.

    Args:
        is_first_of_host: Whether this is the first rank of its host, which builds; the other ranks
            wait for it.
    """
    if os.environ.get(SWITCH) == "0":
        return
    try:
        path = library()
        if not _is_settled(path):
            check_tools()
            _build_alone(path, is_first_of_host=is_first_of_host)
    except Exception as error:
        log.info("torchwhere: the native extension is not built: %s", error)


def _is_settled(path: Path) -> bool:
    """Whether the extension is built, or a build has failed.

    Lists the folder: NFS may cache for a minute that a file does not exist.
    """
    try:
        names = os.listdir(path.parent)
    except FileNotFoundError:
        return False
    return path.name in names or failure_file(path).name in names


def _build_alone(path: Path, *, is_first_of_host: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "w") as file:
        _wait(path, file.fileno(), is_first_of_host=is_first_of_host)
        if _is_settled(path):
            return
        _remove_stale_builds(path.parent)
        log.warning(
            "torchwhere: building the native extension for torch %s, once on this machine. Your"
            " script starts in about 20 s. Set TORCHWHERE_NATIVE=0 to start it at once.",
            torch.__version__,
        )
        try:
            build(timeout_s=_MAX_WAIT_S)
        except TorchwhereError as error:
            failure_file(path).write_text(f"{error}\n")
            log.warning(
                "torchwhere: running without the native extension: %s. Runs do not try again;"
                " `torchwhere native` builds it.",
                error,
            )


def _wait(path: Path, lock: int, *, is_first_of_host: bool) -> None:
    """Wait until the extension is built, or until this process has the lock and must build it."""
    until = time.monotonic() + _MAX_WAIT_S
    pause_s = _POLL_S if is_first_of_host else _OTHERS_POLL_S
    if not is_first_of_host:
        time.sleep(pause_s)
    while not _is_settled(path) and not _take_lock(lock):
        if time.monotonic() > until:
            raise TorchwhereError(f"another process has been building it for {_MAX_WAIT_S} s")
        time.sleep(pause_s)


def _take_lock(fd: int) -> bool:
    """Take the lock, if it is free. Returns whether this process has it now."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_stale_builds(folder: Path) -> None:
    for path in folder.glob(f"{BUILDING}*"):
        if time.time() - path.stat().st_mtime > _STALE_S:
            shutil.rmtree(path, ignore_errors=True)
