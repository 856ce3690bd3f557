"""Writes the events of a run for other tools: Parquet for DuckDB, Polars, Spark and Ray, or JSON
lines.

Takes a folder of boxes and the name of the output, which gives the format. Returns a summary
(`Exported`). Holds one box in memory at a time, for any number of ranks. Checks that the output is
writable before it reads the boxes. The output gets its name only when it is complete. An
interrupted export to Parquet resumes where it stopped.
"""

from __future__ import annotations

import contextlib
import gzip
import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.reader import BoxReader, read_or_empty
from torchwhere.blackbox.run import RunSummary, box_files, choose, read_summaries, run_folder
from torchwhere.blackbox.summary import BoxSummary
from torchwhere.core.atomic_file import destination, partial_path, write_errors
from torchwhere.core.errors import TorchwhereError
from torchwhere.core.events import json_text, known_kinds
from torchwhere.core.results import Shown
from torchwhere.core.sanitize import plural
from torchwhere.core.worker_pool import Progress, ProgressCounter

if TYPE_CHECKING:
    from torchwhere.api.parquet import ParquetFolder

FORMATS = (".parquet", ".jsonl", ".jsonl.gz")
_MOST_CAVEATS = 8  # shown in the text


@dataclass(frozen=True, slots=True, repr=False)
class Exported(Shown):
    """The summary of an export. `str()` gives it as text.

    Attributes:
        path: The file or folder that was written.
        format: `.parquet`, `.jsonl` or `.jsonl.gz`.
        ranks: The ranks that were exported.
        events: The number of events in the output.
        bytes: The size of the output.
        overwritten: The number of older events that newer ones overwrote in the rings. They are
            lost.
        caveats: Sentences about missing ranks, torn records and foreign files.

    Example:
        print(torchwhere.export("run/", out="events.parquet"))
    """

    path: Path
    format: str
    ranks: tuple[int, ...]
    events: int
    bytes: int
    overwritten: int
    caveats: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as values for JSON.

        Example:
            json.dumps(exported.to_dict())
        """
        return {
            "path": str(self.path),
            "format": self.format,
            "ranks": list(self.ranks),
            "events": self.events,
            "bytes": self.bytes,
            "overwritten": self.overwritten,
            "caveats": list(self.caveats),
        }

    def __repr__(self) -> str:
        return f"<Exported {self.path}: {self._events()}>"

    def __str__(self) -> str:
        lines = [f"{self._events()} in {self.path} ({self.bytes:,} bytes)"]
        if self.overwritten:
            lines.append(
                "not exported, overwritten in the ring (see --records):"
                f" {plural(self.overwritten, 'older event')}"
            )
        return "\n  ".join([*lines, *self.caveats[:_MOST_CAVEATS]])

    def _events(self) -> str:
        return f"{plural(self.events, 'event')} of {plural(len(self.ranks), 'rank')}"


def export(
    folder: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    ranks: Iterable[int] | None = None,
    kinds: Iterable[str] | None = None,
    force: bool = False,
    on_progress: Progress | None = None,
) -> Exported:
    """Write the events of the newest run in a folder, for other tools.

    Args:
        folder: The folder with the boxes.
        out: The output; its name gives the format. `events.parquet` is a folder with a file for
            each rank and needs `pip install 'torchwhere[parquet]'`. `events.jsonl` and
            `events.jsonl.gz` are one file with a JSON object on each line.
        ranks: Only these ranks.
        kinds: Only events of these kinds.
        force: Replace an earlier export of the same name. Other files are never replaced.
        on_progress: Called with the number of boxes done so far, and the total; each box counts
            twice, because it is read twice.

    Returns:
        A summary of the output.

    Raises:
        TorchwhereError: There is nothing to read, or the output cannot be written.
        TypeError: `out` is not a path.
        ValueError: There is no such kind of event.

    Example:
        torchwhere.export("run/", out="events.parquet", kinds={"collective"})
    """
    target = _target(out)
    wanted = known_kinds(kinds)
    folder = run_folder(folder)
    files = box_files(folder)
    _refuse(target, force=force)
    with write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _writer(target, wanted) as writer:
            summaries = read_summaries(files, ProgressCounter(2 * len(files), on_progress))
            run = RunSummary(Path(folder), *choose(Path(folder), summaries))
            chosen = [summary for _, summary in run.in_order(run.checked_ranks(ranks))]
            writer.expect([summary.rank for summary in chosen])
            events = sum(_written(writer, chosen, on_progress))
    written_files = [target] if target.is_file() else target.rglob("*.parquet")
    return Exported(
        path=target,
        format=target.suffixes[-1] if target.suffix != ".gz" else ".jsonl.gz",
        ranks=tuple(summary.rank for summary in chosen),
        events=events,
        bytes=sum(path.stat().st_size for path in written_files),
        overwritten=sum(summary.counts.overwritten for summary in chosen),
        caveats=tuple(run.caveats()),
    )


# -- the arguments ---------------------------------------------------------------------------------


def _target(out: object) -> Path:
    if not isinstance(out, (str, os.PathLike)):
        raise TypeError(f"export(out=...): expected a path, got {type(out).__name__}")
    target = Path(os.fspath(out))
    if not target.name.endswith(FORMATS):
        raise TorchwhereError(
            f"cannot tell the format of {target}: its name must end with one of"
            f" {', '.join(FORMATS)}"
        )
    return target


def _writer(
    target: Path, kinds: set[str] | None
) -> contextlib.AbstractContextManager[ParquetFolder | JsonLines]:
    """Writes boxes one by one. The output gets its name when the block ends without an error."""
    if target.suffix == ".parquet":
        from torchwhere.api.parquet import ParquetFolder

        return ParquetFolder(target, kinds=kinds)
    return json_lines(target, kinds=kinds)


def _refuse(target: Path, *, force: bool) -> None:
    """Raise an error instead of replacing another file, or an export without `force`."""
    is_folder = target.suffix == ".parquet"
    for path in [target, partial_path(target)] if is_folder else [target]:
        if (path.exists() or path.is_symlink()) and not _is_export(path, is_folder=is_folder):
            raise TorchwhereError(f"{path} exists and is not an export: give another name")
    if target.exists() and not force:
        raise TorchwhereError(f"{target} exists: give another name, or --force to replace it")


def _is_export(path: Path, *, is_folder: bool) -> bool:
    if not is_folder:
        return path.is_file()
    return path.is_dir() and all(
        entry.name.startswith("rank=") and entry.is_dir() for entry in path.iterdir()
    )


# -- reading and writing ---------------------------------------------------------------------------


def _read_box(reader: BoxReader, summary: BoxSummary) -> Box:
    """Read a box again, to write its events."""
    box = read_or_empty(reader.read, summary.path)
    if box.rank != summary.rank or box.run != summary.run:
        raise TorchwhereError(
            f"{summary.path} was deleted or replaced during the export; run it again"
        )
    return box


def _written(
    writer: ParquetFolder | JsonLines, summaries: list[BoxSummary], on_progress: Progress | None
) -> Iterator[int]:
    """Write the boxes. Yields the number of events of each."""
    reader = BoxReader()
    for done, summary in enumerate(summaries, 1):
        count = writer.has(summary)
        yield writer.write(_read_box(reader, summary)) if count is None else count
        if on_progress is not None:
            on_progress(len(summaries) + done, 2 * len(summaries))


@contextlib.contextmanager
def json_lines(target: Path, *, kinds: set[str] | None) -> Iterator[JsonLines]:
    """Opens a file for all events. Compresses it if its name ends with `.gz`."""
    with destination(target) as file:
        if target.name.endswith(".gz"):
            with gzip.GzipFile(filename="", fileobj=file, mode="wb") as packed:
                yield JsonLines(packed, kinds=kinds)
        else:
            yield JsonLines(file, kinds=kinds)


class JsonLines:
    """Writes all events to one file, as `torchwhere events --json` prints them."""

    def __init__(self, file: IO[bytes] | gzip.GzipFile, *, kinds: set[str] | None) -> None:
        self._file, self._kinds = file, kinds

    def expect(self, ranks: Collection[int]) -> None:
        """Needs no preparation: every export writes the whole file."""

    def has(self, summary: BoxSummary) -> int | None:
        return None

    def write(self, box: Box) -> int:
        self._file.writelines(
            f"{json_text(event.to_dict())}\n".encode() for event in box.events(kinds=self._kinds)
        )
        return len(box.rows(self._kinds))
