"""`torchwhere diff`: where ranks that should do the same part, in their events and in their logs.

Exit codes: 0 no difference, 1 they differ, 2 nothing to compare.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from torchwhere.commands.arguments import add_folder, ask, print_json, ranks_asked, reading
from torchwhere.core.errors import TorchwhereError

_THEY_DIFFER = 1


def add(commands: Any) -> None:
    text = "where ranks part: the first place where their events or logs differ"
    sub = commands.add_parser(
        "diff", help=text, description=f"{text}. Exit code 0: no difference; 1: they differ."
    )
    add_folder(sub)
    sub.add_argument(
        "--logs",
        metavar="WHERE",
        help="the ranks' logs: a folder, or a pattern like 'logs/*/stdout.log'",
    )
    sub.add_argument(
        "--strip",
        action="append",
        default=[],
        metavar="REGEX",
        help="what else may differ (may be repeated)",
    )
    sub.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="REGEX",
        help="lines and events to leave out",
    )
    sub.set_defaults(command=reading(_diff))


def _diff(arguments: argparse.Namespace) -> int:
    from torchwhere.diagnose.diff.comparison import diff, find_logs

    logs = find_logs(Path(arguments.folder), arguments.logs)
    compare = partial(
        diff,
        logs=logs,
        ranks=ranks_asked(arguments),
        strip=arguments.strip,
        ignore=arguments.ignore,
    )
    try:
        found = compare(None) if _has_only_logs(arguments, logs) else ask(arguments, compare)
    except ValueError as error:
        raise TorchwhereError(str(error)) from None
    if arguments.json:
        print_json([found.to_dict()])
    else:
        from torchwhere.render import text
        from torchwhere.render.diff import diff_lines

        text.print_lines(partial(diff_lines, found))
    return 0 if found.is_equal else _THEY_DIFFER


def _has_only_logs(arguments: argparse.Namespace, logs: object) -> bool:
    folder = Path(arguments.folder)
    return bool(logs) and folder.is_dir() and not any(folder.glob("*.box"))
