"""What all commands share that read a run's folder: its arguments, how it is read, and what is said
when that fails."""

from __future__ import annotations

import argparse
import codecs
import io
import os
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from torchwhere.core.errors import TorchwhereError
from torchwhere.core.events import json_text

if TYPE_CHECKING:
    from torchwhere.blackbox.run import BoxRun

BAD_INPUT = 2
INTERRUPTED = 130  # what shells say of Ctrl-C
T = TypeVar("T")
_PLAINER = "torchwhere-plainer"
_PLAIN = dict(
    zip("\u251c\u2514\u2502\u2500\u2026\u2192\u00b5\u00d7\u00b1\u25b8", "|`|-~>ux~>", strict=True)
)


def reading(command: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """A command that reads a run: what it cannot read, or write, it says on one line; `| head` and
    Ctrl-C may stop it."""

    def reading_command(arguments: argparse.Namespace) -> int:
        _prepare_output()
        try:
            code = command(arguments)
            sys.stdout.flush()
        except TorchwhereError as error:
            say(error)
            return BAD_INPUT
        except KeyboardInterrupt:
            say("interrupted")
            return INTERRUPTED
        except BrokenPipeError:
            _write_no_more()
            return 0
        except OSError as error:
            _write_no_more()
            say(f"cannot go on: {error.strerror if error.filename is None else error}")
            return BAD_INPUT
        return code

    return reading_command


def _prepare_output() -> None:
    """A terminal that knows no Unicode gets plainer signs, not a traceback; what is closed (`>&-`)
    swallows all."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error(_PLAINER, _plainer)
        sys.stdout.reconfigure(errors=_PLAINER)


def _write_no_more() -> None:
    """Or Python would try to write what is left when it ends, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _plainer(error: UnicodeError) -> tuple[str, int]:
    """What stands for signs that an output does not know, each as wide as what it stands for."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end]
    return "".join(_PLAIN.get(sign, "?") for sign in signs), error.end


def add_folder(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("folder", help="the run's folder")
    sub.add_argument(
        "--rank", action="append", type=int, metavar="R", help="only this rank (may be repeated)"
    )
    sub.add_argument("--json", action="store_true", help="as JSON, for programs")


def ask(arguments: argparse.Namespace, question: Callable[[BoxRun], T]) -> T:
    """What a question finds in the run, with a bar on a terminal while its boxes are read and gone
    through."""
    from torchwhere.render.progress import progress_bar

    with progress_bar("reading boxes") as on_progress:
        return question(read_folder(arguments, on_progress=on_progress))


def read_folder(
    arguments: argparse.Namespace, *, on_progress: Callable[[int, int], None] | None = None
) -> BoxRun:
    from torchwhere.blackbox.run import read_run

    run = read_run(arguments.folder, on_progress=on_progress)
    unknown = sorted((ranks_asked(arguments) or set()) - set(run.boxes))
    if unknown:
        raise TorchwhereError(
            f"{arguments.folder} has no box of rank {unknown[0]}; it has ranks"
            f" {_span(sorted(run.boxes))}"
        )
    for caveat in run.caveats():
        say(caveat)
    return run


def ranks_asked(arguments: argparse.Namespace) -> set[int] | None:
    return set(arguments.rank) if arguments.rank else None


def _span(ranks: list[int]) -> str:
    return f"{ranks[0]} to {ranks[-1]}" if len(ranks) > 8 else ", ".join(map(str, ranks))


def print_json(values: Iterable[Any]) -> None:
    """One object a line. NaN and infinities, which JSON does not have, become texts."""
    for value in values:
        print(json_text(value))


def say(message: object) -> None:
    """To stderr, on one line; a folder's name may hold anything."""
    print(
        "torchwhere:",
        "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(message)),
        file=sys.stderr,
    )
