"""The help of every torchwhere command as data, from the argparse parser. It needs no Sphinx."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from torchwhere import cli

_WIDTH = 78


@dataclass(frozen=True, slots=True)
class ArgumentHelp:
    """One argument or option: how to write it, and what it does."""

    spelling: str  # `folder`, or `-o FILE, --out FILE`
    text: str


@dataclass(frozen=True, slots=True)
class CommandHelp:
    """One command: its name, usage, description and arguments."""

    name: str
    usage: str
    description: str
    arguments: tuple[ArgumentHelp, ...]


def all_commands() -> list[CommandHelp]:
    """Return the help of all commands in alphabetical order."""
    parser = cli.build_parser()
    subparsers = next(
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    return [_command(name, subparser) for name, subparser in sorted(subparsers.choices.items())]


def _command(name: str, parser: argparse.ArgumentParser) -> CommandHelp:
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=_WIDTH)
    arguments = [
        _argument(parser, action)
        for action in parser._actions
        if action.help != argparse.SUPPRESS and action.dest != "help"
    ]
    usage = parser.format_usage().removeprefix("usage: ").rstrip()
    return CommandHelp(name, usage, parser.description or "", tuple(arguments))


def _argument(parser: argparse.ArgumentParser, action: argparse.Action) -> ArgumentHelp:
    text = (action.help or "") % (vars(action) | {"prog": parser.prog})
    if not action.option_strings:
        return ArgumentHelp(_value_name(action), text)
    value = "" if action.nargs == 0 else f" {_value_name(action)}"
    spelling = ", ".join(f"{option}{value}" for option in action.option_strings)
    return ArgumentHelp(spelling, text)


def _value_name(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        return action.metavar
    return action.dest.upper() if action.option_strings else action.dest
