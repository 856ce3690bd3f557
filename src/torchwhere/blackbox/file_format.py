"""The file format of a black box, version 2. `docs/format.md` describes it in full.

    header (twice) | cursors | counters | ring of records | ring of texts | device lanes |
    device progress | device times | table, up to the end of the file

All numbers are little-endian. The sections before the table have a fixed size. The writer allocates
them when it creates the box, and writes them through one memory map. It appends to the table with
ordinary writes: the table grows without remapping, and a full disk is an error code instead of a
signal.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from torchwhere.core.place import PASS_LABELS, Certainty, Pass

MAGIC = b"TRCHWHRE"
VERSION = 2

HEADER_BYTES = 2048
HEADER_COPIES = 2
# magic, version, header bytes, cursors, counters, ring capacity, text bytes, lanes, table offset,
# meta length
HEADER = struct.Struct("<8s II IIIII Q I")
CRC = struct.Struct("<I")
META_BYTES = HEADER_BYTES - HEADER.size - CRC.size

CURSOR_BYTES = 64
CURSORS = 16
COUNTER_BYTES = 32
COUNTERS = 512
LANE_BYTES = 64
LANES = 32  # the last one is not a lane: its words are those of the last look
PROGRESS_BYTES = 32  # of each counter
TIMES_BYTES = 32  # of each record
OLD_TIMES_BYTES = 24  # in older files: without the wait
COUNTER_RANKS = (1 << 20) - 1  # ranks are smaller: a counter stores rank + 1 in 20 bits

# number, t_ns, kind, pass, flags, thread, step, module, call, line, graph, subject, beneficiary,
# param, extra; the CRC follows
RECORD = struct.Struct("<QQ BBBB IIIIIIII Q")
PLACE_RECORD = struct.Struct("<QQ BBBB III 28x")  # the same with zeros after the call
RECORD_BYTES = 64
RECORD_CRC_AT = RECORD_BYTES - 4

# position, length, CRC of everything before it and the text. The position tells a text from one of
# the same length that overwrote it one turn of the ring later.
TEXT = struct.Struct("<QII")
TEXT_BYTES = 1 << 18

# mark, id, type, length, CRC of everything before it and the payload
ENTRY = struct.Struct("<4s II I I")
ENTRY_MARK = b"\xa7tw\xb6"
ENTRY_MOST_BYTES = 1 << 20

NO_CALL = 0xFFFFFFFF  # an unknown call number
NO_STEP = 0xFFFFFFFF

# Words of a cursor slot, 8 bytes each; one store writes each word.
# The thread word is its number + 1; 0: not written.
# The heartbeat thread writes the last word. In the first slot it is the time of the last heartbeat,
# 0 without heartbeats. The other slots hold CPU delays of the last heartbeats, in turn.
(
    CURSOR_PLACE,
    CURSOR_TIME,
    CURSOR_STEP,
    CURSOR_THREAD,
    CURSOR_LINE,
    CURSOR_RECORD,
    CURSOR_PHASE,
    CURSOR_HEARTBEAT,
) = range(8)
# A CPU delay in one word: the upper half is the heartbeat's monotonic clock in ms, the lower half
# the delay in µs. Both wrap around.
CPU_DELAY_SHIFT = 32
CPU_DELAY_MASK = 0xFFFFFFFF
# Words of a counter slot.
COUNTER_STREAM, COUNTER_COUNT, COUNTER_TIME, COUNTER_RECORD = range(4)
# Words of a lane: how far a device has come on one of its streams. Ids and numbers are plus 1.
(
    LANE_PLACE,
    LANE_TIME,
    LANE_STEP,
    LANE_STREAM,
    LANE_RECORD,
    LANE_PENDING,
    LANE_NEXT_PLACE,
    LANE_NEXT_RECORD,
) = range(8)
# Words of the last slot: when the device was last looked at, and how many marks were left out.
POLL_TIME, POLL_SKIPPED = range(2)
# Words of a progress slot, which belongs to the counter of the same index.
PROGRESS_REACHED, PROGRESS_REACHED_TIME, PROGRESS_DONE, PROGRESS_DONE_TIME = range(4)
# Words of a times slot, which belongs to the record of the same slot. The highest byte of the
# number, and the highest bits of the wait, are the index of the lane plus 1; 0: unknown.
TIMES_NUMBER, TIMES_REACHED, TIMES_DONE, TIMES_WAITED = range(4)
TIMES_LANE_SHIFT = 56
TIMES_NUMBER_MASK = (1 << TIMES_LANE_SHIFT) - 1
WAITED_LANE_SHIFT = 59
WAITED_MASK = (1 << WAITED_LANE_SHIFT) - 1
DONE_BEFORE = 1 << 63  # in the word of the end: it was done at that time or before
DONE_MASK = DONE_BEFORE - 1
# The stream of a counter in one word: an entry id above, then source + 1, then destination + 1.
STREAM_ID_SHIFT = 40
STREAM_SOURCE_SHIFT = 20
STREAM_RANK_MASK = 0xFFFFF

# The amounts of a memory record are in units of the allocators: they round sizes up to it.
MEMORY_UNIT_BYTES = 512
MEMORY_RESERVED_SHIFT = 32  # in `extra`; allocated is below
MEMORY_MASK = 0xFFFFFFFF
FLAG_AT_LEAST = 64  # of a memory record: the peak may have been higher

# A place in one word: module (table id) above, then the pass, then the call.
PASS_SHIFT = 32
MODULE_SHIFT = 36
CALL_MASK = 0xFFFFFFFF
PASS_MASK = 0xF

FLAG_ASYNC = 1
FLAG_INFERRED = 2
FLAG_UNKNOWN = 4
FLAG_SHADOW = 8
FLAG_REPLAYED = 16
FLAG_ON_DEVICE = 32  # a collective on an accelerator
# of a collective: the rank loaded data, saved a checkpoint or, with both flags, evaluated
FLAG_LOADS = 64
FLAG_SAVES = 128


class Record(NamedTuple):
    """The fields of a record, in the order of the format."""

    number: int
    t_ns: int
    kind: int
    pass_: int
    flags: int
    thread: int
    step: int
    module: int
    call: int
    line: int
    graph: int
    subject: int
    beneficiary: int
    param: int
    extra: int


class EntryType(IntEnum):
    """Types of table entries. Ids are unique over all types, so a record needs no type beside an
    id."""

    META = 1  # JSON object: the whole meta if it does not fit into the header
    MODULE = 2  # name of a module
    LINE = 3  # file:line
    GROUP = 4  # JSON object: a process group
    COLLECTIVE = 5  # JSON object: the fields of a collective that repeat
    BENEFICIARY = 6  # JSON: whose parameters a collective moves; a unit's name or parameter names
    PARAM = 7  # name of a parameter
    GRAPH = 8  # a compiled graph
    THREAD = 9  # name of a thread
    PHASE = 10  # name of a phase
    PHASE_PATH = 11  # JSON: the path of a phase, outermost name first
    LAYOUT = 12  # a part of a layout of the watched models, compressed JSON
    MEMORY = 16  # JSON object: the memory of the device at one time, for long jobs
    CUDA_GRAPH = 20  # JSON object: a CUDA graph that was captured
    FRAME = 24  # JSON list: `file:line` and function of a frame in a sample of a stack


@dataclass(frozen=True, slots=True)
class Geometry:
    """Offsets of the sections in one file."""

    capacity: int
    cursors: int = CURSORS
    counters: int = COUNTERS
    text_bytes: int = TEXT_BYTES
    lanes: int = 0  # 0: the box has no device sections
    times_bytes: int = TIMES_BYTES

    @property
    def cursors_at(self) -> int:
        return HEADER_BYTES * HEADER_COPIES

    @property
    def counters_at(self) -> int:
        return self.cursors_at + self.cursors * CURSOR_BYTES

    @property
    def ring_at(self) -> int:
        return self.counters_at + self.counters * COUNTER_BYTES

    @property
    def texts_at(self) -> int:
        return self.ring_at + self.capacity * RECORD_BYTES

    @property
    def lanes_at(self) -> int:
        return self.texts_at + self.text_bytes

    @property
    def progress_at(self) -> int:
        return self.lanes_at + self.lanes * LANE_BYTES

    @property
    def times_at(self) -> int:
        return self.progress_at + (self.counters * PROGRESS_BYTES if self.lanes else 0)

    @property
    def table_at(self) -> int:
        return self.times_at + (self.capacity * self.times_bytes if self.lanes else 0)


def pack_header(geometry: Geometry, meta: bytes) -> bytes:
    """One header copy in its full size, with its CRC."""
    if len(meta) > META_BYTES:
        raise ValueError(f"header meta of {len(meta)} bytes; at most {META_BYTES} fit")
    fixed = HEADER.pack(
        MAGIC,
        VERSION,
        HEADER_BYTES,
        geometry.cursors,
        geometry.counters,
        geometry.capacity,
        geometry.text_bytes,
        geometry.lanes,
        geometry.table_at,
        len(meta),
    )
    body = (fixed + meta).ljust(HEADER_BYTES - CRC.size, b"\0")
    return body + CRC.pack(zlib.crc32(body))


def mask_heartbeat(words: bytes, *, cursors: int) -> bytes:
    """Zero the heartbeat words in a section that starts with the cursors: a heartbeat is not
    progress."""
    masked, end = bytearray(words), min(len(words), cursors * CURSOR_BYTES)
    for byte in range(CURSOR_HEARTBEAT * 8, CURSOR_HEARTBEAT * 8 + 8):
        masked[byte:end:CURSOR_BYTES] = bytes(len(range(byte, end, CURSOR_BYTES)))
    return bytes(masked)


def slots(section: bytes, slot_bytes: int) -> list[list[int]]:
    """The words of each slot of a section; of a truncated file, the slots that exist."""
    words = memoryview(section[: len(section) // slot_bytes * slot_bytes]).cast("Q").tolist()
    size = slot_bytes // 8
    return [words[at : at + size] for at in range(0, len(words), size)]


def unpack_record(data: bytes) -> Record | None:
    """The record in a slot; None if it is torn."""
    if len(data) < RECORD_BYTES or zlib.crc32(data[:-4]) != CRC.unpack(data[-4:])[0]:
        return None
    return Record._make(RECORD.unpack(data[:-4]))


def memory_fields(row: Any) -> dict[str, Any]:
    """The fields of a memory record."""
    amounts, unit = int(row["extra"]), MEMORY_UNIT_BYTES
    return {
        "allocated_bytes": (amounts & MEMORY_MASK) * unit,
        "reserved_bytes": (amounts >> MEMORY_RESERVED_SHIFT) * unit,
        "peak_bytes": int(row["subject"]) * unit,
        "peak_is_exact": not row["flags"] & FLAG_AT_LEAST,
    }


def pack_entry(entry_id: int, entry_type: int, payload: bytes) -> bytes:
    """One entry of the table."""
    return _sealed(ENTRY.pack(ENTRY_MARK, entry_id, entry_type, len(payload), 0), payload)


def pack_text(position: int, payload: bytes) -> bytes:
    """One text of the ring of texts."""
    return _sealed(TEXT.pack(position, len(payload), 0), payload)


def _sealed(head: bytes, payload: bytes) -> bytes:
    """Set the CRC at the end of a head, which covers the rest of the head and the payload."""
    fields = head[: -CRC.size]
    return fields + CRC.pack(sealed_crc(fields, payload)) + payload


def sealed_crc(fields: bytes, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(fields))


def stream_word(entry_id: int, source: int, destination: int) -> int:
    """The stream of a counter in one word; -1 as source and destination: the whole group."""
    return entry_id << STREAM_ID_SHIFT | (source + 1) << STREAM_SOURCE_SHIFT | (destination + 1)


def unpack_stream(word: int) -> tuple[int, int, int]:
    """Entry id, source and destination of a counter."""
    return (
        word >> STREAM_ID_SHIFT,
        (word >> STREAM_SOURCE_SHIFT & STREAM_RANK_MASK) - 1,
        (word & STREAM_RANK_MASK) - 1,
    )


# -- the place word of a cursor --------------------------------------------------------------------


def pass_of(packed_place: int) -> int:
    return packed_place >> PASS_SHIFT & PASS_MASK


def cursor_place(packed_place: int, *, name: Callable[[int], str | None]) -> dict[str, Any]:
    """Pass, module, call and certainty: arguments of a `Place`. `name` looks up table ids."""
    pass_, module_id = pass_of(packed_place), packed_place >> MODULE_SHIFT
    module, call = name(module_id), packed_place & CALL_MASK
    # In a recomputation, the cursor does not hold the number of the call.
    has_call = module is not None and call != NO_CALL and pass_ != Pass.RECOMPUTE
    is_lost = pass_ not in PASS_LABELS or (module_id and module is None)
    return {
        "pass_": PASS_LABELS.get(pass_, "outside"),
        "module": module,
        "call": call if has_call else None,
        "certainty": Certainty.UNKNOWN if is_lost else Certainty.EXACT,
    }


def certainty_of(flags: int, *, is_lost: bool) -> Certainty:
    """How the place of a record is known. `is_lost`: its pass or its module cannot be read."""
    if is_lost or flags & FLAG_UNKNOWN:
        return Certainty.UNKNOWN
    return Certainty.INFERRED if flags & FLAG_INFERRED else Certainty.EXACT
