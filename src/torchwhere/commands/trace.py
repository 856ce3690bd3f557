"""`torchwhere trace`: a run as a timeline, for Perfetto and HTA."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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
    reading,
)
from torchwhere.core.atomic_file import destination, destination_folder
from torchwhere.core.errors import TorchwhereError
from torchwhere.core.rank_text import ranks_phrase
from torchwhere.core.sanitize import plural

if TYPE_CHECKING:
    from torchwhere.diagnose.clocks.clocks import Clock, Clocks
    from torchwhere.diagnose.timeline.load import RunTimelines
    from torchwhere.render.trace import TraceCounts

_MOST_STEP = 0xFFFFFFFE
_LEVEL = 3  # of compression: a sixth larger than the best level, in a fifth of the time
_MOST_CLOCKS = 8  # printed
_MOST_DOUBT_NS = 1e6  # a smaller uncertainty is not printed


def add(commands: Any) -> None:
    sub = add_command(
        commands, "trace", "write a timeline of all ranks on one clock, for Perfetto and HTA"
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
    sub.set_defaults(command=reading(_trace))


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


@dataclass(frozen=True, slots=True)
class _Written:
    """What a trace holds, and its size in bytes (0 on a pipe)."""

    counts: TraceCounts
    clocks: Clocks
    size: int


def _trace(arguments: argparse.Namespace) -> int:
    out = arguments.out
    if out == "-" and arguments.json:
        raise TorchwhereError("-o - and --json both write to stdout: give only one of them")
    if not out:
        raise TorchwhereError("the file name after -o is empty: give a file")
    if _is_folder(out):
        written = _write_folder(Path(out), arguments)
    else:
        written = _write_file(out, arguments)
    if not written.counts.has_modules:
        print_message(
            "the run has no module calls. To record them, use torchwhere run --module-events or"
            " watch(module_events=True)"
        )
    if arguments.json:
        summary = {"file": out, "bytes": written.size, **written.counts.to_dict()}
        print_json([summary | {"clocks": written.clocks.to_dict()}])
    elif out != "-":
        print_sentences(_summary(out, written))
    return 0


@contextlib.contextmanager
def _loaded(arguments: argparse.Namespace) -> Iterator[RunTimelines]:
    """Load the run and print its caveats; a progress bar lasts as long as the block."""
    from torchwhere.core.worker_pool import gc_paused
    from torchwhere.diagnose.timeline.load import load_timelines
    from torchwhere.render.progress import progress_bar

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
            print_message(f"left out, none of these steps: {ranks_phrase(timelines.lacking)}")
        yield timelines


# -- files -----------------------------------------------------------------------------------------


def _is_folder(out: str) -> bool:
    return out.endswith(("/", os.sep)) or Path(out).is_dir()


def _pieces(timelines: RunTimelines, counts: TraceCounts) -> Iterator[str]:
    """Yield the text of one file with all ranks."""
    from torchwhere.render import trace

    is_first = True
    for box, timeline in timelines.timelines():
        if is_first:
            yield trace.head(box, timelines)
        writer = trace.RankWriter(box, timeline, timelines, counts=counts)
        for piece in trace.joined(writer.events(), is_first=is_first):
            yield piece
            is_first = False
    yield trace.TAIL


def _write_folder(folder: Path, arguments: argparse.Namespace) -> _Written:
    """Write one file for each rank."""
    from torchwhere.render import trace

    counts = trace.TraceCounts()
    names = set()
    size = 0
    with destination_folder(folder) as part, _loaded(arguments) as timelines:
        for box, timeline in timelines.timelines():
            writer = trace.RankWriter(box, timeline, timelines, counts=counts, is_kineto=True)
            pieces = [
                trace.head(box, timelines),
                *trace.joined(writer.events(), is_first=True),
                trace.TAIL,
            ]
            path = part / f"rank{box.rank}.json.gz"
            with path.open("xb") as file:
                size += _write(file, pieces, is_packed=True)
            names.add(path.name)
    _warn_of_other_files(folder, names)
    return _Written(counts, timelines.clocks, size)


def _warn_of_other_files(folder: Path, written: set[str]) -> None:
    """HTA reads every file in the folder, also those of an earlier trace with more ranks."""
    others = sorted({path.name for path in folder.glob("rank*.json*")} - written)
    if others:
        listed = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if others[3:] else "")
        print_message(
            f"{folder} also holds {listed}, from another trace. HTA reads every file in the folder:"
            " delete those"
        )


def _write_file(out: str, arguments: argparse.Namespace) -> _Written:
    """Write one file with all ranks."""
    from torchwhere.render.trace import TraceCounts

    counts = TraceCounts()
    if out == "-":
        with _loaded(arguments) as timelines:
            for piece in _pieces(timelines, counts):
                sys.stdout.write(piece)
        return _Written(counts, timelines.clocks, 0)
    with destination(out) as file, _loaded(arguments) as timelines:
        size = _write(file, _pieces(timelines, counts), is_packed=out.endswith(".gz"))
    return _Written(counts, timelines.clocks, size)


def _write(file: IO[bytes], pieces: Iterable[str], *, is_packed: bool) -> int:
    if is_packed:
        with gzip.GzipFile(
            filename="", fileobj=file, mode="wb", compresslevel=_LEVEL, mtime=0
        ) as packed:
            packed.writelines(piece.encode() for piece in pieces)
    else:
        file.writelines(piece.encode() for piece in pieces)
    return file.tell() if file.seekable() else 0


# -- the summary -----------------------------------------------------------------------------------


def _summary(out: str, written: _Written) -> Iterator[str]:
    counts = written.counts
    unfinished = f", {counts.unfinished} unfinished" if counts.unfinished else ""
    yield (
        f"{out}: {plural(len(counts.ranks), 'rank')}, {counts.slices:,} slices{unfinished},"
        f" {counts.flows:,} arrows, {written.size / 1e6:.1f} MB"
    )
    others = [clock for clock in written.clocks.clocks if clock.evidence != "reference"]
    for clock in others[:_MOST_CLOCKS]:
        yield f"clock of {clock.host or '?'} ({ranks_phrase(clock.ranks)}): {_clock_text(clock)}"
    if len(others) > _MOST_CLOCKS:
        yield f"and {len(others) - _MOST_CLOCKS} more clocks; --json lists all of them"
    yield (
        "One file for each rank, for HTA"
        if _is_folder(out)
        else "Open it in https://ui.perfetto.dev"
    )


def _clock_text(clock: Clock) -> str:
    if clock.evidence == "unmatched":
        return "not aligned, because it shares no call with the first clock"
    doubt_ns = clock.uncertainty_ns or 0.0
    doubt = f", at most {doubt_ns / 1e6:,.1f} ms off" if doubt_ns > _MOST_DOUBT_NS else ""
    if clock.evidence == "wall clock":
        return f"not changed, because nothing contradicts it{doubt}"
    offset_ns = clock.line.offset_ns
    direction = "ahead" if offset_ns >= 0 else "behind"
    return (
        f"was {abs(offset_ns) / 1e6:,.3f} ms {direction}, {clock.line.slope * 1e6:+.1f} ppm, by"
        f" {clock.calls:,} calls ({clock.evidence}){doubt}"
    )
