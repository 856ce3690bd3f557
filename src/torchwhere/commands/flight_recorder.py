"""`torchwhere flight-recorder`: a run as dumps of PyTorch's flight recorder, for those who have tools for these."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from torchwhere.commands.reading import print_json, reading, say


def add(commands: Any) -> None:
    text = "write a run as flight recorder dumps, which torchfrtrace reads"
    sub = commands.add_parser("flight-recorder", help=text, description=f"{text}; the place rides along.")
    sub.add_argument("folder", help="the run's folder")
    sub.add_argument("-o", "--out", required=True, metavar="DUMPS", help="the folder to write to: a new or an empty one")
    sub.add_argument("--json", action="store_true", help="say what was written as JSON")
    sub.set_defaults(command=reading(_flight_recorder))


def _flight_recorder(arguments: argparse.Namespace) -> int:
    from torchwhere.blackbox.run import read_run
    from torchwhere.flight_recorder.writing import write_dumps
    from torchwhere.show.progress import progress_bar

    with progress_bar("writing dumps") as on_progress:
        run = read_run(arguments.folder, on_progress=on_progress)
        for caveat in run.caveats():
            say(caveat)
        written = write_dumps(run, folder=arguments.out)
    if arguments.json:
        print_json([written.to_dict()])
    else:
        sys.stdout.write(f"{written}\n")
    return 0
