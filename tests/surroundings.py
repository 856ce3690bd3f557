"""Contexts that some jobs need: a cgroup with a memory limit, a network that can fail. Both need
root.

Made by the test before the job starts, entered by a rank before it is watched, gone when the test
is over. On a machine where they cannot be made, `NotHereError` says why.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LIMIT_BYTES = 300_000_000
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),  # version 1
    (Path("/sys/fs/cgroup"), "memory.max"),  # version 2
)
_NETNS = Path("/var/run/netns")
_CLONE_NEWNET = 0x40000000


class NotHereError(Exception):
    """This machine cannot give a job what it needs."""


# -- memory ----------------------------------------------------------------------------------------


@contextmanager
def memory_limit(name: str) -> Iterator[None]:
    """A cgroup whose processes may use 300 MB together."""
    folder = _limited(name)
    try:
        yield
    finally:
        deadline = time.monotonic() + 10
        while folder.exists() and time.monotonic() < deadline:
            with suppress(OSError):  # a process in it is not yet gone
                folder.rmdir()
            time.sleep(0.02)


def _limited(name: str) -> Path:
    problems = []
    for root, limit in _CGROUPS:
        folder = root / name
        try:
            folder.mkdir()
            (folder / limit).write_text(str(LIMIT_BYTES))
        except OSError as error:
            problems.append(f"{root}: {error.strerror}")
            with suppress(OSError):
                folder.rmdir()
            continue
        return folder
    raise NotHereError(f"no cgroup with a limit of memory can be made ({'; '.join(problems)})")


def enter_memory_limit(name: str) -> None:
    for root, limit in _CGROUPS:
        if (root / name / limit).exists():
            (root / name / "cgroup.procs").write_text(str(os.getpid()))
            return


# -- network ---------------------------------------------------------------------------------------


@contextmanager
def two_networks(name: str) -> Iterator[None]:
    """Two network namespaces, `<name>-0` and `<name>-1`, joined by one cable."""
    sides = [f"{name}-0", f"{name}-1"]
    try:
        for side in sides:
            _ip("netns", "add", side)
        _ip(
            "-n",
            sides[0],
            "link",
            "add",
            "cable",
            "type",
            "veth",
            "peer",
            "name",
            "cable",
            "netns",
            sides[1],
        )
        for number, side in enumerate(sides):
            _ip("-n", side, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "cable")
            _ip("-n", side, "link", "set", "lo", "up")
            _ip("-n", side, "link", "set", "cable", "up")
        yield
    finally:
        for side in sides:
            if (_NETNS / side).exists():
                _ip("netns", "del", side)
        for left in Path(tempfile.gettempdir()).glob(f"{name}-*"):  # pipes and dumps of the ranks
            left.unlink()


def enter_network(name: str, side: int) -> None:
    """Only for a process of one thread: those it starts later follow it."""
    with (_NETNS / f"{name}-{side}").open() as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ["GLOO_SOCKET_IFNAME"] = "cable"


def pull_cable() -> None:
    """Take the link down: packets of the others never arrive, without any error."""
    _ip("link", "set", "cable", "down")


def _ip(*words: str) -> None:
    try:
        done = subprocess.run(
            ["ip", *words], capture_output=True, text=True, timeout=10, check=False
        )
    except OSError as error:
        raise NotHereError(f"there is no `ip`: {error.strerror}") from None
    if done.returncode:
        raise NotHereError(f"ip {' '.join(words)}: {done.stderr.strip()}")
