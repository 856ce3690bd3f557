"""Polls a box that is being written: what its rank does now, from a few KB, as often as needed.

A `LiveBox` stays with one file. `look` reads the header, the cursors and the used counters with one
call, and the table only if it has grown. It reads a record only if the place is asked for, or if
the rank has stopped moving and the record may be its last. Like all readers, it never raises on
content.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import (
    COUNTER_BYTES,
    COUNTER_COUNT,
    CURSOR_BYTES,
    CURSOR_HEARTBEAT,
    CURSOR_PHASE,
    CURSOR_PLACE,
    CURSOR_RECORD,
    CURSOR_STEP,
    CURSOR_TIME,
    NO_STEP,
    RECORD_BYTES,
    STREAM_ID_SHIFT,
    Geometry,
    Record,
    cursor_place,
    mask_heartbeat,
    unpack_record,
    unpack_stream,
)
from torchwhere.blackbox.issued import Issued, matched_call, stream_name
from torchwhere.blackbox.live_device import LiveDevice
from torchwhere.blackbox.live_line import live_line
from torchwhere.blackbox.live_names import BoxNames, NameReader
from torchwhere.blackbox.phase_sums import ENDED
from torchwhere.blackbox.reader import HEADERS_BYTES, parse_header, read_table
from torchwhere.blackbox.ring import read_step_ns
from torchwhere.blackbox.string_table import (
    UNKNOWN_OP,
    StreamName,
    half_written,
    json_int,
    json_object,
)
from torchwhere.blackbox.summary import BoxSummary
from torchwhere.core.device_place import DevicePlace
from torchwhere.core.events import TEXT_FIELD, Kind
from torchwhere.core.place import Place, line_fields, unknown_place

_COUNTERS_AT_ONCE = 16  # counter slots in a read; more if all of them are used
_CURSOR_WORDS, _COUNTER_WORDS = CURSOR_BYTES // 8, COUNTER_BYTES // 8
_KINDS = frozenset(Kind)


class LiveBox:
    """One box that is polled."""

    def __init__(self, path: Path, names: NameReader) -> None:
        self.path = path
        self._reader = names
        self._reset()

    def _reset(self) -> None:
        self.meta: dict[str, Any] = {}
        self.rank = -1  # not readable yet
        self.run: tuple[str, int] = ("", 0)
        self._header_problem: str | None = None
        self._read_problem: str | None = None  # at the last look
        self.step: int | None = None
        self.moved_ns = 0  # wall clock of the rank's host
        self.mean_step_ns: float | None = None  # of all steps but the longest
        self.ended_steps = 0
        self.has_begun = False  # whether a module, a collective or a step was seen
        self._file: tuple[int, int] = (0, 0)
        self._header = self._data = b""
        self._geometry: Geometry | None = None
        self._names: BoxNames | None = None
        self._read_bytes, self._table_end, self._cursor_at = HEADERS_BYTES, 0, 0
        self._offset_ns = self._beat = 0  # _beat: the rank's monotonic clock of its last heartbeat
        self._record: Record | None = None  # the last one
        self._last_counter: tuple[int, int, int, int] | None = None  # of the latest collective
        # the next four are computed when asked for, and dropped when the rank moves
        self._counts: dict[StreamName, int] | None = None
        self._place: Place | None = None
        self._issued: Issued | None = None
        self._arrived: Issued | None = None
        self._ended: str | None = None
        self._has_read_record = False  # since the rank moved
        self._device = LiveDevice(self.path)

    # -- looking -----------------------------------------------------------------------------------

    def look(self) -> bool:
        """Read the file again. Returns True if the rank has moved. Keeps the last state if the file
        is gone."""
        self._read_problem = None
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return self._look(fd)
            finally:
                os.close(fd)
        except OSError as error:
            self._read_problem = f"cannot be read: {error.strerror}"
            return False

    def _look(self, fd: int) -> bool:
        stat = os.fstat(fd)
        if (stat.st_dev, stat.st_ino) != self._file:
            self._reset()
            self._file = stat.st_dev, stat.st_ino
        data = self._read(fd)
        if data == self._data:
            if not self._has_read_record:
                self._read_record(fd)
            return self._look_at_device(fd)
        header = data[:HEADERS_BYTES]
        if header != self._header and not self._parse_header(header, stat.st_size):
            return False
        words = self._words(fd, data)
        if words is None:
            return False
        is_first = not self._data
        self._read_table(fd)
        self._parse_words(memoryview(words).cast("Q"))
        self._data, self._has_read_record = words, False
        self._counts = self._place = self._issued = self._arrived = None
        self._device.cpu_has_moved()
        self._look_at_device(fd)
        if is_first:
            self._read_record(fd)
        return True

    def _look_at_device(self, fd: int) -> bool:
        """Look at the device. Returns True if it has moved: work that it does is progress."""
        assert self._geometry is not None
        has_moved = self._device.look(fd, self._geometry)
        self._moved_at(self._device.t_ns)
        if has_moved:
            self._arrived = self._counts = None
        return has_moved

    def _read(self, fd: int) -> bytes:
        """Header, cursors and the used counters, without heartbeats."""
        data, geometry = os.pread(fd, self._read_bytes, 0), self._geometry
        if geometry is None:
            return data
        beat_at = HEADERS_BYTES + CURSOR_HEARTBEAT * 8
        self._beat = int.from_bytes(data[beat_at : beat_at + 8], "little")
        words = mask_heartbeat(data[HEADERS_BYTES:], cursors=geometry.cursors)
        return data[:HEADERS_BYTES] + words

    def _parse_header(self, header: bytes, size: int) -> bool:
        """Read a new header. Returns False if it is torn: the next look tries again."""
        box = parse_header(header, size=size, path=self.path)
        geometry = box.geometry
        if geometry is None:
            self._header_problem = box.problems[0]
            return False
        if box.rank < 0 or not geometry.cursors:
            self._header_problem = "its header names no rank"
            return False
        self._header_problem = box.problems[0] if box.problems else None
        self._header, self._geometry = header, geometry
        self._offset_ns = json_int(box.meta, "clock_offset_ns")
        self.moved_ns = max(self.moved_ns, json_int(box.meta, "started_ns"))
        self.rank, self.run, self.meta = box.rank, box.run, box.meta
        return True

    def _words(self, fd: int, data: bytes) -> bytes | None:
        """Header, cursors and all used counters; None while the file is too short for cursors."""
        geometry = self._geometry
        assert geometry is not None
        most = min(geometry.ring_at, os.fstat(fd).st_size)  # the header may hold any number
        while self._read_bytes < most and (
            self._read_bytes == HEADERS_BYTES or data[-COUNTER_BYTES:][:8] != bytes(8)
        ):
            at = max(self._read_bytes, geometry.counters_at)
            self._read_bytes = min(at + _COUNTERS_AT_ONCE * COUNTER_BYTES, most)
            data = self._read(fd)
        return data[: len(data) // 8 * 8] if len(data) >= geometry.counters_at else None

    def _read_table(self, fd: int) -> None:
        geometry = self._geometry
        assert geometry is not None
        if self._names is None:
            start = geometry.table_at
            data = read_table(fd, start=start)
            self._names = self._reader.read(data)
        else:
            start = self._table_end  # of the last whole entry: the next one may have been torn
            data = read_table(fd, start=start)
            if not data:
                return
            self._reader.extend(self._names, data)
        self._table_end = start + len(data) - half_written(data)

    def _parse_words(self, words: memoryview) -> None:
        """Take the few values that every look needs of every rank."""
        geometry, names = self._geometry, self._names
        assert geometry is not None
        assert names is not None
        first, last = geometry.cursors_at >> 3, geometry.counters_at >> 3
        times = words[first + CURSOR_TIME : last : _CURSOR_WORDS].tolist()
        newest = max(range(len(times)), key=times.__getitem__)
        self._cursor_at = at = first + newest * _CURSOR_WORDS
        moved = times[newest]
        self.mean_step_ns = self._last_counter = None
        for counter in range(last, len(words) - _COUNTER_WORDS + 1, _COUNTER_WORDS):
            stream, count, t_ns, record = words[counter : counter + _COUNTER_WORDS].tolist()
            if not stream:
                break
            entry_id = stream >> STREAM_ID_SHIFT
            if entry_id in names.groups:
                if count and (self._last_counter is None or t_ns >= self._last_counter[2]):
                    self._last_counter = stream, count, t_ns, record
                moved = max(moved, t_ns)
            elif entry_id == names.steps_id and count and unpack_stream(stream)[1] == ENDED:
                # The words are count, total and longest. The first step is seldom like the others.
                self.mean_step_ns = (t_ns - record) / (count - 1) if count > 1 else t_ns
                self.ended_steps = count
        steps = words[first + CURSOR_STEP : last : _CURSOR_WORDS].tolist()
        self.step = max(steps) if times[newest] else None
        self.has_begun = bool(self._last_counter or words[at] or self.step)
        self._moved_at(moved)

    def _moved_at(self, t_ns: int) -> None:
        if t_ns:
            self.moved_ns = max(self.moved_ns, t_ns + self._offset_ns)

    # -- records -----------------------------------------------------------------------------------

    def _read_record(self, fd: int | None = None) -> None:
        """Read the last record of the box; if it is an end record, also how the watch ended."""
        self._has_read_record = True
        geometry = self._geometry
        if geometry is None or not self._data:
            return
        words = memoryview(self._data).cast("Q")
        first, last = geometry.cursors_at >> 3, geometry.counters_at >> 3
        newest = max(words[first + CURSOR_RECORD : last : _CURSOR_WORDS].tolist())
        record = self._record_at(newest, fd)
        if record is not None:
            self._record = record
            self._moved_at(record.t_ns)
            if record.kind == Kind.END:
                self._ended = self._end_reason(record.extra)

    def _record_at(self, number: int, fd: int | None = None) -> Record | None:
        geometry = self._geometry
        assert geometry is not None
        at = geometry.ring_at + number % geometry.capacity * RECORD_BYTES
        try:
            if fd is not None:
                data = os.pread(fd, RECORD_BYTES, at)
            else:
                with self.path.open("rb") as file:
                    data = os.pread(file.fileno(), RECORD_BYTES, at)
        except OSError:
            return None
        record = unpack_record(data)
        if record is None or record.number != number or record.kind not in _KINDS:
            return None
        return record

    def _end_reason(self, position: int) -> str:
        text = Box(path=self.path, geometry=self._geometry, _texts=None).text(position)
        reason = json_object(text).get(TEXT_FIELD[Kind.END])
        return str(reason) if reason is not None else text or "ended"

    def _last_record(self) -> Record | None:
        if not self._has_read_record:
            self._read_record()
        return self._record

    def recent_step_ns(self) -> float | None:
        """The usual duration of its last steps; None if the end of the ring has no whole one."""
        record, geometry = self._last_record(), self._geometry
        if record is None or geometry is None:
            return None
        return read_step_ns(self.path, geometry, newest=record.number)

    # -- the state of the rank ---------------------------------------------------------------------

    def summary(self) -> BoxSummary:
        return BoxSummary(
            path=self.path,
            rank=self.rank,
            run=self.run,
            is_readable=self.rank >= 0,
            last_ns=self.moved_ns,
            lacks_counts=False,
            checksum=0,
            meta=self.meta,
            problems=(self.problem,) if self.problem else (),
            beat_ns=self._beat + self._offset_ns if self._beat else 0,
        )

    @property
    def problem(self) -> str | None:
        return self._read_problem or self._header_problem

    @property
    def ended(self) -> str | None:
        """How the watch ended, from its end record; None while it runs, and without that record."""
        return self._ended

    @property
    def is_compiling(self) -> bool:
        record = self._last_record()
        return record is not None and record.kind == Kind.COMPILE_BEGIN

    def place(self) -> Place:
        """Where the thread is that moved last."""
        if self._place is None:
            self._place = self._find_place()
        return self._place

    def _find_place(self) -> Place:
        names = self._names
        if not self._data or names is None:
            return unknown_place(self.rank)
        cursor = self._cursor()
        return Place(
            rank=self.rank,
            step=None if self.step == NO_STEP else self.step,
            **line_fields(names.name(live_line(cursor, self._last_record()))),
            **cursor_place(cursor[CURSOR_PLACE], name=names.name),
        )

    def _cursor(self) -> list[int]:
        words = memoryview(self._data).cast("Q")
        return words[self._cursor_at : self._cursor_at + _CURSOR_WORDS].tolist()

    def phase(self) -> str | None:
        if self._names is None or not self._data:
            return None
        return self._names.name(self._cursor()[CURSOR_PHASE])

    def issued(self) -> Issued | None:
        """Its last collective."""
        if self._issued is None and self._names is not None and self._last_counter is not None:
            self._issued = self._find_issued(self._names, self._last_counter)
        return self._issued

    def _find_issued(self, names: BoxNames, counter: tuple[int, int, int, int]) -> Issued:
        stream, count, _, number = counter
        record = self._last_record()
        if record is None or record.kind != Kind.COLLECTIVE:
            record = self._record_at(number)
        matched = matched_call(names, record, self._group_counters(names))
        if matched is not None:
            return matched
        is_call = record is not None and record.kind == Kind.COLLECTIVE
        op = names.op(record.subject)[0] if record and is_call else UNKNOWN_OP
        return Issued(
            op, names.groups[stream >> STREAM_ID_SHIFT], count - 1, stream_name(names, stream)
        )

    def arrived(self) -> Issued | None:
        """The last collective that it has reached: on its device if it runs there."""
        names, geometry = self._names, self._geometry
        if self._arrived is None and names is not None and geometry is not None:
            self._arrived, reached = self.issued(), self._device.reached(geometry, names)
            streams = {stream_name(names, stream) for stream in reached}
            if self._arrived is not None and self._arrived.stream in streams:
                number = self._device.record
                record = self._record_at(number) if number is not None else None
                self._arrived = matched_call(names, record, reached.items()) or self._arrived
        return self._arrived

    def counts(self) -> dict[StreamName, int]:
        """How many collectives it has reached, by stream: on its device if they run there, else
        how many it has issued."""
        if self._counts is None:
            self._counts = {}
            if self._names is not None and self._geometry is not None:
                reached = self._device.reached(self._geometry, self._names)
                for stream, count in self._group_counters(self._names):
                    name = stream_name(self._names, stream)
                    self._counts[name] = reached.get(stream, count)
        return self._counts

    def device(self) -> DevicePlace | None:
        """Where its device is; None if no device has reached a mark."""
        if self._geometry is None or self._names is None:
            return None
        return self._device.place(
            self._geometry, self._names, cpu=self.place(), offset_ns=self._offset_ns
        )

    def _group_counters(self, names: BoxNames) -> Iterator[tuple[int, int]]:
        """Stream word and count of each counter that belongs to a group."""
        words = memoryview(self._data).cast("Q")
        if self._geometry is None or not self._data:
            return
        start = self._geometry.counters_at >> 3
        for at in range(start, len(words) - _COUNTER_WORDS + 1, _COUNTER_WORDS):
            if words[at] >> STREAM_ID_SHIFT in names.groups:
                yield words[at], words[at + COUNTER_COUNT]
