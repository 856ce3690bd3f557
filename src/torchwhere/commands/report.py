"""`torchwhere report`: one page with everything a run's boxes know, to be opened from disk.

The page is written beside its place and then put there: an older one is whole until the new one is.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchwhere.commands.reading import print_json, reading
from torchwhere.errors import TorchwhereError

_PAGE = "report.html"


def add(commands: Any) -> None:
    text = "one page with everything a run knows: verdict, rank map, modules, collectives, steps"
    sub = commands.add_parser("report", help=text, description=f"{text}. It needs no network and opens from disk.")
    sub.add_argument("folder", help="the run's folder")
    sub.add_argument("-o", "--out", metavar="FILE", help=f"where the page goes (default: {_PAGE})")
    sub.add_argument("--json", action="store_true", help="the page's data as JSON instead, to the standard output or to FILE")
    sub.set_defaults(command=reading(_report))


def _report(arguments: argparse.Namespace) -> int:
    from torchwhere.reporting import report_json, report_on
    from torchwhere.show.page.page import page_html, page_json
    from torchwhere.show.progress import progress_bar
    from torchwhere.show.text import amount, plain

    out = None if arguments.json and arguments.out is None else _place(arguments.out or _PAGE)
    with progress_bar("reading boxes") as on_progress:
        found = report_json(report_on(arguments.folder, on_progress=on_progress))
    if out is None:
        print_json([found])
        return 0
    content = (page_json(found) + "\n" if arguments.json else page_html(found)).encode()
    _write(out, content)
    sys.stdout.write(f"{plain(arguments.out or _PAGE)}  {amount(len(content))}\n")
    return 0


def _place(out: str) -> Path:
    """Where it goes; that it can go there is known before the boxes are read."""
    path = Path(out).resolve()  # where a link leads, the link stays
    if path.is_dir():
        raise TorchwhereError(f"{out} is a folder; give the name of a file, like {Path(out) / _PAGE}")
    if not path.parent.is_dir():
        raise TorchwhereError(f"{Path(out).parent} is no folder; make it first, or give another place with -o")
    if not os.access(path if path.exists() and not path.is_file() else path.parent, os.W_OK):
        raise TorchwhereError(f"{Path(out).parent} cannot be written to; give another place with -o")
    return path


def _write(path: Path, content: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    try:
        if path.exists() and not path.is_file():  # a pipe or a device stays what it is
            path.write_bytes(content)
            return
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise TorchwhereError(f"{path} could not be written: {error.strerror}; give another place with -o") from None
