"""Printing and logging from many ranks: `print_rank` and `rank_log`.

Lines come out whole however many processes print at once (`core/locked_write.py`), and every line
says whose it is. A file for each rank is for comparing: `torchwhere diff run/` shows where the
ranks part. Works before and without `init_process_group`, inside and outside a watch, and without
torch.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from torchwhere.core.errors import TorchwhereError
from torchwhere.core.locked_write import write_all, write_whole
from torchwhere.core.place import Certainty, Place

if TYPE_CHECKING:
    from torchwhere.recorder.session import Session

log = logging.getLogger("torchwhere")

Ranks = int | str | Iterable[int]


def get_rank() -> int:
    """The rank of this process: from the process group if there is one, else from the launcher
    (`RANK`), else 0."""
    # not imported for this: without it there is no group
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else 0


def place_of(frame: FrameType | None) -> Place:
    """The place of the calling thread, with the line that `frame` was called from; without a watch
    the rank alone."""
    session = _watch()
    if session is None:
        return Place(rank=get_rank(), step=None, pass_="outside", certainty=Certainty.UNKNOWN)
    return session.recorder.place(frame)


def _watch() -> Session | None:
    # without it nobody watches, and torch may not even be here
    process = sys.modules.get("torchwhere.api.watch")
    return None if process is None else process.current()


# -- printing --------------------------------------------------------------------------------------


def print_rank(
    *values: object,
    ranks: Ranks = 0,
    place: bool = False,
    sep: str = " ",
    end: str = "\n",
    file: TextIO | None = None,
    flush: bool = True,
) -> None:
    """Print on some ranks: `ranks` is one, several, or "all". Every line begins with `[rank]`, or
    with the place if asked for.

    The text is written at once and whole, as if `flush` were always true: a part of it that stays
    behind could be torn.
    """
    rank = get_rank()
    if not is_among(rank, ranks):
        return
    prefix = f"[{place_of(sys._getframe(1))}]" if place else f"[{rank}]"
    print_whole(_prefixed(prefix, sep.join(map(str, values)) + end), file=file)


def print_whole(text: str, *, file: TextIO | None = None) -> None:
    """Write a text whole to `file`, or to where `print` would write it."""
    file = sys.stdout if file is None else file
    if file is not None:  # a process without a console has none
        _unseen_by_dynamo()
        write_whole(text, file)


def is_among(rank: int, ranks: Ranks) -> bool:
    """Whether `rank` is one of those asked for. Raises for what cannot be a choice of ranks."""
    if isinstance(ranks, str):
        if ranks != "all":
            raise ValueError(f'ranks={ranks!r}: expected a rank, several of them, or "all"')
        return True
    if isinstance(ranks, int) and not isinstance(ranks, bool):
        chosen = [ranks]
    elif isinstance(ranks, Iterable):
        chosen = list(ranks)
    else:
        raise TypeError(f'ranks={ranks!r}: expected a rank, several of them, or "all"')
    for one in chosen:
        if not isinstance(one, int) or isinstance(one, bool):
            raise TypeError(f"ranks={ranks!r}: {one!r} is not a rank")
        if one < 0:
            raise ValueError(f"ranks={ranks!r}: ranks are counted from 0")
    return rank in chosen


def _prefixed(prefix: str, text: str) -> str:
    """Every line with the prefix, so that the lines of one rank can be picked out of many."""
    lines = text.removesuffix("\n").split("\n")
    marked = "\n".join(f"{prefix} {line}" if line else prefix for line in lines)
    return f"{marked}\n" if text.endswith("\n") else marked


# -- a file for each rank --------------------------------------------------------------------------


def rank_log(
    *values: object,
    folder: str | os.PathLike[str] | None = None,
    rank: int | None = None,
    place: bool = False,
    sep: str = " ",
    end: str = "\n",
) -> None:
    """Add a line to `log_rank_<rank>.txt`, in `folder`, else in the folder of the watch, else in
    the working directory.

    The line is in the file when this returns. The files are closed at exit; `torchwhere diff`
    compares them.
    """
    rank = get_rank() if rank is None else rank
    prefix = f"[{place_of(sys._getframe(1))}]" if place else ""
    text = sep.join(map(str, values)) + end
    append(_prefixed(prefix, text) if prefix else text, folder=folder, rank=rank)


def append(text: str, *, folder: str | os.PathLike[str] | None, rank: int) -> io.FileIO:
    """Add a text to the file of a rank, whole, and give the open file."""
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
        raise ValueError(f"rank={rank!r}: expected a rank, counted from 0")
    path = (_folder() if folder is None else Path(folder)).absolute() / f"log_rank_{rank}.txt"
    return _logs.append(path, text.encode("utf-8", "backslashreplace"))


def _folder() -> Path:
    session = _watch()
    return Path.cwd() if session is None or session.out is None else session.out


class _Logs:
    """The open files of this process. For all threads; a forked child starts with files of its
    own."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._files: dict[Path, io.FileIO] = {}
        self._said: set[Path] = set()

    def append(self, path: Path, data: bytes) -> io.FileIO:
        if self._pid != os.getpid():  # forked: another thread may have held the lock at that moment
            self._begin()
        with self._lock:
            file = self._opened(path)
            try:
                write_all(file.fileno(), data)
            except OSError as error:  # a full disk: not worth a training
                self._say_once(path, error)
        return file

    def _opened(self, path: Path) -> io.FileIO:
        file = self._files.get(path)
        # somebody has closed or deleted it
        if file is None or file.closed or os.fstat(file.fileno()).st_nlink == 0:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                # Unbuffered, at the end: whole lines, whichever processes of this rank write.
                file = open(path, "ab", buffering=0)  # noqa: SIM115 - kept open for the next line
            except OSError as error:
                raise TorchwhereError(
                    f"{path} cannot be written: {error.strerror}. Choose another folder with"
                    " folder=..."
                ) from None
            if not self._files:
                atexit.register(self.close)
            self._files[path] = file
        return file

    def _say_once(self, path: Path, error: OSError) -> None:
        if path not in self._said:
            self._said.add(path)
            log.warning(
                "torchwhere: %s cannot be written (%s): lines are lost, the job goes on",
                path,
                error.strerror,
            )

    def close(self) -> None:
        """Close them all; the next line opens its file again."""
        atexit.unregister(self.close)
        with self._lock:
            for file in self._files.values():
                with contextlib.suppress(OSError):
                    file.close()
            self._files.clear()


_logs = _Logs()
close_logs = _logs.close


# -- torch.compile ---------------------------------------------------------------------------------

_NOT_FOR_DYNAMO = (print_rank, print_whole, write_whole, rank_log, append)
_is_unseen = False


def _unseen_by_dynamo() -> None:
    """Where a compiled function prints, the graph breaks and dynamo would compile the frames below:
    it is told not to, once."""
    global _is_unseen
    if not _is_unseen and "torch" in sys.modules:
        from torchwhere.hooks._torch import unseen

        for function in _NOT_FOR_DYNAMO:
            unseen(function)
        _is_unseen = True


for _function in (print_rank, rank_log):
    # what torch.compiler.disable sets, without importing torch for it
    _function.__dict__["_torchdynamo_disable"] = True
_unseen_by_dynamo()
