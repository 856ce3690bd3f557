"""Looks at the processes of a run from outside: do they exist, do they run, what are their Python
stacks.

Reads /proc and requests stacks. If a process is gone, its cgroup shows whether the kernel killed it
because memory ran out: the kernel's count of such kills has grown since the process started, or
since the last look.
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

from torchwhere.blackbox.file_names import STALL_MARK, fault_file, stall_file
from torchwhere.blackbox.summary import BoxOrSummary
from torchwhere.processes import py_spy
from torchwhere.processes.cgroup import limit_bytes, oom_kills
from torchwhere.processes.launcher import pid_namespace
from torchwhere.processes.py_spy import MainThread, PythonFrame
from torchwhere.processes.status import ProcessStatus

_UNSEEN = ProcessStatus()
_EXITED = ("Z", "X")  # zombie, dead


def look(
    boxes: Mapping[int, BoxOrSummary], *, stacks: Iterable[int] = (), patience_s: float = 1.0
) -> dict[int, ProcessStatus]:
    """Status of every process on this host, with the Python stacks of the ranks in `stacks`."""
    wanted = set(stacks)
    can_answer = {
        rank: box
        for rank, box in boxes.items()
        if rank in wanted and _state(box) not in (None, *_EXITED, "T", "t")
    }
    rank_stacks = request_stacks(can_answer, patience_s=patience_s)
    # one time for the whole look: a process that is gone was gone while the others existed
    now_ns = time.time_ns()
    host = socket.gethostname() if Path("/proc/self/stat").exists() else None
    here = {rank for rank, box in boxes.items() if _is_visible(box, host)}
    spied = _spied({rank: boxes[rank] for rank in sorted(wanted & here)})
    for rank, main in spied.items():
        rank_stacks.setdefault(rank, without_own_frames(main.frames))
    observer = _Observer(now_ns)
    statuses = {
        rank: observer.status(box, rank_stacks.get(rank, ())) if rank in here else observer.far(box)
        for rank, box in boxes.items()
    }
    for rank, main in spied.items():
        statuses[rank] = replace(statuses[rank], holds_gil=main.holds_gil)
    return statuses


def merged(
    seen: Mapping[int, ProcessStatus], saved: Mapping[int, dict[str, Any]]
) -> dict[int, ProcessStatus]:
    """The current statuses. Where a process is gone or out of reach, adds what a monitor saved."""
    statuses = dict(seen)
    for rank, value in saved.items():
        now, earlier = statuses.get(rank, ProcessStatus()), ProcessStatus.from_dict(value)
        if not now.alive:
            statuses[rank] = now.after(earlier)
    return statuses


def saved_stack(box: Path, *, moved_ns: int) -> Stack:
    """The stack that a stalled rank has saved beside its box; empty if it has moved since."""
    return stall_stack(read_text(stall_file(box)), last_ns=moved_ns)[0]


def is_running(pid: int) -> bool:
    stat = _stat(pid)
    return bool(stat) and stat[0] not in _EXITED


def is_descendant(box: BoxOrSummary, ancestor: int) -> bool:
    """Whether the process of a box runs on this host, and `ancestor` started it directly or
    indirectly."""
    if box.meta.get("host") != socket.gethostname():
        return False
    stat = _own_stat(box)
    while stat:
        parent = int(stat[1])
        if parent == ancestor:
            return True
        stat = _stat(parent)
    return False


class _Observer:
    """One look. Reads each OOM counter and lists each folder once: ranks share them."""

    def __init__(self, now_ns: int) -> None:
        self._now_ns = now_ns
        self._oom_kills: dict[str, int | None] = {}  # by counter file
        self._side_files: dict[str, frozenset[str]] = {}  # names by folder

    def status(self, box: BoxOrSummary, stack: Stack) -> ProcessStatus:
        """Status of a process on this host."""
        stat, now_ns = _own_stat(box), self._now_ns
        state = stat[0] if stat else None
        alive = state not in (None, *_EXITED)
        kills = self._kills(box)
        ended: str | None = None
        crashed_at: Stack = ()
        stalled_at: Stack = ()
        stalled_ns: int | None = None
        if state in (None, "Z"):
            ended, crashed_at = crash_stack(self._side_file(box, fault_file))
            if ended is None:
                stalled_at, stalled_ns = self._stall(box)
        is_killed = not alive or _has_sigkill(box.meta.get("pid"))
        return ProcessStatus(
            alive=alive,
            state=state,
            ended=ended,
            stack=stack or crashed_at or stalled_at,
            alive_ns=now_ns if alive else None,
            gone_ns=None if alive else now_ns,
            stack_ns=now_ns if stack else stalled_ns,
            oom_kills=kills,
            out_of_memory=_out_of_memory(box, kills) if is_killed else None,
            exit_code=_zombie_exit_code(stat) if state == "Z" else None,
        )

    def far(self, box: BoxOrSummary) -> ProcessStatus:
        """Status of a process on another host: only its fault and stall files are known."""
        ended, crashed_at = crash_stack(self._side_file(box, fault_file))
        if ended is not None:
            return ProcessStatus(ended=ended, stack=crashed_at)
        stack, stack_ns = self._stall(box)
        return ProcessStatus(stack=stack, stack_ns=stack_ns) if stack else _UNSEEN

    def _stall(self, box: BoxOrSummary) -> tuple[Stack, int | None]:
        return stall_stack(self._side_file(box, stall_file), last_ns=box.last_ns)

    def _kills(self, box: BoxOrSummary) -> int | None:
        counter = box.meta.get("oom_counter")
        if not isinstance(counter, str):
            return None
        if counter not in self._oom_kills:
            self._oom_kills[counter] = oom_kills(counter)
        return self._oom_kills[counter]

    def _side_file(self, box: BoxOrSummary, name_of: Callable[[Path], Path]) -> str:
        """Text of a file that a rank may have written beside its box. Most ranks have none: one
        listing of the folder replaces two failing reads for each rank."""
        folder, _ = os.path.split(box.path)
        if folder not in self._side_files:
            with contextlib.suppress(OSError):
                self._side_files[folder] = frozenset(
                    name for name in os.listdir(folder or ".") if not name.endswith(".box")
                )
        names = self._side_files.get(folder)
        if not names:
            return ""
        path = name_of(box.path)
        return read_text(path) if path.name in names else ""


def _out_of_memory(box: BoxOrSummary, kills: int | None) -> str | None:
    """Sentence for a killed process, if its cgroup has seen an OOM kill since it started."""
    counter, before = box.meta.get("oom_counter"), box.meta.get("oom_kills")
    if not isinstance(counter, str) or not isinstance(before, int):
        return None
    if kills is None or kills <= before:
        return None
    limit = limit_bytes(counter)
    limited = f"cgroup limit {limit / 1e6:.0f} MB" if limit is not None else "no cgroup limit"
    return (
        f"killed by the system: out of memory ({limited}, its oom_kill count went from {before} to"
        f" {kills})"
    )


def _has_sigkill(pid: Any) -> bool:
    """Whether an existing process was already killed: the kernel counts a kill first, and a large
    process takes long to exit. SIGKILL is pending, or its memory is gone."""
    status = read_text(Path(f"/proc/{pid}/status"))
    pending = re.findall(r"^(?:SigPnd|ShdPnd):\s*([0-9a-f]+)", status, re.MULTILINE)
    is_pending = any(int(bits, 16) >> (signal.SIGKILL - 1) & 1 for bits in pending)
    return is_pending or "VmSize:" not in status


def _is_visible(box: BoxOrSummary, host: str | None) -> bool:
    """Whether the writer of a box runs on this host and in this PID namespace, not in another
    container."""
    if host is None or box.meta.get("host") != host:
        return False
    namespace = box.meta.get("pid_namespace")
    return namespace is None or namespace == pid_namespace()


def _state(box: BoxOrSummary) -> str | None:
    """State (R, S, D, T, ...) of the process that wrote a box; None if it is gone."""
    stat = _own_stat(box)
    return stat[0] if stat else None


def _own_stat(box: BoxOrSummary) -> list[str]:
    """`_stat` of the process that wrote a box; empty if another process has its number now."""
    pid, started = box.meta.get("pid"), box.meta.get("pid_started")
    stat = _stat(pid) if isinstance(pid, int) else []
    is_writer = bool(stat) and (started is None or int(stat[19]) == started)
    return stat if is_writer else []


def _zombie_exit_code(stat: list[str]) -> int | None:
    """Exit code of a process that its parent has not collected yet. The kernel shows 0 to a user
    who may not read it, so 0 means unknown."""
    return os.waitstatus_to_exitcode(int(stat[49])) or None


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the state on; empty for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _spied(boxes: Mapping[int, BoxOrSummary]) -> dict[int, MainThread]:
    """Main threads that py-spy can read, even of a stopped process, and whether each holds the
    GIL."""
    ranks = {
        int(box.meta["pid"]): rank
        for rank, box in boxes.items()
        if _state(box) not in (None, *_EXITED)
    }
    return {ranks[pid]: main for pid, main in py_spy.main_threads(ranks).items()} if ranks else {}


# -- stacks ----------------------------------------------------------------------------------------
# A running rank writes its stack, as Python's fault handler prints it, when it gets a signal that
# its watch handles (`hooks/stack_files.py`). A process is only signalled if its box names it, no
# other process has its number, and it catches that signal. A rank that crashes or stalls writes its
# stack unasked.


Stack = tuple[str, ...]  # `file:line in function`, innermost first
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x0*([0-9a-f]+).*$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_CRASH = re.compile(r"^Fatal Python error: (.*)$", re.MULTILINE)
# The native extension writes it (`terminate.h`), just before the fault handler writes the stacks.
_UNCAUGHT = re.compile(
    r"^Uncaught C\+\+ exception: (.*?)(?=^Fatal Python error: |\Z)", re.MULTILINE | re.DOTALL
)
IN_NATIVE_THREAD = "in a native thread"  # how a process crashed
_MAX_FRAMES = 64
# These run the script, outside of it; the last one is the console script in bin/.
_LAUNCHERS = re.compile(r"/torchwhere/|<frozen runpy>|/runpy\.py|/torchwhere$")
_OWN = "/torchwhere/hooks/"  # inside the script


def request_stacks(
    boxes: Mapping[int, BoxOrSummary], *, patience_s: float
) -> dict[int, tuple[str, ...]]:
    """Ask processes for their stacks and wait for the answers."""
    sizes = {rank: _request(box) for rank, box in boxes.items()}
    pending = {rank: size for rank, size in sizes.items() if size is not None}
    stacks: dict[int, Stack] = {}
    texts: dict[int, str] = {}
    deadline = time.monotonic() + patience_s
    while pending and time.monotonic() < deadline:
        time.sleep(0.02)
        for rank, size in list(pending.items()):
            box, before = boxes[rank].path, texts.get(rank)
            texts[rank] = read_text(fault_file(box), start=size)
            stack = training_stack(texts[rank], read_text(stall_file(box)))
            if stack:
                stacks[rank] = stack
            if stack and texts[rank] == before:  # else it still prints: the main thread comes last
                del pending[rank]
    return stacks


def crash_stack(text: str) -> tuple[str | None, Stack]:
    """How a process crashed, from its fault file, and the stack of the thread that crashed; of
    the main thread, if a thread without Python crashed."""
    crash, uncaught = _CRASH.search(text), _UNCAUGHT.search(text)
    if crash is None and uncaught is None:
        return None, ()
    reason = crash[1] if crash is not None else "Aborted"
    threads = text[crash.end() :] if crash is not None else ""
    current = re.search(r"^Current thread 0x[0-9a-f]+.*\n((?:  .*\n)*)", threads, re.MULTILINE)
    stack = without_own_frames(_frames(current[1])) if current is not None else ()
    if not stack:
        reason, stack = f"{reason} {IN_NATIVE_THREAD}", main_thread_stack(threads)
    return f"{reason}: {uncaught[1].strip()}" if uncaught is not None else reason, stack


def stall_stack(text: str, *, last_ns: int) -> tuple[Stack, int | None]:
    """The stack in a stall file and its time. Empty if the rank has moved since, or if its last
    event is unknown."""
    first, _, frames = text.partition("\n")
    t_ns = first.removeprefix(STALL_MARK)
    is_current = t_ns.isdecimal() and int(t_ns) > last_ns > 0
    return (without_own_frames(_frames(frames)), int(t_ns)) if is_current else ((), None)


def without_own_frames(frames: list[PythonFrame]) -> Stack:
    """A stack without the frames of the launcher and of torchwhere."""
    while frames and _LAUNCHERS.search(frames[-1].file):
        frames.pop()
    shown = [frame for frame in frames[:_MAX_FRAMES] if _OWN not in frame.file]
    return tuple(f"{frame.file}:{frame.line} in {frame.function}" for frame in shown)


def read_text(path: Path, *, start: int = 0) -> str:
    """At most 1 MB of a file; empty if it is not readable."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(1 << 20).decode("utf-8", "replace")
    except OSError:
        return ""


def _request(box: BoxOrSummary) -> int | None:
    """Signal a process to write its stack. Returns the size of its fault file before; None if it
    cannot answer."""
    number, pid = box.meta.get("stack_signal"), box.meta.get("pid")
    if not isinstance(number, int) or not isinstance(pid, int):
        return None
    if box.meta.get("host") != socket.gethostname() or not catches(pid, number):
        return None
    try:
        size = fault_file(box.path).stat().st_size
        os.kill(pid, number)
    except OSError:
        return None
    return size


def catches(pid: int, number: int) -> bool:
    """Whether a process handles a signal: without a handler, the signal would kill it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return caught is not None and bool(int(caught.group(1), 16) >> (number - 1) & 1)


def main_thread_stack(text: str) -> Stack:
    """Stack of the main thread, which the fault handler prints last."""
    blocks = _THREAD.split(text)
    return without_own_frames(_frames(blocks[-1])) if len(blocks) > 1 else ()


def training_stack(text: str, stalled: str) -> Stack:
    """Stack of the thread that trains, which the stall file of the process names. Stack of the main
    thread if there is no such file, or if that thread has ended. Empty until the fault handler has
    printed the main thread: it prints that one last."""
    main, named = main_thread_stack(text), _THREAD.search(stalled)
    if not main or named is None:
        return main
    _, *parts = _THREAD.split(text)
    stacks = dict(zip(parts[::2], parts[1::2], strict=True))
    return without_own_frames(_frames(stacks.get(named[1], ""))) or main


def _frames(text: str) -> list[PythonFrame]:
    matches = map(_FRAME.match, text.splitlines())
    return [PythonFrame(match[1], int(match[2]), match[3]) for match in matches if match]
