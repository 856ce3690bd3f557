"""Writes the events of a run for other tools: Parquet for DuckDB, Polars, Spark and Ray, or JSON
lines.

Takes a folder of boxes and the name of what to write, which says the format; gives an account of it
(`Exported`). One box is in memory at a time, however many ranks there are. What is written stands
under its name only when all of it is there; that it can be written is known before the boxes are
read. An export to Parquet that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import gzip
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, cast

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.columns import rows_of
from torchwhere.blackbox.reader import BoxReader
from torchwhere.blackbox.run import RunSummary, box_files, choose
from torchwhere.blackbox.summary import BoxSummary, summarize
from torchwhere.core.atomic_file import destination, partial_path, write_errors
from torchwhere.core.errors import TorchwhereError
from torchwhere.core.events import json_text, known_kinds
from torchwhere.core.results import Shown

Progress = Callable[[int, int], None]  # how much is done, of how much

FORMATS = (".parquet", ".jsonl", ".jsonl.gz")
_MOST_CAVEATS = 8  # in the text


@dataclass(frozen=True, slots=True, repr=False)
class Exported(Shown):
    """What was written, and what the boxes did not have."""

    path: Path
    format: str
    ranks: tuple[int, ...]
    events: int
    bytes: int
    overwritten: int  # events that were older than their rings: nobody has them any more
    caveats: tuple[str, ...] = ()  # missing ranks, torn records, foreign files

    def to_dict(self) -> dict[str, Any]:
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
        return f"<Exported {self.path}: {self.events:,} events of {len(self.ranks)} ranks>"

    def __str__(self) -> str:
        ranks = f"{len(self.ranks)} rank{'s' * (len(self.ranks) != 1)}"
        said = f"{self.events:,} events of {ranks} in {self.path} ({self.bytes:,} bytes)"
        lost = [
            (
                f"not there: {self.overwritten:,} older events, overwritten in the rings (see"
                " --records)"
            )
        ] * bool(self.overwritten)
        return "\n  ".join([said, *lost, *self.caveats[:_MOST_CAVEATS]])


class Writer(Protocol):
    """Takes boxes one by one. What it wrote has its name when it is left without an error."""

    def __enter__(self) -> Writer: ...
    def __exit__(self, *error: object) -> None: ...

    def expect(self, ranks: Collection[int]) -> None:
        """Be told which boxes will come."""

    def has(self, label: BoxSummary) -> int | None:
        """How many events of that box, as it is now, are there already."""

    def write(self, box: Box) -> int:
        """Write the events of a box; how many."""


def export(
    folder: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    ranks: Iterable[int] | None = None,
    kinds: Iterable[str] | None = None,
    force: bool = False,
    on_progress: Progress | None = None,
) -> Exported:
    """Write the events of the newest run in a folder, of all its ranks and kinds or of some.

    `out` says what: `events.parquet` is a folder with a file for each rank (`pip install
    'torchwhere[parquet]'`), `events.jsonl` and `events.jsonl.gz` are a file with a JSON object a
    line. An earlier export is replaced only with `force`.
    """
    target = _target(out)
    wanted = known_kinds(kinds)
    files = box_files(os.fspath(folder))
    _refuse(target, force=force)
    with write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _writer(target, wanted) as writer:
            run = RunSummary(Path(folder), *choose(Path(folder), _labels(files, on_progress)))
            chosen = [run.boxes[rank] for rank in _checked_ranks(ranks, run)]
            writer.expect([one.rank for one in chosen])
            events = sum(_written(writer, chosen, on_progress))
    return Exported(
        path=target,
        format=target.suffixes[-1] if target.suffix != ".gz" else ".jsonl.gz",
        ranks=tuple(one.rank for one in chosen),
        events=events,
        bytes=sum(
            path.stat().st_size
            for path in ([target] if target.is_file() else target.rglob("*.parquet"))
        ),
        overwritten=sum(one.counts.overwritten for one in chosen),
        caveats=tuple(run.caveats()),
    )


# -- what was asked for ----------------------------------------------------------------------------


def _target(out: object) -> Path:
    if not isinstance(out, (str, os.PathLike)):
        raise TypeError(f"export(out=...): expected a path, got {type(out).__name__}")
    target = Path(os.fspath(out))
    if not target.name.endswith(FORMATS):
        raise TorchwhereError(
            f"cannot tell what to write to {target}: a name ends with {', '.join(FORMATS)}"
        )
    return target


def _checked_ranks(ranks: Iterable[int] | None, run: RunSummary[BoxSummary]) -> list[int]:
    chosen = run.checked_ranks(ranks)
    return sorted(run.boxes if chosen is None else chosen)


def _writer(target: Path, kinds: set[str] | None) -> Writer:
    if target.suffix == ".parquet":
        from torchwhere.api.parquet import ParquetFolder

        return ParquetFolder(target, kinds=kinds)
    return JsonLines(target, kinds=kinds)


def _refuse(target: Path, *, force: bool) -> None:
    """Never write over what is not an export, and over one only when told to."""
    is_folder = target.suffix == ".parquet"
    for path in (target, *[partial_path(target)] * is_folder):
        if (path.exists() or path.is_symlink()) and not _is_export(path, is_folder=is_folder):
            raise TorchwhereError(f"{path} is there already, and is no export: give another name")
    if target.exists() and not force:
        raise TorchwhereError(
            f"{target} is there already: give another name, or --force to replace it"
        )


def _is_export(path: Path, *, is_folder: bool) -> bool:
    if not is_folder or not path.is_dir():
        return not is_folder and path.is_file()
    return all(one.name.startswith("rank=") and one.is_dir() for one in path.iterdir())


# -- reading and writing ---------------------------------------------------------------------------


def _labels(files: list[Path], on_progress: Progress | None) -> list[BoxSummary]:
    """Who the boxes belong to. They are read again when their turn comes: none is kept in
    memory."""
    reader, found = BoxReader(), []
    for done, path in enumerate(files, 1):
        found.append(summarize(_box(reader, path)))
        if on_progress is not None:
            on_progress(done, 2 * len(files))
    return found


def _box(reader: BoxReader, path: Path) -> Box:
    try:
        return reader.read(path)
    except TorchwhereError as error:  # deleted since the folder was listed
        return Box(path=path, problems=[str(error)])


def _again(reader: BoxReader, known: BoxSummary) -> Box:
    box = _box(reader, known.path)
    if box.rank != known.rank or box.run != known.run:
        raise TorchwhereError(
            f"{known.path} is gone, or another one, since the export began: export again"
        )
    return box


def _written(
    writer: Writer, labels: list[BoxSummary], on_progress: Progress | None
) -> Iterator[int]:
    reader = BoxReader()
    for done, one in enumerate(labels, 1):
        known = writer.has(one)
        yield known if known is not None else writer.write(_again(reader, one))
        if on_progress is not None:
            on_progress(len(labels) + done, 2 * len(labels))


class JsonLines:
    """All events as `torchwhere events --json` prints them, in one file, compressed if its name
    says so."""

    def __init__(self, target: Path, *, kinds: set[str] | None) -> None:
        self._target, self._kinds = target, kinds
        self._stack = contextlib.ExitStack()
        self._file: IO[bytes] | None = None

    def __enter__(self) -> JsonLines:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(destination(self._target))
            if self._target.name.endswith(".gz"):
                file = cast(
                    IO[bytes],
                    stack.enter_context(gzip.GzipFile(filename="", fileobj=file, mode="wb")),
                )
            self._file, self._stack = file, stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def expect(self, ranks: Collection[int]) -> None:
        """It takes all."""

    def has(self, label: BoxSummary) -> int | None:
        return None

    def write(self, box: Box) -> int:
        assert self._file is not None
        self._file.writelines(
            f"{json_text(event.to_dict())}\n".encode() for event in box.events(kinds=self._kinds)
        )
        return len(rows_of(box, kinds=self._kinds))
