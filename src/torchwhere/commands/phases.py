"""`torchwhere phases`: where the time of a step goes, rank by rank and over all of them."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from torchwhere.commands.arguments import add_folder, ask, print_json, ranks_asked, reading


def add(commands: Any) -> None:
    text = "where the time of a step goes: the phases of a run"
    sub = commands.add_parser("phases", help=text, description=text)
    add_folder(sub)
    sub.set_defaults(command=reading(_phases))


def _phases(arguments: argparse.Namespace) -> int:
    from torchwhere.diagnose.phases import phases

    found = ask(arguments, partial(phases, ranks=ranks_asked(arguments)))
    if arguments.json:
        print_json([found.to_dict()])
    else:
        from torchwhere.render import text
        from torchwhere.render.phases import phases_lines

        text.print_lines(partial(phases_lines, found))
    return 0
