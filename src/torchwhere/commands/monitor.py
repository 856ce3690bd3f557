"""`torchwhere monitor`: watch a running job from outside and print a verdict when it goes wrong."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchwhere.commands.arguments import (
    add_command,
    add_ending_stall,
    add_folder,
    add_json,
    chosen_stall_s,
    print_json,
)
from torchwhere.core.errors import nothing_recorded

if TYPE_CHECKING:
    from torchwhere.diagnose.doctor.verdict import Verdict
    from torchwhere.monitor.single import SingleHost


def add(commands: Any) -> None:
    sub = add_command(
        commands,
        "monitor",
        "watch a running job; print a verdict if a rank hangs, exits early or differs",
        _monitor,
        more="The monitor exits when the job does. `torchwhere run` starts one on each host.",
    )
    add_folder(sub)
    add_options(sub)
    others = sub.add_mutually_exclusive_group()
    others.add_argument(
        "--serve",
        type=_port,
        metavar="PORT",
        help="be the lead monitor: wait for monitors of other hosts on this port",
    )
    others.add_argument(
        "--join",
        type=_address,
        metavar="HOST:PORT",
        help="send this host's observations to the lead monitor",
    )
    sub.add_argument("--launcher", type=int, help=argparse.SUPPRESS)


def add_options(sub: argparse.ArgumentParser) -> None:
    """Add the options that `run` passes on to the monitor it starts."""
    add_ending_stall(sub)
    sub.add_argument(
        "--end-with",
        type=_signal,
        metavar="SIGNAL",
        help="send this signal to the ranks after a verdict, e.g. SIGTERM (default: only report)",
    )
    add_json(sub, "print the monitor's verdicts as JSON, one object per line")


def _signal(text: str) -> signal.Signals:
    name = text.upper() if text.upper().startswith("SIG") else f"SIG{text.upper()}"
    try:
        return signal.Signals(int(text)) if text.isdecimal() else signal.Signals[name]
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a signal name (example: SIGTERM)"
        ) from None


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (example: 29600)")
    return int(text)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host.strip("[]"):
        raise argparse.ArgumentTypeError(f"{text!r} is not an address (example: node0:29600)")
    return host.strip("[]"), _port(port)


def _role(arguments: argparse.Namespace, folder: Path) -> SingleHost:
    from torchwhere.monitor.follower import Follower
    from torchwhere.monitor.lead import Lead
    from torchwhere.monitor.roles import role_from_launcher
    from torchwhere.monitor.single import SingleHost

    if arguments.serve is not None:
        return Lead(
            folder, stall_s=chosen_stall_s(arguments), rendezvous=None, port=arguments.serve
        )
    if arguments.join is not None:
        return Follower(folder, rendezvous=None, address=arguments.join)
    if arguments.launcher is not None:
        return role_from_launcher(folder, stall_s=chosen_stall_s(arguments))
    return SingleHost()


def _print_json(verdict: Verdict) -> None:
    """Print a verdict at once. A closed stdout does not end the monitor: it also writes files."""
    from torchwhere.render.verdict import verdict_json

    with contextlib.suppress(BrokenPipeError):
        print_json(verdict_json(verdict))
        sys.stdout.flush()


def _monitor(arguments: argparse.Namespace) -> int:
    from torchwhere.monitor.monitor import Monitor

    folder = Path(arguments.folder)
    if not folder.is_dir():
        raise nothing_recorded(f"there is no folder {folder}", folder)
    # c10d logs every failed connection. The monitor expects failures and reports them in a verdict.
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    monitor = Monitor(
        folder,
        stall_s=chosen_stall_s(arguments),
        end_with=arguments.end_with,
        print_verdict=_print_json if arguments.json else None,
        launcher=arguments.launcher,
        role=_role(arguments, folder),
    )
    if not monitor.watch():
        os._exit(0)  # a normal exit would end a thread inside c10d, and C++ would abort
    return 0
