"""The progress bar: on a terminal alone, only for what takes its time, and gone afterwards."""

from __future__ import annotations

import io
import sys

import pytest

from torchwhere.render import progress
from torchwhere.render.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Called in the test itself: pytest puts its own stderr in place when a test begins."""
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return found


def test_nothing_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    """Into a file or a pipe nothing is written, and whoever works is not asked to tell."""
    with progress_bar("reading boxes") as tell:
        assert tell is None
    assert capsys.readouterr().err == ""


def test_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal there is a bar with how much is done of how much; at the end its line is
    erased."""
    screen = terminal(monkeypatch)
    monkeypatch.setattr(progress, "_SHORT_S", -1.0)
    with progress_bar("reading boxes") as tell:
        assert tell is not None
        for done in (64, 128, 192, 256):
            tell(done, 256)
    said = screen.getvalue()
    assert "reading boxes" in said
    assert "256/256" in said
    assert said.rstrip("\r\n").endswith("\x1b[2K")


def test_no_bar_for_what_is_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes half a second shows nothing: a bar that flashes up is noise."""
    screen = terminal(monkeypatch)
    with progress_bar("reading boxes") as tell:
        assert tell is not None
        tell(4, 4)
    assert screen.getvalue().strip() == ""


def test_a_bar_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the middle takes the bar away and goes on."""
    screen = terminal(monkeypatch)
    monkeypatch.setattr(progress, "_SHORT_S", -1.0)
    with pytest.raises(ValueError, match="mine"):
        fail_in_the_middle()
    assert screen.getvalue().rstrip("\r\n").endswith("\x1b[2K")


def fail_in_the_middle() -> None:
    with progress_bar("reading boxes") as tell:
        assert tell is not None
        tell(1, 4)
        raise ValueError("mine")
