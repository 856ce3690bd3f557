"""`torchwhere comms`, `groups`, `layout` and `phases`: one table each from the boxes of a run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
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

# What a table prints: JSON values, and a function that makes the lines for a width.
Output = tuple[Iterable[Any], Callable[..., Iterator["Line"]]]


def add(commands: Any) -> None:
    for name, text, table in _TABLES:
        sub = add_command(commands, name, text, partial(_print_table, table))
        add_folder(sub)
        add_ranks(sub)
        add_json(sub)


def _print_table(
    table: Callable[[BoxRun, set[int] | None], Output], arguments: argparse.Namespace
) -> int:
    values, lines = read_and(arguments, lambda run: table(run, chosen_ranks(arguments)))
    print_result(arguments, values, lines)
    return 0


def _comms(run: BoxRun, ranks: set[int] | None) -> Output:
    from torchwhere.diagnose.comms.tree import comms
    from torchwhere.render.text import comms_lines

    tree = comms(run, ranks=ranks)
    return [tree.to_dict()], partial(comms_lines, tree)


def _groups(run: BoxRun, ranks: set[int] | None) -> Output:
    from torchwhere.diagnose.groups import groups
    from torchwhere.render.text import groups_lines

    process_groups = groups(run, ranks=ranks)
    return process_groups, partial(groups_lines, process_groups)


def _layout(run: BoxRun, ranks: set[int] | None) -> Output:
    from torchwhere.diagnose.layout.layouts import layouts
    from torchwhere.render.layout import layouts_lines

    compared = layouts(run, ranks=ranks)
    if not compared.cohorts:
        raise TorchwhereError(
            f"{run.folder} holds no layout. A layout is recorded at the end of the first step of a"
            " model with parameters, or at the end of the watch: this job ended earlier, or an"
            " older torchwhere recorded it."
        )
    return [compared.to_dict()], partial(layouts_lines, compared)


def _phases(run: BoxRun, ranks: set[int] | None) -> Output:
    from torchwhere.diagnose.phases import phases
    from torchwhere.render.phases import phases_lines

    table = phases(run, ranks=ranks)
    return [table.to_dict()], partial(phases_lines, table)


_TABLES = (
    ("comms", "show the collectives that each module causes, as a tree", _comms),
    ("groups", "show the process groups of a run", _groups),
    ("layout", "show how the model is laid out over the ranks, and which ranks differ", _layout),
    ("phases", "show where the time of a step goes: its parts and your own phases", _phases),
)
