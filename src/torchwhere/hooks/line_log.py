"""Records which line of the user's forward made which autograd nodes, on request:
`forward_lines()`.

While it is active, Python calls back at every new line of the user's own code (`sys.settrace`; it
does not trace torch and installed packages). The autograd sequence number shows which nodes were
made since the previous line: so the number of a node gives the line, and no op costs anything.
Compiled code is compiled as usual. It traces only the thread that asked, and leaves a thread alone
that a debugger or a coverage tool already traces.
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

_MOST_SPANS = 1 << 20  # spans of numbers per thread, 12 MB


class UserLine(NamedTuple):
    """A line of the user's code."""

    file: str
    line: int
    function: str


class LineLog:
    """The lines of one thread: from number `seqs[i]` on, line `lines[i]` of the table made the
    nodes; 0 is an unknown line."""

    def __init__(self) -> None:
        self.table: list[UserLine | None] = [None]
        self.seqs = array("Q")
        self.lines = array("I")
        self.end = 0  # the number of the next node, at the last check
        self._ids: dict[tuple[int, int], int] = {}
        self._codes: list[CodeType] = []  # referenced, so that their ids stay unique

    def add(self, until: int, code: CodeType | None, line: int) -> None:
        """Record that this line made the nodes from `end` until this number."""
        if len(self.seqs) >= _MOST_SPANS:
            del self.seqs[: _MOST_SPANS // 2], self.lines[: _MOST_SPANS // 2]
        self.seqs.append(self.end)
        self.lines.append(0 if code is None else self._id(code, line))
        self.end = until

    def _id(self, code: CodeType, line: int) -> int:
        key = id(code), line
        line_id = self._ids.get(key)
        if line_id is None:
            line_id = self._ids[key] = len(self.table)
            self.table.append(UserLine(code.co_filename, line, code.co_name))
            self._codes.append(code)
        return line_id

    def find(self, seq: int) -> UserLine | None:
        at = bisect_right(self.seqs, seq) - 1
        return self.table[self.lines[at]] if at >= 0 and seq < self.end else None


class LineTracer:
    """Fills the log of the thread that starts it. Its own errors end the tracing, never the
    program."""

    def __init__(self, log: LineLog) -> None:
        self.log = log
        self._sequence_nr: Callable[[], int] = _torch.getter("sequence_nr", 0)
        self._code: CodeType | None = None
        self._line = 0
        self._traced: list[FrameType] = []

    def start(self, frame: FrameType | None) -> None:
        """Trace from `frame` on, and the frames around it after it returns."""
        log, now = self.log, self._sequence_nr()
        log.add(now, None, 0)  # nodes made while no tracer ran belong to no line
        self._at(frame)
        for around in python_stack.outwards(frame):
            if python_stack.is_users(around.f_code.co_filename) and around.f_trace is None:
                around.f_trace = self._inside
                self._traced.append(around)
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
        """Python calls this when a function is entered, and then the returned function for each of
        its lines."""
        if not python_stack.is_users(frame.f_code.co_filename):
            return None
        return self._inside(frame, event, arg)

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
        """Continue with the innermost frame of the user's own code."""
        while frame is not None and not python_stack.is_users(frame.f_code.co_filename):
            frame = frame.f_back
        self._code, self._line = (frame.f_code, frame.f_lineno) if frame is not None else (None, 0)


# by thread; a thread never reuses a sequence number, so a log stays valid
_logs: dict[int, LineLog] = {}
_local = threading.local()


def begin(frame: FrameType | None) -> bool:
    """Record lines on this thread from now on. Returns False if another tool traces it."""
    depth = getattr(_local, "depth", 0)
    if not depth:
        if sys.gettrace() is not None:
            return False
        log = _logs.get(threading.get_ident())
        # a new thread may have the ident of an ended one
        if log is None or _torch.getter("sequence_nr", 0)() < log.end:
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
    """The line that made the node with this number, and whether only one thread could have made it.
    The log of the calling thread comes first."""
    lines = [line for log in logs() if (line := log.find(seq)) is not None]
    return (lines[0] if lines else None), len(lines) == 1


def logs() -> list[LineLog]:
    """All logs, the one of the calling thread first."""
    own = threading.get_ident()
    return [log for ident, log in sorted(_logs.items(), key=lambda item: item[0] != own)]


def forget() -> None:
    """Drop all recorded lines."""
    _logs.clear()


def shortened(written: UserLine, folder: str | None = None) -> str:
    """`file:line`, relative to a folder; by default the current folder."""
    return python_stack.shortened(
        written.file, written.line, folder=folder or python_stack.current_folder()
    )
