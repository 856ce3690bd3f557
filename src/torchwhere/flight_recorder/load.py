"""Converts many dumps to boxes, in worker processes if there are many files.

Only `unpickle.py` ever reads the contents of a dump. What the workers send back is torchwhere's
own data.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchwhere.core.worker_pool import (
    Progress,
    ProgressCounter,
    default_workers,
    gc_paused,
    run_jobs,
)
from torchwhere.flight_recorder.dump import read_dump
from torchwhere.flight_recorder.dump_box import DumpBox
from torchwhere.flight_recorder.limits import RefusedFileError
from torchwhere.flight_recorder.to_boxes import to_box

File = tuple[int, Path]  # rank and path
_FEW = 24  # this process reads so many files before a worker has started
_CHUNK = 8  # files in one job


def read_all(files: Sequence[File], *, on_progress: Progress | None = None) -> list[DumpBox | str]:
    """Returns the box of each file, or the reason why it was refused."""
    results: list[DumpBox | str] = [""] * len(files)
    progress = ProgressCounter(len(files), on_progress)
    workers = default_workers() if len(files) > _FEW else 0
    chunks = [(start, files[start : start + _CHUNK]) for start in range(0, len(files), _CHUNK)]
    with gc_paused():
        for _, (start, boxes) in run_jobs(_DumpChunkReader, chunks, workers=workers):
            results[start : start + len(boxes)] = boxes
            progress.add(len(boxes))
    return results


class _DumpChunkReader:
    """The task of a worker: reads some files in a row. It returns them with their position."""

    def __call__(self, chunk: tuple[int, Sequence[File]]) -> tuple[int, list[DumpBox | str]]:
        start, files = chunk
        return start, [_read(rank, path) for rank, path in files]


def _read(rank: int, path: Path) -> DumpBox | str:
    try:
        return to_box(read_dump(path, rank))
    except RefusedFileError as error:
        return str(error)
