"""What whoever looks at a job while it is there keeps of it, for a doctor who comes when it is
over, or when a box is gone.

Two files in the run's folder, named for who keeps them and for the host: a snapshot
(`hearing/snapshot.py`), what the boxes of the ranks said last, a few KB a rank; and what was seen
of their processes. A monitor writes them all the time, a rank that has come to rest now and then, a
doctor when it finds something wrong. `snapshots/read.py` reads them.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.summary import BoxOrSummary
from torchwhere.processes.status import ProcessStatus
from torchwhere.snapshots.encode import CALLS, MOST_BYTES, HostSnapshot, encode_snapshot, transcribe
from torchwhere.snapshots.read import MONITOR, SNAPSHOT_SUFFIX

SILENCE_S = 1.0
OFTEN_S = 5.0
_MOST_SHARE = 0.02  # of one core
MOST_RANKS = 256  # that are read at once; no host has as many


class SnapshotWriter:
    """The two files of one who keeps them, written over and over."""

    def __init__(self, folder: Path, *, teller: str = MONITOR) -> None:
        self.path = folder / f"{teller}-{socket.gethostname()}{SNAPSHOT_SUFFIX}"
        self._teller = teller
        self._written_at = 0.0  # monotonic: before the boxes were read
        self._next_at = 0.0

    def is_due(self, moved_at: float) -> bool:
        """Whether what has moved since it was written down, last at `moved_at`, has come to rest,
        or goes on for too long."""
        now = time.monotonic()
        is_time = now - moved_at > SILENCE_S or now - self._written_at > OFTEN_S
        return is_time and self._written_at < moved_at and now > self._next_at

    def write(self, boxes: Mapping[int, Box], *, read_ns: int, read_at: float) -> None:
        """What boxes say that were read not before `read_ns` by the wall clock, `read_at` by the
        monotonic one."""
        if not boxes:
            return
        self._written_at = read_at
        data, calls = b"", CALLS
        while not data or (len(data) > MOST_BYTES and calls > 1):
            batch, is_cut = transcribe(boxes.values(), calls=calls)
            data, calls = (
                encode_snapshot(
                    HostSnapshot(socket.gethostname(), batch, is_cut=is_cut, read_ns=read_ns)
                ),
                calls // 2,
            )
        write_whole(self.path, data)
        self._next_at = time.monotonic() + (time.monotonic() - read_at) / _MOST_SHARE

    def write_seen(
        self, labels: Mapping[int, BoxOrSummary], seen: Mapping[int, ProcessStatus]
    ) -> None:
        """What one look has seen of the processes of this host."""
        here = {rank: status for rank, status in seen.items() if status.alive is not None}
        ranks = {
            rank: as_saved(labels[rank], status, is_once=True) for rank, status in here.items()
        }
        write_whole(
            self.path.with_suffix(".json"), json.dumps({"role": self._teller, "ranks": ranks})
        )


def as_saved(box: BoxOrSummary, seen: ProcessStatus, *, is_once: bool = False) -> dict[str, Any]:
    """What was seen of a process, with whose it is. Who looks but once cannot say how long it was
    there: that it was alive then is left out."""
    whose = {
        name: box.meta.get(name) for name in ("pid", "pid_started", "pid_namespace", "host")
    } | {"run": list(box.run)}
    moments = {"seen_ns": seen.alive_ns, "alive_ns": None} if is_once else {}
    return seen.to_dict() | moments | whose


def write_whole(path: Path, content: str | bytes) -> None:
    """Whole or not at all; a folder that cannot be written is said by the ranks themselves."""
    try:
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        part.replace(path)
    except OSError:
        pass
