"""Writes a black box: records, texts, table entries, cursors and counters.

Hot: `record` is called for every event (about 0.6 us), the cursor words for every module call. A
record is packed, sealed with a CRC and copied into the map by one C call under the GIL, so threads
never mix inside a record, and a process killed in the middle of the copy leaves a record that the
reader counts as torn and never shows. The native part does the same without the GIL: its numbers
are taken atomically, and every number has a slot of its own.

Every store goes to the page cache: what `record` has returned for survives SIGKILL. It does not
survive the machine.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from zlib import crc32

from torchwhere.blackbox import sigbus_guard
from torchwhere.blackbox.file_format import (
    COUNTER_BYTES,
    COUNTER_RANKS,
    COUNTERS,
    CRC,
    CURSOR_BYTES,
    CURSOR_HEART,
    CURSORS,
    ENTRY,
    ENTRY_MOST_BYTES,
    HEADER_BYTES,
    HEADER_COPIES,
    META_BYTES,
    MODULE_SHIFT,
    PASS_MASK,
    PASS_SHIFT,
    QUEUED_MASK,
    QUEUED_SHIFT,
    RECORD,
    RECORD_BYTES,
    RECORD_OF_PLACE,
    TEXT,
    EntryType,
    Geometry,
    mask_heartbeat,
    pack_entry,
    pack_header,
    pack_text,
)
from torchwhere.blackbox.lock import lock_new_file

DEFAULT_RECORDS = 1 << 16  # 4 MiB of records
TABLE_MOST_BYTES = 1 << 26
STALL_MARK = "torchwhere: stalled, "  # begins a rest file; the wall clock follows, in ns


def box_name(rank: int) -> str:
    return f"rank{rank}.box"


def fault_file(box: Path) -> Path:
    """Where a rank writes its stack when it crashes in C, or when it is asked for it."""
    return box.with_suffix(".fault")


def stall_file(box: Path) -> Path:
    """Where a rank writes its stack when it stands still."""
    return box.with_suffix(".stall")


class BoxWriter:
    """One rank's box. With no path it is kept in memory alone: the same interface, nothing to read
    afterwards."""

    def __init__(
        self,
        path: Path | None,
        *,
        meta: dict[str, Any],
        records: int = DEFAULT_RECORDS,
        on_lost: Callable[[str], None] = lambda why: None,
        native: Any = None,
    ) -> None:
        self.path = path
        # the native part, where it is used: then it writes the records, its own and ours
        self.native = native
        self.geometry = Geometry(capacity=records)
        self._on_lost = on_lost
        # Reentrant: a signal handler or a finalizer of the job may come to us from inside one of
        # our own calls.
        self._lock = threading.RLock()
        self._fd: int | None = None
        self._ids: dict[tuple[int, str], int] = {}
        self._entries = itertools.count(1)
        self._table_end = self._written_end = self.geometry.table_at
        self._tally_slots: dict[object, int] = {}
        self._beats = 0
        self._text_end = 0
        self._numbers = itertools.count()
        self.meta = meta
        self._map = self._open(path) if path is not None else _memory(self.geometry.table_at)
        self.words = memoryview(self._map).cast("Q")
        self.native_box = (
            native.Box(self._map, self.geometry.ring_at, self.geometry.capacity)
            if native is not None
            else None
        )
        self.record: Callable[..., int] = (
            self._make_record() if self.native_box is None else self.native_box.record
        )
        self.counter: Any = (
            _Counter() if self.native_box is None else self.native_box
        )  # its `step` is the one that records belong to
        self.closed = False
        self.write_meta()
        self._guard = None
        if path is not None:
            self._guard = sigbus_guard.guard_region(
                self._map, is_short=self._is_short, on_lost=self._lose_truncated
            )

    # -- the file ----------------------------------------------------------------------------------

    def _open(self, path: Path) -> mmap.mmap:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = lock_new_file(path)
        try:
            # A sparse file would turn a full disk into SIGBUS at some later store; allocated, it is
            # an OSError here.
            os.posix_fallocate(fd, 0, self.geometry.table_at)
            # The map keeps a copy of the descriptor it is made from, in forked children too. Made
            # from the locked one, it would keep the box locked after the death of its writer, for
            # as long as a data loader's worker lives.
            with path.open("r+b") as unlocked:
                mapped = mmap.mmap(unlocked.fileno(), self.geometry.table_at)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise
        self._fd = fd
        return mapped

    def write_meta(self) -> None:
        """Write `self.meta` into both header copies. Where it is too long it goes to the table
        whole, and here what fits."""
        payload = json.dumps(self.meta, default=str)
        if len(payload) > META_BYTES:
            self.intern(EntryType.META, payload)
            short: dict[str, Any] = {}
            for key, value in self.meta.items():
                if len(json.dumps(short | {key: value}, default=str)) <= META_BYTES:
                    short[key] = value
            payload = json.dumps(short, default=str)
        block = pack_header(self.geometry, payload.encode())
        for copy in range(HEADER_COPIES):
            self._map[copy * HEADER_BYTES : (copy + 1) * HEADER_BYTES] = block

    def rename(self, path: Path) -> None:
        """Give the box another name (a rank became known). Map and descriptor are those of the
        file, not of the name."""
        self.check_file()
        if self._fd is None or self.path is None or path == self.path:
            return
        # nobody else can take the name between making room for it and moving there
        place = lock_new_file(path)
        try:
            os.rename(self.path, path)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(place)
        self.path = path

    def _lose(self, why: str) -> None:
        """Say once that the file is gone. Not under the lock: what is told may log, and logging has
        locks of its own."""
        if self._drop_file():
            self._on_lost(f"{self.path} {why}; the job goes on, this rank is no longer recorded")

    def _lose_truncated(self) -> None:
        self._lose("was truncated by somebody else")

    def _drop_file(self) -> bool:
        with self._lock:  # nobody is writing to it now
            fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
        return fd is not None

    def _is_short(self) -> bool:
        # before the size: a signal handler may make both grow in between
        written_end = self._written_end
        return self._fd is not None and os.fstat(self._fd).st_size < written_end

    def check_file(self) -> None:
        """Say it once if the file has been deleted or cut under us. Called now and then, never on
        the hot path."""
        try:
            with self._lock:
                is_deleted = self._fd is not None and os.fstat(self._fd).st_nlink == 0
                is_short = self._is_short()
        except OSError as error:  # a server that has forgotten the file
            self._lose(f"is gone ({error.strerror})")
            return
        if is_deleted:
            self._lose("was deleted")
        elif is_short:
            self._lose_truncated()

    def abandon(self) -> None:
        """In a forked child: let go of the file without a word. What the child still stores goes to
        memory of its own."""
        self.closed = True
        self._lock = threading.RLock()  # a thread of the parent may have held it at the fork
        if self.native_box is not None:
            self.native_box.abandon()
        self._drop_file()
        if self._guard is not None:
            self._guard.detach()
            self._guard.close()
            self._guard = None

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.check_file()
        self.words.release()
        if self.native_box is not None:
            self.native_box.close()
        if self._guard is not None:
            self._guard.close()
            self._guard = None
        self._map.close()
        self._drop_file()

    # -- records -----------------------------------------------------------------------------------

    def _make_record(self) -> Callable[..., int]:
        """`record(kind, t_ns, ...)`: store one record, fields in the order of the format, and
        return its number.

        A closure with positional arguments: a method with keywords takes twice the time, and this
        is the hot path.
        """
        numbers, pack, pack_crc, region = self._numbers, RECORD.pack, CRC.pack, self._map
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
            beneficiary: int = 0,
            param: int = 0,
            more: int = 0,
        ) -> int:
            number = next(numbers)
            data = pack(
                number,
                t_ns,
                kind,
                pass_,
                flags,
                thread,
                step,
                module,
                call,
                line,
                graph,
                what,
                beneficiary,
                param,
                more,
            )
            at = ring_at + number % capacity * RECORD_BYTES
            region[at : at + RECORD_BYTES] = data + pack_crc(crc32(data))
            return number

        return record

    def make_place_record(
        self, current_step: Callable[[], int]
    ) -> Callable[[int, int, int, int, int], None]:
        """`record(kind, t_ns, word, call, thread)`: one that has a place and nothing else, given as
        a word.

        With module events there are two for every module call: it saves a frame, and six fields.
        """
        if self.native_box is not None:
            return self._make_native_place_record(current_step)
        numbers, pack, pack_crc, region = self._numbers, RECORD_OF_PLACE.pack, CRC.pack, self._map
        ring_at, capacity = self.geometry.ring_at, self.geometry.capacity

        def record(kind: int, t_ns: int, word: int, call: int, thread: int) -> None:
            number = next(numbers)
            pass_, module = word >> PASS_SHIFT & PASS_MASK, word >> MODULE_SHIFT
            data = pack(number, t_ns, kind, pass_, 0, thread, current_step(), module, call)
            at = ring_at + number % capacity * RECORD_BYTES
            region[at : at + RECORD_BYTES] = data + pack_crc(crc32(data))

        return record

    def _make_native_place_record(
        self, current_step: Callable[[], int]
    ) -> Callable[[int, int, int, int, int], None]:
        write = self.record

        def record(kind: int, t_ns: int, word: int, call: int, thread: int) -> None:
            write(
                kind,
                t_ns,
                word >> PASS_SHIFT & PASS_MASK,
                0,
                thread,
                current_step(),
                word >> MODULE_SHIFT,
                call,
            )

        return record

    def copy_of(self, number: int) -> bytes:
        """The bytes of a record that was just written, as they stand in the ring."""
        at = self.geometry.ring_at + number % self.geometry.capacity * RECORD_BYTES
        return bytes(self._map[at : at + RECORD_BYTES])

    # -- texts and names ---------------------------------------------------------------------------

    def text(self, text: str) -> int:
        """Store a text in the ring of texts and return where (the count of bytes written before
        it)."""
        room = self.geometry.text_bytes
        payload = _encoded(text, room // 4)
        size = TEXT.size + len(payload)
        with self._lock:
            start = self._text_end
            if start % room + size > room:  # texts do not wrap around: the reader copies one slice
                start += room - start % room
            self._text_end = start + size
            at = self.geometry.texts_at + start % room
            self._map[at : at + size] = pack_text(start, payload)
        return start

    def intern(self, sort: int, text: str) -> int:
        """The id of a name; the name is in the file before the first record that uses it. 0 if the
        table is full."""
        known = self._ids.get((sort, text))
        return known if known is not None else self.intern_many(sort, (text,))[0]

    def intern_many(self, sort: int, texts: Iterable[str]) -> list[int]:
        """`intern` for many names with one write."""
        keys = [(sort, text) for text in texts]
        with self._lock:
            room = self.geometry.table_at + TABLE_MOST_BYTES - self._table_end
            fresh: dict[tuple[int, str], int] = {}
            entries: list[bytes] = []
            for key in keys:
                payload = _encoded(key[1], ENTRY_MOST_BYTES)
                if key not in self._ids and key not in fresh and ENTRY.size + len(payload) <= room:
                    fresh[key] = next(self._entries)
                    entries.append(pack_entry(fresh[key], sort, payload))
                    room -= len(entries[-1])
            errors = self._append(b"".join(entries))
            self._ids.update(fresh)  # after the write: other threads look here without the lock
        if errors is not None:
            self._lose(errors)
        return [self._ids.get(key, 0) for key in keys]

    def names(self) -> dict[int, tuple[int, str]]:
        """The table as a reader of the file gets it: ids to sorts and texts, as far as it was
        written."""
        with self._lock:
            return {entry_id: key for key, entry_id in self._ids.items()}

    def _append(self, data: bytes) -> str | None:
        """Write at the end of the table; returns what went wrong. Without a file the table is only
        counted."""
        size = len(data)
        at = self._table_end
        end = self._table_end = at + size
        try:
            if self._is_short():  # writing behind the end would fill the gap with zeros and hide it
                return "was truncated by somebody else"
            while self._fd is not None and at < end:
                at += os.pwrite(self._fd, data[at - end :], at)
        except OSError as error:
            return f"cannot grow ({error.strerror})"
        self._written_end = max(self._written_end, end)
        return None

    # -- what is true right now --------------------------------------------------------------------

    def cursor_at(self, slot: int) -> int:
        """Index of a cursor slot's first word in `words`. Threads beyond the last slot share it."""
        return (self.geometry.cursors_at + min(slot, CURSORS - 1) * CURSOR_BYTES) >> 3

    def beat(self, t_ns: int, *, cpu_delay_ns: int | None = None) -> None:
        """The process is there; and since the last beat its main thread waited so long for a
        CPU."""
        if cpu_delay_ns is not None:
            waited = (t_ns // 10**6 & QUEUED_MASK) << QUEUED_SHIFT | (
                cpu_delay_ns // 1000 & QUEUED_MASK
            )
            self.words[self.cursor_at(1 + self._beats % (CURSORS - 1)) + CURSOR_HEART] = waited
            self._beats += 1
        self.words[self.cursor_at(0) + CURSOR_HEART] = t_ns

    def present(self) -> bytes:
        """All cursors and counters, as they are, without the heart: what moves changes them."""
        return mask_heartbeat(
            self._map[self.geometry.cursors_at : self.geometry.ring_at], cursors=CURSORS
        )

    def counter_at(self, who: tuple[int, int, int]) -> int | None:
        """Index of the counter words of one counted stream (group, source, destination).

        None when all are taken, for a group that found no room in the table, and for ranks no word
        can hold.
        """
        group, source, destination = who
        with self._lock:
            at = self._tally_slots.get(who)
            if (
                at is None
                and len(self._tally_slots) < COUNTERS
                and group
                and min(who) >= -1
                and max(who[1:]) < COUNTER_RANKS
            ):
                at = (self.geometry.counters_at + len(self._tally_slots) * COUNTER_BYTES) >> 3
                self.words[at] = group << 40 | (source + 1) << 20 | (destination + 1)
                self._tally_slots[who] = at
        return at


class _Counter:
    """Counts steps where there is no native part to do so."""

    __slots__ = ("step",)

    def __init__(self) -> None:
        self.step = 0


def _memory(size: int) -> mmap.mmap:
    """Private: by default Python shares an anonymous map with forked children."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _encoded(text: str, most_bytes: int) -> bytes:
    """UTF-8, cut between two characters where it is too long."""
    payload = text.encode("utf-8", "replace")
    return (
        payload
        if len(payload) <= most_bytes
        else payload[:most_bytes].decode("utf-8", "ignore").encode()
    )
