"""Last words: where a rank's Python stack goes when it crashes in C, and when somebody outside asks
for it.

Python's own fault handler writes it, from C, without the GIL: it works while the process holds the
GIL, waits or loops. A signal that nobody uses is made to mean "write your stack"; its number is in
the box. A fault handler that the program enables, before or while we watch, is left as it is. All
of it is taken back at the end, and an empty file is deleted.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys
from io import FileIO
from pathlib import Path

# above the first real-time signal; glibc keeps the lowest for itself, and some libraries the next
_FIRST_TRIED = 8


class Faults:
    """One process's fault file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._is_enabler = False
        self._references = 0  # to the file, without those of the fault handler
        self.signal: int | None = None

    def install(self) -> None:
        self._file = FileIO(self._path, "wb")
        self._references = sys.getrefcount(self._file)
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
        """Let go of handlers and file, and delete nothing: a forked child inherits them, but the
        file is its parent's."""
        if self.signal is not None:
            faulthandler.unregister(self.signal)
            self.signal = None
        if self._is_enabler and self._is_in_use():
            faulthandler.disable()
        self._is_enabler = False
        if self._file is not None:
            self._file.close()
            self._file = None

    def _is_in_use(self) -> bool:
        """Whether the fault handler still writes to our file. It tells nobody, but it holds a
        reference; a program that has enabled it anew for a file of its own made it let go."""
        return sys.getrefcount(self._file) > self._references

    def rename(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            self._path.rename(path)
            self._path = path
