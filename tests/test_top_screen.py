"""`torchwhere top` in a real terminal: tmux, and a real job of four ranks that hangs when it is
told to."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPT = """
import itertools, os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=int(os.environ["RANK"]), world_size=4)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in itertools.count():
    while dist.get_rank() == 2 and step > 2 and os.path.exists("hang"):
        time.sleep(0.05)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.05)
"""
PATIENCE_S = 300.0  # the machine may be busy

if shutil.which("tmux") is None and not os.environ.get("TORCHWHERE_NEEDS_TMUX"):
    pytest.skip("there is no tmux to drive the screen in", allow_module_level=True)


def until(seen: Callable[[], bool], what: object = "") -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not seen():
        assert time.monotonic() < deadline, f"not seen: {what() if callable(what) else what}"
        time.sleep(0.05)


class Tmux:
    """One window with a shell in it."""

    def __init__(self, folder: Path, *, columns: int = 80, lines: int = 24) -> None:
        self._socket = str(folder / "tmux")
        plain = {
            name: value
            for name, value in os.environ.items()
            if name not in ("TMUX", "NO_COLOR", "LC_ALL", "LC_CTYPE")
        }
        self._environment = plain | {"LANG": "C.UTF-8"}
        (folder / "shell").write_text("PS1='$ '\nunset HISTFILE\n")
        shell = shlex.join(["bash", "--rcfile", str(folder / "shell"), "-i"])
        self("new-session", "-d", "-x", str(columns), "-y", str(lines), "-c", str(folder), shell)

    def __call__(self, *arguments: str) -> str:
        command = ["tmux", "-u", "-f", "/dev/null", "-S", self._socket, *arguments]
        done = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=400, check=True
        )
        return done.stdout

    def type(self, text: str) -> None:
        self("send-keys", "-l", text)

    def press(self, *keys: str) -> None:
        self("send-keys", *keys)

    def text(self) -> str:
        return self("capture-pane", "-p")

    def coloured(self) -> str:
        return self("capture-pane", "-p", "-e")

    def sees(self, pattern: str) -> None:
        until(
            lambda: re.search(pattern, self.text(), re.MULTILINE) is not None,
            lambda: f"{pattern} in\n{self.text()}",
        )

    def top(self, folder: Path, *options: str, **environment: str) -> None:
        variables = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
        self.type(
            shlex.join(
                [
                    "env",
                    *variables,
                    sys.executable,
                    "-m",
                    "torchwhere",
                    "top",
                    *options,
                    str(folder),
                ]
            )
        )
        self.press("Enter")

    def code(self, number: int) -> None:
        """What the last command ended with; the terminal is a shell's again, and it echoes."""
        self.sees(r"^\$ ?$")
        self.type("echo code $?; stty -a")
        self.press("Enter")
        self.sees(r"^code \d+$")
        self.sees("icanon")
        assert f"code {number}\n" in self.text()
        assert re.search(r"(?<!-)icanon", self.text())
        assert re.search(r"(?<!-)echo ", self.text())
        assert self(
            "display-message", "-p", "#{alternate_on} #{cursor_flag} #{wrap_flag}"
        ).split() == ["0", "1", "1"]

    def close(self) -> None:
        subprocess.run(
            ["tmux", "-S", self._socket, "kill-server"],
            capture_output=True,
            timeout=400,
            check=False,
        )


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Tmux]:
    window = Tmux(tmp_path)
    try:
        window.sees(r"^\$")
        yield window
    finally:
        window.close()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A job that trains until the test is over: its folder."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "train.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torchwhere",
        "run",
        "--no-monitor",
        "--out",
        "run",
        "train.py",
    ]
    with (folder / "log").open("wb") as log:
        # Not by torchrun: it gives each rank a session of its own, and they would outlive it when
        # it is killed.
        ranks = [
            subprocess.Popen(
                command,
                cwd=folder,
                env=os.environ | {"OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": "4"},
                stdout=log,
                stderr=log,
            )
            for rank in range(4)
        ]
    yield folder
    for process in ranks:
        process.kill()
        process.wait()


@pytest.fixture
def hang(job: Path) -> Iterator[Path]:
    """While this file is there, rank 2 does not go on."""
    yield job / "hang"
    (job / "hang").unlink(missing_ok=True)


def test_a_hang_shows_and_goes(job: Path, hang: Path, tmux: Tmux) -> None:
    """The screen waits for the run, shows it move, marks the stuck rank and those that wait for it,
    shows the verdict, and shows the job go on; keys work."""
    tmux.top(job / "run", "--stall", "1.5")
    tmux.sees(r"^..0 +running +\d+ .* all_reduce #\d+")
    tmux.sees(r"4 ranks .* steps/s")
    tmux.sees(r"^4 moving")
    tmux.sees(r"^HEALTHY: ")
    hang.touch()
    tmux.sees(r"^rank 2 STUCK for \d+\.\ds; 3 ranks wait in all_reduce #\d+ default")
    tmux.sees(r"^.!2 +STUCK")
    assert (
        len(
            re.findall(r"^.![013] +waiting .* bwd +0 .*all_reduce #\d+ ", tmux.text(), re.MULTILINE)
        )
        == 3
    )
    assert re.search(r"\x1b\[37m\x1b\[41m|\x1b\[1;37;41m", tmux.coloured())
    tmux.sees(r"^HANG: Rank 2 never issued all_reduce")
    tmux.sees(r"^    .*train\.py:12 in <module>")
    tmux.press("n", "Enter")
    tmux.sees(r"^rank 2 +STUCK")
    tmux.sees(r"^stack, innermost first")
    tmux.sees(r"MainThread +step")
    tmux.press("Escape")
    tmux.sees(r"^>!2 +STUCK")
    tmux.press("/")
    tmux.type("waiting")
    tmux.press("Enter")
    tmux.sees(r"filter 'waiting': 3 of 4")
    tmux.press("Escape")
    tmux("resize-window", "-x", "20", "-y", "10")
    tmux.sees(r"^.!2 +STUCK +\d+\.\ds$")
    tmux("resize-window", "-x", "120", "-y", "30")
    tmux.sees(r"^.!0 +waiting for 2 +\d+ backward +0 ")
    hang.unlink()
    tmux.sees(r"^4 moving")
    tmux.press("p")
    tmux.sees(r"^PAUSED")
    tmux.press("p", "?")
    tmux.sees(r"^n +jump to the slowest")
    tmux.press("q")
    tmux.code(0)


def test_plain_terminals(job: Path, tmux: Tmux) -> None:
    """Without colour and without UTF-8 the screen is plainer and says the same; a terminal that can
    nothing gets lines."""
    tmux.top(job / "run", NO_COLOR="1", LC_ALL="C")
    tmux.sees(r"^..3 +running +\d+ ")
    text, coloured = tmux.text(), tmux.coloured()
    assert text.isascii()
    assert "~" in text  # where something was cut
    assert not re.search(r"\x1b\[(\d+;)*(3[0-7]|4[0-7])[;m]", coloured)
    tmux.press("q")
    tmux.code(0)
    tmux.press("C-l")
    tmux.top(job / "run", TERM="dumb")
    tmux.sees(r"^ +3 +running")
    tmux.sees(r"HEALTHY")
    assert "q quit" not in tmux.text()
    tmux.code(0)


def test_the_terminal_is_given_back(job: Path, tmux: Tmux) -> None:
    """Suspended, continued, interrupted, terminated: each time the terminal is as it was."""
    tmux.top(job / "run")
    tmux.sees(r"q quit")
    tmux.press("C-z")
    tmux.sees(r"Stopped")
    tmux.code(148)
    tmux.type("clear; fg")
    tmux.press("Enter")
    tmux.sees(r"q quit")
    tmux.press("C-c")
    tmux.code(130)
    tmux.type("clear")
    tmux.press("Enter")
    tmux.top(job / "run")
    tmux.sees(r"q quit")
    shell = int(tmux("display-message", "-p", "#{pane_pid}"))
    (child,) = map(int, Path(f"/proc/{shell}/task/{shell}/children").read_text().split())
    os.kill(child, signal.SIGTERM)
    tmux.code(143)
    assert "q quit" not in tmux.text()
