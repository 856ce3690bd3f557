"""Python's `logging` with the place: `PlaceFilter` stamps records, `RankHandler` writes them whole,
rank by rank.

A record gets `place` (the text of the whole) and its parts as `place_rank`, `place_step`,
`place_pass`, `place_module`, `place_call` and `place_line`: plain `module` and `lineno` are
logging's own. `rank` is there too unless the record has one.

A log call inside a log call, and what torchwhere itself logs, is stamped with the rank alone:
asking for the place could lead to the next log call, or wait for a lock that the one who logs is
holding.
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
from torchwhere.core.place import Certainty, Place, shown

PLACE_FORMAT = "[%(place)s] %(levelname)s %(name)s: %(message)s"


class _Asking(threading.local):
    """Whether this thread is asking for a place."""

    now = False


class PlaceFilter(logging.Filter):
    """Stamps every record with the place it was logged at, and lets it pass. For loggers and for
    handlers."""

    _asking = _Asking()

    def filter(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "place_rank"):  # the first one to stamp it stood nearest
            self._stamp(record, self._place(record))
        return True

    def _place(self, record: logging.LogRecord) -> Place:
        if not self._asking.now and record.name.partition(".")[0] != "torchwhere":
            self._asking.now = True
            try:
                return place_of(sys._getframe(2))
            except Exception:  # a log call never fails over where it was made
                pass
            finally:
                self._asking.now = False
        return Place(rank=get_rank(), step=None, pass_="outside", certainty=Certainty.UNKNOWN)

    def _stamp(self, record: logging.LogRecord, place: Place) -> None:
        is_known = place.certainty is not Certainty.UNKNOWN
        record.place = str(place) if is_known else f"rank {place.rank}"
        record.place_rank = place.rank
        record.place_step = "-" if place.step is None else place.step
        record.place_pass = place.pass_
        record.place_module = shown(place.module)
        record.place_call = "-" if place.call is None else place.call
        record.place_line = place.line or "-"
        if not hasattr(record, "rank"):
            record.rank = place.rank


class RankHandler(logging.Handler):
    """Writes records, stamped with their place, to the rank's own file (see `rank_log`), or whole
    to `file` from some ranks.

    `folder` is where the files go; `ranks` says which ranks write at all: one, several, or "all".
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
            raise ValueError("RankHandler(file=..., folder=...): records go to one or the other")
        self._ranks = (
            list(ranks) if isinstance(ranks, Iterable) and not isinstance(ranks, str) else ranks
        )
        is_among(0, self._ranks)  # say now what is wrong with them, not at the first record
        self._folder, self._file = folder, file
        # before the handler's lock is taken: finding the place may need locks of its own
        self.addFilter(PlaceFilter())
        self.setFormatter(logging.Formatter(PLACE_FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            rank = get_rank()
            if is_among(rank, self._ranks):
                text = self.format(record) + "\n"
                if self._file is None:
                    append(text, folder=self._folder, rank=rank)
                else:
                    write_whole(text, self._file)
        except Exception:  # as every handler of logging does
            self.handleError(record)
