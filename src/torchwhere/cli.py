"""The command `torchwhere`. What each of its commands does is in `commands/`.

Exit codes: 0 done, also when `| head` has seen enough; 1 `diff` has found a difference, `doctor` a
job that is not healthy; 2 wrong arguments, nothing there to read, an output that cannot be written,
or a script that cannot be started (the message says what to do); 130 Ctrl-C. Once its script has
started, `run` ends exactly as the script does.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from torchwhere.commands import (
    comms,
    diff,
    doctor,
    events,
    export,
    flight_recorder,
    groups,
    layout,
    monitor,
    native,
    phases,
    report,
    run,
    top,
    trace,
)
from torchwhere.core.version import __version__

_READING = (
    events,
    comms,
    groups,
    layout,
    phases,
    diff,
    doctor,
    monitor,
    top,
    flight_recorder,
    export,
    report,
    trace,
)
COMMANDS = (run, *_READING, native)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="torchwhere", description="Where is it? The place of a PyTorch job, on every rank."
    )
    parser.add_argument("--version", action="version", version=f"torchwhere {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    arguments = parser.parse_args(argv)
    return int(arguments.command(arguments))
