"""`torchwhere events`: the recorded events, as a table or as JSON."""

from __future__ import annotations

import argparse
import itertools
from functools import partial
from typing import Any

from torchwhere.commands.arguments import (
    add_command,
    add_folder,
    add_json,
    add_kinds,
    add_ranks,
    at_least,
    chosen_ranks,
    print_message,
    print_result,
    read_and,
)


def add(commands: Any) -> None:
    sub = add_command(commands, "events", "show the events of a run, rank by rank", _events)
    add_folder(sub)
    add_ranks(sub)
    sub.add_argument(
        "--last", type=at_least(1), metavar="N", help="show only the last N events of each rank"
    )
    add_kinds(sub)
    add_json(sub, "print one JSON object per line, for programs")


def _events(arguments: argparse.Namespace) -> int:
    from torchwhere.blackbox.device import device_lanes
    from torchwhere.blackbox.summary import started_ns
    from torchwhere.render.text import events_lines

    run = read_and(arguments, lambda run: run)
    kinds = set(arguments.kind) if arguments.kind else None
    events = run.events(ranks=chosen_ranks(arguments), kinds=kinds, last=arguments.last)
    first = next(events, None)
    if first is None:
        print_message(f"{arguments.folder} has no such events")
        return 0
    events = itertools.chain([first], events)
    first_start_ns = min(filter(None, map(started_ns, run.summaries.values())), default=0)
    has_device = bool(device_lanes(run.boxes[first.place.rank]))
    print_result(
        arguments,
        (event.to_dict() for event in events),
        partial(events_lines, events, started_ns=first_start_ns, has_device=has_device),
    )
    return 0
