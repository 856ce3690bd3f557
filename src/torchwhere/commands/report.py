"""`torchwhere report`: one HTML page with everything that the boxes of a run show."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from torchwhere.commands.arguments import (
    add_command,
    add_folder,
    add_json,
    print_json,
    print_sentences,
)
from torchwhere.core.atomic_file import destination
from torchwhere.core.units import amount

_PAGE = "report.html"


def add(commands: Any) -> None:
    sub = add_command(
        commands,
        "report",
        "write one HTML page: verdict, rank map, modules, collectives, steps",
        _report,
        more="It opens from disk and needs no network.",
    )
    add_folder(sub)
    sub.add_argument("-o", "--out", metavar="FILE", help=f"output file (default: {_PAGE})")
    add_json(sub, "write the data of the page as JSON instead, to stdout or to FILE")


def _report(arguments: argparse.Namespace) -> int:
    out = arguments.out or _PAGE
    if arguments.json and arguments.out is None:
        sys.stdout.write(_content(arguments))
        return 0
    with destination(
        out
    ) as file:  # an output that cannot be written fails before the boxes are read
        size = file.write(_content(arguments).encode())
    if arguments.json:
        print_json({"file": out, "bytes": size})
    else:
        print_sentences([f"{out}  {amount(size)}"])
    return 0


def _content(arguments: argparse.Namespace) -> str:
    from torchwhere.pipeline.report import report_json, report_on
    from torchwhere.render.page.page import page_html, page_json
    from torchwhere.render.progress import progress_bar

    with progress_bar("reading boxes") as on_progress:
        report = report_json(report_on(arguments.folder, on_progress=on_progress))
    return page_json(report) + "\n" if arguments.json else page_html(report)
