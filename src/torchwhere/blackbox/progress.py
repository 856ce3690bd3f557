"""A box's pulse: how many collectives it has counted and how far its steps are, without reading the
box.

Reads the cursors and counters alone, a few KB. Moves of a cursor do not count: a rank in an endless
loop moves and gets nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from torchwhere.blackbox.file_format import (
    COUNTER_BYTES,
    COUNTER_COUNT,
    CURSOR_BYTES,
    CURSOR_RECORD,
    CURSOR_STEP,
    HEADER_BYTES,
    HEADER_COPIES,
    Geometry,
)

# cursors and counters lie before the ring, at the same place in every box
_GEOMETRY = Geometry(capacity=1)


@dataclass(frozen=True, slots=True)
class Progress:
    """Equal pulses: nothing was counted in between."""

    counts: bytes


def read_progress(path: Path) -> Progress:
    """Of a box that cannot be read, an empty one."""
    try:
        with path.open("rb") as file:
            file.seek(HEADER_BYTES * HEADER_COPIES)
            data = file.read(_GEOMETRY.ring_at - _GEOMETRY.cursors_at)
    except OSError:
        data = b""
    if len(data) < _GEOMETRY.ring_at - _GEOMETRY.cursors_at:
        return Progress(b"")
    split = _GEOMETRY.counters_at - _GEOMETRY.cursors_at
    cursors = np.frombuffer(data[:split], "<u8").reshape(-1, CURSOR_BYTES // 8)
    counters = np.frombuffer(data[split:], "<u8").reshape(-1, COUNTER_BYTES // 8)
    steps = cursors[:, (CURSOR_STEP, CURSOR_RECORD)]
    return Progress(steps.tobytes() + counters[:, COUNTER_COUNT].tobytes())
