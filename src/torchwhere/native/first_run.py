"""Builds the native part before a job begins, the first time on a machine: what `torchwhere run` does by itself.

Before a job and never beside one: a compiler takes a core and a gigabyte of memory, for which a running job has other uses. Of
all processes that find nothing one builds, the others wait for it. What failed is written down and not tried again by itself.
Nothing that goes wrong here reaches the job: it then runs without the native part.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path

import torch

from torchwhere.errors import TorchwhereError
from torchwhere.native.build import build, check_tools
from torchwhere.native.load import BUILDING, SWITCH, failure_file, library, log

_PATIENCE_S = 120  # a job waits no longer, whether it builds or another process does
_ASK_EVERY_S = 0.1
_LEFT_S = 3600  # a folder to build in that is older was left by a process that was killed


def prepare() -> None:
    """Have the native part built, if it can be, and say so; where it cannot be for want of a compiler, say nothing."""
    if os.environ.get(SWITCH) == "0":
        return
    try:
        path = library()
        if not _is_settled(path):
            check_tools()
            _build_alone(path)
    except Exception as error:
        log.info("torchwhere: the native part is not built: %s", error)


def _is_settled(path: Path) -> bool:
    """It is there, or was tried in vain."""
    return os.path.exists(path) or os.path.exists(failure_file(path))


def _build_alone(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "w") as file:
        _lock(file.fileno())
        if _is_settled(path):
            return
        _tidy(path.parent)
        log.warning(
            "torchwhere: builds its native part for torch %s, once on this machine. Your script begins in about 20 s; "
            "with TORCHWHERE_NATIVE=0 at once.",
            torch.__version__,
        )
        try:
            build(timeout_s=_PATIENCE_S)
        except TorchwhereError as error:
            failure_file(path).write_text(f"{error}\n")
            log.warning("torchwhere: goes on without, and does not try again by itself: %s", error)


def _lock(fd: int) -> None:
    """Wait until this process is the only one that builds."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise TorchwhereError(f"another process has been building it for {_PATIENCE_S} s") from None
            time.sleep(_ASK_EVERY_S)
        else:
            return


def _tidy(folder: Path) -> None:
    for left in folder.glob(f"{BUILDING}*"):
        if time.time() - left.stat().st_mtime > _LEFT_S:
            shutil.rmtree(left, ignore_errors=True)
