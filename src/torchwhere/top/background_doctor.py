"""Runs the doctor in the background, in a separate process, while a live screen is shown.

The process is `torchwhere doctor --json`, so it takes no time from the screen. It runs when the
troubled ranks change, and now and then while they stay the same: less often the longer it takes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Hashable
from pathlib import Path
from typing import IO, Any

_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; from torchwhere.cli import main;"
    " sys.exit(main({arguments!r}))"
)
_AGAIN_S = 5.0  # between runs while ranks are in trouble; doubles each time
_HEALTHY_S = 30.0  # between runs while no rank is
_MOST_AGAIN_S = 60.0
_MOST_SHARE = 0.05  # of the time


class BackgroundDoctor:
    """Keeps the last verdict on a run; at most one doctor process at a time."""

    def __init__(self, folder: str | Path, *, stall_s: float) -> None:
        self._arguments = ["doctor", "--json", "--stall", str(stall_s), "--", str(folder)]
        self.verdict: dict[str, Any] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._troubled: Hashable = None
        self._started_at = self._due_at = 0.0
        self._pause_s = _AGAIN_S

    def update(self, troubled: Hashable) -> bool:
        """Take the ranks in trouble and run the doctor if due. Returns True on a new verdict."""
        now = time.monotonic()
        is_new = self._collect(now)
        if troubled != self._troubled:
            if not (troubled and self._troubled):
                self.verdict = None  # it was on another situation
            self._troubled, self._due_at, self._pause_s = troubled, 0.0, _AGAIN_S
        if self._process is None and now >= self._due_at:
            self._start(now)
        return is_new

    def wait(self, most_s: float = 60.0) -> None:
        """Wait for the verdict of the running doctor."""
        if self._process is not None:
            try:
                self._process.wait(most_s)
            except subprocess.TimeoutExpired:
                return
            self._collect(time.monotonic())

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._output is not None:
            self._output.close()
            self._output = None

    def _start(self, now: float) -> None:
        program = _PROGRAM.format(path=sys.path, arguments=self._arguments)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe could fill up and block
        self._started_at = now
        self._due_at = now + (self._pause_s if self._troubled else _HEALTHY_S)
        self._pause_s = min(2 * self._pause_s, _MOST_AGAIN_S)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C and Ctrl-Z are for the screen
            )
        except OSError:
            self.close()

    def _collect(self, now: float) -> bool:
        """Read the output of a doctor that has exited. Returns True if it is a verdict."""
        if self._process is None or self._process.poll() is None or self._output is None:
            return False
        if self._due_at:
            self._due_at = max(self._due_at, now + (now - self._started_at) / _MOST_SHARE)
        self._output.seek(0)
        try:
            verdict = json.loads(self._output.read())
        except ValueError:
            verdict = None
        self._process = None
        self.close()
        if not isinstance(verdict, dict):
            return False
        self.verdict = verdict
        return True
