"""Sphinx extension: the directive `command-reference` shows every command with its options."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from command_help import ArgumentHelp, CommandHelp, all_commands
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class CommandReference(SphinxDirective):
    """Inserts one section for each command."""

    def run(self) -> list[nodes.Node]:
        return [_section(command) for command in all_commands()]


def _section(command: CommandHelp) -> nodes.section:
    title = f"torchwhere {command.name}"
    section = nodes.section("", ids=[nodes.make_id(title)], names=[title])
    section += nodes.title("", title)
    section += nodes.paragraph("", command.description)
    section += nodes.literal_block(command.usage, command.usage, language="none")
    section += _table(command.arguments)
    return section


def _table(arguments: Iterable[ArgumentHelp]) -> nodes.table:
    body = nodes.tbody()
    for argument in arguments:
        body += _row(nodes.literal("", argument.spelling), nodes.Text(argument.text))
    head = nodes.thead("", _row(nodes.Text("argument"), nodes.Text("meaning")))
    columns = [nodes.colspec(colwidth=width) for width in (30, 70)]
    return nodes.table("", nodes.tgroup("", *columns, head, body, cols=2))


def _row(*cells: nodes.Node) -> nodes.row:
    return nodes.row("", *(nodes.entry("", nodes.paragraph("", "", cell)) for cell in cells))


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("command-reference", CommandReference)
    return {"parallel_read_safe": True}
