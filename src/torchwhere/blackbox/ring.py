"""Reads the ring of a box: its records in the order they were written, and a count of the others.

Takes the bytes of the section and returns the good records with counts. It checks the CRC of every
record. That is cheap for an intact ring: a CRC is linear, so a record that ends with its own CRC
has the same effect on a running CRC, whatever its content. A block of such records has a CRC that
is known in advance. Only the records of a block with another CRC are checked one by one.

`usual_step_ns` gives the usual duration of the steps among the records.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchwhere.blackbox import file_format
from torchwhere.blackbox.file_format import RECORD_BYTES, Geometry
from torchwhere.core.events import Kind, SideKind

RECORD_DTYPE = np.dtype(
    [
        ("number", "<u8"),
        ("t_ns", "<u8"),
        ("kind", "u1"),
        ("pass", "u1"),
        ("flags", "u1"),
        ("thread", "u1"),
    ]
    + [
        (name, "<u4")
        for name in ("step", "module", "call", "line", "graph", "subject", "beneficiary", "param")
    ]
    + [("extra", "<u8"), ("crc", "<u4")]
)
_BLOCK = 256  # records in one check
_STEPS = 50  # the last ones that count as usual
_TAIL = 512  # records that `read_step_ns` reads: 32 KB
_IS_KNOWN = np.isin(np.arange(256), [*Kind, *SideKind])  # by kind
_IS_SIDE = np.isin(np.arange(256), list(SideKind))


@dataclass(slots=True)
class Counts:
    """Counts of all record slots and table bytes of a file."""

    good: int = 0  # events
    torn: int = 0  # not finished, or damaged
    unknown: int = 0  # of kinds that this version does not know
    overwritten: int = 0  # older than the ring
    torn_entries: int = 0
    lost_texts: int = 0  # overwritten or damaged when they were read
    aside: int = 0  # good records that are not events


@dataclass(frozen=True, slots=True)
class Ring:
    """Content of the slots."""

    records: npt.NDArray[Any]
    torn: int  # not finished, or damaged
    unknown: int  # of kinds that this version does not know
    overwritten: int


def parse_ring(section: memoryview, capacity: int) -> Ring:
    """Read a section; of a truncated file, the slots that exist."""
    usable = section[: len(section) // RECORD_BYTES * RECORD_BYTES]
    slots = np.frombuffer(usable, np.uint8).reshape(-1, RECORD_BYTES)
    used = _used(slots)
    raw = slots[: len(used)] if _is_prefix(used) else slots[used]
    rows, whole = as_records(raw), _have_right_crc(raw)
    numbers, known = rows["number"].astype(np.int64), _IS_KNOWN[rows["kind"]]
    written = _written(numbers, capacity)
    if written is not None and whole.all() and known.all():
        oldest = written % capacity if written > capacity else 0
        in_order = np.concatenate([raw[oldest:], raw[:oldest]]) if oldest else raw
        return Ring(as_records(in_order), 0, 0, max(0, written - capacity))
    is_in_its_slot = rows["number"] % np.uint64(capacity) == used.astype(np.uint64)
    return _damaged(raw, used, whole & is_in_its_slot, known, capacity)


def _written(numbers: npt.NDArray[np.int64], capacity: int) -> int | None:
    """Number of records written, if each is in its slot: the current turn of the ring, then the
    rest of the turn before."""
    count = len(numbers)
    last = int(numbers.max(initial=-1))
    if (last + 1 != count and count != capacity) or last + 1 < count:
        return None
    expected = np.arange(count, dtype=np.int64)
    expected += last - last % capacity if count == capacity else 0
    expected[last % capacity + 1 :] -= capacity
    return last + 1 if np.array_equal(numbers, expected) else None


def _damaged(
    raw: npt.NDArray[np.uint8],
    used: npt.NDArray[np.int64],
    whole: npt.NDArray[np.bool_],
    known: npt.NDArray[np.bool_],
    capacity: int,
) -> Ring:
    """Sort out slots that are torn, unknown or out of order."""
    numbers = as_records(raw)["number"]
    written = int(numbers[whole].max()) + 1 if whole.any() else 0
    # An empty slot below the last written one was not finished, or is truncated.
    empty = min(written, capacity) - int((used < written).sum())
    good = raw[whole & known]
    return Ring(
        records=as_records(good[np.argsort(as_records(good)["number"], kind="stable")]),
        torn=len(used) - int(whole.sum()) + empty,
        unknown=int((whole & ~known).sum()),
        overwritten=max(0, written - capacity),
    )


def _used(slots: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """The slots that are not all zero. A record almost never has a CRC of zero, so in most cases
    the CRC words are enough."""
    words = slots.view("<u8")
    have_crc = np.flatnonzero(words[:, -1] >> np.uint64(32))
    rest = words[len(have_crc) :]
    if _is_prefix(have_crc) and not rest.any():
        return have_crc
    used: npt.NDArray[np.int64] = np.flatnonzero(words.any(axis=1))
    return used


def _is_prefix(used: npt.NDArray[np.int64]) -> bool:
    return not len(used) or int(used[-1]) == len(used) - 1


def split_sides(records: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Separate the records of events from the others, which have a `SideKind`."""
    is_side = _IS_SIDE[records["kind"]]
    if not is_side.any():
        return records, records[:0]
    # Moving rows of bytes is many times faster than moving records.
    raw = records.view(np.uint8).reshape(-1, RECORD_BYTES)
    return as_records(raw[~is_side]), as_records(raw[is_side])


def as_records(raw: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """View rows of bytes or words as records. Moving rows is many times faster than moving
    records."""
    return raw.view(RECORD_DTYPE)[:, 0]


def as_words(records: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """View records as rows of eight words."""
    return records.view("<u8").reshape(-1, RECORD_BYTES // 8)


# -- CRCs ------------------------------------------------------------------------------------------


def _have_right_crc(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Which records match their own CRC."""
    are_right = np.ones(len(raw), np.bool_)
    data = np.ascontiguousarray(raw).data.cast("B") if len(raw) else memoryview(b"")
    for start in range(0, len(raw), _BLOCK):
        block = data[start * RECORD_BYTES : (start + _BLOCK) * RECORD_BYTES]
        if zlib.crc32(block) != _crc_of_block(len(block) // RECORD_BYTES):
            part = raw[start : start + _BLOCK]
            crcs = [zlib.crc32(row[: file_format.RECORD_CRC_AT]) for row in part]
            are_right[start : start + _BLOCK] = as_records(part)["crc"] == crcs
    return are_right


@cache
def _crc_of_block(count: int) -> int:
    """The CRC of this many intact records in a row, whatever their content."""
    data = bytes(file_format.RECORD_CRC_AT)
    return zlib.crc32((data + file_format.CRC.pack(zlib.crc32(data))) * count)


# -- parts of a file that is being written ---------------------------------------------------------


def read_section(path: Path, at: int, length: int) -> bytes:
    """A section of a file, as far as it exists."""
    try:
        with path.open("rb") as file:
            file.seek(at)
            return file.read(length)
    except OSError:
        return b""


def usual_step_ns(records: npt.NDArray[Any], *, from_start: bool) -> float | None:
    """The median duration of the last steps, as users count them, among records in the order of
    their numbers. It leaves out compilations, evaluations and checkpoints between the others.

    Returns None if no step but the first has ended. `from_start` says that the records begin with
    the first one of the box: its first step does not count, because it begins with the watch and
    contains imports and the set-up of the job.
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
    data = b"".join(
        read_section(path, geometry.ring_at + start * RECORD_BYTES, (stop - start) * RECORD_BYTES)
        for start, stop in slots
    )
    records = np.frombuffer(data[: len(data) // RECORD_BYTES * RECORD_BYTES], RECORD_DTYPE)
    is_whole = records["number"] == np.arange(first, first + len(records))
    return usual_step_ns(records[is_whole], from_start=first == 0)
