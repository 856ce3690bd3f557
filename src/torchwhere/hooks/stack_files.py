"""Writes the Python stacks of a rank into files: when it stalls, crashes in C, or gets a signal."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from io import FileIO
from itertools import islice
from pathlib import Path

from torchwhere.blackbox.file_names import STACK_IN_MEMORY, STALL_MARK
from torchwhere.hooks.python_stack import outwards
from torchwhere.native.load import NativeExtension

_MOST_FRAMES = 64


class StallStackFile:
    """The stall file of one process: the stack of the thread that trains, in a stalled rank.

    The doctor has it after the process has ended. Each stall overwrites the file, and the end of
    the watch deletes it. After a line with the time it has the format of Python's fault handler.
    The fault handler itself cannot write a single thread, so Python code writes the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_over = False

    def write(self, thread: int) -> None:
        """Write the stack of the thread with this ident. Any thread may call this."""
        lines = [f"{STALL_MARK}{time.time_ns()}", f"Thread 0x{thread:016x}:"]
        frames = outwards(sys._current_frames().get(thread))
        lines += [
            f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}'
            for frame in islice(frames, _MOST_FRAMES)
        ]
        part = self._path.with_name(f".{self._path.name}.part")
        part.write_text("\n".join(lines) + "\n", errors="replace")
        os.replace(part, self._path)
        if self._is_over:  # the watch ended meanwhile
            self.remove()

    def remove(self) -> None:
        self._is_over = True
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def rename(self, path: Path) -> None:
        """Use another file: the rank is known now. Deletes the file under the assumed rank."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        self._path = path


# above the first real-time signal: glibc uses the lowest ones, and some libraries use the next
_FIRST_TRIED = 8


class Faults:
    """The fault file of one process: all its stacks when it crashes in C, and when another process
    asks with a signal.

    Python's fault handler writes them in C, without the GIL. So it works while the process holds
    the GIL, waits or loops. The watch registers the fault handler for an unused signal, whose
    number is in the box. It leaves a fault handler alone that the program enables, before or during
    the watch. The end of the watch removes everything and deletes an empty file.

    A C++ exception that a native thread does not catch also ends the process, for example a timeout
    in the watchdog of NCCL. The native extension then writes its message first.
    """

    def __init__(self, path: Path, *, native: NativeExtension | None = None) -> None:
        self._path = path
        self._native = native
        self._file: FileIO | None = None
        self._is_enabler = False
        self._references = 0  # to the file, without those of the fault handler
        self.signal: int | None = None

    def install(self) -> None:
        self._file = FileIO(self._path, "wb")
        self._references = sys.getrefcount(self._file)
        if self._native is not None:
            self._native.terminate_begin(self._file.fileno())
        if not faulthandler.is_enabled():
            faulthandler.enable(self._file, all_threads=True)
            self._is_enabler = True
        for number in range(signal.SIGRTMIN + _FIRST_TRIED, signal.SIGRTMAX):
            if signal.getsignal(number) == signal.SIG_DFL:
                faulthandler.register(number, self._file, all_threads=True, chain=False)
                self.signal = number
                return

    def remove(self) -> None:
        if self._file is not None:
            self.abandon()
            with contextlib.suppress(OSError):
                if self._path.stat().st_size == 0:
                    self._path.unlink()

    def abandon(self) -> None:
        """Release handlers and file without deleting it: a forked child inherits them, but the file
        belongs to its parent."""
        if self.signal is not None:
            faulthandler.unregister(self.signal)
            self.signal = None
        if self._is_enabler and self._is_in_use():
            faulthandler.disable()
        self._is_enabler = False
        if self._file is not None:
            if self._native is not None:
                self._native.terminate_end()
            self._file.close()
            self._file = None

    def abandon_in_fork(self) -> None:
        """Release handlers and file in a forked child. The child still answers the signal, with
        the stacks of its own threads, into a file in memory: it may be a worker that its parent
        waits for."""
        number = self.signal
        self.abandon()
        if number is not None:
            with contextlib.suppress(OSError):
                file = os.memfd_create(f"{STACK_IN_MEMORY}{number}")
                faulthandler.register(number, file, all_threads=True, chain=False)

    def _is_in_use(self) -> bool:
        """Whether the fault handler still writes to our file. It has no function that says so, but
        it holds a reference to the file until a program enables it for another file."""
        return sys.getrefcount(self._file) > self._references

    def rename(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            self._path.rename(path)
            self._path = path
