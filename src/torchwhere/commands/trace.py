"""`torchwhere trace`: a run as a timeline, for Perfetto and HTA."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from torchwhere.commands.arguments import (
    add_command,
    add_folder,
    add_json,
    add_ranks,
    chosen_ranks,
    print_json,
    print_message,
    print_sentences,
)
from torchwhere.core.atomic_file import destination, destination_folder
from torchwhere.core.errors import TorchwhereError

if TYPE_CHECKING:
    from torchwhere.blackbox.box import Box
    from torchwhere.diagnose.clocks.clocks import Clocks
    from torchwhere.diagnose.timeline.load import RunTimelines
    from torchwhere.diagnose.timeline.slices import Timeline
    from torchwhere.render.trace_counts import TraceCounts

_MOST_STEP = 0xFFFFFFFE
_LEVEL = 3  # of compression: a sixth larger than the best level, in a fifth of the time


def add(commands: Any) -> None:
    sub = add_command(
        commands,
        "trace",
        "write a timeline of all ranks on one clock, for Perfetto and HTA",
        _trace,
    )
    add_folder(sub)
    add_ranks(sub)
    sub.add_argument(
        "-o",
        "--out",
        default="trace.json.gz",
        metavar="FILE",
        help=(
            "output (default: %(default)s): FILE.json is not compressed, - is stdout, FOLDER/ gets"
            " one file for each rank, for HTA"
        ),
    )
    steps = sub.add_mutually_exclusive_group()
    steps.add_argument("--step", type=_step, dest="steps", metavar="N", help="write only this step")
    steps.add_argument(
        "--steps",
        type=_steps,
        dest="steps",
        metavar="A:B",
        help="write only the steps from A to B - 1",
    )
    add_json(sub)


def _step(text: str) -> range:
    if not text.isdecimal() or int(text) > _MOST_STEP:
        raise argparse.ArgumentTypeError(f"{text!r} is not a step: a number of 0 or more")
    return range(int(text), int(text) + 1)


def _steps(text: str) -> range:
    first, colon, last = text.partition(":")
    if not colon or not all(part.isdecimal() for part in (first, last) if part):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of steps: A:B, :B or A:")
    steps = range(int(first or 0), min(int(last or _MOST_STEP), _MOST_STEP))
    if not steps:
        raise argparse.ArgumentTypeError(f"{text!r} holds no step: A must be less than B")
    return steps


def _trace(arguments: argparse.Namespace) -> int:
    out = arguments.out
    if out == "-" and arguments.json:
        raise TorchwhereError("-o - and --json both write to stdout: give only one of them")
    if not out:
        raise TorchwhereError("the file name after -o is empty: give a file")
    from torchwhere.render.trace_counts import TraceCounts
    from torchwhere.render.trace_summary import NO_MODULES, trace_summary

    is_folder = out.endswith(("/", os.sep)) or Path(out).is_dir()
    write = _write_folder if is_folder else _write_file
    counts = TraceCounts()
    clocks, size = write(out, arguments, counts)
    if not counts.has_modules:
        print_message(NO_MODULES)
    if arguments.json:
        summary = {"file": out, "bytes": size, **counts.to_dict()}
        print_json(summary | {"clocks": clocks.to_dict()})
    elif out != "-":
        print_sentences(trace_summary(out, counts, clocks=clocks, size=size, is_folder=is_folder))
    return 0


@contextlib.contextmanager
def _loaded(arguments: argparse.Namespace) -> Iterator[RunTimelines]:
    """Load the run and print its caveats; a progress bar lasts as long as the block."""
    from torchwhere.core.worker_pool import gc_paused
    from torchwhere.diagnose.timeline.load import load_timelines
    from torchwhere.render.progress import progress_bar
    from torchwhere.render.trace_summary import lacking_text

    with gc_paused(), progress_bar("reading boxes") as on_progress:
        timelines = load_timelines(
            arguments.folder,
            ranks=chosen_ranks(arguments),
            steps=arguments.steps,
            on_progress=on_progress,
        )
        for caveat in timelines.run.caveats():
            print_message(caveat)
        if timelines.lacking:
            print_message(lacking_text(timelines.lacking))
        yield timelines


# -- files -----------------------------------------------------------------------------------------


def _pieces(
    ranks: Iterable[tuple[Box, Timeline]],
    timelines: RunTimelines,
    counts: TraceCounts,
    *,
    is_kineto: bool = False,
) -> Iterator[str]:
    """Yield the text of one file with these ranks."""
    from torchwhere.render import trace

    is_first = True
    for box, timeline in ranks:
        if is_first:
            yield trace.head(box, timelines)
        writer = trace.RankWriter(box, timeline, timelines, counts=counts, is_kineto=is_kineto)
        for piece in trace.joined(writer.events(), is_first=is_first):
            yield piece
            is_first = False
    yield trace.TAIL


def _write_folder(
    out: str, arguments: argparse.Namespace, counts: TraceCounts
) -> tuple[Clocks, int]:
    """Write one file for each rank. Returns the clocks, and the size of the files in bytes."""
    names = set()
    size = 0
    with destination_folder(out) as part, _loaded(arguments) as timelines:
        for box, timeline in timelines.timelines():
            pieces = _pieces([(box, timeline)], timelines, counts, is_kineto=True)
            path = part / f"rank{box.rank}.json.gz"
            with path.open("xb") as file:
                size += _write(file, pieces, is_packed=True)
            names.add(path.name)
    _warn_of_other_files(Path(out), names)
    return timelines.clocks, size


def _warn_of_other_files(folder: Path, written: set[str]) -> None:
    """HTA reads every file in the folder, also those of an earlier trace with more ranks."""
    from torchwhere.render.trace_summary import other_files_text

    others = sorted({path.name for path in folder.glob("rank*.json*")} - written)
    if others:
        print_message(other_files_text(folder, others))


def _write_file(out: str, arguments: argparse.Namespace, counts: TraceCounts) -> tuple[Clocks, int]:
    """Write one file with all ranks. Returns the clocks, and its size in bytes; 0 on a pipe."""
    if out == "-":
        with _loaded(arguments) as timelines:
            sys.stdout.writelines(_pieces(timelines.timelines(), timelines, counts))
        return timelines.clocks, 0
    with destination(out) as file, _loaded(arguments) as timelines:
        pieces = _pieces(timelines.timelines(), timelines, counts)
        size = _write(file, pieces, is_packed=out.endswith(".gz"))
    return timelines.clocks, size


def _write(file: IO[bytes], pieces: Iterable[str], *, is_packed: bool) -> int:
    if is_packed:
        with gzip.GzipFile(
            filename="", fileobj=file, mode="wb", compresslevel=_LEVEL, mtime=0
        ) as packed:
            packed.writelines(piece.encode() for piece in pieces)
    else:
        file.writelines(piece.encode() for piece in pieces)
    return file.tell() if file.seekable() else 0
