"""`torchwhere doctor`: who hangs, who differs, who died, and why."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from torchwhere.commands.reading import print_json, reading

SICK = 1


def add(commands: Any) -> None:
    text = "who hangs, who differs, who died, and why: one verdict, at any time"
    sub = commands.add_parser(
        "doctor",
        help=text,
        description=f"{text}. Exit code: 0 healthy, 1 anything else, 2 nothing to read.",
    )
    sub.add_argument("folder", help="the run's folder")
    sub.add_argument("--json", action="store_true", help="as JSON, for programs")
    sub.add_argument(
        "--stall", type=float, default=10.0, metavar="S", help="a wait this long is a hang (default: %(default)s s)"
    )
    sub.set_defaults(command=reading(_doctor))


def _doctor(arguments: argparse.Namespace) -> int:
    from torchwhere.consultation import consult
    from torchwhere.show.verdict import verdict_json, verdict_text

    verdict = consult(arguments.folder, stall_s=arguments.stall)
    if arguments.json:
        print_json([verdict_json(verdict)])
    else:
        sys.stdout.write(verdict_text(verdict) + "\n")
    return 0 if verdict.kind == "healthy" else SICK
