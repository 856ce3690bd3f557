"""The memory cgroup of a process: how many of its processes the kernel has killed because memory
ran out, and its limit.

The Linux OOM killer leaves only a counter behind. A rank records the path of its cgroup's counter
and its value at the start. `processes/look.py` reads the counter again when a rank is gone. Reads
version 2 (`memory.events`) and version 1 (`memory.oom_control`); for a process without a cgroup of
its own, the count of the whole machine (`/proc/vmstat`). Nothing here raises: unreadable values are
None.

Limits: a counter says that a process of the cgroup was killed, not which one. Ranks in one
container share a counter.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_MACHINE = "/proc/vmstat"
_COUNTERS = ("memory.events", "memory.oom_control")
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_NO_LIMIT = 1 << 60  # version 1 has no word for "no limit": it stores the largest number of pages
_KILLS = re.compile(r"^oom_kill (\d{1,18})$", re.MULTILINE)
_MOUNT = re.compile(r"^\S+ (?P<at>\S+) (?P<type>cgroup2?) (?P<options>\S+)", re.MULTILINE)


def oom_counter(pid: int | str = "self", *, proc: Path = Path("/proc")) -> str | None:
    """Path of the file that counts the kills in a process's cgroup."""
    for folder in _folders(_read(proc / str(pid) / "cgroup"), _read(proc / str(pid) / "mounts")):
        for name in _COUNTERS:
            if oom_kills(str(folder / name)) is not None:
                return str(folder / name)
    return _MACHINE if oom_kills(_MACHINE) is not None else None


def oom_kills(counter: str) -> int | None:
    """Number of kills so far. The path may come from a box, so it is checked first."""
    if counter != _MACHINE and Path(counter).name not in _COUNTERS:
        return None
    match = _KILLS.search(_read(Path(counter)))
    return int(match[1]) if match else None


def limit_bytes(counter: str) -> int | None:
    """Memory that the processes of a cgroup may use together: the smallest limit of the cgroup and
    its parents. None without a limit."""
    limits = []
    folder = Path(counter).parent
    while folder != folder.parent and (folder / "cgroup.procs").exists():
        for name in _LIMITS:
            text = _read(folder / name).strip()
            if text.isdigit() and int(text) < _NO_LIMIT:
                limits.append(int(text))
        folder = folder.parent
    return min(limits, default=None)


def _folders(cgroup: str, mounts: str) -> list[Path]:
    """Candidate folders of a process's memory cgroup, from /proc/<pid>/cgroup and the mounts."""
    folders = []
    mounted = [match.groupdict() for match in _MOUNT.finditer(mounts)]
    for line in cgroup.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        is_unified = number == "0" and not controllers
        if not is_unified and "memory" not in controllers.split(","):
            continue
        for mount in mounted:
            is_v2 = mount["type"] == "cgroup2"
            has_memory = "memory" in mount["options"].split(",")
            if is_v2 if is_unified else has_memory:
                # A container may see its cgroup as the root although /proc shows the host's path,
                # or the other way round.
                folders += [Path(mount["at"] + path), Path(mount["at"])]
    return folders


def _read(path: Path) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return os.read(fd, 1 << 16).decode("utf-8", "replace")
        finally:
            os.close(fd)
    except OSError:
        return ""
