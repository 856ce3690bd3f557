"""The command `torchwhere`. Its subcommands are in `commands/`.

Exit codes:

- 0: done, also if the reader of a pipe (`| head`) stopped early
- 1: `diff` found a difference; `doctor` found a job that is not healthy; `attach` found a hang
- 2: wrong arguments, nothing to read, an output that cannot be written, or a script that cannot be
  started; the message says what to do
- 130: Ctrl-C

Once its script has started, `run` exits exactly as the script does.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from torchwhere.commands import (
    attach,
    diff,
    doctor,
    events,
    export,
    flight_recorder,
    monitor,
    native,
    report,
    run,
    tables,
    top,
    trace,
)
from torchwhere.core.version import __version__

COMMANDS = (
    run,
    events,
    tables,
    diff,
    doctor,
    attach,
    monitor,
    top,
    flight_recorder,
    export,
    report,
    trace,
    native,
)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of `torchwhere` with all its subcommands."""
    parser = argparse.ArgumentParser(
        prog="torchwhere",
        description="Show where a PyTorch job is, on every rank, and why it hangs.",
    )
    parser.add_argument("--version", action="version", version=f"torchwhere {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = build_parser().parse_args(argv)
    return int(arguments.command(arguments))
