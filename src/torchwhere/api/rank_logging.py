"""Adds the place to Python's `logging`: `PlaceFilter` adds it to records, `RankHandler` writes them
to a file for each rank.

A record gets `place` (the whole place as text) and its parts as `place_rank`, `place_step`,
`place_pass`, `place_module`, `place_call` and `place_line`: logging itself uses `module` and
`lineno`. It also gets `rank`, unless it already has one.

A log call inside a log call, and records of torchwhere itself, get only the rank: computing the
place could log again, or wait for a lock that the logging code holds.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterable
from typing import TextIO

from torchwhere.api.printing import Ranks, append, get_rank, is_among, place_of
from torchwhere.core.locked_write import write_whole
from torchwhere.core.place import Certainty, Place, shown, unknown_place

PLACE_FORMAT = "[%(place)s] %(levelname)s %(name)s: %(message)s"


class _Lookup(threading.local):
    """Whether this thread is computing a place."""

    is_running = False


class PlaceFilter(logging.Filter):
    """Adds the current place to every log record, and drops none. For loggers and handlers.

    A record gets `place` (text), `place_rank`, `place_step`, `place_pass`, `place_module`,
    `place_call`, `place_line`, and `rank` unless it already has one.

    Example:
        handler = logging.StreamHandler()
        handler.addFilter(torchwhere.PlaceFilter())
        handler.setFormatter(logging.Formatter("[%(place)s] %(message)s"))
        logging.getLogger().addHandler(handler)
    """

    _lookup = _Lookup()

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the place to a record. Returns True."""
        if not hasattr(record, "place_rank"):  # the first filter is nearest to the log call
            self._add_place(record, self._place(record))
        return True

    def _place(self, record: logging.LogRecord) -> Place:
        if not self._lookup.is_running and record.name.partition(".")[0] != "torchwhere":
            self._lookup.is_running = True
            try:
                return place_of(sys._getframe(2))
            except Exception:  # a log call must not fail because its place is unknown
                pass
            finally:
                self._lookup.is_running = False
        return unknown_place(get_rank())

    def _add_place(self, record: logging.LogRecord, place: Place) -> None:
        is_known = place.certainty is not Certainty.UNKNOWN
        record.place = str(place) if is_known else f"rank {place.rank}"
        record.place_rank = place.rank
        record.place_step = "-" if place.step is None else place.step
        record.place_pass = place.pass_
        record.place_module = shown(place.module)
        record.place_call = "-" if place.call is None else place.call
        record.place_line = place.full_line or "-"
        if not hasattr(record, "rank"):
            record.rank = place.rank


class RankHandler(logging.Handler):
    """Writes log records with their place to `log_rank_<rank>.txt` (see `rank_log`), or to a file
    that all ranks share.

    Args:
        level: The lowest level of the records.
        folder: The folder of the files. The default is the output folder of the watch, or else the
            working directory.
        file: Write to this open file instead, for example `sys.stderr`. Lines stay whole.
        ranks: The ranks that write: one rank, several, or "all".

    Raises:
        TypeError: `ranks` has the wrong type.
        ValueError: Both `folder` and `file` are given, or `ranks` is not a choice of ranks.

    Example:
        logging.getLogger().addHandler(torchwhere.RankHandler(logging.INFO))
    """

    def __init__(
        self,
        level: int | str = logging.NOTSET,
        *,
        folder: str | os.PathLike[str] | None = None,
        file: TextIO | None = None,
        ranks: Ranks = "all",
    ) -> None:
        super().__init__(level)
        if file is not None and folder is not None:
            raise ValueError("RankHandler(file=..., folder=...): give only one of them")
        self._ranks = (
            list(ranks) if isinstance(ranks, Iterable) and not isinstance(ranks, str) else ranks
        )
        is_among(0, self._ranks)  # raises for wrong ranks now, not at the first record
        self._folder, self._file = folder, file
        # A filter runs before the handler takes its lock: computing the place may need other locks.
        self.addFilter(PlaceFilter())
        self.setFormatter(logging.Formatter(PLACE_FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, if this rank is one of `ranks`."""
        try:
            rank = get_rank()
            if is_among(rank, self._ranks):
                text = self.format(record) + "\n"
                if self._file is None:
                    append(text, folder=self._folder, rank=rank)
                else:
                    write_whole(text, self._file)
        except Exception:  # as in every handler of logging
            self.handleError(record)
