"""Summaries of boxes, without their records: enough to group boxes into runs, to find their
processes, and to see whether a box has changed."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import (
    COUNTER_BYTES,
    COUNTER_COUNT,
    CURSOR_BYTES,
    CURSOR_RECORD,
    CURSOR_STEP,
    Geometry,
)
from torchwhere.blackbox.ring import Counts, read_section
from torchwhere.blackbox.string_table import json_int

# the cursors and counters are before the ring, at the same offsets in every box of this version
_USUAL = Geometry(capacity=1)
JOB_KEYS = (  # of the meta that other hosts need too
    "rank",
    "rank_is_assumed",
    "world_size",
    "run_id",
    "store",
    "restart",
    "started_ns",
    "folder",
    "counted",
    "devices",
)
_META_KEYS = (
    *JOB_KEYS,
    "host",
    "pid",
    "pid_started",
    "pid_namespace",
    "stack_signal",
    "oom_counter",
    "oom_kills",
    "flight_recorder",
)


@dataclass(frozen=True, slots=True)
class BoxSummary:
    """Path, owner and state of a box whose content stays in its file."""

    path: Path
    rank: int
    run: tuple[str, int]
    is_readable: bool
    last_ns: int  # wall clock of its last record, or of its start
    lacks_counts: bool
    checksum: int  # of its cursors and counters: another one if it was written since
    meta: dict[str, Any] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    problems: tuple[str, ...] = ()
    beat_ns: int = 0  # wall clock of its last heartbeat


BoxOrSummary = Box | BoxSummary


def summarize(box: Box) -> BoxSummary:
    return BoxSummary(
        path=box.path,
        rank=box.rank,
        run=box.run,
        is_readable=box.is_readable,
        last_ns=box.last_ns,
        lacks_counts=box.lacks_counts,
        checksum=box.checksum,
        meta={name: box.meta[name] for name in _META_KEYS if name in box.meta},
        counts=box.counts,
        problems=tuple(box.problems),
        beat_ns=box.beat_ns,
    )


def read_checksum(path: Path) -> int:
    """`Box.checksum` of a file, from a few KB; 0 if it is not readable."""
    data = _read_words(path)
    return zlib.crc32(data) if data else 0


def started_ns(box: BoxOrSummary) -> int:
    """Wall clock of the start of the watch; 0 if it is unknown."""
    return json_int(box.meta, "started_ns")


def read_progress(path: Path) -> bytes:
    """The counts of a box, from a few KB; empty if it is not readable.

    If they are equal at two moments, no collective, step or record was counted in between. Cursor
    moves do not count: a rank in an endless loop moves without making progress.
    """
    data = _read_words(path)
    if len(data) < _USUAL.ring_at - _USUAL.cursors_at:
        return b""
    split = _USUAL.counters_at - _USUAL.cursors_at
    cursors = np.frombuffer(data[:split], "<u8").reshape(-1, CURSOR_BYTES // 8)
    counters = np.frombuffer(data[split:], "<u8").reshape(-1, COUNTER_BYTES // 8)
    steps = cursors[:, (CURSOR_STEP, CURSOR_RECORD)]
    return steps.tobytes() + counters[:, COUNTER_COUNT].tobytes()


def _read_words(path: Path) -> bytes:
    """The cursors and counters of a box; empty if it is not readable."""
    return read_section(path, _USUAL.cursors_at, _USUAL.ring_at - _USUAL.cursors_at)
