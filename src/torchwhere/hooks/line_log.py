"""Which line of the user's forward made which autograd nodes, on request: `forward_lines()`.

While it is on, Python tells of every new line of the user's own code (`sys.settrace`; code of torch
and of installed packages is not traced). The autograd sequence number says which nodes were made
since the line before: so a node is known by its number, and nothing is done for any op. Compiled
code is compiled as ever. One thread: the one that asked. A debugger or a coverage tool that traces
the thread already is left alone.
"""

from __future__ import annotations

import sys
import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torchwhere.hooks import _torch, python_stack

_MOST = 1 << 20  # spans of numbers kept per thread, 12 MB


class UserLine(NamedTuple):
    """A line of the user's code."""

    file: str
    line: int
    function: str


class LineLog:
    """The lines of one thread: from `seqs[i]` on, nodes were made by line `lines[i]` of the table;
    0 is none that is known."""

    def __init__(self) -> None:
        self.table: list[UserLine | None] = [None]
        self.seqs = array("Q")
        self.lines = array("I")
        self.end = 0  # the number the next node will get, as of the last look
        self._ids: dict[tuple[int, int], int] = {}
        self._codes: list[CodeType] = []  # kept, so that their ids stay their own

    def add(self, until: int, code: CodeType | None, line: int) -> None:
        """Nodes from `end` until this number were made by this line."""
        if len(self.seqs) >= _MOST:
            del self.seqs[: _MOST // 2], self.lines[: _MOST // 2]
        self.seqs.append(self.end)
        self.lines.append(0 if code is None else self._id(code, line))
        self.end = until

    def _id(self, code: CodeType, line: int) -> int:
        key = id(code), line
        known = self._ids.get(key)
        if known is None:
            known = self._ids[key] = len(self.table)
            self.table.append(UserLine(code.co_filename, line, code.co_name))
            self._codes.append(code)
        return known

    def find(self, seq: int) -> UserLine | None:
        at = bisect_right(self.seqs, seq) - 1
        return self.table[self.lines[at]] if at >= 0 and seq < self.end else None


class LineTracer:
    """Fills the log of the thread it is started on. An error of its own ends the tracing, never the
    program."""

    def __init__(self, log: LineLog) -> None:
        self.log = log
        self._sequence_nr: Callable[[], int] = _torch.private("sequence_nr") or (lambda: 0)
        self._code: CodeType | None = None
        self._line = 0
        self._traced: list[FrameType] = []

    def start(self, frame: FrameType | None) -> None:
        """Trace from `frame` on, and the frames around it when they go on."""
        log, now = self.log, self._sequence_nr()
        log.add(now, None, 0)  # what was made in between belongs to no line
        self._at(frame)
        while frame is not None:
            if python_stack.is_users(frame.f_code.co_filename) and frame.f_trace is None:
                frame.f_trace = self._inside
                self._traced.append(frame)
            frame = frame.f_back
        sys.settrace(self._called)

    def stop(self) -> None:
        if sys.gettrace() == self._called:
            sys.settrace(None)
        for frame in self._traced:
            if frame.f_trace == self._inside:
                frame.f_trace = None
        self._traced.clear()
        self._look()
        self._code = None

    @_torch.unseen
    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Python calls this when a function is entered; what it returns is called for each of its
        lines."""
        return (
            self._inside(frame, event, arg)
            if python_stack.is_users(frame.f_code.co_filename)
            else None
        )

    @_torch.unseen
    def _inside(self, frame: FrameType, event: str, arg: Any) -> Any:
        try:
            self._look()
            if event == "return":
                self._at(frame.f_back)
            else:
                self._code, self._line = frame.f_code, frame.f_lineno
        except Exception:
            sys.settrace(None)
            return None
        return self._inside

    def _look(self) -> None:
        now = self._sequence_nr()
        if now != self.log.end:
            self.log.add(now, self._code, self._line)

    def _at(self, frame: FrameType | None) -> None:
        """Go on with the innermost frame of the user's."""
        while frame is not None and not python_stack.is_users(frame.f_code.co_filename):
            frame = frame.f_back
        self._code, self._line = (frame.f_code, frame.f_lineno) if frame is not None else (None, 0)


# by thread; the numbers of a thread are never given again, so a log stays right
_logs: dict[int, LineLog] = {}
_local = threading.local()


def begin(frame: FrameType | None) -> bool:
    """Record lines on this thread from now on; False where something else traces it."""
    depth = getattr(_local, "depth", 0)
    if not depth:
        if sys.gettrace() is not None:
            return False
        log = _logs.get(threading.get_ident())
        sequence_nr = _torch.private("sequence_nr")
        # a new thread with an old one's number
        if log is None or (sequence_nr is not None and sequence_nr() < log.end):
            log = _logs[threading.get_ident()] = LineLog()
        _local.tracer = LineTracer(log)
        _local.tracer.start(frame)
    _local.depth = depth + 1
    return True


def end() -> None:
    _local.depth -= 1
    if not _local.depth:
        _local.tracer.stop()
        del _local.tracer


def find(seq: int) -> tuple[UserLine | None, bool]:
    """The line that made the node with this number, and whether only one thread could have: the
    calling thread is likelier."""
    own = _logs.get(threading.get_ident())
    found = [line for log in _logs.values() if (line := log.find(seq)) is not None]
    mine = own.find(seq) if own is not None else None
    return mine or (found[0] if found else None), len(found) == 1


def logs() -> list[LineLog]:
    """All logs, that of the calling thread first."""
    own = threading.get_ident()
    return [log for ident, log in sorted(_logs.items(), key=lambda item: item[0] != own)]


def forget() -> None:
    """Let go of what was recorded."""
    _logs.clear()


def shortened(written: UserLine, folder: str | None = None) -> str:
    """`file:line`, relative to a folder: the watch's, or the one the process is in."""
    return python_stack.shortened(
        written.file, written.line, folder=folder or python_stack.current_folder()
    )
