"""`torchwhere export`: the events of a run as Parquet or JSON lines, for DuckDB, Polars,
Spark..."""

from __future__ import annotations

import argparse
from typing import Any

from torchwhere.commands.arguments import (
    add_command,
    add_folder,
    add_json,
    add_kinds,
    add_ranks,
    chosen_ranks,
    print_summary,
)


def add(commands: Any) -> None:
    sub = add_command(
        commands,
        "export",
        "write the events of a run as Parquet or JSON lines, for other tools",
        _export,
        more="Parquet needs: pip install 'torchwhere[parquet]'",
    )
    add_folder(sub)
    sub.add_argument(
        "-o",
        "--out",
        required=True,
        metavar="FILE",
        help="output; its name ends with .parquet (a folder), .jsonl or .jsonl.gz",
    )
    add_ranks(sub)
    add_kinds(sub)
    sub.add_argument(
        "--force", action="store_true", help="replace an earlier export of the same name"
    )
    add_json(sub, "print a summary of the export as JSON")


def _export(arguments: argparse.Namespace) -> int:
    from torchwhere.api.export import export
    from torchwhere.render.progress import progress_bar

    with progress_bar("exporting") as on_progress:
        written = export(
            arguments.folder,
            out=arguments.out,
            ranks=chosen_ranks(arguments),
            kinds=arguments.kind,
            force=arguments.force,
            on_progress=on_progress,
        )
    print_summary(arguments, written)
    return 0
