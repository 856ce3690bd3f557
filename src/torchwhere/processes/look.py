"""Looks at the processes of a run from outside: are they there, do they run, where are their Python
stacks.

Reads /proc and asks a rank for its stack by a signal that its watch has made harmless (see
`hooks/fault_stack.py`). A process is only ever signalled if its box names it, it has not been
replaced by another one of the same number, and it catches that signal. Of one that cannot answer
`py-spy` reads the stack, where it is installed. That a process was killed for want of memory is
told by its cgroup: the kernel's count of such kills went up since the process began, or since it
was last seen.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchwhere.blackbox.summary import BoxOrSummary
from torchwhere.blackbox.writer import STALL_MARK, fault_file, stall_file
from torchwhere.processes import py_spy
from torchwhere.processes.cgroup import limit_bytes, oom_kills
from torchwhere.processes.namespace import pid_namespace
from torchwhere.processes.py_spy import MainThread, PySpyFrame
from torchwhere.processes.status import ProcessStatus

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_MOST_FRAMES = 64
_UNSEEN = ProcessStatus()
_LAUNCHERS = ("/torchwhere/", "<frozen runpy>", "/runpy.py")  # what runs a script, outside it


def look(
    boxes: Mapping[int, BoxOrSummary], *, stacks: Iterable[int] = (), patience_s: float = 1.0
) -> dict[int, ProcessStatus]:
    """See every process of this host, and ask those of the ranks in `stacks` for their Python
    stack."""
    wanted = set(stacks)
    asked = {
        rank: size
        for rank, box in boxes.items()
        if rank in wanted and (size := _ask(box)) is not None
    }
    deadline = time.monotonic() + patience_s
    found: dict[int, tuple[str, ...]] = {}
    while len(found) < len(asked) and time.monotonic() < deadline:
        time.sleep(0.02)
        for rank, size in asked.items():
            if rank not in found and (stack := _answer(boxes[rank], size)):
                found[rank] = stack
    # of the whole look: who is found gone was gone while the others were there
    now_ns = time.time_ns()
    host = socket.gethostname() if Path("/proc/self/stat").exists() else None
    here = {
        rank
        for rank, box in boxes.items()
        if host is not None and box.meta.get("host") == host and _is_near(box)
    }
    spied = _spied({rank: boxes[rank] for rank in sorted(wanted & here)})
    found = {rank: _shown(main.frames) for rank, main in spied.items()} | found
    counts: dict[str, int | None] = {}  # ranks of one cgroup share a counter
    notes = _Notes()
    seen = {
        rank: (
            _status(box, found.get(rank, ()), counts, notes, now_ns)
            if rank in here
            else _unseen(box, notes)
        )
        for rank, box in boxes.items()
    }
    return seen | {
        rank: replace(seen[rank], holds_gil=main.holds_gil) for rank, main in spied.items()
    }


class _Notes:
    """What ranks have written beside their boxes. Most have written nothing: their folder is listed
    once, instead of asking for two files of each."""

    def __init__(self) -> None:
        self._names: dict[str, frozenset[str]] = {}  # by folder

    def of(self, box: BoxOrSummary, name_of: Callable[[Path], Path]) -> str:
        folder, _ = os.path.split(box.path)
        if folder not in self._names:
            with contextlib.suppress(OSError):
                self._names[folder] = frozenset(
                    name for name in os.listdir(folder or ".") if not name.endswith(".box")
                )
        path = name_of(box.path) if self._names.get(folder) else None
        return _read(path) if path is not None and path.name in self._names[folder] else ""


def _status(
    box: BoxOrSummary,
    stack: tuple[str, ...],
    counts: dict[str, int | None],
    notes: _Notes,
    now_ns: int,
) -> ProcessStatus:
    state, exit_code = _stat(box)
    alive = state not in (None, "Z", "X")
    counter = box.meta.get("oom_counter")
    if isinstance(counter, str) and counter not in counts:
        counts[counter] = oom_kills(counter)
    kills = counts.get(counter) if isinstance(counter, str) else None
    ended, crashed_at = _last_words(box, notes) if state in (None, "Z") else (None, ())
    rested_at, rested_ns = (
        _rest(box, notes) if state in (None, "Z") and ended is None else ((), None)
    )
    return ProcessStatus(
        alive=alive,
        state=state,
        ended=ended,
        stack=stack or crashed_at or rested_at,
        alive_ns=now_ns if alive else None,
        gone_ns=None if alive else now_ns,
        stack_ns=now_ns if stack else rested_ns,
        oom_kills=kills,
        out_of_memory=(
            None if alive and not _is_dying(box.meta.get("pid")) else _out_of_memory(box, kills)
        ),
        exit_code=exit_code,
    )


def _out_of_memory(box: BoxOrSummary, kills: int | None) -> str | None:
    """That a process which is gone was killed for want of memory: since it began, a process of its
    cgroup was."""
    counter, before = box.meta.get("oom_counter"), box.meta.get("oom_kills")
    if (
        kills is None
        or not isinstance(counter, str)
        or not isinstance(before, int)
        or kills <= before
    ):
        return None
    most = limit_bytes(counter)
    limit = (
        f"cgroup limit {most / 1e6:.0f} MB" if most is not None else "no limit but the machine's"
    )
    return (
        f"killed by the system: out of memory ({limit}, its oom_kill count went from {before} to"
        f" {kills})"
    )


def _is_dying(pid: Any) -> bool:
    """Whether a process that is there was killed already: the system counts one that it kills
    first, and a large one takes long to go. It has SIGKILL before it, or its memory is gone."""
    status = _read(Path(f"/proc/{pid}/status"))
    pending = (
        int(bits, 16)
        for bits in re.findall(r"^(?:SigPnd|ShdPnd):\s*([0-9a-f]+)", status, re.MULTILINE)
    )
    return any(bits >> (signal.SIGKILL - 1) & 1 for bits in pending) or "VmSize:" not in status


def _is_near(box: BoxOrSummary) -> bool:
    """Whether the processes that this one sees are those that the writer of a box saw: not so from
    another container."""
    namespace = box.meta.get("pid_namespace")
    return namespace is None or namespace == pid_namespace()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _state(box: BoxOrSummary) -> str | None:
    """R, S, D, T ... of the process that wrote a box; None if it is gone, or its number is
    another's now."""
    return _stat(box)[0]


def _stat(box: BoxOrSummary) -> tuple[str | None, int | None]:
    """The same, and the exit code of a process that has ended and that its parent has not yet asked
    for it."""
    pid = box.meta.get("pid")
    if not isinstance(pid, int):
        return None, None
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None, None
    started = box.meta.get("pid_started")
    if started is not None and int(stat[19]) != started:
        return None, None
    # The kernel says 0 to a user who may not know the exit code.
    return stat[0], (os.waitstatus_to_exitcode(int(stat[49])) or None) if stat[0] == "Z" else None


def _last_words(box: BoxOrSummary, notes: _Notes) -> tuple[str | None, tuple[str, ...]]:
    """How a process says it crashed, if it could: what Python's fault handler wrote for it, and the
    stack of that thread."""
    text = notes.of(box, fault_file)
    crash = re.search(r"^Fatal Python error: (.*)$", text, re.MULTILINE)
    if crash is None:
        return None, ()
    current = re.search(
        r"^Current thread 0x[0-9a-f]+.*\n((?:  .*\n)*)", text[crash.end() :], re.MULTILINE
    )
    return crash[1], _shown(_frames(current[1])) if current is not None else ()


def _rest(box: BoxOrSummary, notes: _Notes) -> tuple[tuple[str, ...], int | None]:
    """Where a process stood when it last came to rest, by its own words, and when that was; nothing
    if it has moved since."""
    first, _, text = notes.of(box, stall_file).partition("\n")
    moment = first.removeprefix(STALL_MARK)
    # of a box that is gone it is not known when it last moved
    is_last = moment.isdecimal() and int(moment) > box.last_ns > 0
    return (_shown(_frames(text)), int(moment)) if is_last else ((), None)


def _unseen(box: BoxOrSummary, notes: _Notes) -> ProcessStatus:
    """A process of another host: all there is are its own words."""
    rested_at, rested_ns = _rest(box, notes)
    return ProcessStatus(stack=rested_at, stack_ns=rested_ns) if rested_at else _UNSEEN


def _read(path: Path, *, start: int = 0) -> str:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(1 << 20).decode("utf-8", "replace")
    except OSError:
        return ""


# -- stacks ----------------------------------------------------------------------------------------


def _ask(box: BoxOrSummary) -> int | None:
    """Have a process write its stack; the size of its file before it does. None where it cannot be
    asked."""
    number, pid = box.meta.get("stack_signal"), box.meta.get("pid")
    if (
        not isinstance(number, int)
        or not isinstance(pid, int)
        or box.meta.get("host") != socket.gethostname()
    ):
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


def _answer(box: BoxOrSummary, size: int) -> tuple[str, ...]:
    """The main thread's frames, once they are written."""
    return main_thread(_read(fault_file(box.path), start=size))


def main_thread(text: str) -> tuple[str, ...]:
    """`file:line in function`, innermost first, of the thread that Python's fault handler prints
    last: the main one."""
    blocks = re.split(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*$", text, flags=re.MULTILINE)
    return _shown(_frames(blocks[-1])) if len(blocks) > 1 else ()


def _frames(text: str) -> list[PySpyFrame]:
    return [
        PySpyFrame(match[1], int(match[2]), match[3])
        for line in text.splitlines()
        if (match := _FRAME.match(line))
    ]


def _shown(frames: list[PySpyFrame]) -> tuple[str, ...]:
    """A stack without what runs the script, and without torchwhere's own."""
    while frames and any(part in frames[-1].file for part in _LAUNCHERS):
        frames.pop()
    shown = [frame for frame in frames[:_MOST_FRAMES] if "/torchwhere/hooks/" not in frame.file]
    return tuple(f"{frame.file}:{frame.line} in {frame.function}" for frame in shown)


def _spied(boxes: Mapping[int, BoxOrSummary]) -> dict[int, MainThread]:
    """What py-spy sees of ranks: their stacks, stopped and deaf as they may be, and who holds the
    GIL."""
    ranks = {
        int(box.meta["pid"]): rank
        for rank, box in boxes.items()
        if _state(box) not in (None, "Z", "X")
    }
    return {ranks[pid]: main for pid, main in py_spy.main_threads(ranks).items()} if ranks else {}


def merged(
    seen: Mapping[int, ProcessStatus], kept: Mapping[int, dict[str, Any]]
) -> dict[int, ProcessStatus]:
    """What is seen now, and where nobody can look or all is over, what a monitor saw and kept."""
    found = dict(seen)
    for rank, value in kept.items():
        now, then = found.get(rank, ProcessStatus()), ProcessStatus.from_dict(value)
        if not now.alive:
            found[rank] = now.after(then)
    return found
