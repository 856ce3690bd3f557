"""A glance at a box: what its rank is doing now, from the cursors and counts alone, a few KB, as
often as one likes.

A `LiveBox` stays with one file. `look` reads the header, the cursors and the counters that are used
in one call; the table only where it has grown; a record only when somebody asks for the place, or
when nothing moves any more and it may be the last one. Like all that reads, it never raises on
content.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torchwhere.blackbox import file_format
from torchwhere.blackbox.box import PASS_LABELS, Box
from torchwhere.blackbox.file_format import (
    CURSOR_BYTES,
    HEADER_BYTES,
    HEADER_COPIES,
    NO_CALL,
    NO_STEP,
    RECORD_BYTES,
    Geometry,
)
from torchwhere.blackbox.live_names import (
    UNKNOWN_OP,
    BoxNames,
    GroupEntry,
    NameReader,
    half_written,
    loaded,
)
from torchwhere.blackbox.reader import parse_box
from torchwhere.blackbox.summary import BoxSummary
from torchwhere.core.events import TEXT_FIELD, Kind
from torchwhere.core.place import Certainty, Pass, Place

_HEAD = HEADER_BYTES * HEADER_COPIES
_SOME = 16  # counter slots that are read at first, and more of them when they are all in use
_CURSOR_WORDS, _TALLY_WORDS = CURSOR_BYTES // 8, file_format.COUNTER_BYTES // 8
_KINDS = frozenset(Kind)


class StreamName(NamedTuple):
    """What is counted in one sequence, by a name that is the same on all ranks."""

    group: str
    source: int = -1
    destination: int = -1


@dataclass(frozen=True, slots=True)
class Issued:
    """The collective that a rank issued last."""

    op: str
    group: GroupEntry
    number: int
    stream: StreamName


class LiveBox:
    """One box, looked at again and again."""

    def __init__(self, path: Path, names: NameReader) -> None:
        self.path = path
        self._names = names
        self._forget()

    def _forget(self) -> None:
        self.meta: dict[str, Any] = {}
        self.rank = -1  # not readable yet
        self.run: tuple[str, int] = ("", 0)
        self._problem: str | None = None  # what its header says
        self._trouble: str | None = None  # what the system said at the last look
        self.step: int | None = None
        self.moved_ns = 0  # wall clock of the rank's host
        self.mean_step_ns: float | None = None  # over its life, less the longest
        self.has_begun = False  # whether a module, a collective or a step was seen
        self._file: tuple[int, int] = (0, 0)
        self._header = self._data = b""
        self._geometry: Geometry | None = None
        self._known: BoxNames | None = None
        self._reach, self._table_end, self._cursor_at = _HEAD, 0, 0
        self._offset_ns = 0
        self._record: tuple[int, ...] | None = None  # the last one
        # of the stream that was counted last
        self._last_tally: tuple[int, int, int, int] | None = None
        # this and the next two: made when asked for, until something moves
        self._counts: dict[StreamName, int] | None = None
        self._place: Place | None = None
        self._issued: Issued | None = None
        self._ended: str | None = None
        self._is_read = False  # whether the last record was looked at since something moved

    # -- looking -----------------------------------------------------------------------------------

    def look(self) -> bool:
        """Read it again; whether anything has moved. A file that is gone keeps what was known of
        it."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self._trouble = f"cannot be read: {error.strerror}"
            return False
        self._trouble = None
        try:
            return self._look(fd)
        except OSError as error:
            self._trouble = f"cannot be read: {error.strerror}"
            return False
        finally:
            os.close(fd)

    def _look(self, fd: int) -> bool:
        stat = os.fstat(fd)
        if (stat.st_dev, stat.st_ino) != self._file:
            self._forget()
            self._file = stat.st_dev, stat.st_ino
        data = self._read(fd)
        if data == self._data:
            if not self._is_read:
                self._read_record(fd)
            return False
        if data[:_HEAD] != self._header and not self._meet(data[:_HEAD], stat.st_size):
            return False
        if (words := self._words(fd, data)) is None:
            return False
        is_new = not self._data
        self._read_table(fd)
        self._take(memoryview(words).cast("Q"))
        self._data = words
        self._is_read, self._counts, self._place, self._issued = False, None, None, None
        if is_new:
            self._read_record(fd)
        return True

    def _read(self, fd: int) -> bytes:
        """Header, cursors and counters, as far as they are looked at."""
        data, geometry = os.pread(fd, self._reach, 0), self._geometry
        return (
            data[:_HEAD] + file_format.mask_heartbeat(data[_HEAD:], cursors=geometry.cursors)
            if geometry is not None
            else data
        )

    def _meet(self, header: bytes, size: int) -> bool:
        """Read a header that is new. One that is torn just now is read the next time."""
        box = parse_box(header)
        geometry = box.geometry
        if geometry is None or box.rank < 0 or not geometry.cursors:
            said = [problem for problem in box.problems if not problem.startswith("cut short")]
            self._problem = said[0] if said else "its header names no rank"
            return False
        self._header, self._geometry = header, geometry
        self._problem = (
            f"cut short: {size} of at least {geometry.table_at} bytes"
            if size < geometry.table_at
            else None
        )
        offset, started = box.meta.get("clock_offset_ns"), box.meta.get("started_ns")
        self._offset_ns = offset if isinstance(offset, int) else 0
        self.moved_ns = max(self.moved_ns, started if isinstance(started, int) else 0)
        self.rank, self.run, self.meta = box.rank, box.run, box.meta
        return True

    def _words(self, fd: int, data: bytes) -> bytes | None:
        """Header, cursors and all counters that are used; None while the file is shorter than its
        cursors."""
        geometry = self._geometry
        assert geometry is not None
        most = min(geometry.ring_at, os.fstat(fd).st_size)  # what the header says may be anything
        while self._reach < most and (
            self._reach == _HEAD or data[-file_format.COUNTER_BYTES :][:8] != bytes(8)
        ):
            at = max(self._reach, geometry.counters_at)
            self._reach = min(at + _SOME * file_format.COUNTER_BYTES, most)
            data = self._read(fd)
        return data[: len(data) // 8 * 8] if len(data) >= geometry.counters_at else None

    def _read_table(self, fd: int) -> None:
        geometry = self._geometry
        assert geometry is not None
        size = os.fstat(fd).st_size
        if self._known is None:
            data = os.pread(fd, max(0, size - geometry.table_at), geometry.table_at)
            self._known = self._names.read(data)
        elif size > self._table_end:
            # From the last entry that was there on: it may have been half written.
            data = os.pread(fd, size - self._table_end, self._table_end)
            self._names.grow(self._known, data)
        else:
            return
        self._table_end = max(geometry.table_at, size - half_written(data))

    def _take(self, words: memoryview) -> None:
        """What is wanted of every rank at every look; nothing else."""
        geometry, known = self._geometry, self._known
        assert geometry is not None
        assert known is not None
        first, last = geometry.cursors_at >> 3, geometry.counters_at >> 3
        times = words[first + file_format.CURSOR_TIME : last : _CURSOR_WORDS].tolist()
        newest = max(range(len(times)), key=times.__getitem__)
        self._cursor_at = at = first + newest * _CURSOR_WORDS
        moved = times[newest]
        self.mean_step_ns = self._last_tally = None
        for counter in range(last, len(words) - _TALLY_WORDS + 1, _TALLY_WORDS):
            who, count, t_ns, record = words[counter : counter + _TALLY_WORDS].tolist()
            if not who:
                break
            if who >> 40 in known.groups:
                if count and (self._last_tally is None or t_ns >= self._last_tally[2]):
                    self._last_tally = who, count, t_ns, record
                moved = max(moved, t_ns)
            elif who >> 40 == known.steps_id and (who >> 20 & 0xFFFFF) == 1 and count:
                # Words of such a counter: how often, in all, the longest. The first step is seldom
                # like the others.
                self.mean_step_ns = (t_ns - record) / (count - 1) if count > 1 else t_ns
        self.step = (
            max(words[first + file_format.CURSOR_STEP : last : _CURSOR_WORDS].tolist())
            if times[newest]
            else None
        )
        self.has_begun = bool(self._last_tally or words[at] or self.step)
        self._moved_to(moved)

    def _moved_to(self, t_ns: int) -> None:
        if t_ns:
            self.moved_ns = max(self.moved_ns, t_ns + self._offset_ns)

    # -- records -----------------------------------------------------------------------------------

    def _read_record(self, fd: int | None = None) -> None:
        """The last record of the thread that moved last, and of the box: how it ended, if it
        did."""
        self._is_read = True
        geometry = self._geometry
        if geometry is None or not self._data:
            return
        words = memoryview(self._data).cast("Q")
        first, last = geometry.cursors_at >> 3, geometry.counters_at >> 3
        newest = max(words[first + file_format.CURSOR_RECORD : last : _CURSOR_WORDS].tolist())
        found = self._record_at(newest, fd)
        if found is not None:
            self._record = found
            self._moved_to(found[1])
            if found[2] == Kind.END:
                self._ended = self._text(found[14])

    def _record_at(self, number: int, fd: int | None = None) -> tuple[int, ...] | None:
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
        if len(data) < RECORD_BYTES or zlib.crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
            return None
        record = file_format.RECORD.unpack(data[:-4])
        return record if record[0] == number and record[2] in _KINDS else None

    def _text(self, start: int) -> str:
        text = Box(path=self.path, geometry=self._geometry, _texts=None).text(start)
        reason = loaded(text).get(TEXT_FIELD[Kind.END])
        return str(reason) if reason is not None else text or "ended"

    # -- what it says ------------------------------------------------------------------------------

    def label(self) -> BoxSummary:
        problems = (self.problem,) if self.problem else ()
        return BoxSummary(
            self.path,
            self.rank,
            self.run,
            self.rank >= 0,
            self.moved_ns,
            False,
            0,
            self.meta,
            problems=problems,
        )

    @property
    def problem(self) -> str | None:
        return self._trouble or self._problem

    @property
    def ended(self) -> str | None:
        """How the watch ended, in the rank's own words; None while it goes on, and of one that
        could not say it."""
        return self._ended

    @property
    def is_compiling(self) -> bool:
        self._know_record()
        return self._record is not None and self._record[2] == Kind.COMPILE_BEGIN

    def _know_record(self) -> None:
        if not self._is_read:
            self._read_record()

    def place(self) -> Place:
        """Where the thread is that moved last. The line is that of its last record, where the
        cursor has none."""
        if self._place is None:
            self._place = self._find_place()
        return self._place

    def _find_place(self) -> Place:
        if not self._data or self._known is None:
            return Place(self.rank, None, "outside", certainty=Certainty.UNKNOWN)
        self._know_record()
        row = (
            memoryview(self._data)
            .cast("Q")[self._cursor_at : self._cursor_at + _CURSOR_WORDS]
            .tolist()
        )
        word, call = (
            row[file_format.CURSOR_PLACE],
            row[file_format.CURSOR_PLACE] & file_format.CALL_MASK,
        )
        pass_, entry = (
            word >> file_format.PASS_SHIFT & file_format.PASS_MASK,
            word >> file_format.MODULE_SHIFT,
        )
        module = self._known.name(entry)
        is_lost = pass_ not in PASS_LABELS or (entry and module is None)
        line = self._known.name(row[file_format.CURSOR_LINE]) if pass_ == Pass.BACKWARD else None
        if line is None and self._record is not None:
            line = self._known.name(self._record[9])
        return Place(
            rank=self.rank,
            step=None if self.step == NO_STEP else self.step,
            pass_=PASS_LABELS.get(pass_, "outside"),
            module=module,
            call=None if module is None or call == NO_CALL or pass_ == Pass.RECOMPUTE else call,
            line=line,
            certainty=Certainty.UNKNOWN if is_lost else Certainty.EXACT,
        )

    def phase(self) -> str | None:
        known = self._known
        return (
            known.name(memoryview(self._data).cast("Q")[self._cursor_at + file_format.CURSOR_PHASE])
            if known and self._data
            else None
        )

    def issued(self) -> Issued | None:
        """Its last collective."""
        if self._issued is None and self._known is not None and self._last_tally is not None:
            self._issued = self._find_issued(self._known, self._last_tally)
        return self._issued

    def _find_issued(self, known: BoxNames, counter: tuple[int, int, int, int]) -> Issued:
        self._know_record()
        who, count, _, number = counter
        record = (
            self._record
            if self._record is not None and self._record[2] == Kind.COLLECTIVE
            else self._record_at(number)
        )
        op, group = UNKNOWN_OP
        if record is not None and record[2] == Kind.COLLECTIVE:
            op, group = known.ops.get(record[11], UNKNOWN_OP)
            for stream, counted in self._streams():
                if known.groups[stream >> 40].name == group and counted == record[14] + 1:
                    who, count = stream, counted
        entry = known.groups[who >> 40]
        return Issued(op, entry, count - 1, _stream(entry, who))

    def counts(self) -> dict[StreamName, int]:
        """How many collectives it has issued, by stream."""
        known = self._known
        if self._counts is None:
            self._counts = (
                {_stream(known.groups[who >> 40], who): count for who, count in self._streams()}
                if known
                else {}
            )
        return self._counts

    def _streams(self) -> Iterator[tuple[int, int]]:
        """The counters of groups: who, and how often."""
        words = memoryview(self._data).cast("Q")
        if self._geometry is not None and self._known is not None and self._data:
            for at in range(
                self._geometry.counters_at >> 3, len(words) - _TALLY_WORDS + 1, _TALLY_WORDS
            ):
                if words[at] >> 40 in self._known.groups:
                    yield words[at], words[at + file_format.COUNTER_COUNT]


def _stream(group: GroupEntry, who: int) -> StreamName:
    return StreamName(group.name, (who >> 20 & 0xFFFFF) - 1, (who & 0xFFFFF) - 1)
