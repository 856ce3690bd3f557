"""Python stacks of ranks, as Python's fault handler prints them.

A running rank writes its stack when it gets a signal that its watch handles (see
`hooks/fault_stack.py`). A process is only signalled if its box names it, no other process has its
number, and it catches that signal. A rank that crashes or stalls writes its stack unasked.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from torchwhere.blackbox.file_names import STALL_MARK, fault_file
from torchwhere.blackbox.summary import BoxOrSummary
from torchwhere.processes.py_spy import PythonFrame

Stack = tuple[str, ...]  # `file:line in function`, innermost first
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_CRASH = re.compile(r"^Fatal Python error: (.*)$", re.MULTILINE)
# The native extension writes it (`terminate.h`), just before the fault handler writes the stacks.
_UNCAUGHT = re.compile(
    r"^Uncaught C\+\+ exception: (.*?)(?=^Fatal Python error: |\Z)", re.MULTILINE | re.DOTALL
)
IN_NATIVE_THREAD = "in a native thread"  # how a process crashed
_MAX_FRAMES = 64
_LAUNCHERS = ("/torchwhere/", "<frozen runpy>", "/runpy.py")  # run the script, outside of it
_OWN = "/torchwhere/hooks/"  # inside the script


def request_stacks(
    boxes: Mapping[int, BoxOrSummary], *, patience_s: float
) -> dict[int, tuple[str, ...]]:
    """Ask processes for their stacks and wait for the answers."""
    sizes = {rank: _request(box) for rank, box in boxes.items()}
    pending = {rank: size for rank, size in sizes.items() if size is not None}
    stacks: dict[int, Stack] = {}
    deadline = time.monotonic() + patience_s
    while pending and time.monotonic() < deadline:
        time.sleep(0.02)
        for rank, size in list(pending.items()):
            stack = _main_thread(read_text(fault_file(boxes[rank].path), start=size))
            if stack:
                stacks[rank] = stack
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
        reason, stack = f"{reason} {IN_NATIVE_THREAD}", _main_thread(threads)
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
    while frames and any(part in frames[-1].file for part in _LAUNCHERS):
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
    if box.meta.get("host") != socket.gethostname() or not _catches(pid, number):
        return None
    try:
        size = fault_file(box.path).stat().st_size
        os.kill(pid, number)
    except OSError:
        return None
    return size


def _catches(pid: int, number: int) -> bool:
    """Whether a process handles a signal: without a handler, the signal would kill it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return caught is not None and bool(int(caught.group(1), 16) >> (number - 1) & 1)


def _main_thread(text: str) -> Stack:
    """Stack of the main thread, which the fault handler prints last."""
    blocks = re.split(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*$", text, flags=re.MULTILINE)
    return without_own_frames(_frames(blocks[-1])) if len(blocks) > 1 else ()


def _frames(text: str) -> list[PythonFrame]:
    matches = map(_FRAME.match, text.splitlines())
    return [PythonFrame(match[1], int(match[2]), match[3]) for match in matches if match]
