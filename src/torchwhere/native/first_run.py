"""Builds the native part before a job begins, the first time on a machine: what `torchwhere run`
does by itself.

Before a job and never beside one: a compiler takes a core and 0.9 GB of memory, for which a running
job has other uses. One process builds, on a host and on all hosts that share a cache; the others
wait for it. What failed is written down and not tried again by itself. Nothing that goes wrong here
reaches the job: it then runs without the native part.
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

_PATIENCE_S = 120  # a job waits no longer, whether it builds or another process does
_ASK_EVERY_S = 0.2
_OTHERS_ASK_EVERY_S = 2.0  # the folder may be on another machine, and thousands ask
_LEFT_S = 3600  # a folder to build in that is older was left by a process that was killed


def prepare(*, is_first_of_host: bool = True) -> None:
    """Have the native part built, if it can be, and say so; where it cannot be for want of a
    compiler, say nothing. Other ranks of a host leave it to the first one, if that is there."""
    if os.environ.get(SWITCH) == "0":
        return
    try:
        path = library()
        if not _is_settled(path):
            check_tools()
            _build_alone(path, is_first_of_host=is_first_of_host)
    except Exception as error:
        log.info("torchwhere: the native part is not built: %s", error)


def _is_settled(path: Path) -> bool:
    """It is there, or was tried in vain. The folder is listed: over NFS, of a file that was not
    there it may be believed for a minute that it is not."""
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
        _tidy(path.parent)
        log.warning(
            "torchwhere: builds its native part for torch %s, once on this machine. Your script"
            " begins in about 20 s; with TORCHWHERE_NATIVE=0 at once.",
            torch.__version__,
        )
        try:
            build(timeout_s=_PATIENCE_S)
        except TorchwhereError as error:
            failure_file(path).write_text(f"{error}\n")
            log.warning(
                "torchwhere: goes on without. `torchwhere native` tries again, a run does not try"
                " again by itself: %s",
                error,
            )


def _wait(path: Path, lock: int, *, is_first_of_host: bool) -> None:
    """Until it is built, or this process is to build it."""
    until, pause_s = (
        time.monotonic() + _PATIENCE_S,
        _ASK_EVERY_S if is_first_of_host else _OTHERS_ASK_EVERY_S,
    )
    if not is_first_of_host:
        time.sleep(pause_s)
    while not _is_settled(path) and not _is_locked(lock):
        if time.monotonic() > until:
            raise TorchwhereError(f"another process has been building it for {_PATIENCE_S} s")
        time.sleep(pause_s)


def _is_locked(fd: int) -> bool:
    """Whether this process is the only one that builds from now on."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _tidy(folder: Path) -> None:
    for left in folder.glob(f"{BUILDING}*"):
        if time.time() - left.stat().st_mtime > _LEFT_S:
            shutil.rmtree(left, ignore_errors=True)
