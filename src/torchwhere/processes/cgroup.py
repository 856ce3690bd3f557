"""The memory cgroup of a process: how many of it the kernel has killed for want of memory, and what
its limit is.

Linux kills without a word; all it leaves is a counter. A rank writes down where its cgroup is and
how far the counter was, and whoever finds the rank gone looks again. Reads version 2
(`memory.events`) and version 1 (`memory.oom_control`); for a process that is in no cgroup of its
own, the whole machine's count (`/proc/vmstat`). Nothing here raises: what cannot be read is None.

Limits: a counter says that a process of the cgroup was killed, not which. Ranks of one container
share one.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_MACHINE = "/proc/vmstat"
_COUNTERS = ("memory.events", "memory.oom_control")
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_NO_LIMIT = 1 << 60  # version 1 says "none" as the largest number of pages
_KILLS = re.compile(r"^oom_kill (\d{1,18})$", re.MULTILINE)
_MOUNT = re.compile(r"^\S+ (?P<at>\S+) (?P<type>cgroup2?) (?P<options>\S+)", re.MULTILINE)


def oom_counter(pid: int | str = "self", *, proc: Path = Path("/proc")) -> str | None:
    """The file that counts the kills in a process's cgroup."""
    for folder in _folders(_read(proc / str(pid) / "cgroup"), _read(proc / str(pid) / "mounts")):
        for name in _COUNTERS:
            if oom_kills(str(folder / name)) is not None:
                return str(folder / name)
    return _MACHINE if oom_kills(_MACHINE) is not None else None


def oom_kills(counter: str) -> int | None:
    """How many processes were killed so far. The name of the file may come from a box, and is not
    trusted."""
    if counter != _MACHINE and Path(counter).name not in _COUNTERS:
        return None
    found = _KILLS.search(_read(Path(counter)))
    return int(found[1]) if found else None


def limit_bytes(counter: str) -> int | None:
    """What the processes of a cgroup may use together: the least that it or one above it allows;
    None where nobody says."""
    found = []
    folder = Path(counter).parent
    while folder != folder.parent and (folder / "cgroup.procs").exists():
        for name in _LIMITS:
            text = _read(folder / name).strip()
            if text.isdigit() and int(text) < _NO_LIMIT:
                found.append(int(text))
        folder = folder.parent
    return min(found, default=None)


def _folders(cgroup: str, mounts: str) -> list[Path]:
    """Where a process's memory cgroup may lie, by /proc/<pid>/cgroup and what is mounted."""
    found = []
    mounted = [match.groupdict() for match in _MOUNT.finditer(mounts)]
    for line in cgroup.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        is_unified = number == "0" and not controllers
        for mount in mounted:
            is_its_own = (
                mount["type"] == "cgroup2"
                if is_unified
                else "memory" in mount["options"].split(",")
            )
            if is_its_own and (is_unified or "memory" in controllers.split(",")):
                # A container may see itself as the root and name its place on the host, or the
                # other way round.
                found += [Path(mount["at"] + path), Path(mount["at"])]
    return found


def _read(path: Path) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return os.read(fd, 1 << 16).decode("utf-8", "replace")
        finally:
            os.close(fd)
    except OSError:
        return ""
