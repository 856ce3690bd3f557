"""`torchwhere top`: what every rank is doing, now, on a live screen."""

from __future__ import annotations

import argparse
import math
import sys
from functools import partial
from typing import Any

from torchwhere.commands.arguments import print_json, reading, say


def add(commands: Any) -> None:
    text = "what every rank is doing now, on a live screen; plain lines where there is no terminal"
    sub = commands.add_parser(
        "top",
        help=text,
        description=(
            f"{text}. Press ? for its keys, q to quit. Exit code: 0, or 2 if there is nothing to"
            " read."
        ),
    )
    sub.add_argument("folder", help="the run's folder; on the screen it may come later")
    sub.add_argument(
        "--interval",
        type=_seconds,
        metavar="S",
        help="look this often (default: 0.5 s on the screen, once elsewhere)",
    )
    sub.add_argument(
        "--count",
        type=_count,
        metavar="N",
        help="look so many times and print lines, on a terminal too",
    )
    sub.add_argument(
        "--stall",
        type=_seconds,
        default=1.5,
        metavar="S",
        help=(
            "a rank that has not moved for this long, and for longer than it usually does, is"
            " marked (default: %(default)s s)"
        ),
    )
    sub.add_argument("--json", action="store_true", help="as JSON, for programs: one object a look")
    sub.set_defaults(command=reading(_top))


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not (math.isfinite(found) and 0.01 <= found <= 86400):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds, at least 0.01")
    return found


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of looks, at least 1")
    return int(text)


def _top(arguments: argparse.Namespace) -> int:
    from torchwhere.render.screen import can_paint

    try:
        if can_paint() and not arguments.json and arguments.count is None:
            from torchwhere.top.app import watch_screen

            watch_screen(
                arguments.folder, stall_s=arguments.stall, interval_s=arguments.interval or 0.5
            )
        else:
            _print(arguments)
    except (KeyboardInterrupt, EOFError):
        return 130
    return 0


def _print(arguments: argparse.Namespace) -> None:
    from torchwhere.render.text import print_lines
    from torchwhere.render.top import plain_lines
    from torchwhere.top.app import looks

    found = looks(
        arguments.folder,
        stall_s=arguments.stall,
        interval_s=arguments.interval,
        count=arguments.count,
    )
    said, gap = None, ""
    for run, verdict in found:
        if arguments.json:
            print_json([run.to_dict() | {"verdict": verdict}])
        elif run.ranks:
            sys.stdout.write(gap)
            print_lines(partial(plain_lines, run, verdict=verdict))
            gap = "\n"
        elif run.problem != said:
            said = run.problem
            say(f"{said}; waiting for it")
        sys.stdout.flush()
