"""Writes a black box: records, texts, table entries, cursors and tallies.

Hot: `record` is called for every event (about 0.6 us), the cursor words for every module call. A record is packed, sealed
with a CRC and stored with two copies into the map; each is one C call under the GIL, so threads never mix inside a record,
and a process killed between the two leaves a record that the reader counts as torn and never shows.

Every store goes to the page cache: what `record` has returned for survives SIGKILL. It does not survive the machine.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from zlib import crc32

from torchwhere.blackbox import guard
from torchwhere.blackbox.layout import (
    CURSOR_BYTES,
    CURSORS,
    ENTRY_MOST_BYTES,
    HEADER_BYTES,
    HEADER_COPIES,
    META_BYTES,
    RECORD,
    RECORD_BYTES,
    RECORD_CRC_AT,
    TALLIES,
    TALLY_BYTES,
    TEXT,
    Geometry,
    Sort,
    pack_entry,
    pack_header,
)
from torchwhere.errors import TorchwhereError

DEFAULT_RECORDS = 1 << 16  # 4 MiB of records
TABLE_MOST_BYTES = 1 << 26


def box_name(rank: int) -> str:
    return f"rank{rank}.box"


class BoxWriter:
    """One rank's box. With no path it is kept in memory alone: the same interface, nothing to read afterwards."""

    def __init__(
        self,
        path: Path | None,
        *,
        meta: dict[str, Any],
        records: int = DEFAULT_RECORDS,
        on_lost: Callable[[str], None] = lambda why: None,
    ) -> None:
        self.path = path
        self.geometry = Geometry(capacity=records)
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._guard: guard.Guard | None = None
        self._ids: dict[tuple[int, str], int] = {}
        self._table_end = self.geometry.table_at
        self._tally_slots: dict[object, int] = {}
        self._text_end = 0
        self._numbers = itertools.count()
        self.meta = meta
        self._map = self._open() if path is not None else mmap.mmap(-1, self.geometry.table_at)
        self._words32 = memoryview(self._map).cast("I")
        self.words = memoryview(self._map).cast("Q")
        self.record = self._make_record()
        self.closed = False
        self.write_meta()
        if self._fd is not None and guard.supported():
            self._guard = guard.Guard(self._map, lambda: self._lose("was truncated by somebody else"))

    # -- the file ----------------------------------------------------------------------------------------------------

    def _open(self) -> mmap.mmap:
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _set_aside(self.path)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A sparse file would turn a full disk into SIGBUS at some later store; allocated, it is an OSError here.
            os.posix_fallocate(fd, 0, self.geometry.table_at)
            mapped = mmap.mmap(fd, self.geometry.table_at)
        except BaseException:
            os.close(fd)
            self.path.unlink(missing_ok=True)
            raise
        self._fd = fd
        return mapped

    def write_meta(self) -> None:
        """Write `self.meta` into both header copies; what is too long for them goes to the table whole."""
        payload = json.dumps(self.meta, default=str).encode()
        if len(payload) > META_BYTES:
            self.intern(Sort.META, payload.decode())
            short = {k: v for k, v in self.meta.items() if len(json.dumps(v, default=str)) < 100}
            payload = json.dumps(short, default=str).encode()[:META_BYTES]
        block = pack_header(self.geometry, payload)
        for copy in range(HEADER_COPIES):
            self._map[copy * HEADER_BYTES : (copy + 1) * HEADER_BYTES] = block

    def rename(self, path: Path) -> None:
        """Give the box another name (a rank became known). Map and descriptor are those of the file, not of the name."""
        if self._fd is None or self.path is None:
            return
        _set_aside(path)
        os.rename(self.path, path)
        self.path = path

    def _lose(self, why: str) -> None:
        if self._fd is not None:
            self._drop_file()
            self._on_lost(f"{self.path} {why}; the job goes on, this rank is no longer recorded")

    def _drop_file(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def check_file(self) -> None:
        """Say it once if the file has been deleted under us. Called now and then, never on the hot path."""
        if self._fd is not None and os.fstat(self._fd).st_nlink == 0:
            self._lose("was deleted")

    def abandon(self) -> None:
        """In a forked child: let go of the file without a word. The parent's map must not be written to."""
        self.closed = True
        self._drop_file()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.check_file()
        self.words.release()
        self._words32.release()
        if self._guard is not None:
            self._guard.close()
            self._guard = None
        self._map.close()
        self._drop_file()

    # -- records -----------------------------------------------------------------------------------------------------

    def _make_record(self) -> Callable[..., int]:
        """`record(kind, t_ns, ...)`: store one record, fields in the order of the format, and return its number.

        A closure with positional arguments: a method with keywords takes twice the time, and this is the hot path.
        """
        numbers, pack, region, words32 = self._numbers, RECORD.pack, self._map, self._words32
        ring_at, capacity = self.geometry.ring_at, self.geometry.capacity

        def record(
            kind: int,
            t_ns: int,
            pass_: int = 0,
            flags: int = 0,
            thread: int = 0,
            step: int = 0,
            module: int = 0,
            call: int = 0,
            line: int = 0,
            graph: int = 0,
            what: int = 0,
            aim: int = 0,
            param: int = 0,
            more: int = 0,
        ) -> int:
            number = next(numbers)
            data = pack(number, t_ns, kind, pass_, flags, thread, step, module, call, line, graph, what, aim, param, more)
            at = ring_at + number % capacity * RECORD_BYTES
            region[at : at + RECORD_CRC_AT] = data
            words32[(at + RECORD_CRC_AT) >> 2] = crc32(data)
            return number

        return record

    # -- texts and names ---------------------------------------------------------------------------------------------

    def text(self, text: str) -> int:
        """Store a text in the ring of texts and return where (the count of bytes written before it)."""
        room = self.geometry.text_bytes
        payload = text.encode("utf-8", "replace")[: room // 4]
        data = TEXT.pack(len(payload), crc32(payload)) + payload
        with self._lock:
            start = self._text_end
            if start % room + len(data) > room:  # texts do not wrap around: the reader copies one slice
                start += room - start % room
            self._text_end = start + len(data)
            at = self.geometry.texts_at + start % room
            self._map[at : at + len(data)] = data
        return start

    def intern(self, sort: int, text: str) -> int:
        """The id of a name; the name is in the file before the first record that uses it. 0 if the table is full."""
        known = self._ids.get((sort, text))
        return known if known is not None else self.intern_many(sort, (text,))[0]

    def intern_many(self, sort: int, texts: Iterable[str]) -> list[int]:
        """`intern` for many names with one write."""
        with self._lock:
            fresh: list[bytes] = []
            ids = [self._ids.get((sort, text)) or self._add(sort, text, fresh) for text in texts]
            self._append(b"".join(fresh))
        return ids

    def _add(self, sort: int, text: str, fresh: list[bytes]) -> int:
        payload = text.encode("utf-8", "replace")[:ENTRY_MOST_BYTES]
        used = self._table_end - self.geometry.table_at
        if used + sum(map(len, fresh)) + len(payload) > TABLE_MOST_BYTES:
            return 0
        entry_id = len(self._ids) + 1
        self._ids[sort, text] = entry_id
        fresh.append(pack_entry(entry_id, sort, payload))
        return entry_id

    def _append(self, data: bytes) -> None:
        if not data or self._fd is None:
            return
        try:
            written = os.pwrite(self._fd, data, self._table_end)
        except OSError as error:
            self._lose(f"cannot grow ({error.strerror})")
        else:
            self._table_end += written

    # -- what is true right now --------------------------------------------------------------------------------------

    def cursor_at(self, slot: int) -> int:
        """Index of a cursor slot's first word in `words`. Threads beyond the last slot share it."""
        return (self.geometry.cursors_at + min(slot, CURSORS - 1) * CURSOR_BYTES) >> 3

    def tally_at(self, who: tuple[int, int, int]) -> int | None:
        """Index of the tally words of one counted stream (group, source, destination); None when all are taken."""
        at = self._tally_slots.get(who)
        if at is None and len(self._tally_slots) < TALLIES:
            at = (self.geometry.tallies_at + len(self._tally_slots) * TALLY_BYTES) >> 3
            self._tally_slots[who] = at
            group, source, destination = who
            self.words[at] = group << 40 | (source + 1) << 20 | (destination + 1)
        return at


def _set_aside(path: Path) -> None:
    """Make room for a new box at `path`: an older one keeps its evidence under another name, a live one is an error."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(os.fstat(fd).st_ctime))
        for attempt in itertools.count():
            aside = path.with_name(f"{path.stem}.{stamp}{f'.{attempt}' if attempt else ''}.box")
            if not aside.exists():
                os.rename(path, aside)
                return
    except BlockingIOError:
        raise TorchwhereError(
            f"{path} is being written by another process. Give every job its own folder (out=..., --out), and in processes "
            "that do not have RANK set start watching after init_process_group, when the rank is known."
        ) from None
    finally:
        os.close(fd)
