"""The terminal: the whole screen, keys, and everything put back as it was, however it ends.

Plain ANSI sequences that every terminal of the last thirty years knows, tmux and ssh in between
included. Only lines that have changed are sent. Signals: a resized window is painted anew; SIGTSTP
gives the terminal back, stops, and takes it again when continued; SIGTERM and SIGHUP end as
`SystemExit`, so that what was changed is undone on the way out.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import sys
import termios
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from torchwhere.render.text import Line

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"  # the other screen, no cursor, no wrapping
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[0m\x1b[?1049l"
_SGR = {
    "bold": "1",
    "dim": "2",
    "reverse": "7",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "magenta": "35",
    "cyan": "36",
}
_CULPRIT = {True: "1;37;41", False: "1;7"}  # with colour, and without
_SEQUENCE = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|O.)|\x1b|.", re.DOTALL)
_ARROWS = {"A": "up", "B": "down", "C": "right", "D": "left", "H": "home", "F": "end"}
_KEYS = {
    **{f"\x1b{lead}{snapshot}": name for lead in "[O" for snapshot, name in _ARROWS.items()},
    "\x1b[1~": "home",
    "\x1b[7~": "home",
    "\x1b[4~": "end",
    "\x1b[8~": "end",
    "\x1b[5~": "pageup",
    "\x1b[6~": "pagedown",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\b": "backspace",
    "\x1b": "escape",
    "\x06": "pagedown",
    "\x02": "pageup",
}
_REST_S = 0.05  # how long the rest of a key's sequence may take


def can_paint() -> bool:
    """Whether there is a terminal to paint on: one that can move its cursor, to read from and to
    write to."""
    return (
        sys.stdin.isatty()
        and sys.stdout.isatty()
        and os.environ.get("TERM", "dumb") not in ("", "dumb")
    )


def has_colour() -> bool:
    return not os.environ.get("NO_COLOR")


def is_ascii() -> bool:
    """Whether the terminal is not known to understand UTF-8. Python takes LANG=C for UTF-8; the
    terminal may not."""
    said = next(
        (value for name in ("LC_ALL", "LANG") if (value := os.environ.get(name))),
        os.environ.get("LC_CTYPE", ""),
    )
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    return encoding != "utf8" or "utf" not in said.lower()


class Screen:
    """The terminal of this process while it is ours."""

    def __init__(self, *, colour: bool) -> None:
        self._colour = colour
        self._in, self._out = sys.stdin.fileno(), sys.stdout.fileno()
        self._painted: list[str] = []
        self._is_resized = False
        self._typed = ""
        self._saved: list[Any] = []

    # -- taking and giving back --------------------------------------------------------------------

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """The terminal is ours within this block."""
        wake, self._wake = os.pipe()
        self._woken = wake
        for fd in (wake, self._wake):
            os.set_blocking(fd, False)
        before = {
            number: signal.getsignal(number)
            for number in (signal.SIGWINCH, signal.SIGTSTP, signal.SIGTERM, signal.SIGHUP)
        }
        old_wake = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        try:
            signal.signal(signal.SIGWINCH, self._resize)
            signal.signal(signal.SIGTSTP, self._suspend)
            signal.signal(signal.SIGTERM, _end)
            signal.signal(signal.SIGHUP, _end)
            self._saved = termios.tcgetattr(self._in)
            self._take()
            try:
                yield
            finally:
                self._give_back()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(old_wake)
            os.close(wake)
            os.close(self._wake)

    def _take(self) -> None:
        mode = termios.tcgetattr(self._in)
        mode[3] &= ~(termios.ICANON | termios.ECHO)  # keys at once; Ctrl-C and Ctrl-Z stay signals
        mode[6][termios.VMIN], mode[6][termios.VTIME] = 1, 0
        termios.tcsetattr(self._in, termios.TCSADRAIN, mode)
        self._write(_ENTER)
        self._painted = []

    def _give_back(self) -> None:
        with contextlib.suppress(EOFError, OSError, termios.error):  # the terminal may be gone
            self._write(_LEAVE)
            termios.tcsetattr(self._in, termios.TCSADRAIN, self._saved)

    def _resize(self, number: int, frame: FrameType | None) -> None:
        self._is_resized = True

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        self._give_back()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        # Here again when continued.
        signal.signal(signal.SIGTSTP, self._suspend)
        self._take()
        self._is_resized = True

    # -- painting ----------------------------------------------------------------------------------

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        try:
            found = os.get_terminal_size(self._out)
        except OSError:
            found = shutil.get_terminal_size()
        return max(found.columns, 1), max(found.lines, 1)

    def paint(self, lines: Sequence[Line]) -> None:
        """Show these lines, from the top; only what is not there yet is sent."""
        rendered = [self._render(line) for line in lines]
        sent = []
        if self._is_resized or len(rendered) != len(self._painted):
            self._is_resized, self._painted = False, []
            sent.append("\x1b[0m\x1b[2J")
        for at, text in enumerate(rendered):
            if at >= len(self._painted) or self._painted[at] != text:
                # erased first: behind a full line the last cell would go
                sent.append(f"\x1b[{at + 1};1H\x1b[0m\x1b[2K{text}")
        self._painted = rendered
        self._write("".join(sent))

    def _render(self, line: Line) -> str:
        return "".join(
            f"\x1b[0;{codes}m{text}\x1b[0m" if (codes := self._codes(style)) else text
            for text, style in line
            if text
        )

    def _codes(self, style: str) -> str:
        words = style.split()
        if "culprit" in words:
            return _CULPRIT[self._colour]
        known = [
            _SGR[word] for word in words if word in _SGR and (self._colour or int(_SGR[word]) < 30)
        ]
        return ";".join(known)

    def _write(self, text: str) -> None:
        data = text.encode(sys.stdout.encoding or "ascii", "replace")
        try:
            while data:
                data = data[os.write(self._out, data) :]
        except OSError as error:  # the terminal is gone: a window or an ssh that was closed
            raise EOFError from error

    # -- keys --------------------------------------------------------------------------------------

    def keys(self, wait_s: float) -> list[str]:
        """The keys that are pressed within a time; none if it passes, or the window is resized.
        EOFError: nobody is there."""
        if not self._is_resized and self._wait(wait_s):
            self._read()
            while self._typed and _is_begun(self._typed) and self._wait(_REST_S):
                self._read()
        found, self._typed = _SEQUENCE.findall(self._typed), ""
        return [
            _KEYS.get(key, key)
            for key in found
            if key in _KEYS or (len(key) == 1 and key.isprintable())
        ]

    def _wait(self, wait_s: float) -> bool:
        ready, _, _ = select.select([self._in, self._woken], [], [], max(0.0, wait_s))
        if self._woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 4096)
        return self._in in ready

    def _read(self) -> None:
        try:
            data = os.read(self._in, 4096)
        except OSError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        self._typed += data.decode("utf-8", "ignore")


def _is_begun(typed: str) -> bool:
    """Whether the last key may have more to come."""
    tail = typed[typed.rfind("\x1b") :] if "\x1b" in typed else ""
    return tail in ("\x1b", "\x1b[", "\x1bO") or re.fullmatch(r"\x1b\[[0-9;?]+", tail) is not None


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
