"""The ring of a box: its records in the order they were written, and an account of every slot.

Takes the bytes of the section, gives the good records and counts. Every record is checked against
its CRC. That is cheap where all is well: a CRC is linear, so a sealed record has the same effect on
a running CRC whatever it holds, and so many of them in a row have one CRC that is known beforehand.
Only where a block does not have it is each of its records looked at.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from torchwhere.blackbox import file_format
from torchwhere.blackbox.file_format import RECORD_BYTES
from torchwhere.core.events import Kind

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
_BLOCK = 256  # records that are checked at once
_KNOWN = np.isin(np.arange(256), list(Kind))


@dataclass(frozen=True, slots=True)
class Ring:
    """What the slots hold."""

    records: npt.NDArray[Any]
    torn: int  # begun and not finished, or damaged
    unknown: int  # of a kind this version does not know
    overwritten: int


def parse_ring(section: memoryview, capacity: int) -> Ring:
    """Of a file that was cut, the slots that are there."""
    usable = section[: len(section) // RECORD_BYTES * RECORD_BYTES]
    slots = np.frombuffer(usable, np.uint8).reshape(-1, RECORD_BYTES)
    used = _used(slots)
    raw = slots[: len(used)] if _is_prefix(used) else slots[used]
    rows, whole = as_records(raw), _whole(raw)
    numbers, known = rows["number"].astype(np.int64), _KNOWN[rows["kind"]]
    written = _written(numbers, capacity)
    if written is not None and whole.all() and known.all():
        turn = written % capacity if written > capacity else 0
        in_order = np.concatenate([raw[turn:], raw[:turn]]) if turn else raw
        return Ring(as_records(in_order), 0, 0, max(0, written - capacity))
    return _damaged(
        raw,
        used,
        whole & (rows["number"] % np.uint64(capacity) == used.astype(np.uint64)),
        known,
        capacity,
    )


def _written(numbers: npt.NDArray[np.int64], capacity: int) -> int | None:
    """How many records were written, if each stands where it belongs: the last lap, then what is
    left of the one before."""
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
    """Slot by slot: what is whole, and what is not."""
    numbers = as_records(raw)["number"]
    written = int(numbers[whole].max()) + 1 if whole.any() else 0
    # A slot that must have been written and is empty was begun and not finished, or is cut off.
    empty = min(written, capacity) - int((used < written).sum())
    good = raw[whole & known]
    return Ring(
        records=as_records(good[np.argsort(as_records(good)["number"], kind="stable")]),
        torn=len(used) - int(whole.sum()) + empty,
        unknown=int((whole & ~known).sum()),
        overwritten=max(0, written - capacity),
    )


def _used(slots: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """The slots that are not all zero. A sealed record nearly never has a zero for its CRC: mostly
    those words are enough."""
    words = slots.view("<u8")
    sealed = np.flatnonzero(words[:, -1] >> np.uint64(32))
    rest = words[len(sealed) :]
    if _is_prefix(sealed) and not rest.any():
        return sealed
    found: npt.NDArray[np.int64] = np.flatnonzero(words.any(axis=1))
    return found


def _is_prefix(used: npt.NDArray[np.int64]) -> bool:
    return not len(used) or int(used[-1]) == len(used) - 1


def as_records(raw: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Rows of bytes or words as records. To move rows about is many times faster than to move
    records."""
    return raw.view(RECORD_DTYPE)[:, 0]


def as_words(records: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Records as rows of eight words."""
    return records.view("<u8").reshape(-1, RECORD_BYTES // 8)


# -- CRCs ------------------------------------------------------------------------------------------


def _whole(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Which records have the CRC that they are sealed with."""
    found = np.ones(len(raw), np.bool_)
    data = np.ascontiguousarray(raw).data.cast("B") if len(raw) else memoryview(b"")
    for start in range(0, len(raw), _BLOCK):
        block = data[start * RECORD_BYTES : (start + _BLOCK) * RECORD_BYTES]
        if zlib.crc32(block) != _crc_of_sealed(len(block) // RECORD_BYTES):
            part = raw[start : start + _BLOCK]
            found[start : start + _BLOCK] = _crcs(part) == as_records(part)["crc"]
    return found


@cache
def _crc_of_sealed(count: int) -> int:
    """The CRC of so many sealed records in a row, whatever they hold."""
    data = bytes(file_format.RECORD_CRC_AT)
    return zlib.crc32((data + file_format.CRC.pack(zlib.crc32(data))) * count)


@cache
def _crc_tables() -> tuple[npt.NDArray[np.uint32], int]:
    """The CRC of a record is the xor of one table value per byte."""
    length = file_format.RECORD_CRC_AT
    zero = zlib.crc32(bytes(length))
    tables = np.empty((length, 256), np.uint32)
    for position in range(length):
        tail = bytes(length - position - 1)
        head = bytes(position)
        tables[position] = [zlib.crc32(head + bytes([value]) + tail) ^ zero for value in range(256)]
    return tables, zero


def _crcs(columns: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """The CRC of every record, all at once."""
    tables, zero = _crc_tables()
    found = np.full(len(columns), zero, np.uint32)
    for position in range(file_format.RECORD_CRC_AT):
        found ^= tables[position][columns[:, position]]
    return found
