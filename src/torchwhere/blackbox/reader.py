"""Reads one black box at any time: while its process runs, is stuck or stopped, or after it exited.

The file may be truncated or damaged. The reader copies it once (a file that shrinks under a memory
map would kill the reader) and returns what is intact. It never raises on content: `Box.counts`
counts bad records, `Box.problems` describes the rest. A `BoxReader` reads many boxes, and leaves
the ring of texts, the largest section, in the file until it is needed.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import (
    CRC,
    HEADER,
    HEADER_BYTES,
    HEADER_COPIES,
    MAGIC,
    OLD_TIMES_BYTES,
    VERSION,
    EntryType,
    Geometry,
)
from torchwhere.blackbox.ring import Counts, parse_ring, split_sides
from torchwhere.blackbox.string_table import TableReader, json_object
from torchwhere.core.errors import TorchwhereError

NO_HEADER = "no readable header: not a black box, or damaged"
WRITTEN_BY = "written by"  # starts the problem of a box in another format
_MOST_LANES = 64
HEADERS_BYTES = HEADER_BYTES * HEADER_COPIES


def read_box(path: str | Path) -> Box:
    """Read one file. Raises `TorchwhereError` only if the file is not readable, never on
    content."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TorchwhereError(f"cannot read {path}: {error.strerror}") from error
    return parse_box(data, path=path)


def read_or_empty(read: Callable[[Path], Box], path: Path) -> Box:
    """Read one file of a folder that was listed. An empty box with a problem if that fails: no
    permission, or the file was deleted since."""
    try:
        return read(path)
    except TorchwhereError as error:
        return Box(path=path, problems=[str(error)])


def read_header(path: Path) -> Box:
    """Read the header only: which rank and process wrote the file. Empty if it is not readable."""
    try:
        with path.open("rb") as file:
            data = file.read(HEADERS_BYTES)
            return parse_header(data, size=os.fstat(file.fileno()).st_size, path=path)
    except OSError:
        return Box(path=path)


def parse_box(data: bytes, *, path: Path = Path("<bytes>")) -> Box:
    box = parse_header(data, size=len(data), path=path)
    if box.geometry is not None:
        texts_at, lanes_at = box.geometry.texts_at, box.geometry.lanes_at
        table_at = box.geometry.table_at
        box._head, box._texts = data[:texts_at], data[texts_at:lanes_at]
        box._device = data[lanes_at:table_at]
        _parse_sections(box, data[table_at:], TableReader())
    return box


class BoxReader:
    """Reads the boxes of one job; decodes the parts that their tables share only once."""

    def __init__(self) -> None:
        self._tables = TableReader()

    def read(self, path: Path) -> Box:
        """Like `read_box`, but leaves the texts in the file."""
        try:
            with path.open("rb", buffering=0) as file:
                return self._read(file.fileno(), path)
        except OSError as error:
            raise TorchwhereError(f"cannot read {path}: {error.strerror}") from error

    def _read(self, fd: int, path: Path) -> Box:
        header = os.pread(fd, HEADERS_BYTES, 0)
        box = parse_header(header, size=os.fstat(fd).st_size, path=path)
        box._texts = None
        if box.geometry is not None:
            box._head = os.pread(fd, box.geometry.texts_at, 0)
            lanes_at = box.geometry.lanes_at
            box._device = os.pread(fd, box.geometry.table_at - lanes_at, lanes_at)
            # The table comes last: a name is in the file before the first record that uses it.
            _parse_sections(box, read_table(fd, start=box.geometry.table_at), self._tables)
        return box


def read_table(fd: int, *, start: int) -> bytes:
    """The table of an open file, from an offset on."""
    length = os.fstat(fd).st_size - start
    return os.pread(fd, length, start) if length > 0 else b""


def parse_header(data: bytes, *, size: int, path: Path) -> Box:
    """A box with the content of its header, given the size of its file."""
    box = Box(path=path)
    for copy in range(HEADER_COPIES):
        block = data[copy * HEADER_BYTES : (copy + 1) * HEADER_BYTES]
        if block[:8] != MAGIC or len(block) < HEADER_BYTES:
            continue
        if zlib.crc32(block[:-4]) != CRC.unpack(block[-4:])[0]:
            continue
        _parse_header_copy(box, block, size)
        return box
    box.problems.append(NO_HEADER)
    return box


def _parse_header_copy(box: Box, block: bytes, size: int) -> None:
    fields = HEADER.unpack(block[: HEADER.size])
    _, version, _, cursors, counters, capacity, text_bytes, lanes, table_at, meta_bytes = fields
    if version != VERSION:
        box.problems.append(_wrong_version(version))
        return
    box.geometry = Geometry(
        capacity=max(capacity, 1),
        cursors=cursors,
        counters=counters,
        text_bytes=max(text_bytes, 1),
        lanes=min(lanes, _MOST_LANES),
    )
    older = replace(box.geometry, times_bytes=OLD_TIMES_BYTES)
    if older.table_at == table_at:
        box.geometry = older
    meta = block[HEADER.size : HEADER.size + meta_bytes]
    box.meta = json_object(meta.decode("utf-8", "replace"))
    if size < box.geometry.table_at:
        box.problems.append(f"cut short: {size} of at least {box.geometry.table_at} bytes")


def _wrong_version(version: int) -> str:
    if version < VERSION:
        writer, advice = "an older torchwhere", "Record the run again."
    else:
        writer, advice = "a newer torchwhere", "Update torchwhere."
    return (
        f"{WRITTEN_BY} {writer} (format {version}); this version reads format {VERSION}. {advice}"
    )


def _parse_sections(box: Box, table: bytes, tables: TableReader) -> None:
    """Parse everything but the header."""
    geometry = box.geometry
    assert geometry is not None
    string_table = tables.read(table)
    ring_section = memoryview(box._head)[geometry.ring_at : geometry.texts_at]
    ring = parse_ring(ring_section, geometry.capacity)
    box.names = string_table.names
    box.records, box.side_records = split_sides(ring.records)
    box.counts = Counts(
        good=len(box.records),
        torn=ring.torn,
        unknown=ring.unknown,
        overwritten=ring.overwritten,
        torn_entries=string_table.torn,
        aside=len(box.side_records),
    )
    whole_meta: dict[str, Any] = {}  # if it did not fit into the header
    for entry_type, text in box.names.values():
        if entry_type == EntryType.META:
            whole_meta |= json_object(text)
    box.meta = whole_meta | box.meta
