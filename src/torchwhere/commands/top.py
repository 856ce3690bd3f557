"""`torchwhere top`: what every rank is doing now, on a live screen."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

from torchwhere.commands.arguments import (
    INTERRUPTED,
    add_command,
    add_json,
    add_stall,
    at_least,
    folder_of_run,
    print_json,
    print_message,
    seconds,
)

_INTERVAL_S = 0.5


def add(commands: Any) -> None:
    sub = add_command(
        commands,
        "top",
        "show what every rank is doing now, on a live screen",
        _top,
        more="Without a terminal it prints lines. Press ? for the keys, q to quit. Exit code: 0, or"
        " 2 if there is nothing to read.",
    )
    sub.add_argument(
        "folder",
        type=folder_of_run,
        help="folder of the run, or one of its boxes; the screen waits until the folder exists",
    )
    sub.add_argument(
        "--interval",
        type=seconds,
        metavar="S",
        help=f"seconds between updates (default: {_INTERVAL_S} on the screen, else print once)",
    )
    sub.add_argument(
        "--count",
        type=at_least(1),
        metavar="N",
        help="print N updates as lines and exit, on a terminal too",
    )
    add_stall(sub)
    add_json(sub, "print one JSON object for each update, for programs")


def _top(arguments: argparse.Namespace) -> int:
    from torchwhere.render.screen import can_paint

    try:
        if can_paint() and not arguments.json and arguments.count is None:
            from torchwhere.top.app import watch_screen

            watch_screen(
                arguments.folder,
                stall_s=arguments.stall,
                interval_s=arguments.interval or _INTERVAL_S,
            )
        else:
            _print_updates(arguments)
    except (KeyboardInterrupt, EOFError):
        return INTERRUPTED
    return 0


def _print_updates(arguments: argparse.Namespace) -> None:
    from torchwhere.render.lines import print_lines
    from torchwhere.render.top import plain_lines
    from torchwhere.top.app import updates

    printed_problem, gap = None, ""
    for run, verdict in updates(
        arguments.folder,
        stall_s=arguments.stall,
        interval_s=arguments.interval,
        count=arguments.count,
    ):
        if arguments.json:
            print_json(run.to_dict() | {"verdict": verdict})
        elif run.ranks:
            sys.stdout.write(gap)
            print_lines(partial(plain_lines, run, verdict=verdict))
            gap = "\n"
        elif run.problem != printed_problem:
            printed_problem = run.problem
            print_message(f"{run.problem}; waiting for it")
        sys.stdout.flush()
