"""`torchwhere run`: run an unchanged training script, or a launcher, under watch."""

from __future__ import annotations

import argparse
import os
from typing import Any

from torchwhere.commands.arguments import BAD_INPUT, add_command, print_message
from torchwhere.commands.watch_options import OUT, add_watch_options, watch_options
from torchwhere.core.errors import TorchwhereError

_DEFAULT_OUT = "torchwhere-run"


def add(commands: Any) -> None:
    sub = add_command(
        commands,
        "run",
        "run an unchanged training script under watch",
        _run,
        more="Example: torchrun --nproc-per-node 4 -m torchwhere run --out run/ train.py",
    )
    sub.add_argument(
        "--out",
        help=f"folder for the black boxes (default: {OUT}, or else {_DEFAULT_OUT})",
    )
    add_watch_options(sub)
    sub.add_argument(
        "-m",
        dest="is_module",
        action="store_true",
        help="run a module by its name, like python -m",
    )
    sub.add_argument(
        "script", help="path of the script, name of the module, or a program such as torchrun"
    )
    sub.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    sub.set_defaults(command=_run)  # without `reading`: the exceptions belong to the script


def _run(arguments: argparse.Namespace) -> int:
    from torchwhere.commands import launch

    try:
        execute = launch.begin(
            arguments.script,
            arguments.arguments,
            out=arguments.out or os.environ.get(OUT) or _DEFAULT_OUT,
            is_module=arguments.is_module,
            options=watch_options(arguments),
        )
    except TorchwhereError as error:
        print_message(error)
        return BAD_INPUT
    execute()  # outside the try: from here on every exception belongs to the script
    return 0
