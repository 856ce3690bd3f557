"""Reads one black box: while its process runs, is stuck, stopped, or long dead; whole, cut, or
damaged.

Takes the bytes of a file once (a file that shrinks under a map would kill the reader) and gives
back what is good. It never raises on content: what is not good is counted in `Box.counts` and said
in `Box.problems`. A `BoxReader` reads many boxes, and leaves the ring of texts, the largest, in the
file until it is asked.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

from torchwhere.blackbox import file_format
from torchwhere.blackbox.box import Box, Counts, loaded
from torchwhere.blackbox.file_format import HEADER, HEADER_BYTES, HEADER_COPIES, EntryType, Geometry
from torchwhere.blackbox.ring import parse_ring
from torchwhere.blackbox.string_table import TableReader
from torchwhere.core.errors import TorchwhereError


def read_box(path: str | Path) -> Box:
    """Read one file. Raises `TorchwhereError` only when there is no file to read; content never
    raises."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TorchwhereError(f"cannot read {path}: {error.strerror}") from error
    return parse_box(data, path=path)


def read_header(path: Path) -> Box:
    """Who wrote a file, and nothing of what it holds; of one that cannot be read, an empty box."""
    box = Box(path=path)
    try:
        with path.open("rb") as file:
            _parse_header(
                box, file.read(HEADER_BYTES * HEADER_COPIES), os.fstat(file.fileno()).st_size
            )
    except OSError:
        pass
    return box


def parse_box(data: bytes, *, path: Path = Path("<bytes>")) -> Box:
    box = Box(path=path)
    _parse_header(box, data, len(data))
    if box.geometry is not None:
        texts_at, table_at = box.geometry.texts_at, box.geometry.table_at
        box._head, box._texts = data[:texts_at], data[texts_at:table_at]
        _parse_rest(box, data[table_at:], TableReader())
    return box


class BoxReader:
    """Reads the boxes of one job, one after another, and what their tables have in common once."""

    def __init__(self) -> None:
        self._tables = TableReader()

    def read(self, path: Path) -> Box:
        """As `read_box`, but the texts stay in the file."""
        box = Box(path=path, _texts=None)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise TorchwhereError(f"cannot read {path}: {error.strerror}") from error
        try:
            size = os.fstat(fd).st_size
            head = os.pread(fd, HEADER_BYTES * HEADER_COPIES, 0)
            _parse_header(box, head, size)
            if box.geometry is not None:
                box._head = os.pread(fd, box.geometry.texts_at, 0)
                # The table comes last: a name is in the file before the first record that uses it.
                table = os.pread(
                    fd, max(0, os.fstat(fd).st_size - box.geometry.table_at), box.geometry.table_at
                )
                _parse_rest(box, table, self._tables)
        except OSError as error:
            raise TorchwhereError(f"cannot read {path}: {error.strerror}") from error
        finally:
            os.close(fd)
        return box


def _parse_rest(box: Box, table: bytes, tables: TableReader) -> None:
    """All but the header."""
    geometry = box.geometry
    assert geometry is not None
    read = tables.read(table)
    ring = parse_ring(
        memoryview(box._head)[geometry.ring_at : geometry.texts_at], geometry.capacity
    )
    box.names, box.records = read.names, ring.records
    box.counts = Counts(len(ring.records), ring.torn, ring.unknown, ring.overwritten, read.torn)
    whole: dict[str, Any] = {}  # what did not fit into the header
    for sort, text in box.names.values():
        if sort == EntryType.META and isinstance(meta := loaded(text), dict):
            whole |= meta
    box.meta = whole | box.meta


def _parse_header(box: Box, data: bytes, size: int) -> None:
    for copy in range(HEADER_COPIES):
        block = data[copy * HEADER_BYTES : (copy + 1) * HEADER_BYTES]
        if block[:8] != file_format.MAGIC or len(block) < HEADER_BYTES:
            continue
        _, version, _, cursors, counters, capacity, text_bytes, _, _, meta_bytes = HEADER.unpack(
            block[: HEADER.size]
        )
        if zlib.crc32(block[:-4]) != int.from_bytes(block[-4:], "little"):
            continue
        if version != file_format.VERSION:
            box.problems.append(
                f"written in format {version}, this torchwhere reads {file_format.VERSION}: use the"
                " other version"
            )
            return
        box.geometry = Geometry(
            capacity=max(capacity, 1),
            cursors=cursors,
            counters=counters,
            text_bytes=max(text_bytes, 1),
        )
        meta = loaded(block[HEADER.size : HEADER.size + meta_bytes].decode("utf-8", "replace"))
        box.meta = meta if isinstance(meta, dict) else {}
        if size < box.geometry.table_at:
            box.problems.append(f"cut short: {size} of at least {box.geometry.table_at} bytes")
        return
    box.problems.append("no readable header: not a black box, or damaged")
