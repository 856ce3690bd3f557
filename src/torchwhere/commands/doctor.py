"""`torchwhere doctor`: which rank hangs, differs or exited, and why."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from torchwhere.commands.arguments import (
    add_command,
    add_json,
    add_stall,
    folder_of_run,
    print_verdict,
)
from torchwhere.core.errors import TorchwhereError

if TYPE_CHECKING:
    from torchwhere.diagnose.doctor.verdict import Verdict

_NOT_HEALTHY = 1


def add(commands: Any) -> None:
    sub = add_command(
        commands,
        "doctor",
        "diagnose a running or ended job: which rank hangs, differs or exited, and why",
        _doctor,
        more="Exit code: 0 healthy, 1 any other verdict, 2 nothing to read.",
    )
    sub.add_argument(
        "folder", nargs="?", type=folder_of_run, help="folder of the run, or one of its boxes"
    )
    sub.add_argument(
        "--flight-recorder",
        metavar="DUMPS",
        help="folder of PyTorch flight recorder dumps, to use instead of a run or in addition",
    )
    add_json(sub)
    add_stall(sub)


def _doctor(arguments: argparse.Namespace) -> int:
    verdict = _verdict(arguments)
    print_verdict(arguments, verdict)
    return 0 if verdict.kind == "healthy" else _NOT_HEALTHY


def _verdict(arguments: argparse.Namespace) -> Verdict:
    from torchwhere.flight_recorder.verdict import consult_dumps, with_dumps
    from torchwhere.pipeline.verdict import diagnose_folder
    from torchwhere.render.progress import progress_bar

    folder, dumps = arguments.folder, arguments.flight_recorder
    if folder is None and dumps is None:
        raise TorchwhereError(
            "give the folder of a run, or --flight-recorder and a folder of dumps"
        )
    if folder is None:
        with progress_bar("reading dumps") as on_progress:
            return consult_dumps(dumps, on_progress=on_progress)
    with progress_bar("reading boxes") as on_progress:
        verdict = diagnose_folder(folder, stall_s=arguments.stall, on_progress=on_progress)
    if dumps is None:
        return verdict
    with progress_bar("reading dumps") as on_progress:
        return with_dumps(verdict, dumps, on_progress=on_progress)
