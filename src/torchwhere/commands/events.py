"""`torchwhere events`: what was recorded, as a table or as JSON."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from torchwhere.commands.arguments import add_folder, ask, print_json, ranks_asked, reading, say
from torchwhere.core.events import KIND_LABELS

if TYPE_CHECKING:
    from torchwhere.blackbox.run import BoxRun
    from torchwhere.core.events import Event


def add(commands: Any) -> None:
    text = "the events of a run, as a table or as JSON"
    sub = commands.add_parser("events", help=text, description=text)
    add_folder(sub)
    sub.add_argument("--last", type=_count, metavar="N", help="only the last N of each rank")
    sub.add_argument(
        "--kind", action="append", choices=KIND_LABELS, metavar="KIND", help=", ".join(KIND_LABELS)
    )
    sub.set_defaults(command=reading(_events))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def _events(arguments: argparse.Namespace) -> int:
    run = ask(arguments, lambda run: run)
    kinds = set(arguments.kind) if arguments.kind else None
    events: Iterator[Event] = run.events(
        ranks=ranks_asked(arguments), kinds=kinds, last=arguments.last
    )
    first = next(events, None)
    if first is None:
        say(f"no such events in {arguments.folder}")
        return 0
    events = itertools.chain([first], events)
    if arguments.json:
        print_json(event.to_dict() for event in events)
    else:
        from torchwhere.render import text

        text.print_lines(partial(text.events_lines, events, started_ns=_started_ns(run)))
    return 0


def _started_ns(run: BoxRun) -> int:
    started = [box.meta.get("started_ns") for box in run.summaries.values()]
    return min((value for value in started if isinstance(value, int)), default=0)
