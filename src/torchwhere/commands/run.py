"""`torchwhere run`: a training script under watch, unchanged."""

from __future__ import annotations

import argparse
from typing import Any

from torchwhere.commands.arguments import BAD_INPUT, say
from torchwhere.commands.monitor import add_options
from torchwhere.core.errors import TorchwhereError

_DEFAULT_RECORDS = 1 << 16


def add(commands: Any) -> None:
    sub = commands.add_parser(
        "run",
        help="run a training script under watch, unchanged",
        description=(
            "Run a training script under watch: torchrun --nproc-per-node 4 -m torchwhere run --out"
            " run/ train.py"
        ),
    )
    sub.add_argument(
        "--out", default="torchwhere-run", help="folder for the black boxes (default: %(default)s)"
    )
    sub.add_argument(
        "--module-events", action="store_true", help="record every module call as an event"
    )
    sub.add_argument(
        "--records",
        type=_ring_size,
        default=_DEFAULT_RECORDS,
        help="size of the ring (default: %(default)s)",
    )
    sub.add_argument(
        "--no-monitor", action="store_true", help="start no process that watches from outside"
    )
    add_options(sub)
    sub.add_argument(
        "-m",
        dest="is_module",
        action="store_true",
        help="the script is a module's name, as for python -m",
    )
    sub.add_argument("script", help="path of the script, or name of the module")
    sub.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    sub.set_defaults(command=_run)


def _monitor_options(arguments: argparse.Namespace) -> list[str]:
    options = ["--stall", str(arguments.stall), *["--json"] * arguments.json]
    return (
        options if arguments.end_with is None else [*options, "--end-with", arguments.end_with.name]
    )


def _ring_size(text: str) -> int:
    if not text.isdecimal() or int(text) < 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 16 or more")
    return int(text)


def _run(arguments: argparse.Namespace) -> int:
    from torchwhere.commands import launch

    try:
        execute = launch.begin(
            arguments.script,
            arguments.arguments,
            out=arguments.out,
            is_module=arguments.is_module,
            module_events=arguments.module_events,
            records=arguments.records,
            monitor=None if arguments.no_monitor else _monitor_options(arguments),
        )
    except TorchwhereError as error:
        say(error)
        return BAD_INPUT
    execute()  # outside the try: what is raised from here on is the script's own
    return 0
