"""The file format of a black box, version 1. `docs/format.md` says the same in words.

    header (twice) | cursors | counters | ring of records | ring of texts | table, growing to the
    end of the file

All numbers are little-endian. Everything but the table has a fixed size, is allocated when the box
is made and written through one memory map. The table is appended to with ordinary writes, so it can
grow without remapping, and a full disk is an error code there instead of a signal.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

MAGIC = b"TRCHWHRE"
VERSION = 1

HEADER_BYTES = 2048
HEADER_COPIES = 2
# magic, version, header bytes, cursors, counters, ring capacity, text bytes, table offset, meta
# length
HEADER = struct.Struct("<8s II IIIII Q I")
CRC = struct.Struct("<I")
META_BYTES = HEADER_BYTES - HEADER.size - CRC.size

CURSOR_BYTES = 64
CURSORS = 16
COUNTER_BYTES = 32
COUNTERS = 512
COUNTER_RANKS = (1 << 20) - 1  # ranks are below this: a counter keeps rank + 1 in 20 bits

# number, t_ns, kind, pass, flags, thread, step, module, call, line, graph, what, aim, param, more;
# the CRC follows
RECORD = struct.Struct("<QQ BBBB IIIIIIII Q")
RECORD_OF_PLACE = struct.Struct("<QQ BBBB III 28x")  # the same, all after the call being 0
RECORD_BYTES = 64
RECORD_CRC_AT = RECORD_BYTES - 4

# position, length, CRC of everything before it and the text. Without the position a text that was
# overwritten by one of the same length, a lap later, would pass for it.
TEXT = struct.Struct("<QII")
TEXT_BYTES = 1 << 18

# mark, id, sort, length, CRC of everything before it and the payload
ENTRY = struct.Struct("<4s II I I")
ENTRY_MARK = b"\xa7tw\xb6"
ENTRY_MOST_BYTES = 1 << 20

NO_CALL = 0xFFFFFFFF  # a call number that is not known
NO_STEP = 0xFFFFFFFF

# Words of a cursor slot, 8 bytes each, each written in one store.
# The thread is its number + 1: 0 says that it was not written.
# The last is not the thread's but the heart's: in the first slot it is when the process was last
# there; 0 if it has none. In the others, one after another and again from the first, for how long
# the main thread waited for a CPU before a beat.
(
    CURSOR_PLACE,
    CURSOR_TIME,
    CURSOR_STEP,
    CURSOR_THREAD,
    CURSOR_LINE,
    CURSOR_RECORD,
    CURSOR_PHASE,
    CURSOR_HEART,
) = range(8)
# Such a wait in one word: the beat in ms, by the monotonic clock, above; below, µs. Both go round.
QUEUED_SHIFT = 32
QUEUED_MASK = 0xFFFFFFFF
# Words of a counter slot.
COUNTER_WHO, COUNTER_COUNT, COUNTER_TIME, COUNTER_RECORD = range(4)

# A place in one word: module (table id) above, then the pass, then the call.
PASS_SHIFT = 32
MODULE_SHIFT = 36
CALL_MASK = 0xFFFFFFFF
PASS_MASK = 0xF

FLAG_ASYNC = 1
FLAG_INFERRED = 2
FLAG_UNKNOWN = 4
FLAG_SHADOW = 8


class EntryType(IntEnum):
    """What a table entry is. An entry's id is unique over all sorts, so a record needs no sort
    beside an id."""

    META = 1  # JSON object: what did not fit into the header
    MODULE = 2  # the name of a module
    LINE = 3  # file:line
    GROUP = 4  # JSON object: a process group
    COLLECTIVE = 5  # JSON object: everything of a collective that repeats
    BENEFICIARY = 6  # JSON: the beneficiary of a collective, a unit's name or a list of parameters
    PARAM = 7  # the name of a parameter
    GRAPH = 8  # a compiled graph
    THREAD = 9  # the name of a thread
    PHASE = 10  # the name of a phase
    PHASE_PATH = 11  # JSON: a phase by its path, names from the outermost on
    LAYOUT = 12  # a part of a layout of the watched models, compressed JSON


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where everything is in one file."""

    capacity: int
    cursors: int = CURSORS
    counters: int = COUNTERS
    text_bytes: int = TEXT_BYTES

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
    def table_at(self) -> int:
        return self.texts_at + self.text_bytes


def pack_header(geometry: Geometry, meta: bytes) -> bytes:
    """One header block, padded to its full size, sealed with a CRC."""
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
        0,
        geometry.table_at,
        len(meta),
    )
    body = (fixed + meta).ljust(HEADER_BYTES - CRC.size, b"\0")
    return body + CRC.pack(zlib.crc32(body))


def mask_heartbeat(words: bytes, *, cursors: int) -> bytes:
    """Cursors, and what follows them, without the words that a heart writes: a rank that stands
    still beats on, and that is no move."""
    found, end = bytearray(words), min(len(words), cursors * CURSOR_BYTES)
    for at in range(CURSOR_HEART * 8, CURSOR_HEART * 8 + 8):
        found[at:end:CURSOR_BYTES] = bytes(len(range(at, end, CURSOR_BYTES)))
    return bytes(found)


def pack_entry(entry_id: int, sort: int, payload: bytes) -> bytes:
    """One entry of the table."""
    head = ENTRY.pack(ENTRY_MARK, entry_id, sort, len(payload), 0)[: -CRC.size]
    return head + CRC.pack(zlib.crc32(payload, zlib.crc32(head))) + payload


def pack_text(position: int, payload: bytes) -> bytes:
    """One text of the ring of texts."""
    head = TEXT.pack(position, len(payload), 0)[: -CRC.size]
    return head + CRC.pack(zlib.crc32(payload, zlib.crc32(head))) + payload
