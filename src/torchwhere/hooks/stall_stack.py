"""Writes the stack of a stalled rank's main thread to `rank<N>.stall`, so that the doctor has it
after the process has ended.

Each stall overwrites the file, and the end of the watch deletes it. After a line with the time it
has the format of Python's fault handler. The fault handler itself cannot write a single thread, so
Python code writes the file.
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
    """The stall file of one process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_over = False

    def write(self) -> None:
        """Write the stack of the main thread. Any thread may call this."""
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
