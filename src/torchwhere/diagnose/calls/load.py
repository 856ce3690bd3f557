"""Reads all boxes of a run, in worker processes if there are many, into a `JobCalls`.

It keeps no box in memory. A small run is read in this process, because starting a worker takes as
long as reading a few hundred boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.reader import BoxReader, read_or_empty
from torchwhere.blackbox.run import RunSummary, box_files, choose
from torchwhere.blackbox.summary import BoxSummary
from torchwhere.core.progress import Progress, ProgressCounter
from torchwhere.core.worker_pool import default_workers, run_jobs
from torchwhere.diagnose.calls.encode import CallBatch, Encoder
from torchwhere.diagnose.calls.job_calls import JobCalls

_FEW = 256  # this process reads so many boxes before a worker has started
_CHUNK = 64  # boxes that become one batch


class Extractor(Protocol):
    """Extracts extra data from each box while it is read.

    A worker process creates it and pickles it back.
    """

    def take(self, box: Box) -> Box:
        """Extracts what it wants from a box. Returns the box for the encoder."""
        ...


E = TypeVar("E", bound=Extractor)


class _NoExtractor:
    def take(self, box: Box) -> Box:
        return box


def load_calls(
    folder: str | Path, *, on_progress: Progress | None = None, processes: int | None = None
) -> tuple[RunSummary[BoxSummary], JobCalls]:
    """Loads the newest run in a folder.

    Args:
        folder: The folder with the boxes.
        on_progress: Called with the number of boxes read so far and the number of all boxes.
        processes: How many worker processes read; by default this depends on the number of boxes.

    Raises:
        TorchwhereError: The folder holds no run.
    """
    run, job_calls, _ = load_calls_with(
        _NoExtractor, folder, on_progress=on_progress, processes=processes
    )
    return run, job_calls


def load_calls_with(
    make_extractor: Callable[[], E],
    folder: str | Path,
    *,
    on_progress: Progress | None = None,
    processes: int | None = None,
) -> tuple[RunSummary[BoxSummary], JobCalls, list[E]]:
    """Like `load_calls`. Also returns the extractors: each has seen some of the boxes."""
    files = box_files(folder)
    if processes is None:
        processes = default_workers() if len(files) > _FEW else 0
    chunks = [files[start : start + _CHUNK] for start in range(0, len(files), _CHUNK)]
    batches: list[tuple[int, CallBatch]] = []
    extractors: list[E] = []
    progress = ProgressCounter(len(files), on_progress)
    task = partial(_BoxChunkReader, make_extractor)
    for worker, (batch, extractor) in run_jobs(task, chunks, workers=processes):
        batches.append((worker, batch))
        extractors.append(extractor)
        progress.add(len(batch.rank_summaries))
    summaries = [summary.box_summary for _, batch in batches for summary in batch.rank_summaries]
    run = RunSummary(Path(folder), *choose(Path(folder), summaries))
    job_calls = JobCalls()
    wanted = {summary.path for summary in run.boxes.values()}
    for worker, batch in batches:
        job_calls.add_batch(batch, encoder=worker, wanted=wanted)
    job_calls.by_rank = dict(sorted(job_calls.by_rank.items()))
    return run, job_calls, extractors


class _BoxChunkReader(Generic[E]):
    """The task of a worker: reads some boxes and encodes them as one batch."""

    def __init__(self, make_extractor: Callable[[], E]) -> None:
        self._make_extractor = make_extractor
        self._reader = BoxReader()
        self._encoder = Encoder()

    def __call__(self, files: Sequence[Path]) -> tuple[CallBatch, E]:
        extractor = self._make_extractor()
        boxes = map(partial(read_or_empty, self._reader.read), files)
        return self._encoder.encode(map(extractor.take, boxes)), extractor
