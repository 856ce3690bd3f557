"""`torchwhere export`: the events of a run for DuckDB, Polars, Spark, Ray and whatever else reads
Parquet or JSON."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from torchwhere.commands.arguments import print_json, ranks_asked, reading
from torchwhere.core.events import KIND_LABELS


def add(commands: Any) -> None:
    text = "write the events of a run as Parquet or JSON lines, for other tools"
    sub = commands.add_parser(
        "export", help=text, description=f"{text}. Parquet needs: pip install 'torchwhere[parquet]'"
    )
    sub.add_argument("folder", help="the run's folder")
    sub.add_argument(
        "-o",
        "--out",
        required=True,
        metavar="FILE",
        help="what to write: its name ends with .parquet (a folder), .jsonl or .jsonl.gz",
    )
    sub.add_argument(
        "--rank", action="append", type=int, metavar="R", help="only this rank (may be repeated)"
    )
    sub.add_argument(
        "--kind", action="append", choices=KIND_LABELS, metavar="KIND", help=", ".join(KIND_LABELS)
    )
    sub.add_argument("--force", action="store_true", help="replace an earlier export of that name")
    sub.add_argument("--json", action="store_true", help="say what was written as JSON")
    sub.set_defaults(command=reading(_export))


def _export(arguments: argparse.Namespace) -> int:
    from torchwhere.api.export import export
    from torchwhere.render.progress import progress_bar
    from torchwhere.render.text import plain

    with progress_bar("exporting") as on_progress:
        written = export(
            arguments.folder,
            out=arguments.out,
            ranks=ranks_asked(arguments),
            kinds=arguments.kind,
            force=arguments.force,
            on_progress=on_progress,
        )
    if arguments.json:
        print_json([written.to_dict()])
    else:
        sys.stdout.writelines(f"{plain(line)}\n" for line in str(written).split("\n"))
    return 0
