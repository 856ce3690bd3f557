"""Reads the boxes of a large job at once: processes of their own, each of which writes down what
some of the boxes say.

Takes a folder, gives who is there (`RunSummary`) and what they say (`JobCalls`), without keeping a
box. Few boxes are read right here. The processes are plain interpreters that know nothing of this
one but its import path: it may have threads, or no main module.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.reader import BoxReader
from torchwhere.blackbox.run import RunSummary, box_files, choose
from torchwhere.blackbox.summary import BoxSummary
from torchwhere.core.errors import TorchwhereError
from torchwhere.diagnose.calls.encode import CallBatch, Encoder
from torchwhere.diagnose.calls.rank_calls import JobCalls

Progress = Callable[[int, int], None]  # boxes read, of how many


class Extractor(Protocol):
    """Takes of the boxes, as they are read, what else is wanted of them. Is made in the process
    that reads, and comes home."""

    def take(self, box: Box) -> Box: ...


Aside = Callable[[], Extractor] | None

_FEW = 256  # boxes that are read before another process has started
_CHUNK = 64  # boxes that are written down together
_MOST_PROCESSES = 8
_PIPE_BYTES = 1 << 20  # a transcript of so many boxes fits
_HERE = -1  # the clerk of this process
_PROGRAM = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); from"
    " torchwhere.diagnose.calls.load import serve; serve()"
)
_Work = deque[list[Path]]
_Told = queue.SimpleQueue["tuple[int, CallBatch] | None"]


def load_calls(
    folder: str | Path,
    *,
    on_progress: Progress | None = None,
    processes: int | None = None,
    extra: Aside = None,
) -> tuple[RunSummary[BoxSummary], JobCalls]:
    """The newest run in a folder. Raises `TorchwhereError` when there is nothing there to read.

    `aside` makes a `Extractor` for some of the boxes at a time; those are in `JobCalls.asides`.
    """
    files = box_files(folder)
    told = []
    done = 0
    for encoder, batch in _read(
        files, _how_many(len(files)) if processes is None else processes, extra
    ):
        told.append((encoder, batch))
        done += len(batch.rank_summaries)
        if on_progress is not None:
            on_progress(done, len(files))
    labels = [rank_summary.label for _, batch in told for rank_summary in batch.rank_summaries]
    chosen, earlier, unreadable = choose(Path(folder), labels)
    job_calls = JobCalls()
    wanted = {label.path for label in chosen.values()}
    job_calls.extras = [batch.extra for _, batch in told if batch.extra is not None]
    for encoder, batch in told:
        job_calls.admit(batch, encoder=encoder, wanted=wanted)
    job_calls.by_rank = dict(sorted(job_calls.by_rank.items()))
    return RunSummary(Path(folder), dict(sorted(chosen.items())), earlier, unreadable), job_calls


def _how_many(boxes: int) -> int:
    return (
        min(len(os.sched_getaffinity(0)), _MOST_PROCESSES) if boxes > _FEW and sys.executable else 0
    )


def _read(files: Sequence[Path], processes: int, extra: Aside) -> Iterator[tuple[int, CallBatch]]:
    """Transcripts as they come, each with the number of the clerk that wrote it."""
    work: _Work = deque(
        list(files[start : start + _CHUNK]) for start in range(0, len(files), _CHUNK)
    )
    with contextlib.ExitStack() as stack:
        told: _Told = queue.SimpleQueue()
        for number in range(processes):
            stack.enter_context(_Worker(number, work, told, extra))
        for _ in range(processes):  # each says when it is done
            yield from iter(told.get, None)
    # What nobody took, or whose reader was killed, is read here.
    reader, encoder = BoxReader(), Encoder()
    while work:
        yield _HERE, _written_down(encoder, _boxes(reader, work.popleft()), extra)


def _written_down(encoder: Encoder, boxes: Iterator[Box], extra: Aside) -> CallBatch:
    taker = extra() if extra is not None else None
    batch = encoder.encode(boxes if taker is None else map(taker.take, boxes))
    batch.extra = taker
    return batch


def _boxes(reader: BoxReader, files: Sequence[Path]) -> Iterator[Box]:
    for path in files:
        try:
            yield reader.read(path)
        except TorchwhereError as error:  # deleted since the folder was listed
            yield Box(path=path, problems=[str(error)])


class _Worker:
    """A process that reads, and the thread that hands it work and takes what it has written
    down."""

    def __init__(self, number: int, work: _Work, told: _Told, extra: Aside) -> None:
        self._number, self._work, self._told, self._aside = number, work, told, extra
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(
            target=self._hand_out, name=f"torchwhere-loader-{number}", daemon=True
        )

    def __enter__(self) -> _Worker:
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=_PIPE_BYTES,
                pipesize=_PIPE_BYTES,
            )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._thread.join()
        for pipe in (
            (self._process.stdin, self._process.stdout) if self._process is not None else ()
        ):
            with contextlib.suppress(OSError):  # what was not sent is lost with the process
                if pipe is not None:
                    pipe.close()

    def _hand_out(self) -> None:
        chunk: list[Path] | None = None
        try:
            if self._process is None or self._process.stdin is None or self._process.stdout is None:
                return
            _send(self._process.stdin, sys.path)
            _send(self._process.stdin, self._aside)
            while self._work:
                chunk = self._work.popleft()
                _send(self._process.stdin, chunk)
                self._told.put((self._number, pickle.load(self._process.stdout)))
                chunk = None
        except IndexError:  # another one took the last
            pass
        except (OSError, EOFError, ValueError, pickle.UnpicklingError):
            if chunk is not None:
                self._work.append(chunk)
        finally:
            self._told.put(None)


def _send(pipe: IO[bytes], what: Any) -> None:
    pickle.dump(what, pipe, protocol=5)
    pipe.flush()


def serve() -> None:
    """What such a process does: paths in, transcripts out, until there is nobody to read for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it ends it
    gc.disable()  # there are no cycles, and much that is only made to be sent away
    reader, encoder = BoxReader(), Encoder()
    with contextlib.suppress(EOFError, OSError):
        extra = pickle.load(sys.stdin.buffer)
        while True:
            files = pickle.load(sys.stdin.buffer)
            _send(sys.stdout.buffer, _written_down(encoder, _boxes(reader, files), extra))
