"""Polls a box that is being written: what its rank does now, from a few KB, as often as needed.

A `LiveBox` stays with one file. `look` reads the header, the cursors and the used counters with one
call, and the table only if it has grown. It reads a record only if the place is asked for, or if
the rank has stopped moving and the record may be its last. Like all readers, it never raises on
content.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import (
    CALL_MASK,
    COUNTER_BYTES,
    COUNTER_TIME,
    CURSOR_BYTES,
    CURSOR_HEARTBEAT,
    CURSOR_LINE,
    CURSOR_PHASE,
    CURSOR_PLACE,
    CURSOR_RECORD,
    CURSOR_STEP,
    CURSOR_TIME,
    MODULE_SHIFT,
    NO_STEP,
    RECORD_BYTES,
    STREAM_ID_SHIFT,
    Geometry,
    Record,
    cursor_place,
    mask_heartbeat,
    pass_of,
    slots,
    stream_word,
    unpack_record,
)
from torchwhere.blackbox.issued import Issued, matched_call, stream_name
from torchwhere.blackbox.live_device import LiveDevice
from torchwhere.blackbox.live_names import BoxNames, NameReader
from torchwhere.blackbox.phase_sums import ENDED
from torchwhere.blackbox.reader import HEADERS_BYTES, NO_HEADER, parse_header, read_table
from torchwhere.blackbox.ring import read_section, read_step_ns
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
from torchwhere.core.place import Pass, Place, line_fields, unknown_place

_COUNTERS_AT_ONCE = 16  # counter slots in a read; more if all of them are used
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
        self._header_problem: str | None = NO_HEADER
        self._read_problem: str | None = None  # at the last look
        self.step: int | None = None
        self.moved_ns = 0  # wall clock of the rank's host
        self.mean_step_ns: float | None = None  # of all steps but the longest
        self.ended_steps = 0
        self.has_begun = False  # whether a module, a collective or a step was seen
        # how the watch ended, from its end record; None while it runs, and without that record
        self.ended: str | None = None
        self._file: tuple[int, int] = (0, 0)
        self._header = self._data = b""
        self._geometry = Geometry(capacity=1)
        self._names = BoxNames({}, {}, {}, {})
        self._read_bytes, self._table_end = HEADERS_BYTES, 0
        self._offset_ns = self._beat = 0  # _beat: the rank's monotonic clock of its last heartbeat
        self._cursor: list[int] = []  # the words of the cursor that moved last
        self._newest = 0  # the number of the last record
        self._record: Record | None = None  # the last one
        self._issued_counts: dict[int, int] = {}  # of collectives, by the stream words
        self._last_counter: list[int] | None = None  # of the latest collective
        # the next four are computed when asked for, and dropped when the rank moves
        self._counts: dict[StreamName, int] | None = None
        self._place: Place | None = None
        self._issued: Issued | None = None
        self._arrived: Issued | None = None
        self._has_read_record = False  # since the rank moved
        self._device = LiveDevice(self.path, self._geometry, self._names, self._wall_ns)

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
        data = self._with_counters(fd, data)
        if len(data) < self._geometry.counters_at:
            return False
        is_first = not self._data
        self._read_table(fd)
        self._parse_words(data)
        self._data, self._has_read_record = data, False
        self._counts = self._place = self._issued = self._arrived = None
        self._device.cpu_has_moved()
        self._look_at_device(fd)
        if is_first:
            self._read_record(fd)
        return True

    def _look_at_device(self, fd: int) -> bool:
        """Look at the device. Returns True if it has moved: work that it does is progress."""
        has_moved = self._device.look(fd)
        self._moved_at(self._device.t_ns)
        if has_moved:
            self._arrived = self._counts = None
        return has_moved

    def _read(self, fd: int) -> bytes:
        """Header, cursors and the used counters, without heartbeats."""
        data = os.pread(fd, self._read_bytes, 0)
        beat_at = HEADERS_BYTES + CURSOR_HEARTBEAT * 8
        self._beat = int.from_bytes(data[beat_at : beat_at + 8], "little")
        words = mask_heartbeat(data[HEADERS_BYTES:], cursors=self._geometry.cursors)
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

    def _with_counters(self, fd: int, data: bytes) -> bytes:
        """Header, cursors and all used counters."""
        geometry = self._geometry
        most = min(geometry.ring_at, os.fstat(fd).st_size)  # the header may hold any number
        while self._read_bytes < most and (
            self._read_bytes == HEADERS_BYTES or data[-COUNTER_BYTES:][:8] != bytes(8)
        ):
            at = max(self._read_bytes, geometry.counters_at)
            self._read_bytes = min(at + _COUNTERS_AT_ONCE * COUNTER_BYTES, most)
            data = self._read(fd)
        return data

    def _read_table(self, fd: int) -> None:
        # from the end of the last whole entry: the next one may have been torn
        start = self._table_end or self._geometry.table_at
        data = read_table(fd, start=start)
        if not self._table_end:
            self._names = self._reader.read(data)
            self._device = LiveDevice(self.path, self._geometry, self._names, self._wall_ns)
        elif data:
            self._reader.extend(self._names, data)
        self._table_end = start + len(data) - half_written(data)

    def _parse_words(self, data: bytes) -> None:
        """Take the few values that every look needs of every rank."""
        geometry, names = self._geometry, self._names
        cursors = slots(data[geometry.cursors_at : geometry.counters_at], CURSOR_BYTES)
        self._cursor = max(cursors, key=itemgetter(CURSOR_TIME))
        self._newest = max(cursor[CURSOR_RECORD] for cursor in cursors)
        last_step = max(cursor[CURSOR_STEP] for cursor in cursors)
        self.step = last_step if self._cursor[CURSOR_TIME] else None
        moved, issued = self._cursor[CURSOR_TIME], []
        self._issued_counts, self.mean_step_ns = {}, None
        steps = stream_word(names.steps_id, ENDED, -1)
        for counter in slots(data[geometry.counters_at :], COUNTER_BYTES):
            stream, count, t_ns, longest_ns = counter
            if stream >> STREAM_ID_SHIFT in names.groups:
                self._issued_counts[stream] = count
                moved = max(moved, t_ns)
                if count:
                    issued.append(counter)
            elif stream == steps and count:
                # Here the time is the total. The first step is seldom like the others.
                self.mean_step_ns = (t_ns - longest_ns) / (count - 1) if count > 1 else t_ns
                self.ended_steps = count
        # of two at the same time, the later slot
        self._last_counter = max(reversed(issued), key=itemgetter(COUNTER_TIME), default=None)
        self.has_begun = bool(self._last_counter or self._cursor[CURSOR_PLACE] or self.step)
        self._moved_at(moved)

    def _moved_at(self, t_ns: int) -> None:
        if t_ns:
            self.moved_ns = max(self.moved_ns, self._wall_ns(t_ns))

    def _wall_ns(self, t_ns: int) -> int:
        return t_ns + self._offset_ns

    # -- records -----------------------------------------------------------------------------------

    def _read_record(self, fd: int | None = None) -> None:
        """Read the last record of the box; if it is an end record, also how the watch ended."""
        self._has_read_record = True
        record = self._record_at(self._newest, fd) if self._data else None
        if record is not None:
            self._record = record
            self._moved_at(record.t_ns)
            if record.kind == Kind.END:
                self.ended = self._end_reason(record.extra)

    def _record_at(self, number: int, fd: int | None = None) -> Record | None:
        at = self._geometry.ring_at + number % self._geometry.capacity * RECORD_BYTES
        try:
            if fd is not None:
                data = os.pread(fd, RECORD_BYTES, at)
            else:
                data = read_section(self.path, at, RECORD_BYTES)
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
        record = self._last_record()
        if record is None:
            return None
        return read_step_ns(self.path, self._geometry, newest=record.number)

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
            beat_ns=self.beat_ns,
        )

    @property
    def beat_ns(self) -> int:
        """The wall clock of its last heartbeat; 0 if there was none."""
        return self._wall_ns(self._beat) if self._beat else 0

    @property
    def problem(self) -> str | None:
        return self._read_problem or self._header_problem

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
        if not self._cursor:
            return unknown_place(self.rank)
        line = _live_line(self._cursor, self._last_record())
        return Place(
            rank=self.rank,
            step=None if self.step == NO_STEP else self.step,
            **line_fields(self._names.name(line)),
            **cursor_place(self._cursor[CURSOR_PLACE], name=self._names.name),
        )

    def phase(self) -> str | None:
        return self._names.name(self._cursor[CURSOR_PHASE]) if self._cursor else None

    def issued(self) -> Issued | None:
        """Its last collective."""
        if self._issued is None and self._last_counter is not None:
            self._issued = self._find_issued(*self._last_counter)
        return self._issued

    def _find_issued(self, stream: int, count: int, _t_ns: int, number: int) -> Issued:
        names, record = self._names, self._last_record()
        if record is None or record.kind != Kind.COLLECTIVE:
            record = self._record_at(number)
        matched = matched_call(names, record, self._issued_counts)
        if matched is not None:
            return matched
        is_call = record is not None and record.kind == Kind.COLLECTIVE
        op = names.op(record.subject)[0] if record and is_call else UNKNOWN_OP
        return Issued(
            op, names.groups[stream >> STREAM_ID_SHIFT], count - 1, stream_name(names, stream)
        )

    def arrived(self) -> Issued | None:
        """The last collective that it has reached: on its device if it runs there."""
        if self._arrived is None:
            names, reached = self._names, self._device.reached()
            self._arrived = self.issued()
            known = [stream for stream in reached if stream >> STREAM_ID_SHIFT in names.groups]
            streams = {stream_name(names, stream) for stream in known}
            if self._arrived is not None and self._arrived.stream in streams:
                number = self._device.record
                record = self._record_at(number) if number is not None else None
                self._arrived = matched_call(names, record, reached) or self._arrived
        return self._arrived

    def counts(self) -> dict[StreamName, int]:
        """How many collectives it has reached, by stream: on its device if they run there, else
        how many it has issued."""
        if self._counts is None:
            reached = self._device.reached()
            self._counts = {
                stream_name(self._names, stream): reached.get(stream, count)
                for stream, count in self._issued_counts.items()
            }
        return self._counts

    def device(self) -> DevicePlace | None:
        """Where its device is; None if no device has reached a mark."""
        return self._device.place(cpu=self.place())


def _live_line(cursor: Sequence[int], record: Record | None) -> int:
    """The table id of the line; 0 if it is not known.

    In backward the cursor has the line. Otherwise the line of the last record counts, unless the
    thread has entered another module since: then it belongs to an earlier place.

    Args:
        cursor: The words of the cursor.
        record: The last record of the box.
    """
    place = cursor[CURSOR_PLACE]
    if pass_of(place) == Pass.BACKWARD and cursor[CURSOR_LINE]:
        return cursor[CURSOR_LINE]
    if record is None:
        return 0
    module = place >> MODULE_SHIFT
    is_there = (module, pass_of(place)) == (record.module, record.pass_)
    is_same_call = not module or place & CALL_MASK == record.call
    has_moved = cursor[CURSOR_TIME] > record.t_ns
    return record.line if (is_there and is_same_call) or not (module and has_moved) else 0
