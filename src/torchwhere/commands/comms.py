"""`torchwhere comms`: which collectives each module causes, as a tree."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from torchwhere.commands.arguments import add_folder, ask, print_json, ranks_asked, reading


def add(commands: Any) -> None:
    text = "which collectives each module causes, as a tree"
    sub = commands.add_parser("comms", help=text, description=text)
    add_folder(sub)
    sub.set_defaults(command=reading(_comms))


def _comms(arguments: argparse.Namespace) -> int:
    from torchwhere.diagnose.comms.tree import comms

    found = ask(arguments, partial(comms, ranks=ranks_asked(arguments)))
    if arguments.json:
        print_json([found.to_dict()])
    else:
        from torchwhere.render import text

        text.print_lines(partial(text.comms_lines, found))
    return 0
