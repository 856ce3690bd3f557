"""Prints and logs from many ranks: `print_rank` and `rank_log`.

Lines stay whole even if many processes print at once (`core/locked_write.py`), and every line names
its rank. `rank_log` writes a file for each rank; `torchwhere diff run/` shows where the files
diverge. Works before and without `init_process_group`, inside and outside a watch, and without
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
from torchwhere.core.place import Place, unknown_place

if TYPE_CHECKING:
    from torchwhere.recorder.session import Session

log = logging.getLogger("torchwhere")

Ranks = int | str | Iterable[int]


def get_rank() -> int:
    """The rank of this process: from the process group if there is one, else from the launcher
    (`RANK`), else 0."""
    # Not imported here: if it is not loaded, there is no process group.
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else 0


def place_of(frame: FrameType | None) -> Place:
    """The place of the calling thread, with the line that called `frame`. Without a watch only the
    rank is known."""
    session = _session()
    if session is None:
        return unknown_place(get_rank())
    return session.recorder.place(frame)


def _session() -> Session | None:
    # Not imported here: before the first watch it is not loaded, and torch may be missing.
    watch = sys.modules.get("torchwhere.api.watch")
    return None if watch is None else watch.current()


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
    """Print on some ranks. Every line begins with `[rank]`, or with the place.

    Args:
        *values: The values to print, as for `print`.
        ranks: The ranks that print: one rank, several, or "all".
        place: Begin the lines with the current place instead of the rank.
        sep: The text between the values.
        end: The text after the last value.
        file: The file to write to; by default `sys.stdout`.
        flush: Has no effect, the text is always written at once: a part that stays in a buffer
            could be mixed with the lines of other ranks.

    Raises:
        TypeError: `ranks` has the wrong type.
        ValueError: A rank is negative, or `ranks` is a text other than "all".

    Example:
        torchwhere.print_rank("loss", loss.item(), ranks=[0, 1], place=True)
    """
    rank = get_rank()
    if not is_among(rank, ranks):
        return
    prefix = f"[{place_of(sys._getframe(1))}]" if place else f"[{rank}]"
    print_whole(_prefixed(prefix, sep.join(map(str, values)) + end), file=file)


def print_whole(text: str, *, file: TextIO | None = None) -> None:
    """Write a text to `file` or to `sys.stdout`, without lines of other processes in between."""
    file = sys.stdout if file is None else file
    if file is not None:  # `sys.stdout` is None in a process without a console
        _hide_from_dynamo()
        write_whole(text, file)


def is_among(rank: int, ranks: Ranks) -> bool:
    """Whether `rank` is one of `ranks`. Raises an error if `ranks` is not a choice of ranks."""
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
    for number in chosen:
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"ranks={ranks!r}: {number!r} is not a rank")
        if number < 0:
            raise ValueError(f"ranks={ranks!r}: ranks are counted from 0")
    return rank in chosen


def _prefixed(prefix: str, text: str) -> str:
    """Put the prefix before every line, so that a search finds all lines of one rank."""
    lines = text.removesuffix("\n").split("\n")
    prefixed = "\n".join(f"{prefix} {line}" if line else prefix for line in lines)
    return f"{prefixed}\n" if text.endswith("\n") else prefixed


# -- a file for each rank --------------------------------------------------------------------------


def rank_log(
    *values: object,
    folder: str | os.PathLike[str] | None = None,
    rank: int | None = None,
    place: bool = False,
    sep: str = " ",
    end: str = "\n",
) -> None:
    """Append a line to `log_rank_<rank>.txt`.

    The line is in the file when the function returns. torchwhere closes the files at exit;
    `torchwhere diff` compares them.

    Args:
        *values: The values to write, as for `print`.
        folder: The folder of the file. The default is the output folder of the watch, or else the
            working directory.
        rank: The rank in the name of the file; by default the rank of this process.
        place: Begin the lines with the current place.
        sep: The text between the values.
        end: The text after the last value.

    Raises:
        TorchwhereError: The file cannot be opened.
        ValueError: `rank` is not a rank.

    Example:
        torchwhere.rank_log("grad norm", norm.item())
    """
    rank = get_rank() if rank is None else rank
    prefix = f"[{place_of(sys._getframe(1))}]" if place else ""
    text = sep.join(map(str, values)) + end
    append(_prefixed(prefix, text) if prefix else text, folder=folder, rank=rank)


def append(text: str, *, folder: str | os.PathLike[str] | None, rank: int) -> io.FileIO:
    """Append a text to the file of a rank in one write. Returns the open file."""
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
        raise ValueError(f"rank={rank!r}: expected a rank, counted from 0")
    path = (_folder() if folder is None else Path(folder)).absolute() / f"log_rank_{rank}.txt"
    return _logs.append(path, text.encode("utf-8", "backslashreplace"))


def _folder() -> Path:
    session = _session()
    return Path.cwd() if session is None or session.out is None else session.out


class _Logs:
    """The open files of this process, for all threads. A forked child opens its own."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._files: dict[Path, io.FileIO] = {}
        self._warned: set[Path] = set()

    def append(self, path: Path, data: bytes) -> io.FileIO:
        if self._pid != os.getpid():  # after a fork, a thread of the parent may hold the lock
            self._begin()
        with self._lock:
            file = self._opened(path)
            try:
                write_all(file.fileno(), data)
            except OSError as error:  # for example a full disk, which must not end the training
                self._warn_once(path, error)
        return file

    def _opened(self, path: Path) -> io.FileIO:
        file = self._files.get(path)
        # the program may have closed or deleted the file
        if file is None or file.closed or os.fstat(file.fileno()).st_nlink == 0:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                # Unbuffered appends keep lines whole if several processes of this rank write.
                file = open(path, "ab", buffering=0)  # noqa: SIM115 - kept open for the next line
            except OSError as error:
                raise TorchwhereError(
                    f"cannot write {path}: {error.strerror}. Choose another folder with folder=..."
                ) from None
            if not self._files:
                atexit.register(self.close)
            self._files[path] = file
        return file

    def _warn_once(self, path: Path, error: OSError) -> None:
        if path not in self._warned:
            self._warned.add(path)
            log.warning(
                "torchwhere: cannot write %s (%s): lines are lost, the job continues",
                path,
                error.strerror,
            )

    def close(self) -> None:
        """Close all files. The next line opens its file again."""
        atexit.unregister(self.close)
        with self._lock:
            for file in self._files.values():
                with contextlib.suppress(OSError):
                    file.close()
            self._files.clear()


_logs = _Logs()
close_logs = _logs.close


# -- torch.compile ---------------------------------------------------------------------------------

_HIDDEN_FROM_DYNAMO = (print_rank, print_whole, write_whole, rank_log, append)
_is_hidden = False


def _hide_from_dynamo() -> None:
    """Keep dynamo from compiling these functions, once torch is loaded. A compiled function that
    prints breaks its graph there, and dynamo would compile the frames below."""
    global _is_hidden
    if not _is_hidden and "torch" in sys.modules:
        from torchwhere.hooks._torch import unseen

        for function in _HIDDEN_FROM_DYNAMO:
            unseen(function)
        _is_hidden = True


for _function in (print_rank, rank_log):
    # torch.compiler.disable sets this attribute; it is set here without importing torch
    _function.__dict__["_torchdynamo_disable"] = True
_hide_from_dynamo()
