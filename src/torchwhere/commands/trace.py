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

from torchwhere.commands.arguments import add_folder, print_json, ranks_asked, reading, say
from torchwhere.core.atomic_file import destination, destination_folder
from torchwhere.core.errors import TorchwhereError

if TYPE_CHECKING:
    from torchwhere.diagnose.clocks.clocks import Clock, Clocks
    from torchwhere.diagnose.timeline.load import RunTimelines
    from torchwhere.render.trace import TraceCounts

_MOST_STEP = 0xFFFFFFFE
_LEVEL = 3  # of compression: a sixth larger than the best, in a fifth of the time
_MOST_CLOCKS = 8  # that are said
_MOST_DOUBT_NS = 1e6  # that is not


def add(commands: Any) -> None:
    text = "a timeline of all ranks, with aligned clocks, for Perfetto and HTA"
    sub = commands.add_parser("trace", help=text, description=text)
    add_folder(sub)
    sub.add_argument(
        "-o",
        "--out",
        default="trace.json.gz",
        metavar="FILE",
        help=(
            "where to (default: %(default)s); .json: not compressed; -: to stdout; FOLDER/: a file"
            " for each rank, for HTA"
        ),
    )
    chosen = sub.add_mutually_exclusive_group()
    chosen.add_argument("--step", type=_step, dest="steps", metavar="N", help="only this step")
    chosen.add_argument(
        "--steps",
        type=_steps,
        dest="steps",
        metavar="A:B",
        help="only the steps from A to before B",
    )
    sub.set_defaults(command=reading(_trace))


def _step(text: str) -> range:
    if not text.isdecimal() or int(text) > _MOST_STEP:
        raise argparse.ArgumentTypeError(f"{text!r} is not a step: a number of 0 or more")
    return range(int(text), int(text) + 1)


def _steps(text: str) -> range:
    first, colon, last = text.partition(":")
    if not colon or not all(part.isdecimal() for part in (first, last) if part):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of steps: A:B, :B or A:")
    found = range(int(first or 0), min(int(last or _MOST_STEP), _MOST_STEP))
    if not found:
        raise argparse.ArgumentTypeError(
            f"{text!r} holds no step: it goes from the first to before the second"
        )
    return found


def _trace(arguments: argparse.Namespace) -> int:
    if arguments.out == "-" and arguments.json:
        raise TorchwhereError("-o - and --json both write to stdout: give one of them")
    if not arguments.out:
        raise TorchwhereError("-o needs a file: an empty name is none")
    if _is_folder(arguments.out):
        found, counter, size = _write_folder(Path(arguments.out), arguments)
    else:
        found, counter, size = _write_file(arguments.out, arguments)
    if not counter.has_modules:
        say(
            "no module calls are in it: record them with torchwhere run --module-events, or"
            " watch(module_events=True)"
        )
    if arguments.json:
        print_json(
            [
                {
                    "file": arguments.out,
                    "bytes": size,
                    **counter.to_dict(),
                    "clocks": found.clocks.to_dict(),
                }
            ]
        )
    elif arguments.out != "-":
        _print_lines(_summary(arguments.out, size, counter, found.clocks))
    return 0


@contextlib.contextmanager
def _surveyed(arguments: argparse.Namespace) -> Iterator[RunTimelines]:
    """The run, looked through once, with what is to be said of it; a bar on a terminal as long as
    it is gone through."""
    from torchwhere.core.gc_pause import gc_paused
    from torchwhere.diagnose.timeline.load import load_timelines
    from torchwhere.render.progress import progress_bar

    with gc_paused(), progress_bar("reading boxes") as on_progress:
        found = load_timelines(
            arguments.folder,
            ranks=ranks_asked(arguments),
            steps=arguments.steps,
            on_progress=on_progress,
        )
        for caveat in [*found.run.caveats(), *_remarks(found)]:
            say(caveat)
        yield found


def _remarks(found: RunTimelines) -> Iterator[str]:
    if found.lacking:
        few = ", ".join(map(str, found.lacking[:8])) + (
            f" and {len(found.lacking) - 8} more" if len(found.lacking) > 8 else ""
        )
        yield f"not in it, for they have none of these steps: rank {few}"


# -- files -----------------------------------------------------------------------------------------


def _is_folder(out: str) -> bool:
    return out.endswith(("/", os.sep)) or Path(out).is_dir()


def _pieces(found: RunTimelines, counter: TraceCounts) -> Iterator[str]:
    """One file with all ranks."""
    from torchwhere.render import trace

    is_first = True
    for box, each in found.timelines():
        if is_first:
            yield trace.head(box, found)
        writer = trace.RankWriter(box, each, found, counter=counter)
        for piece in trace.joined(writer.events(), is_first=is_first):
            yield piece
            is_first = False
    yield trace.TAIL


def _write_folder(
    folder: Path, arguments: argparse.Namespace
) -> tuple[RunTimelines, TraceCounts, int]:
    """A file for each rank."""
    from torchwhere.render import trace

    counter, names, size = trace.TraceCounts(), set(), 0
    with destination_folder(folder) as part, _surveyed(arguments) as found:
        for box, each in found.timelines():
            writer = trace.RankWriter(box, each, found, counter=counter, is_kineto=True)
            pieces = [
                trace.head(box, found),
                *trace.joined(writer.events(), is_first=True),
                trace.TAIL,
            ]
            path = part / f"rank{box.rank}.json.gz"
            with path.open("xb") as file:
                size += _write(file, pieces, is_packed=True)
            names.add(path.name)
    _say_others(folder, names)
    return found, counter, size


def _say_others(folder: Path, ours: set[str]) -> None:
    """HTA reads all that is in the folder: what an earlier trace of more ranks has left would be
    taken for this one."""
    others = sorted({path.name for path in folder.glob("rank*.json*")} - ours)
    if others:
        few = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        say(f"{folder} has {few} of another trace beside these: HTA reads all that is in it")


def _write_file(out: str, arguments: argparse.Namespace) -> tuple[RunTimelines, TraceCounts, int]:
    """One file with all ranks; its size."""
    from torchwhere.render.trace import TraceCounts

    counter = TraceCounts()
    if out == "-":
        with _surveyed(arguments) as found:
            for piece in _pieces(found, counter):
                sys.stdout.write(piece)
        return found, counter, 0
    with destination(out) as file, _surveyed(arguments) as found:
        size = _write(file, _pieces(found, counter), is_packed=out.endswith(".gz"))
    return found, counter, size


def _write(file: IO[bytes], pieces: Iterable[str], *, is_packed: bool) -> int:
    if is_packed:
        with gzip.GzipFile(
            filename="", fileobj=file, mode="wb", compresslevel=_LEVEL, mtime=0
        ) as packed:
            packed.writelines(piece.encode() for piece in pieces)
    else:
        file.writelines(piece.encode() for piece in pieces)
    return file.tell() if file.seekable() else 0  # a pipe does not know


# -- what is said ----------------------------------------------------------------------------------


def _summary(out: str, size: int, counter: TraceCounts, clocks: Clocks) -> Iterator[str]:
    ranks = f"{len(counter.ranks)} rank{'s' * (len(counter.ranks) != 1)}"
    unfinished = f", {counter.unfinished} unfinished" if counter.unfinished else ""
    yield (
        f"{out}: {ranks}, {counter.slices:,} slices{unfinished}, {counter.flows:,} arrows,"
        f" {size / 1e6:.1f} MB"
    )
    others = [clock for clock in clocks.clocks if clock.evidence != "reference"]
    for clock in others[:_MOST_CLOCKS]:
        yield f"clock of {clock.host or '?'} ({_ranks(clock)}): {_said(clock)}"
    if len(others) > _MOST_CLOCKS:
        yield f"and {len(others) - _MOST_CLOCKS} more clocks; --json has all of them"
    yield (
        "Open it in https://ui.perfetto.dev" if not _is_folder(out) else "One file a rank, for HTA"
    )


def _ranks(clock: Clock) -> str:
    ranks = clock.ranks
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} .. {ranks[-1]}"


def _said(clock: Clock) -> str:
    if clock.evidence == "unmatched":
        return "not aligned, it has no call in common with the first"
    doubt_ns = clock.uncertainty_ns or 0.0
    doubt = f", at most {doubt_ns / 1e6:,.1f} ms off" if doubt_ns > _MOST_DOUBT_NS else ""
    if clock.evidence == "wall clock":
        return f"left as it is, nothing speaks against it{doubt}"
    ahead = (
        f"{abs(clock.line.offset_ns) / 1e6:,.3f} ms"
        f" {'ahead' if clock.line.offset_ns >= 0 else 'behind'}"
    )
    return (
        f"was {ahead}, {clock.line.slope * 1e6:+.1f} ppm, by {clock.calls:,} calls"
        f" ({clock.evidence}){doubt}"
    )


def _print_lines(lines: Iterable[str]) -> None:
    from torchwhere.render.text import plain

    sys.stdout.writelines(f"{plain(line)}\n" for line in lines)
