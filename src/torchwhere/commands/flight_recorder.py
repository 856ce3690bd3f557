"""`torchwhere flight-recorder`: a run as dumps of PyTorch's flight recorder, for tools that read
those."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchwhere.commands.arguments import (
    add_command,
    add_folder,
    add_json,
    print_message,
    print_summary,
)
from torchwhere.core.atomic_file import destination_folder, write_errors


def add(commands: Any) -> None:
    sub = add_command(
        commands,
        "flight-recorder",
        "write a run as flight recorder dumps, which torchfrtrace reads",
        _flight_recorder,
        more="Each entry also holds the place of the call.",
    )
    add_folder(sub)
    sub.add_argument(
        "-o", "--out", required=True, metavar="DUMPS", help="output folder: new or empty"
    )
    add_json(sub, "print a summary of the dumps as JSON")


def _flight_recorder(arguments: argparse.Namespace) -> int:
    from torchwhere.blackbox.run import read_run
    from torchwhere.flight_recorder.write import check_empty, write_dumps
    from torchwhere.render.progress import progress_bar

    out = Path(arguments.out)
    check_empty(out)
    with write_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    with destination_folder(out) as part, progress_bar("writing dumps") as on_progress:
        run = read_run(arguments.folder, on_progress=on_progress)
        for caveat in run.caveats():
            print_message(caveat)
        written = replace(write_dumps(run, folder=part), folder=out)
    print_summary(arguments, written)
    return 0
