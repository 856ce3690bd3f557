"""`torchwhere diff`: where ranks that should do the same differ, in their events and in their logs.

Exit codes: 0 no difference, 1 a difference, 2 nothing to compare.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from torchwhere.commands.arguments import (
    add_command,
    add_folder,
    add_json,
    add_ranks,
    chosen_ranks,
    print_result,
    read_and,
)
from torchwhere.core.errors import TorchwhereError

_DIFFERENT = 1


def add(commands: Any) -> None:
    sub = add_command(
        commands,
        "diff",
        "show the first place where the events or the logs of ranks differ",
        _diff,
        more="Exit code: 0 no difference, 1 a difference.",
    )
    add_folder(sub)
    add_ranks(sub)
    sub.add_argument(
        "--logs",
        metavar="WHERE",
        help="logs of the ranks: a folder, or a pattern like 'logs/*/stdout.log'",
    )
    sub.add_argument(
        "--strip",
        action="append",
        default=[],
        metavar="REGEX",
        help="ignore this text inside lines and events; can be given several times",
    )
    sub.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="REGEX",
        help="ignore whole lines and events that match; can be given several times",
    )
    add_json(sub)


def _diff(arguments: argparse.Namespace) -> int:
    from torchwhere.diagnose.diff.comparison import diff, find_logs
    from torchwhere.render.diff import diff_lines

    folder = Path(arguments.folder)
    logs = find_logs(folder, arguments.logs)
    has_only_logs = bool(logs) and folder.is_dir() and not any(folder.glob("*.box"))
    compare = partial(
        diff,
        logs=logs,
        ranks=chosen_ranks(arguments),
        strip=arguments.strip,
        ignore=arguments.ignore,
    )
    try:
        result = compare(None) if has_only_logs else read_and(arguments, compare)
    except ValueError as error:
        raise TorchwhereError(str(error)) from None
    print_result(arguments, [result.to_dict()], partial(diff_lines, result))
    return 0 if result.is_equal else _DIFFERENT
