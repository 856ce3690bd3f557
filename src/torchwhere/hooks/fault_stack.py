"""Writes the Python stacks of a rank to its fault file: when it crashes in C, and when another
process asks with a signal.

Python's fault handler writes them in C, without the GIL. So it works while the process holds the
GIL, waits or loops. The watch registers the fault handler for an unused signal, whose number is in
the box. It leaves a fault handler alone that the program enables, before or during the watch. The
end of the watch removes everything and deletes an empty file.

A C++ exception that a native thread does not catch also ends the process, for example a timeout in
the watchdog of NCCL. The native extension then writes its message first.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys
from io import FileIO
from pathlib import Path

from torchwhere.native.load import NativeExtension

# above the first real-time signal: glibc uses the lowest ones, and some libraries use the next
_FIRST_TRIED = 8


class Faults:
    """The fault file of one process."""

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

    def _is_in_use(self) -> bool:
        """Whether the fault handler still writes to our file. It has no function that says so, but
        it holds a reference to the file until a program enables it for another file."""
        return sys.getrefcount(self._file) > self._references

    def rename(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            self._path.rename(path)
            self._path = path
