"""Python stacks as the fault handler prints them: asks running processes, and reads the files.

A running rank writes its stack when it gets a signal that its watch handles
(`hooks/stack_files.py`). A worker that it has forked, such as a DataLoader worker, writes its stack
into a file in memory, which is read through /proc. A process is only signalled if it catches that
signal. A rank that crashes or stalls writes its stack unasked.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torchwhere.blackbox.file_names import STACK_IN_MEMORY, STALL_MARK, fault_file, stall_file
from torchwhere.blackbox.summary import BoxOrSummary
from torchwhere.processes import proc_files
from torchwhere.processes.py_spy import PythonFrame

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


class AskedProcess(NamedTuple):
    """A process that was asked for its stack."""

    file: Path  # its fault handler writes there
    size: int  # of the file, before the request
    stall: Path | None = None  # the file that names the thread that trains


def ask_rank(box: BoxOrSummary) -> AskedProcess | None:
    """Signal a rank to write its stack; None if it cannot answer."""
    number, pid = box.meta.get("stack_signal"), box.meta.get("pid")
    if not isinstance(number, int) or not isinstance(pid, int):
        return None
    return _ask(pid, number, fault_file(box.path), stall_file(box.path))


def ask_worker(pid: int) -> AskedProcess | None:
    """Signal a worker to write its stack; None if it has no file for it."""
    with contextlib.suppress(OSError):  # gone, or of another user
        for file in Path(f"/proc/{pid}/fd").iterdir():
            name = os.readlink(file).removesuffix(" (deleted)")
            _, is_ours, number = name.rpartition(STACK_IN_MEMORY)
            if is_ours and number.isdecimal():
                return _ask(pid, int(number), file)
    return None


def _ask(pid: int, number: int, file: Path, stall: Path | None = None) -> AskedProcess | None:
    # without a handler, the signal would kill the process
    if not proc_files.has_signal(proc_files.read_text(pid, "status"), "SigCgt", number):
        return None
    try:
        asked = AskedProcess(file, file.stat().st_size, stall)
        os.kill(pid, number)
    except OSError:
        return None
    return asked


def wait_for_stacks(
    processes: Mapping[int, AskedProcess | None], *, patience_s: float
) -> dict[int, Stack]:
    """The stacks of those processes that answer in time."""
    pending = {key: asked for key, asked in processes.items() if asked is not None}
    stacks: dict[int, Stack] = {}
    texts: dict[int, str] = {}
    deadline = time.monotonic() + patience_s
    while pending and time.monotonic() < deadline:
        time.sleep(0.02)
        for key, asked in list(pending.items()):
            before, texts[key] = texts.get(key), read_text(asked.file, start=asked.size)
            stalled = read_text(asked.stall) if asked.stall is not None else ""
            stack = training_stack(texts[key], stalled)
            if stack:
                stacks[key] = stack
            if stack and texts[key] == before:  # else it still prints: the main thread comes last
                del pending[key]
    return stacks


# -- reading ---------------------------------------------------------------------------------------


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


def saved_stack(box: Path, *, moved_ns: int) -> Stack:
    """The stack that a stalled rank has saved beside its box; empty if it has moved since."""
    return stall_stack(read_text(stall_file(box)), last_ns=moved_ns)[0]


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
