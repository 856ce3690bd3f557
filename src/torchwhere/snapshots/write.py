"""Saves snapshots of a running job, for a diagnosis after it has ended or lost a box.

A snapshot is two files in the folder of the run, named after the program that saves them and the
host: `<source>-<host>.snapshot` (`encode.py`) holds the last content of the ranks' boxes, a few KB
for each rank, and `<source>-<host>.json` the statuses of their processes. A monitor saves them
continually, a stalled rank from time to time, `doctor` when it finds a problem. `read.py` reads
them.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.summary import BoxOrSummary
from torchwhere.core.atomic_file import replace_file
from torchwhere.processes.status import ProcessStatus
from torchwhere.snapshots.encode import encode_boxes
from torchwhere.snapshots.read import MONITOR, SNAPSHOT_SUFFIX

SILENCE_S = 1.0
OFTEN_S = 5.0
_MAX_SHARE = 0.02  # of one core
MOST_RANKS = 256  # boxes read at once; no host has as many


class SnapshotWriter:
    """Writes and overwrites the two files of one source on one host."""

    def __init__(self, folder: Path, *, source: str = MONITOR) -> None:
        self.path = folder / f"{source}-{socket.gethostname()}{SNAPSHOT_SUFFIX}"
        self._source = source
        self._written_at = 0.0  # monotonic clock before the boxes were read
        self._next_at = 0.0

    def is_due(self, moved_at: float) -> bool:
        """Whether to write again. There must be progress since the last snapshot, the latest at
        `moved_at`, and then silence, or too long a time."""
        now = time.monotonic()
        is_time = now - moved_at > SILENCE_S or now - self._written_at > OFTEN_S
        return is_time and self._written_at < moved_at and now > self._next_at

    def write(self, boxes: Mapping[int, Box], *, read_ns: int, read_at: float) -> None:
        """Save boxes that were read at this time, by the wall clock and the monotonic clock."""
        if not boxes:
            return
        self._written_at = read_at
        replace_file(self.path, encode_boxes(boxes, read_ns=read_ns))
        self._next_at = time.monotonic() + (time.monotonic() - read_at) / _MAX_SHARE

    def write_seen(
        self, boxes: Mapping[int, BoxOrSummary], seen: Mapping[int, ProcessStatus]
    ) -> None:
        """Save the statuses of this host's processes from one look."""
        ranks = {
            rank: as_saved(boxes[rank], status, is_once=True)
            for rank, status in seen.items()
            if status.alive is not None
        }
        content = json.dumps({"role": self._source, "ranks": ranks})
        replace_file(self.path.with_suffix(".json"), content)


def as_saved(box: BoxOrSummary, seen: ProcessStatus, *, is_once: bool = False) -> dict[str, Any]:
    """A status with the identity of its process. A single look does not show how long a process
    lived, so it stores `seen_ns` instead of `alive_ns`."""
    names = ("pid", "pid_started", "pid_namespace", "host")
    identity = {name: box.meta.get(name) for name in names} | {"run": list(box.run)}
    times = {"seen_ns": seen.alive_ns, "alive_ns": None} if is_once else {}
    return seen.to_dict() | times | identity
