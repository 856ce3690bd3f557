"""`torchwhere monitor`: watch a run from outside and say what is wrong, while it is wrong."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import Any

from torchwhere.commands.reading import reading
from torchwhere.errors import TorchwhereError


def add(commands: Any) -> None:
    text = "watch a run from outside; on a hang, a death or a mismatch print the verdict"
    sub = commands.add_parser(
        "monitor", help=text, description=f"{text}. Ends with the job. `torchwhere run` starts one by itself."
    )
    sub.add_argument("folder", help="the run's folder")
    add_options(sub)
    sub.add_argument("--launcher", type=int, help=argparse.SUPPRESS)
    sub.set_defaults(command=reading(_monitor))


def add_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--stall", type=float, default=30.0, metavar="S", help="a wait this long is a hang (default: %(default)s s)"
    )
    sub.add_argument(
        "--end-with",
        type=_signal,
        metavar="SIGNAL",
        help="after a verdict end the ranks with it, as SIGTERM; without: only report",
    )


def _signal(text: str) -> signal.Signals:
    name = text.upper() if text.upper().startswith("SIG") else f"SIG{text.upper()}"
    try:
        return signal.Signals(int(text)) if text.isdecimal() else signal.Signals[name]
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is no signal; one is SIGTERM") from None


def _monitor(arguments: argparse.Namespace) -> int:
    from torchwhere.monitor import Monitor

    folder = Path(arguments.folder)
    if not folder.is_dir():
        raise TorchwhereError(f"there is no folder {folder}. Record one with: torchwhere run --out {folder} train.py")
    Monitor(folder, stall_s=arguments.stall, end_with=arguments.end_with, launcher=arguments.launcher).watch()
    return 0
