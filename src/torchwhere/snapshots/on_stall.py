"""Lets a stalled rank save a snapshot of the ranks around it, in case one of their boxes is lost.

In a job without a monitor, no other process saves snapshots. A stalled rank has time: its heartbeat
thread (`recorder/heartbeat.py`) reads the boxes of its host, looks at their processes, and saves
`stall-<host>.snapshot` and `stall-<host>.json`. Any rank may do this; one each second is enough.
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

_AROUND = 32  # ranks before and after its own: the ranks of its host, on most hosts
_RECENT_S = 1.5


class StallSnapshot:
    """Saves snapshots for one rank."""

    def __init__(self, box: Path, *, rank: int) -> None:
        self.box, self._rank = box, rank
        self._host = socket.gethostname()
        self._snapshot_writer = SnapshotWriter(box.parent, source=STALL)
        self._neighbours: set[int] = set()  # in the last snapshot

    def take(self) -> None:
        """Save a snapshot, unless another rank has just saved one. If a box is gone by now, keep
        the last snapshot."""
        if self._is_recent():
            return
        read_ns, read_at = time.time_ns(), time.monotonic()
        summaries = self._summaries()
        if len(summaries) < 2 or not self._neighbours <= summaries.keys():
            return
        self._neighbours = set(summaries)
        self._snapshot_writer.write_seen(summaries, look(summaries))
        # one box in memory at a time
        boxes = LazyBoxes(summaries, kept=1)
        self._snapshot_writer.write(boxes, read_ns=read_ns, read_at=read_at)

    def _is_recent(self) -> bool:
        try:
            return 0 <= time.time() - self._snapshot_writer.path.stat().st_mtime < _RECENT_S
        except OSError:
            return False

    def _summaries(self) -> dict[int, BoxSummary]:
        """Boxes of this host since the job's last restart; empty without its own box."""
        own = read_header(self.box)
        summaries = {}
        for rank in range(max(0, self._rank - _AROUND), self._rank + _AROUND + 1):
            # a few KB: most of them may belong to other hosts
            box = read_header(self.box.with_name(box_name(rank)))
            is_of_this_run = (box.run, box.meta.get("host")) == (own.run, self._host)
            if box.is_readable and box.rank == rank and is_of_this_run:
                summaries[rank] = summarize(box)
        return summaries if self._rank in summaries else {}
