"""`torchwhere flight-recorder`: a run as dumps of PyTorch's flight recorder, for those who have
tools for these."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchwhere.commands.arguments import print_json, reading, say
from torchwhere.core.atomic_file import destination_folder, write_errors


def add(commands: Any) -> None:
    text = "write a run as flight recorder dumps, which torchfrtrace reads"
    sub = commands.add_parser(
        "flight-recorder", help=text, description=f"{text}; the place rides along."
    )
    sub.add_argument("folder", help="the run's folder")
    sub.add_argument(
        "-o",
        "--out",
        required=True,
        metavar="DUMPS",
        help="the folder to write to: a new or an empty one",
    )
    sub.add_argument("--json", action="store_true", help="say what was written as JSON")
    sub.set_defaults(command=reading(_flight_recorder))


def _flight_recorder(arguments: argparse.Namespace) -> int:
    from torchwhere.blackbox.run import read_run
    from torchwhere.flight_recorder.write import check_empty, write_dumps
    from torchwhere.render.progress import progress_bar
    from torchwhere.render.text import plain

    out = Path(arguments.out)
    check_empty(out)
    with write_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    with destination_folder(out) as part, progress_bar("writing dumps") as on_progress:
        run = read_run(arguments.folder, on_progress=on_progress)
        for caveat in run.caveats():
            say(caveat)
        written = replace(write_dumps(run, folder=part), folder=out)
    if arguments.json:
        print_json([written.to_dict()])
    else:
        sys.stdout.writelines(f"{plain(line)}\n" for line in str(written).split("\n"))
    return 0
