"""`torchwhere run`: run an unchanged training script under watch."""

from __future__ import annotations

import argparse
from typing import Any

from torchwhere.commands.arguments import (
    BAD_INPUT,
    add_command,
    at_least,
    chosen_stall_s,
    print_message,
)
from torchwhere.commands.monitor import add_options
from torchwhere.core.errors import TorchwhereError

_DEFAULT_RECORDS = 1 << 16


def add(commands: Any) -> None:
    sub = add_command(
        commands,
        "run",
        "run an unchanged training script under watch",
        more="Example: torchrun --nproc-per-node 4 -m torchwhere run --out run/ train.py",
    )
    sub.add_argument(
        "--out", default="torchwhere-run", help="folder for the black boxes (default: %(default)s)"
    )
    sub.add_argument(
        "--module-events", action="store_true", help="record every module call as an event"
    )
    sub.add_argument(
        "--records",
        type=at_least(16),
        default=_DEFAULT_RECORDS,
        help="number of events that each box keeps; older ones are overwritten (default:"
        " %(default)s)",
    )
    sub.add_argument(
        "--no-monitor", action="store_true", help="do not start the monitor process of this host"
    )
    sub.add_argument(
        "--no-env",
        action="store_true",
        help="leave the environment variables of NCCL alone (default: on a machine with a GPU, set"
        " those that the doctor needs and that are not set)",
    )
    add_options(sub)
    sub.add_argument(
        "-m",
        dest="is_module",
        action="store_true",
        help="run a module by its name, like python -m",
    )
    sub.add_argument("script", help="path of the script, or name of the module")
    sub.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    sub.set_defaults(command=_run)


def _monitor_options(arguments: argparse.Namespace) -> list[str]:
    options = ["--stall", str(chosen_stall_s(arguments))]
    if arguments.json:
        options.append("--json")
    if arguments.end_with is not None:
        options += ["--end-with", arguments.end_with.name]
    return options


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
            sets_variables=not arguments.no_env,
        )
    except TorchwhereError as error:
        print_message(error)
        return BAD_INPUT
    execute()  # outside the try: from here on every exception belongs to the script
    return 0
