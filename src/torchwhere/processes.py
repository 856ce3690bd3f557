"""Looks at the processes of a run from outside: are they there, do they run, where are their Python stacks.

Reads /proc and asks a rank for its stack by a signal that its watch has made harmless (see `sense/faults.py`). A process is
only ever signalled if its box names it, it has not been replaced by another one of the same number, and it catches that signal.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torchwhere.blackbox.label import Labelled
from torchwhere.blackbox.writer import fault_file
from torchwhere.diagnose.doctor.sighting import Sighting

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_MOST_FRAMES = 64
_UNSEEN = Sighting()
_LAUNCHERS = ("/torchwhere/", "<frozen runpy>", "/runpy.py")  # what runs a script, outside it


def look(boxes: Mapping[int, Labelled], *, stacks: Iterable[int] = (), patience_s: float = 1.0) -> dict[int, Sighting]:
    """See every process of this host, and ask those of the ranks in `stacks` for their Python stack."""
    wanted = set(stacks)
    asked = {rank: size for rank, box in boxes.items() if rank in wanted and (size := _ask(box)) is not None}
    deadline = time.monotonic() + patience_s
    found: dict[int, tuple[str, ...]] = {}
    while len(found) < len(asked) and time.monotonic() < deadline:
        time.sleep(0.02)
        for rank, size in asked.items():
            if rank not in found and (stack := _answer(boxes[rank], size)):
                found[rank] = stack
    host = socket.gethostname() if Path("/proc/self/stat").exists() else None
    here = {rank for rank, box in boxes.items() if host is not None and box.meta.get("host") == host}
    return {rank: _sighting(box, found.get(rank, ())) if rank in here else _UNSEEN for rank, box in boxes.items()}


def _sighting(box: Labelled, stack: tuple[str, ...]) -> Sighting:
    state = _state(box)
    ended = _last_words(box) if state in (None, "Z") else None
    alive = state not in (None, "Z", "X")
    return Sighting(alive=alive, state=state, ended=ended, stack=stack, alive_ns=time.time_ns() if alive else None)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _state(box: Labelled) -> str | None:
    """R, S, D, T ... of the process that wrote a box; None if it is gone, or its number is another's now."""
    pid = box.meta.get("pid")
    if not isinstance(pid, int):
        return None
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    started = box.meta.get("pid_started")
    return stat[0] if started is None or int(stat[19]) == started else None


def _last_words(box: Labelled) -> str | None:
    """How a process says it crashed, if it could: the first line that Python's fault handler wrote for it."""
    text = _read(fault_file(box.path)).partition("Current thread")[0].strip()
    for line in text.splitlines():
        if line.startswith("Fatal Python error"):
            return line.partition(": ")[2]
    return None


def _read(path: Path, *, start: int = 0) -> str:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(1 << 20).decode("utf-8", "replace")
    except OSError:
        return ""


# -- stacks ----------------------------------------------------------------------------------------------------------------


def _ask(box: Labelled) -> int | None:
    """Have a process write its stack; the size of its file before it does. None where it cannot be asked."""
    number, pid = box.meta.get("stack_signal"), box.meta.get("pid")
    if not isinstance(number, int) or not isinstance(pid, int) or box.meta.get("host") != socket.gethostname():
        return None
    if _state(box) in (None, "Z", "X", "T", "t") or not _catches(pid, number):
        return None
    try:
        size = fault_file(box.path).stat().st_size
        os.kill(pid, number)
    except OSError:
        return None
    return size


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal: sent to one that has none, it would end it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return caught is not None and bool(int(caught.group(1), 16) >> (number - 1) & 1)


def _answer(box: Labelled, size: int) -> tuple[str, ...]:
    """The main thread's frames, once they are written."""
    return main_thread(_read(fault_file(box.path), start=size))


def main_thread(text: str) -> tuple[str, ...]:
    """`file:line in function`, innermost first, of the thread that Python's fault handler prints last: the main one."""
    blocks = re.split(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*$", text, flags=re.MULTILINE)
    lines = blocks[-1].splitlines() if len(blocks) > 1 else []
    frames = [match.groupdict() for line in lines if (match := _FRAME.match(line))]
    while frames and any(part in frames[-1]["file"] for part in _LAUNCHERS):
        frames.pop()
    shown = [frame for frame in frames[:_MOST_FRAMES] if "/torchwhere/sense/" not in frame["file"]]
    return tuple(f"{frame['file']}:{frame['line']} in {frame['function']}" for frame in shown)


def merged(seen: Mapping[int, Sighting], kept: Mapping[int, dict[str, Any]]) -> dict[int, Sighting]:
    """What is seen now, and where nobody can look or all is over, what a monitor saw and kept."""
    found = dict(seen)
    for rank, value in kept.items():
        now, then = found.get(rank, Sighting()), Sighting.from_dict(value)
        if not now.alive:
            alive = then.alive if now.alive is None else False
            ended = now.ended or then.ended
            found[rank] = Sighting(alive=alive, state=then.state, ended=ended, stack=then.stack, alive_ns=then.alive_ns)
    return found
