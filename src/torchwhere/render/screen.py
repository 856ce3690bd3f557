"""The terminal as a full screen: painting, keys, and restoring everything at the end.

It uses plain ANSI sequences that every terminal knows, also through tmux and ssh. Only changed
lines are sent. A resized window is painted again. SIGTSTP restores the terminal, stops, and takes
the terminal again when the process continues. SIGTERM and SIGHUP raise `SystemExit`, so that the
terminal is restored on the way out.
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

from torchwhere.render.lines import Line

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"  # alternate screen, no cursor, no wrapping
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
_CULPRIT = {True: "1;37;41", False: "1;7"}  # with colour and without
_SEQUENCE = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|O.)|\x1b|.", re.DOTALL)
_ARROWS = {"A": "up", "B": "down", "C": "right", "D": "left", "H": "home", "F": "end"}
_KEYS = {
    **{f"\x1b{prefix}{final}": name for prefix in "[O" for final, name in _ARROWS.items()},
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
_REST_S = 0.05  # the rest of a key's sequence arrives within this time


def can_paint() -> bool:
    """Whether stdin and stdout are a terminal that can move its cursor."""
    return (
        sys.stdin.isatty()
        and sys.stdout.isatty()
        and os.environ.get("TERM", "dumb") not in ("", "dumb")
    )


def has_colour() -> bool:
    return not os.environ.get("NO_COLOR")


def is_ascii() -> bool:
    """Whether the terminal may not understand UTF-8. Python assumes UTF-8 for LANG=C."""
    variables = ("LC_ALL", "LANG", "LC_CTYPE")
    locale = next((os.environ[name] for name in variables if os.environ.get(name)), "")
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    return encoding != "utf8" or "utf" not in locale.lower()


class Screen:
    """The terminal of this process, as a full screen."""

    def __init__(self, *, colour: bool) -> None:
        self._colour = colour
        self._in, self._out = sys.stdin.fileno(), sys.stdout.fileno()
        self._painted: list[str] = []
        self._is_resized = False
        self._typed = ""
        self._saved: list[Any] = []

    # -- taking and restoring --------------------------------------------------------------------

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Use the terminal as a full screen within this block."""
        self._woken, wake = os.pipe()
        for fd in (self._woken, wake):
            os.set_blocking(fd, False)
        handlers = {
            signal.SIGWINCH: self._resize,
            signal.SIGTSTP: self._suspend,
            signal.SIGTERM: _end,
            signal.SIGHUP: _end,
        }
        before = {number: signal.getsignal(number) for number in handlers}
        old_wake = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        try:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            self._saved = termios.tcgetattr(self._in)
            self._take()
            try:
                yield
            finally:
                self._restore()
        finally:
            for number, old_handler in before.items():
                signal.signal(number, old_handler)
            signal.set_wakeup_fd(old_wake)
            os.close(self._woken)
            os.close(wake)

    def _take(self) -> None:
        mode = termios.tcgetattr(self._in)
        mode[3] &= ~(termios.ICANON | termios.ECHO)  # keys at once; Ctrl-C and Ctrl-Z stay signals
        mode[6][termios.VMIN], mode[6][termios.VTIME] = 1, 0
        termios.tcsetattr(self._in, termios.TCSADRAIN, mode)
        self._write(_ENTER)
        self._painted = []

    def _restore(self) -> None:
        with contextlib.suppress(EOFError, OSError, termios.error):  # the terminal may be gone
            self._write(_LEAVE)
            termios.tcsetattr(self._in, termios.TCSADRAIN, self._saved)

    def _resize(self, number: int, frame: FrameType | None) -> None:
        self._is_resized = True

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        self._restore()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        # The process continues here after SIGCONT.
        signal.signal(signal.SIGTSTP, self._suspend)
        self._take()
        self._is_resized = True

    # -- painting ----------------------------------------------------------------------------------

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        try:
            size = os.get_terminal_size(self._out)
        except OSError:
            size = shutil.get_terminal_size()
        return max(size.columns, 1), max(size.lines, 1)

    def paint(self, lines: Sequence[Line]) -> None:
        """Show these lines from the top. Only changed lines are sent."""
        rendered = [self._render(line) for line in lines]
        sent = []
        if self._is_resized or len(rendered) != len(self._painted):
            self._is_resized, self._painted = False, []
            sent.append("\x1b[0m\x1b[2J")
        for at, text in enumerate(rendered):
            if at >= len(self._painted) or self._painted[at] != text:
                # Erase first: erasing after a full line would delete its last cell.
                sent.append(f"\x1b[{at + 1};1H\x1b[0m\x1b[2K{text}")
        self._painted = rendered
        self._write("".join(sent))

    def _render(self, line: Line) -> str:
        parts = []
        for text, style in line:
            codes = self._codes(style) if text else ""
            parts.append(f"\x1b[0;{codes}m{text}\x1b[0m" if codes else text)
        return "".join(parts)

    def _codes(self, style: str) -> str:
        names = style.split()
        if "culprit" in names:
            return _CULPRIT[self._colour]
        codes = [_SGR[name] for name in names if name in _SGR]
        return ";".join(code for code in codes if self._colour or int(code) < 30)

    def _write(self, text: str) -> None:
        data = text.encode(sys.stdout.encoding or "ascii", "replace")
        try:
            while data:
                data = data[os.write(self._out, data) :]
        except OSError as error:  # the window or the ssh connection was closed
            raise EOFError from error

    # -- keys --------------------------------------------------------------------------------------

    def keys(self, wait_s: float) -> list[str]:
        """Wait for keys. Returns none after `wait_s` seconds or when the window is resized.

        Raises `EOFError` if the terminal is gone.
        """
        if not self._is_resized and self._wait(wait_s):
            self._read()
            while self._typed and _is_incomplete(self._typed) and self._wait(_REST_S):
                self._read()
        sequences, self._typed = _SEQUENCE.findall(self._typed), ""
        return [
            _KEYS.get(key, key)
            for key in sequences
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


def _is_incomplete(typed: str) -> bool:
    """Whether the sequence of the last key may be incomplete."""
    tail = typed[typed.rfind("\x1b") :] if "\x1b" in typed else ""
    return tail in ("\x1b", "\x1b[", "\x1bO") or re.fullmatch(r"\x1b\[[0-9;?]+", tail) is not None


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
