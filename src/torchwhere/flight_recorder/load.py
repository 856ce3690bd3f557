"""Reads many dumps at once: on each core one process that makes boxes of its share of the files.

Takes ranks and paths, gives for each a box, or why it was refused. Few files are read right here,
and so is the share of a process that did not come to its end. The processes are plain interpreters
that know nothing of this one but its import path. What they send back is their own; the dumps
themselves are only ever read by `unpickle.py`.
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
from torchwhere.flight_recorder.to_boxes import DumpBox, to_box
from torchwhere.flight_recorder.unpickle import Caps, RefusedFileError

File = tuple[int, Path]  # rank and path
Progress = Callable[[int, int], None]  # dumps read, of how many
_FEW = 24  # files that are read before another process has started
_MOST_PROCESSES = 8
_PROGRAM = (
    "import pickle, sys; path, share, caps = pickle.load(sys.stdin.buffer); sys.path[:] = path; "
    "from torchwhere.flight_recorder.load import serve; serve(share, caps)"
)


def read_all(
    files: Sequence[File], caps: Caps, *, on_progress: Progress | None = None
) -> list[DumpBox | str]:
    """Of each file its box, or why it was refused.

    `on_progress` is told how far this process is, as if the others were: their shares are as large.
    """
    processes = (
        min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
        if len(files) > _FEW and sys.executable
        else 1
    )
    shares = [files[start::processes] for start in range(processes)]
    found: list[DumpBox | str] = [""] * len(files)
    with gc_paused(), contextlib.ExitStack() as stack:
        helpers = [_started(share, caps, stack) for share in shares[1:]]
        for done, file in enumerate(shares[0], 1):
            found[(done - 1) * processes] = _read(file, caps)
            if on_progress is not None:
                on_progress(min(done * processes, len(files)), len(files))
        for start, helper in enumerate(helpers, 1):
            told = _told(helper) if helper is not None else None
            share = shares[start]
            found[start::processes] = (
                told if told is not None else [_read(file, caps) for file in share]
            )
    return found


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


def _told(process: subprocess.Popen[bytes]) -> list[DumpBox | str] | None:
    assert process.stdout is not None
    try:
        told: list[DumpBox | str] = pickle.load(process.stdout)
    except (OSError, EOFError, ValueError, pickle.UnpicklingError):  # it was killed
        return None
    return told


def serve(share: Sequence[File], caps: Caps) -> None:
    """What such a process does."""
    gc.disable()
    pickle.dump([_read(file, caps) for file in share], sys.stdout.buffer, protocol=5)
    sys.stdout.buffer.flush()
