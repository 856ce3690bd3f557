"""The command: `torchwhere run`, `events`, `comms`, `groups`.

Exit codes: 0 done, also when `| head` has seen enough; 2 wrong arguments, nothing there to read, or a script that cannot be
started (the message says what to do). Once its script has started, `run` ends exactly as the script does.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torchwhere.errors import TorchwhereError
from torchwhere.events import KIND_LABELS
from torchwhere.version import __version__

if TYPE_CHECKING:
    from torchwhere.blackbox.run import Run
    from torchwhere.events import Event

BAD_INPUT = 2
_DEFAULT_RECORDS = 1 << 16


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    return int(arguments.command(arguments))


def _reading(command: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """A command that reads a run: what it cannot read it says on one line; `| head` may stop it at any time."""

    def read(arguments: argparse.Namespace) -> int:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal that knows no Unicode gets question marks, not a traceback
        try:
            code = command(arguments)
            sys.stdout.flush()
        except TorchwhereError as error:
            _say(error)
            return BAD_INPUT
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        return code

    return read


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="torchwhere", description="Where is it? The place of a PyTorch job, on every rank.")
    parser.add_argument("--version", action="version", version=f"torchwhere {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands)
    _add_events(commands)
    for name, command, text in (
        ("comms", _comms, "which collectives each module causes, as a tree"),
        ("groups", _groups, "the process groups of a run"),
    ):
        sub = commands.add_parser(name, help=text, description=text)
        _add_folder(sub)
        sub.set_defaults(command=_reading(command))
    return parser


def _add_run(commands: Any) -> None:
    sub = commands.add_parser(
        "run",
        help="run a training script under watch, unchanged",
        description="Run a training script under watch: torchrun --nproc-per-node 4 -m torchwhere run --out run/ train.py",
    )
    sub.add_argument("--out", default="torchwhere-run", help="folder for the black boxes (default: %(default)s)")
    sub.add_argument("--module-events", action="store_true", help="record every module call as an event")
    sub.add_argument("--records", type=_ring_size, default=_DEFAULT_RECORDS, help="size of the ring (default: %(default)s)")
    sub.add_argument("-m", dest="is_module", action="store_true", help="the script is a module's name, as for python -m")
    sub.add_argument("script", help="path of the script, or name of the module")
    sub.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    sub.set_defaults(command=_run)


def _add_events(commands: Any) -> None:
    text = "the events of a run, as a table or as JSON"
    sub = commands.add_parser("events", help=text, description=text)
    _add_folder(sub)
    sub.add_argument("--last", type=_count, metavar="N", help="only the last N of each rank")
    sub.add_argument("--kind", action="append", choices=KIND_LABELS, metavar="KIND", help=", ".join(KIND_LABELS))
    sub.set_defaults(command=_reading(_events))


def _add_folder(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("folder", help="the run's folder")
    sub.add_argument("--rank", action="append", type=int, metavar="R", help="only this rank (may be repeated)")
    sub.add_argument("--json", action="store_true", help="as JSON, for programs")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def _ring_size(text: str) -> int:
    if not text.isdecimal() or int(text) < 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 16 or more")
    return int(text)


# -- commands --------------------------------------------------------------------------------------------------------------


def _run(arguments: argparse.Namespace) -> int:
    from torchwhere import launch

    try:
        execute = launch.begin(
            arguments.script,
            arguments.arguments,
            out=arguments.out,
            is_module=arguments.is_module,
            module_events=arguments.module_events,
            records=arguments.records,
        )
    except TorchwhereError as error:
        _say(error)
        return BAD_INPUT
    execute()  # outside the try: what is raised from here on is the script's own
    return 0


def _events(arguments: argparse.Namespace) -> int:
    run = _read(arguments)
    kinds = set(arguments.kind) if arguments.kind else None
    events: Iterator[Event] = run.events(ranks=_ranks(arguments), kinds=kinds, last=arguments.last)
    first = next(events, None)
    if first is None:
        _say(f"no such events in {arguments.folder}")
        return 0
    events = itertools.chain([first], events)
    if arguments.json:
        _print_json(event.to_dict() for event in events)
    else:
        from torchwhere.show import text

        text.print_lines(partial(text.events_lines, events, started_ns=_started_ns(run)))
    return 0


def _started_ns(run: Run) -> int:
    started = [box.meta.get("started_ns") for box in run.boxes.values()]
    return min((value for value in started if isinstance(value, int)), default=0)


def _comms(arguments: argparse.Namespace) -> int:
    from torchwhere.diagnose.comms import comms

    found = comms(_read(arguments), ranks=_ranks(arguments))
    if arguments.json:
        _print_json([found.to_dict()])
    else:
        from torchwhere.show import text

        text.print_lines(partial(text.comms_lines, found))
    return 0


def _groups(arguments: argparse.Namespace) -> int:
    run = _read(arguments)
    ranks = _ranks(arguments)
    found: dict[str, dict[str, Any]] = {}
    for rank, box in sorted(run.boxes.items()):
        if ranks is None or rank in ranks:
            found |= box.groups()
    groups = [found[name] for name in sorted(found, key=lambda name: (len(name), name))]
    if arguments.json:
        _print_json(groups)
    else:
        from torchwhere.show import text

        text.print_lines(partial(text.groups_lines, groups))
    return 0


def _read(arguments: argparse.Namespace) -> Run:
    from torchwhere.blackbox.run import read_run

    run = read_run(arguments.folder)
    unknown = sorted((_ranks(arguments) or set()) - set(run.boxes))
    if unknown:
        raise TorchwhereError(f"{arguments.folder} has no box of rank {unknown[0]}; it has ranks {_span(sorted(run.boxes))}")
    for caveat in run.caveats():
        _say(caveat)
    return run


def _ranks(arguments: argparse.Namespace) -> set[int] | None:
    return set(arguments.rank) if arguments.rank else None


def _span(ranks: list[int]) -> str:
    return f"{ranks[0]} to {ranks[-1]}" if len(ranks) > 8 else ", ".join(map(str, ranks))


# -- output ----------------------------------------------------------------------------------------------------------------


def _print_json(values: Iterable[Any]) -> None:
    """One object a line. NaN and infinities, which JSON does not have, become texts."""
    for value in values:
        try:
            line = json.dumps(value, allow_nan=False)
        except ValueError:
            line = json.dumps(_finite(value))
        print(line)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _say(message: object) -> None:
    """To stderr, on one line; a folder's name may hold anything."""
    print("torchwhere:", "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(message)), file=sys.stderr)
