"""What a rank that has come to rest sees of the ranks around it, for a doctor who comes when one of
their boxes is gone.

A job that nobody watches has no monitor to keep a diary. But a rank that stands still has time: its
heart (`recorder/heartbeat.py`) reads the boxes of its host and looks at their processes, once, and
writes down what a monitor would have: `stall-<host>.snapshot` and `stall-<host>.json`. Any rank may
do it; one a second is enough.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

from torchwhere.blackbox.file_names import box_name
from torchwhere.blackbox.lazy_boxes import LazyBoxes
from torchwhere.blackbox.reader import read_header
from torchwhere.blackbox.summary import BoxSummary, summarize
from torchwhere.processes.look import look
from torchwhere.snapshots.read import STALL
from torchwhere.snapshots.write import SnapshotWriter

_AROUND = 32  # ranks before and after its own: those of its host, on most hosts
_JUST_NOW_S = 1.5


class StallSnapshot:
    """One rank, its folder, and the neighbours it has met."""

    def __init__(self, box: Path, *, rank: int) -> None:
        self._box, self._rank = box, rank
        self._host = socket.gethostname()
        self._snapshot_writer = SnapshotWriter(box.parent, teller=STALL)
        self._met: set[int] = set()

    def take(self) -> None:
        """Write down what is there now, unless somebody has just done so. If a box is gone by now,
        what was written stays."""
        if self._was_done():
            return
        read_ns, read_at = time.time_ns(), time.monotonic()
        labels = self._labels()
        if len(labels) < 2 or not self._met <= labels.keys():
            return
        self._met = set(labels)
        self._snapshot_writer.write_seen(labels, look(labels))
        # one box in memory at a time
        self._snapshot_writer.write(LazyBoxes(labels, kept=1), read_ns=read_ns, read_at=read_at)

    def _was_done(self) -> bool:
        try:
            return 0 <= time.time() - self._snapshot_writer.path.stat().st_mtime < _JUST_NOW_S
        except OSError:
            return False

    def _labels(self) -> dict[int, BoxSummary]:
        """Of the boxes of this life of this job on this host, its own among them."""
        own = read_header(self._box)
        found = {}
        for rank in range(max(0, self._rank - _AROUND), self._rank + _AROUND + 1):
            # a few KB: most may be of other hosts
            box = read_header(self._box.with_name(box_name(rank)))
            if (
                box.is_readable
                and box.rank == rank
                and (box.run, box.meta.get("host")) == (own.run, self._host)
            ):
                found[rank] = summarize(box)
        return found if self._rank in found else {}
