"""`torchwhere report`: one page with everything a run's boxes know, to be opened from disk."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from torchwhere.commands.arguments import print_json, reading
from torchwhere.core.atomic_file import destination

_PAGE = "report.html"


def add(commands: Any) -> None:
    text = "one page with everything a run knows: verdict, rank map, modules, collectives, steps"
    sub = commands.add_parser(
        "report", help=text, description=f"{text}. It needs no network and opens from disk."
    )
    sub.add_argument("folder", help="the run's folder")
    sub.add_argument("-o", "--out", metavar="FILE", help=f"where the page goes (default: {_PAGE})")
    sub.add_argument(
        "--json",
        action="store_true",
        help="the page's data as JSON instead, to stdout or to FILE if it is given",
    )
    sub.set_defaults(command=reading(_report))


def _report(arguments: argparse.Namespace) -> int:
    from torchwhere.render.text import amount, plain

    out = arguments.out or _PAGE
    if arguments.json and arguments.out is None:
        sys.stdout.write(_content(arguments))
        return 0
    with destination(out) as file:  # that it cannot go there is known before the boxes are read
        size = file.write(_content(arguments).encode())
    if arguments.json:
        print_json([{"file": out, "bytes": size}])
    else:
        sys.stdout.write(f"{plain(out)}  {amount(size)}\n")
    return 0


def _content(arguments: argparse.Namespace) -> str:
    from torchwhere.pipeline.report import report_json, report_on
    from torchwhere.render.page.page import page_html, page_json
    from torchwhere.render.progress import progress_bar

    with progress_bar("reading boxes") as on_progress:
        found = report_json(report_on(arguments.folder, on_progress=on_progress))
    return page_json(found) + "\n" if arguments.json else page_html(found)
