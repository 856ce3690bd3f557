"""`torchwhere doctor`: who hangs, who differs, who died, and why."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from torchwhere.commands.arguments import print_json, reading
from torchwhere.core.errors import TorchwhereError

SICK = 1


def add(commands: Any) -> None:
    text = "who hangs, who differs, who died, and why: one verdict, at any time"
    sub = commands.add_parser(
        "doctor",
        help=text,
        description=f"{text}. Exit code: 0 healthy, 1 anything else, 2 nothing to read.",
    )
    sub.add_argument("folder", nargs="?", help="the run's folder")
    sub.add_argument(
        "--flight-recorder",
        metavar="DUMPS",
        help=(
            "a folder of PyTorch's flight recorder dumps: instead of a run, or what they add to it"
        ),
    )
    sub.add_argument("--json", action="store_true", help="as JSON, for programs")
    sub.add_argument(
        "--stall",
        type=float,
        default=10.0,
        metavar="S",
        help="a wait this long is a hang (default: %(default)s s)",
    )
    sub.set_defaults(command=reading(_doctor))


def _doctor(arguments: argparse.Namespace) -> int:
    from torchwhere.flight_recorder.verdict import consult_dumps, with_dumps
    from torchwhere.pipeline.verdict import diagnose_folder
    from torchwhere.render.progress import progress_bar
    from torchwhere.render.verdict import verdict_json, verdict_text

    if arguments.folder is None and arguments.flight_recorder is None:
        raise TorchwhereError("give a run's folder, or a folder of dumps with --flight-recorder")
    if arguments.folder is None:
        with progress_bar("reading dumps") as on_progress:
            verdict = consult_dumps(arguments.flight_recorder, on_progress=on_progress)
    else:
        with progress_bar("reading boxes") as on_progress:
            verdict = diagnose_folder(
                arguments.folder, stall_s=arguments.stall, on_progress=on_progress
            )
        if arguments.flight_recorder is not None:
            with progress_bar("reading dumps") as on_progress:
                verdict = with_dumps(verdict, arguments.flight_recorder, on_progress=on_progress)
    if arguments.json:
        print_json([verdict_json(verdict)])
    else:
        sys.stdout.write(verdict_text(verdict) + "\n")
    return 0 if verdict.kind == "healthy" else SICK
