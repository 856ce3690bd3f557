"""`torchwhere monitor`: watch a run from outside and say what is wrong, while it is wrong."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchwhere.commands.arguments import print_json, reading
from torchwhere.core.errors import TorchwhereError

if TYPE_CHECKING:
    from torchwhere.diagnose.doctor.verdict import Verdict
    from torchwhere.monitor.roles import SingleHost


def add(commands: Any) -> None:
    text = "watch a run from outside; on a hang, a death or a mismatch print the verdict"
    sub = commands.add_parser(
        "monitor",
        help=text,
        description=f"{text}. Ends with the job. `torchwhere run` starts one by itself.",
    )
    sub.add_argument("folder", help="the run's folder")
    add_options(sub)
    others = sub.add_mutually_exclusive_group()
    others.add_argument(
        "--serve",
        type=_port,
        metavar="PORT",
        help="speak for monitors of other hosts, which join this one",
    )
    others.add_argument(
        "--join",
        type=_address,
        metavar="HOST:PORT",
        help="tell what is seen here to the one that serves there",
    )
    sub.add_argument("--launcher", type=int, help=argparse.SUPPRESS)
    sub.set_defaults(command=reading(_monitor))


def add_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--stall",
        type=float,
        default=30.0,
        metavar="S",
        help="a wait this long is a hang (default: %(default)s s)",
    )
    sub.add_argument(
        "--end-with",
        type=_signal,
        metavar="SIGNAL",
        help="after a verdict end the ranks with it, as SIGTERM; without: only report",
    )
    sub.add_argument(
        "--json", action="store_true", help="verdicts as JSON, for programs: one object a line"
    )


def _signal(text: str) -> signal.Signals:
    name = text.upper() if text.upper().startswith("SIG") else f"SIG{text.upper()}"
    try:
        return signal.Signals(int(text)) if text.isdecimal() else signal.Signals[name]
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is no signal; one is SIGTERM") from None


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; one is 29600")
    return int(text)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host.strip("[]"):
        raise argparse.ArgumentTypeError(f"{text!r} is no address; one is node0:29600")
    return host.strip("[]"), _port(port)


def _others(arguments: argparse.Namespace, folder: Path) -> SingleHost:
    from torchwhere.monitor.follower import Follower
    from torchwhere.monitor.lead import Lead
    from torchwhere.monitor.role_choice import role
    from torchwhere.monitor.roles import SingleHost

    if arguments.serve is not None:
        return Lead(folder, stall_s=arguments.stall, rendezvous=None, port=arguments.serve)
    if arguments.join is not None:
        return Follower(folder, rendezvous=None, address=arguments.join)
    return role(folder, stall_s=arguments.stall) if arguments.launcher is not None else SingleHost()


def _print_json(verdict: Verdict) -> None:
    """At once, for whoever reads along. That nobody does any more is no reason to watch no longer:
    verdicts are kept, too."""
    from torchwhere.render.verdict import verdict_json

    with contextlib.suppress(BrokenPipeError):
        print_json([verdict_json(verdict)])
        sys.stdout.flush()


def _monitor(arguments: argparse.Namespace) -> int:
    from torchwhere.monitor.monitor import Monitor

    folder = Path(arguments.folder)
    if not folder.is_dir():
        raise TorchwhereError(
            f"there is no folder {folder}. Record one with: torchwhere run --out {folder} train.py"
        )
    # What c10d prints of connections that fail is for the developers of a job; here it is expected,
    # and said in a verdict.
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    monitor = Monitor(
        folder,
        stall_s=arguments.stall,
        end_with=arguments.end_with,
        say_verdict=_print_json if arguments.json else None,
        launcher=arguments.launcher,
        others=_others(arguments, folder),
    )
    if not monitor.watch():
        os._exit(0)  # Python would end a thread inside c10d in the middle, and C++ would abort
    return 0
