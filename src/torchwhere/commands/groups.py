"""`torchwhere groups`: the process groups of a run."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from torchwhere.commands.reading import add_folder, print_json, ranks_asked, read_folder, reading


def add(commands: Any) -> None:
    text = "the process groups of a run"
    sub = commands.add_parser("groups", help=text, description=text)
    add_folder(sub)
    sub.set_defaults(command=reading(_groups))


def _groups(arguments: argparse.Namespace) -> int:
    run = read_folder(arguments)
    ranks = ranks_asked(arguments)
    found: dict[str, dict[str, Any]] = {}
    for rank, box in sorted(run.boxes.items()):
        if ranks is None or rank in ranks:
            found |= box.groups()
    groups = [found[name] for name in sorted(found, key=lambda name: (len(name), name))]
    if arguments.json:
        print_json(groups)
    else:
        from torchwhere.show import text

        text.print_lines(partial(text.groups_lines, groups))
    return 0
