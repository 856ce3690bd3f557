"""Reads many dumps in parallel, with one worker process for each core.

Takes ranks and paths, gives for each file a box, or the reason of its refusal. This process reads
few files itself, and the share of a worker that failed. A worker is a plain interpreter that gets
only this process's import path. Results of workers are trusted pickles; only `unpickle.py` reads
the dumps themselves.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from torchwhere.core.gc_pause import gc_paused
from torchwhere.flight_recorder.dump import read_dump
from torchwhere.flight_recorder.limits import Caps, RefusedFileError
from torchwhere.flight_recorder.to_boxes import DumpBox, to_box

File = tuple[int, Path]  # rank and path
Progress = Callable[[int, int], None]  # dumps read so far, of how many
_FEW = 24  # files that this process reads before a worker has started
_MOST_PROCESSES = 8
_PROGRAM = (
    "import pickle, sys; path, share, caps = pickle.load(sys.stdin.buffer); sys.path[:] = path; "
    "from torchwhere.flight_recorder.load import serve; serve(share, caps)"
)


def read_all(
    files: Sequence[File], caps: Caps, *, on_progress: Progress | None = None
) -> list[DumpBox | str]:
    """The box of each file, or the reason of its refusal.

    `on_progress` gets the progress of this process, scaled to all files: the shares are equal.
    """
    processes = 1
    if len(files) > _FEW and sys.executable:
        processes = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
    shares = [files[start::processes] for start in range(processes)]
    boxes: list[DumpBox | str] = [""] * len(files)
    with gc_paused(), contextlib.ExitStack() as stack:
        workers = [_started(share, caps, stack) for share in shares[1:]]
        for done, file in enumerate(shares[0], 1):
            boxes[(done - 1) * processes] = _read(file, caps)
            if on_progress is not None:
                on_progress(min(done * processes, len(files)), len(files))
        for start, worker in enumerate(workers, 1):
            results = _results(worker) if worker is not None else None
            if results is None:
                results = [_read(file, caps) for file in shares[start]]
            boxes[start::processes] = results
    return boxes


def _read(file: File, caps: Caps) -> DumpBox | str:
    rank, path = file
    try:
        return to_box(read_dump(path, rank, caps=caps))
    except RefusedFileError as error:
        return str(error)


def _started(
    share: Sequence[File], caps: Caps, stack: contextlib.ExitStack
) -> subprocess.Popen[bytes] | None:
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
    except OSError:
        return None
    stack.enter_context(process)
    stack.callback(process.kill)
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        pickle.dump((sys.path, share, caps), process.stdin, protocol=5)
        process.stdin.close()
    return process


def _results(process: subprocess.Popen[bytes]) -> list[DumpBox | str] | None:
    assert process.stdout is not None
    try:
        results: list[DumpBox | str] = pickle.load(process.stdout)
    except (OSError, EOFError, ValueError, pickle.UnpicklingError):  # the worker was killed
        return None
    return results


def serve(share: Sequence[File], caps: Caps) -> None:
    """Run a worker: read its share and write the results to stdout."""
    gc.disable()
    pickle.dump([_read(file, caps) for file in share], sys.stdout.buffer, protocol=5)
    sys.stdout.buffer.flush()
