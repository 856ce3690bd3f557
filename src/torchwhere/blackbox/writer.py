"""Writes a black box: records, texts, table entries, cursors and counters.

Hot: every event calls `record` (about 0.6 us), every module call writes cursor words. A record is
packed, gets its CRC, and one C call under the GIL copies it into the map: threads never mix inside
a record, and a process killed during the copy leaves a record that readers count as torn and never
show. The native extension does the same without the GIL: it takes numbers atomically, and every
number has its own slot.

Every store goes to the page cache: a record survives SIGKILL as soon as `record` has returned. It
does not survive a crash of the machine.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from torchwhere.blackbox.box_file import BoxFile
from torchwhere.blackbox.file_format import (
    COUNTER_BYTES,
    COUNTER_RANKS,
    COUNTERS,
    CPU_DELAY_MASK,
    CPU_DELAY_SHIFT,
    CRC,
    CURSOR_BYTES,
    CURSOR_HEARTBEAT,
    CURSORS,
    ENTRY,
    ENTRY_MOST_BYTES,
    HEADER_BYTES,
    HEADER_COPIES,
    LANES,
    META_BYTES,
    MODULE_SHIFT,
    PASS_MASK,
    PASS_SHIFT,
    PLACE_RECORD,
    RECORD,
    RECORD_BYTES,
    TEXT,
    EntryType,
    Geometry,
    mask_heartbeat,
    pack_entry,
    pack_header,
    pack_text,
    stream_word,
)
from torchwhere.blackbox.step_clock import StepClock

if TYPE_CHECKING:
    from torchwhere.native import extension
    from torchwhere.native.load import NativeExtension

DEFAULT_RECORDS = 1 << 16  # 4 MiB of records
TABLE_MOST_BYTES = 1 << 26


class BoxWriter:
    """One rank's box. Without a path it exists only in memory: same interface, no file."""

    def __init__(
        self,
        path: Path | None,
        *,
        meta: dict[str, Any],
        records: int = DEFAULT_RECORDS,
        on_lost: Callable[[str], None] = lambda why: None,
        native: NativeExtension | None = None,
        has_device: bool = False,
    ) -> None:
        self.native = native  # the native extension, if used: then it writes all records
        self.geometry = Geometry(capacity=records, lanes=LANES if has_device else 0)
        self._ids: dict[tuple[int, str], int] = {}
        self._entries = itertools.count(1)
        self._counter_slots: dict[object, int] = {}
        self._heartbeats = 0
        self._text_end = 0
        self._numbers = itertools.count()
        self.meta = meta
        self._file = BoxFile(path, table_at=self.geometry.table_at, on_lost=on_lost)
        self._map = self._file.map
        self.words = memoryview(self._map).cast("Q")
        self.native_box: extension.Box | None = None
        self.record: Callable[..., int] = self._make_record()
        # its `step` goes into the records
        self.counter: _StepCounter | extension.Box = _StepCounter()
        if native is not None:
            self.native_box = native.Box(self._map, self.geometry.ring_at, self.geometry.capacity)
            self.record = self.native_box.record
            self.counter = self.native_box
        # times the parts of each step
        self.clock: StepClock | extension.Box = self.native_box or StepClock(
            self.record, self.counter
        )
        self.closed = False
        self.write_meta()
        self._file.guard()

    # -- the file ----------------------------------------------------------------------------------

    @property
    def path(self) -> Path | None:
        return self._file.path

    def write_meta(self, **fields: Any) -> None:
        """Add fields to `self.meta`, and write it into both header copies. If it is too long, the
        table gets all of it and the header the keys that fit."""
        self.meta = self.meta | fields
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
        """Rename the box, once the rank is known."""
        self._file.rename(path)

    def check_file(self) -> None:
        """Report a deleted or truncated file, once. Called rarely, never on the hot path."""
        self._file.check()

    def abandon(self) -> None:
        """Release the file in a forked child, silently. Further stores go to the child's memory."""
        self.closed = True
        if self.native_box is not None:
            self.native_box.abandon()
        self._file.abandon()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.check_file()
        self.words.release()
        if self.native_box is not None:
            self.native_box.close()
        self._file.close()

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
            subject: int = 0,
            beneficiary: int = 0,
            param: int = 0,
            extra: int = 0,
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
                subject,
                beneficiary,
                param,
                extra,
            )
            at = ring_at + number % capacity * RECORD_BYTES
            region[at : at + RECORD_BYTES] = data + pack_crc(crc32(data))
            return number

        return record

    def make_place_record(
        self, current_step: Callable[[], int]
    ) -> Callable[[int, int, int, int, int], None]:
        """`record(kind, t_ns, packed_place, call, thread)`: store a record that has only a place.

        With module events there are two for every module call: this saves a frame and six fields.
        """
        if self.native_box is not None:
            return self._make_native_place_record(current_step)
        numbers, pack, pack_crc, region = self._numbers, PLACE_RECORD.pack, CRC.pack, self._map
        ring_at, capacity = self.geometry.ring_at, self.geometry.capacity

        def record(kind: int, t_ns: int, packed_place: int, call: int, thread: int) -> None:
            number = next(numbers)
            pass_, module = packed_place >> PASS_SHIFT & PASS_MASK, packed_place >> MODULE_SHIFT
            data = pack(number, t_ns, kind, pass_, 0, thread, current_step(), module, call)
            at = ring_at + number % capacity * RECORD_BYTES
            region[at : at + RECORD_BYTES] = data + pack_crc(crc32(data))

        return record

    def _make_native_place_record(
        self, current_step: Callable[[], int]
    ) -> Callable[[int, int, int, int, int], None]:
        write = self.record

        def record(kind: int, t_ns: int, packed_place: int, call: int, thread: int) -> None:
            pass_, module = packed_place >> PASS_SHIFT & PASS_MASK, packed_place >> MODULE_SHIFT
            write(kind, t_ns, pass_, 0, thread, current_step(), module, call)

        return record

    def copy_of(self, number: int) -> bytes:
        """The bytes of a record that was just written, as they are in the ring."""
        at = self.geometry.ring_at + number % self.geometry.capacity * RECORD_BYTES
        return bytes(self._map[at : at + RECORD_BYTES])

    def read(self, at: int, length: int) -> bytes:
        """Bytes of any section before the table, as a reader of the file sees them."""
        return bytes(self._map[at : at + length])

    # -- texts and names ---------------------------------------------------------------------------

    def text(self, text: str) -> int:
        """Store a text in the ring of texts. Returns its position (the number of bytes before
        it)."""
        ring_bytes = self.geometry.text_bytes
        payload = _encoded(text, ring_bytes // 4)
        size = TEXT.size + len(payload)
        with self._file.lock:
            start = self._text_end
            if start % ring_bytes + size > ring_bytes:  # a text never wraps: readers copy one slice
                start += ring_bytes - start % ring_bytes
            self._text_end = start + size
            at = self.geometry.texts_at + start % ring_bytes
            self._map[at : at + size] = pack_text(start, payload)
        return start

    def text_of_exit(self, texts: Sequence[str]) -> int:
        """Store the text of exit code 0. When the process ends with another code, the native
        extension replaces it with the text of that code. `texts` has one for each code."""
        size = max(map(len, texts))
        padded = [text.ljust(size) for text in texts]
        position = self.text(padded[0])
        if self.native is not None and self.path is not None:
            at = self.geometry.texts_at + position % self.geometry.text_bytes
            stored = b"".join(pack_text(position, text.encode()) for text in padded)
            self.native.on_exit_code(os.fsencode(self.path.absolute()), at, stored)
        return position

    def intern(self, entry_type: int, text: str) -> int:
        """Id of a name. The name is in the file before the first record that uses it. 0 if the
        table is full."""
        entry_id = self._ids.get((entry_type, text))
        return entry_id if entry_id is not None else self.intern_many(entry_type, (text,))[0]

    def intern_many(self, entry_type: int, texts: Iterable[str]) -> list[int]:
        """`intern` for many names with one write."""
        keys = [(entry_type, text) for text in texts]
        with self._file.lock:
            free = self.geometry.table_at + TABLE_MOST_BYTES - self._file.table_end
            new_ids: dict[tuple[int, str], int] = {}
            entries: list[bytes] = []
            for key in keys:
                payload = _encoded(key[1], ENTRY_MOST_BYTES)
                is_new = key not in self._ids and key not in new_ids
                if is_new and ENTRY.size + len(payload) <= free:
                    new_ids[key] = next(self._entries)
                    entries.append(pack_entry(new_ids[key], entry_type, payload))
                    free -= len(entries[-1])
            problem = self._file.append(b"".join(entries))
            self._ids.update(new_ids)  # after the write: other threads read it without the lock
        if problem is not None:
            self._file.lose(problem)
        return [self._ids.get(key, 0) for key in keys]

    def names(self) -> dict[int, tuple[int, str]]:
        """The table as a reader of the file sees it: ids to types and texts."""
        with self._file.lock:
            return {entry_id: key for key, entry_id in self._ids.items()}

    def name(self, entry_id: int) -> str | None:
        """The text of a table entry. Ids are the positions of the entries, from 1."""
        with self._file.lock:
            keys = itertools.islice(self._ids, max(0, entry_id - 1), max(0, entry_id))
            return next((text for _, text in keys), None)

    def names_of_type(self, entry_type: int) -> list[str]:
        """The texts of all table entries of one type, the oldest first."""
        with self._file.lock:
            return [text for own_type, text in self._ids if own_type == entry_type]

    # -- cursors and counters ----------------------------------------------------------------------

    def cursor_at(self, slot: int) -> int:
        """Index of a cursor slot's first word in `words`. Threads beyond the last slot share it."""
        return (self.geometry.cursors_at + min(slot, CURSORS - 1) * CURSOR_BYTES) >> 3

    def beat(self, t_ns: int, *, cpu_delay_ns: int | None = None) -> None:
        """Write a heartbeat, and how long the main thread waited for a CPU since the last one."""
        if cpu_delay_ns is not None:
            beat_ms, delay_us = t_ns // 10**6, cpu_delay_ns // 1000
            delay = (beat_ms & CPU_DELAY_MASK) << CPU_DELAY_SHIFT | (delay_us & CPU_DELAY_MASK)
            slot = 1 + self._heartbeats % (CURSORS - 1)
            self.words[self.cursor_at(slot) + CURSOR_HEARTBEAT] = delay
            self._heartbeats += 1
        self.words[self.cursor_at(0) + CURSOR_HEARTBEAT] = t_ns

    def present(self) -> bytes:
        """All cursors and counters without the heartbeats: they change if the rank makes
        progress."""
        words = self._map[self.geometry.cursors_at : self.geometry.ring_at]
        return mask_heartbeat(words, cursors=CURSORS)

    def counter_at(self, stream: tuple[int, int, int]) -> int | None:
        """Index of the counter words of a stream (group, source, destination).

        None if all slots are taken, if the group has no table entry, and for ranks that do not fit.
        """
        with self._file.lock:
            at = self._counter_slots.get(stream)
            if at is None and len(self._counter_slots) < COUNTERS and _fits(*stream):
                slot = len(self._counter_slots)
                at = (self.geometry.counters_at + slot * COUNTER_BYTES) >> 3
                self.words[at] = stream_word(*stream)
                self._counter_slots[stream] = at
        return at


class _StepCounter:
    """Counts steps without the native extension."""

    __slots__ = ("step",)

    def __init__(self) -> None:
        self.step = 0


def _fits(group: int, source: int, destination: int) -> bool:
    ranks = (source, destination)
    return group > 0 and min(ranks) >= -1 and max(ranks) < COUNTER_RANKS


def _encoded(text: str, max_bytes: int) -> bytes:
    """UTF-8, cut between two characters if it is too long."""
    payload = text.encode("utf-8", "replace")
    if len(payload) <= max_bytes:
        return payload
    return payload[:max_bytes].decode("utf-8", "ignore").encode()
