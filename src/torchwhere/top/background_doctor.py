"""The doctor on call: a verdict made in the background, by a process of its own, while somebody
looks at a live screen.

`torchwhere doctor` in another process: what it takes, takes nothing from the screen. It is called
when something changes, and now and then while it stays so, the less often the longer it takes.
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
_AGAIN_S = 5.0  # while there is trouble; twice as long each time
_CALM_S = 30.0
_MOST_AGAIN_S = 60.0
_MOST_SHARE = 0.05  # of the time


class BackgroundDoctor:
    """Asked again and again whether there is something new; starts at most one process at a
    time."""

    def __init__(self, folder: str | Path, *, stall_s: float) -> None:
        self._arguments = ["doctor", "--json", "--stall", str(stall_s), "--", str(folder)]
        self.verdict: dict[str, Any] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None
        self._seen: Hashable = None
        self._called_at = self._due_at = 0.0
        self._pause_s = _AGAIN_S

    def see(self, errors: Hashable) -> bool:
        """Tell who is in trouble; whether there is a new verdict."""
        now = time.monotonic()
        news = self._collect(now)
        if errors != self._seen:
            if not (errors and self._seen):
                self.verdict = None  # it was on something else
            self._seen, self._due_at, self._pause_s = errors, 0.0, _AGAIN_S
        if self._process is None and now >= self._due_at:
            self._call(now)
        return news

    def wait(self, most_s: float = 60.0) -> None:
        """Until the one who was called has spoken."""
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
        if self._said is not None:
            self._said.close()
            self._said = None

    def _call(self, now: float) -> None:
        program = _PROGRAM.format(path=sys.path, arguments=self._arguments)
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe would have to be emptied while it writes
        self._called_at = now
        pause = self._pause_s if self._seen else _CALM_S
        self._pause_s = min(2 * self._pause_s, _MOST_AGAIN_S)
        self._due_at = now + pause
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C and Ctrl-Z are for the screen
            )
        except OSError:
            self.close()

    def _collect(self, now: float) -> bool:
        """Whether the one who was called has come to a verdict."""
        if self._process is None or self._process.poll() is None or self._said is None:
            return False
        self._due_at = (
            max(self._due_at, now + (now - self._called_at) / _MOST_SHARE) if self._due_at else 0.0
        )
        self._said.seek(0)
        try:
            found = json.loads(self._said.read())
        except ValueError:
            found = None
        self._process = None
        self.close()
        if isinstance(found, dict):
            self.verdict = found
        return isinstance(found, dict)
