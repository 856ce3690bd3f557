"""`torchwhere groups`: the process groups of a run."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from torchwhere.commands.arguments import add_folder, ask, print_json, ranks_asked, reading


def add(commands: Any) -> None:
    text = "the process groups of a run"
    sub = commands.add_parser("groups", help=text, description=text)
    add_folder(sub)
    sub.set_defaults(command=reading(_groups))


def _groups(arguments: argparse.Namespace) -> int:
    from torchwhere.diagnose.groups import groups

    found = ask(arguments, partial(groups, ranks=ranks_asked(arguments)))
    if arguments.json:
        print_json(found)
    else:
        from torchwhere.render import text

        text.print_lines(partial(text.groups_lines, found))
    return 0
