"""The usual duration of the recent steps of a rank, as users count them.

The first step of a box begins with the watch, so it contains imports and the set-up of the job. It
does not count. The median leaves out compilations, evaluations and checkpoints between the others.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchwhere.blackbox.file_format import RECORD_BYTES, Geometry
from torchwhere.blackbox.ring import RECORD_DTYPE
from torchwhere.core.events import Kind

_STEPS = 50  # the last ones that count
_TAIL = 512  # records that `read_step_ns` reads: 32 KB


def usual_step_ns(records: npt.NDArray[Any], *, from_start: bool) -> float | None:
    """The median duration of the last steps among records in the order of their numbers.

    Returns None if no step but the first has ended. `from_start` says that the records begin with
    the first one of the box.
    """
    begins = records["t_ns"][records["kind"] == int(Kind.STEP_BEGIN)].astype(np.int64)
    took = np.diff(begins[1 if from_start else 0 :])[-_STEPS:]
    took = took[took > 0]  # a torn record may have any time
    return float(np.median(took)) if len(took) else None


def read_step_ns(path: Path, geometry: Geometry, *, newest: int) -> float | None:
    """The same from the end of the ring of a box that is being written, whose last record has the
    number `newest`. None if the file cannot be read."""
    first = max(0, newest + 1 - min(_TAIL, geometry.capacity))
    begin, end = first % geometry.capacity, newest % geometry.capacity + 1
    slots = [(begin, end)] if begin < end else [(begin, geometry.capacity), (0, end)]
    try:
        with path.open("rb", buffering=0) as file:
            data = b"".join(_read(file.fileno(), geometry, *part) for part in slots)
    except OSError:
        return None
    records = np.frombuffer(data[: len(data) // RECORD_BYTES * RECORD_BYTES], RECORD_DTYPE)
    is_whole = records["number"] == np.arange(first, first + len(records))
    return usual_step_ns(records[is_whole], from_start=first == 0)


def _read(fd: int, geometry: Geometry, begin: int, end: int) -> bytes:
    return os.pread(fd, (end - begin) * RECORD_BYTES, geometry.ring_at + begin * RECORD_BYTES)
