"""Where a rank stands that has come to rest: the stack of its main thread, in `rank<N>.stall`, for
a doctor who comes too late.

One at a time: the file is written anew at each rest, and is gone when the watch has ended. It looks
as Python's fault handler shows a stack, after a line with the moment; but it is written by Python
itself, which can do so for one thread.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from torchwhere.blackbox.file_names import STALL_MARK

_MOST_FRAMES = 64


class StallStackFile:
    """One process's."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_over = False

    def write(self) -> None:
        """From any thread: where the main thread is."""
        frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
        lines = [f"{STALL_MARK}{time.time_ns()}"]
        while frame is not None and len(lines) <= _MOST_FRAMES:
            lines.append(
                f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in'
                f" {frame.f_code.co_name}"
            )
            frame = frame.f_back
        part = self._path.with_name(f".{self._path.name}.part")
        part.write_text("\n".join(lines) + "\n", errors="replace")
        os.replace(part, self._path)
        if self._is_over:  # it took so long that the watch is over
            self.remove()

    def remove(self) -> None:
        self._is_over = True
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def rename(self, path: Path) -> None:
        """A rank became known: what was written under another one's name is not to be found
        there."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        self._path = path
