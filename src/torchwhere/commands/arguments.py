"""Code that the subcommands share: arguments, reading the run, printing results, error messages."""

from __future__ import annotations

import argparse
import codecs
import io
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torchwhere.core.errors import TorchwhereError
from torchwhere.core.events import KIND_LABELS, json_text
from torchwhere.core.sanitize import printable
from torchwhere.core.stall import END_STALL_S, STALL_S

if TYPE_CHECKING:
    from torchwhere.blackbox.run import BoxRun
    from torchwhere.diagnose.doctor.verdict import Verdict
    from torchwhere.render.lines import Line

BAD_INPUT = 2
INTERRUPTED = 130  # the exit code that shells use for Ctrl-C
T = TypeVar("T")
Command = Callable[[argparse.Namespace], int]  # returns the exit code
_REPLACE = "torchwhere-replace"
_ASCII = dict(
    zip("\u251c\u2514\u2502\u2500\u2026\u2192\u00b5\u00d7\u00b1\u25b8", "|`|-~>ux~>", strict=True)
)


# -- running a command -----------------------------------------------------------------------------


def reading(command: Command) -> Command:
    """Wrap a command that reads a run: errors become one line on stderr and an exit code.

    A closed pipe (`| head`) ends the command with exit code 0, Ctrl-C with 130.
    """

    def reading_command(arguments: argparse.Namespace) -> int:
        _prepare_output()
        try:
            code = command(arguments)
            sys.stdout.flush()
        except TorchwhereError as error:
            print_message(error)
            return BAD_INPUT
        except KeyboardInterrupt:
            print_message("interrupted")
            return INTERRUPTED
        except BrokenPipeError:
            _discard_output()
            return 0
        except OSError as error:
            _discard_output()
            reason = error.strerror if error.filename is None else error
            print_message(f"cannot continue: {reason}")
            return BAD_INPUT
        return code

    return reading_command


def _prepare_output() -> None:
    """Prepare stdout and stderr for any text.

    An output without Unicode gets ASCII characters instead of a traceback. A closed output (`>&-`)
    is replaced by /dev/null.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - stays open until the exit
    if isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error(_REPLACE, _ascii_instead)
        sys.stdout.reconfigure(errors=_REPLACE)


def _discard_output() -> None:
    """Send stdout to /dev/null, so that Python's flush at exit does not fail and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _ascii_instead(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that the output cannot encode by ASCII ones of the same width."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    return "".join(_ASCII.get(character, "?") for character in characters), error.end


# -- arguments -------------------------------------------------------------------------------------


def add_command(
    commands: Any, name: str, text: str, command: Command, *, more: str = ""
) -> argparse.ArgumentParser:
    """Add a subcommand that calls `reading(command)`. `text` is its line in `torchwhere --help`;
    `more` follows it in its own."""
    sentence = f"{text[0].upper()}{text[1:]}."
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=f"{sentence} {more}".rstrip()
    )
    parser.set_defaults(command=reading(command))
    return parser


def folder_of_run(path: str) -> str:
    """The folder of a run, from its own path or from the path of one of its boxes."""
    from torchwhere.blackbox.run import run_folder

    return run_folder(path)


def add_folder(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("folder", type=folder_of_run, help="folder of the run, or one of its boxes")


def add_ranks(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--rank",
        action="append",
        type=int,
        metavar="R",
        help="use only this rank; can be given several times",
    )


def add_kinds(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--kind",
        action="append",
        choices=KIND_LABELS,
        metavar="KIND",
        help=f"use only events of this kind; can be given several times: {', '.join(KIND_LABELS)}",
    )


def add_json(sub: argparse.ArgumentParser, text: str = "print JSON, for programs") -> None:
    sub.add_argument("--json", action="store_true", help=text)


def add_stall(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--stall",
        type=seconds,
        default=STALL_S,
        metavar="S",
        help="call a wait a hang after this many seconds (default: %(default)g)",
    )


def add_ending_stall(sub: argparse.ArgumentParser) -> None:
    """Add `--stall` to a command with `--end-with`, whose presence decides the default."""
    sub.add_argument(
        "--stall",
        type=seconds,
        metavar="S",
        help=f"call a wait a hang after this many seconds (default: {STALL_S:g}; with --end-with"
        f" {END_STALL_S:g})",
    )


def chosen_stall_s(arguments: argparse.Namespace) -> float:
    """The value of `--stall` of a command with `--end-with`."""
    default = STALL_S if arguments.end_with is None else END_STALL_S
    return default if arguments.stall is None else float(arguments.stall)


def at_least(least: int) -> Callable[[str], int]:
    """Make an argument type: a whole number that is not smaller than `least`."""

    def whole_number(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of {least} or more")
        return int(text)

    return whole_number


def seconds(text: str) -> float:
    """An argument type: a number of seconds, from 0.01 to one day."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not (math.isfinite(number) and 0.01 <= number <= 86400):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds of 0.01 or more")
    return number


def chosen_ranks(arguments: argparse.Namespace) -> set[int] | None:
    return set(arguments.rank) if arguments.rank else None


# -- reading ---------------------------------------------------------------------------------------


def read_and(arguments: argparse.Namespace, analyse: Callable[[BoxRun], T]) -> T:
    """Read the run and analyse it, with a progress bar on a terminal."""
    from torchwhere.blackbox.run import read_run
    from torchwhere.render.progress import progress_bar

    with progress_bar("reading boxes") as on_progress:
        run = read_run(arguments.folder, on_progress=on_progress)
        run.checked_ranks(chosen_ranks(arguments))
        for caveat in run.caveats():
            print_message(caveat)
        return analyse(run)


# -- printing --------------------------------------------------------------------------------------


def print_result(
    arguments: argparse.Namespace, values: Iterable[Any], lines: Callable[..., Iterator[Line]]
) -> None:
    """Print `values` as JSON with `--json`, else the lines that `lines(width=...)` makes."""
    if arguments.json:
        for value in values:
            print_json(value)
        return
    from torchwhere.render.lines import print_lines

    print_lines(lines)


def print_json(value: Any) -> None:
    """Print a JSON object on one line. NaN and infinities, which JSON lacks, become strings."""
    print(json_text(value))


def print_summary(arguments: argparse.Namespace, written: Any) -> None:
    """Print what a command has written: its values as JSON with `--json`, else its text."""
    if arguments.json:
        print_json(written.to_dict())
    else:
        print_sentences(str(written).split("\n"))


def print_verdict(
    arguments: argparse.Namespace, verdict: Verdict, *, other_hosts: Sequence[str] = ()
) -> None:
    """Print a verdict, and sentences about the ranks on other hosts."""
    from torchwhere.render.verdict import verdict_json, verdict_text

    if not arguments.json:
        sys.stdout.write(verdict_text(verdict) + "\n")
        print_sentences(other_hosts)
    elif other_hosts:
        print_json(verdict_json(verdict) | {"other_hosts": other_hosts})
    else:
        print_json(verdict_json(verdict))


def print_sentences(sentences: Iterable[str]) -> None:
    """Print sentences on stdout, each on one line. They may quote any name, so they are
    sanitized."""
    from torchwhere.render.lines import plain

    sys.stdout.writelines(f"{plain(sentence)}\n" for sentence in sentences)


def print_message(message: object) -> None:
    """Print a message on one line of stderr. It may quote any file name, so it is sanitized."""
    print("torchwhere:", printable(message), file=sys.stderr)
