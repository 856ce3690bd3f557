"""`torchwhere layout`: how the models of a run lie over the ranks, and which ranks differ."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from torchwhere.commands.arguments import add_folder, ask, print_json, ranks_asked, reading
from torchwhere.core.errors import TorchwhereError


def add(commands: Any) -> None:
    text = "how the model lies over the ranks, and which ranks differ"
    sub = commands.add_parser("layout", help=text, description=text)
    add_folder(sub)
    sub.set_defaults(command=reading(_layout))


def _layout(arguments: argparse.Namespace) -> int:
    from torchwhere.diagnose.layout.layouts import layouts

    found = ask(arguments, partial(layouts, ranks=ranks_asked(arguments)))
    if not found.cohorts:
        raise TorchwhereError(
            f"{arguments.folder} holds no layout. It is recorded when the first step of a model"
            " with parameters has ended, or the watch; the job ended before, or was recorded by an"
            " older torchwhere."
        )
    if arguments.json:
        print_json([found.to_dict()])
    else:
        from torchwhere.render import text
        from torchwhere.render.layout import layouts_lines

        text.print_lines(partial(layouts_lines, found))
    return 0
