"""`torchwhere comms`, `groups`, `layout` and `phases`: one table each from the boxes of a run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from torchwhere.blackbox.run import BoxRun
    from torchwhere.render.lines import Line

# A table is a method of `torchwhere.Run`, and has the name of its command.
_TABLES = {
    "comms": "show the collectives that each module causes, as a tree",
    "groups": "show the process groups of a run",
    "layout": "show how the model is laid out over the ranks, and which ranks differ",
    "phases": "show where the time of a step goes: its parts and your own phases",
}


def add(commands: Any) -> None:
    for name, text in _TABLES.items():
        sub = add_command(commands, name, text, partial(_print_table, name))
        add_folder(sub)
        add_ranks(sub)
        add_json(sub)


def _print_table(name: str, arguments: argparse.Namespace) -> int:
    table = read_and(arguments, partial(_table, name, chosen_ranks(arguments)))
    values = table if name == "groups" else [table.to_dict()]
    print_result(arguments, values, partial(_lines(name), table))
    return 0


def _table(name: str, ranks: set[int] | None, run: BoxRun) -> Any:
    from torchwhere.api.run import run_of

    table = getattr(run_of(run), name)(ranks=ranks)
    if name == "layout" and not table.cohorts:
        raise TorchwhereError(
            f"{run.folder} holds no layout. A layout is recorded at the end of the first step of a"
            " model with parameters, or at the end of the watch: this job ended earlier, or an"
            " older torchwhere recorded it."
        )
    return table


def _lines(name: str) -> Callable[..., Iterator[Line]]:
    from torchwhere.render import layout, phases, text

    lines: dict[str, Callable[..., Iterator[Line]]] = {
        "comms": text.comms_lines,
        "groups": text.groups_lines,
        "layout": layout.layouts_lines,
        "phases": phases.phases_lines,
    }
    return lines[name]
