"""What one rank's file holds, once it was read: records, names, cursors, counters, and an account
of what is not good.

`events()` makes `Event`s of the records one at a time. Nothing here raises on content.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchwhere.blackbox import file_format
from torchwhere.blackbox.file_format import (
    HEADER_BYTES,
    HEADER_COPIES,
    NO_CALL,
    NO_STEP,
    EntryType,
    Geometry,
)
from torchwhere.blackbox.ring import RECORD_DTYPE
from torchwhere.core.events import TEXT_FIELD, Event, Kind
from torchwhere.core.place import Certainty, Pass, Place
from torchwhere.core.results import Shown

PASS_LABELS = {int(p): p.label for p in Pass}
_KINDS = {int(k): k for k in Kind}
_SIGNATURE = (
    "op",
    "raw_op",
    "group",
    "dtype",
    "shapes",
    "out_shapes",
    "bytes",
    "peer",
    "reduce_op",
    "api",
)
_MOST_RANKS_SHOWN = 64  # a group's members in every one of its events; larger groups: `Box.groups`


@dataclass(slots=True)
class Counts:
    """An account of every record slot and table byte of a file."""

    good: int = 0
    torn: int = 0  # begun and not finished, or damaged
    unknown: int = 0  # of a kind this version does not know
    overwritten: int = 0  # older than the ring
    torn_entries: int = 0
    lost_texts: int = 0  # asked for, and overwritten or damaged


@dataclass(slots=True)
class Cursor:
    """What a thread was doing when the file was read."""

    place: Place
    t_ns: int
    phase: str | None
    last_record: int


@dataclass(slots=True, repr=False)
class Box(Shown):
    """What one rank's file holds."""

    path: Path
    meta: dict[str, Any] = field(default_factory=dict)
    records: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0, RECORD_DTYPE))
    names: dict[int, tuple[int, str]] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    problems: list[str] = field(default_factory=list)
    geometry: Geometry | None = None
    _head: bytes = b""  # all before the ring of texts
    _texts: bytes | None = b""  # None: not read yet
    _json: dict[int, Any] = field(default_factory=dict)
    _threads: dict[str, str] | None = None
    _lost_texts: set[int] = field(default_factory=set)
    _groups: dict[str, dict[str, Any]] | None = None
    _counter_words: list[list[int]] | None = None

    @property
    def rank(self) -> int:
        rank = self.meta.get("rank")
        return rank if isinstance(rank, int) else -1

    @property
    def run(self) -> tuple[str, int]:
        """Which run this box belongs to: run id and restart count. Elastic restarts renumber
        ranks."""
        restart = self.meta.get("restart")
        return str(self.meta.get("run_id", "")), restart if isinstance(restart, int) else 0

    @property
    def is_readable(self) -> bool:
        return self.geometry is not None and self.rank >= 0

    @property
    def last_ns(self) -> int:
        """Wall clock of its last record, or of its start."""
        started = self.meta.get("started_ns", 0)
        last = self.wall_ns(int(self.records["t_ns"].max())) if len(self.records) else 0
        return max(last, started if isinstance(started, int) else 0)

    @property
    def beat_ns(self) -> int:
        """Wall clock of the last moment at which its process was there, by its own heart; 0 if it
        has none."""
        at = file_format.CURSOR_HEART * 8 + (self.geometry.cursors_at if self.geometry else 0)
        beat = (
            int.from_bytes(self._head[at : at + 8], "little")
            if self.geometry and self.geometry.cursors
            else 0
        )
        return self.wall_ns(beat) if beat else 0

    def queued(self) -> list[tuple[int, int]]:
        """For how long its main thread waited for a CPU, as its heart found: (wall clock of a beat,
        ns since the one before), of the last few beats. Empty where the kernel does not tell."""
        geometry, beat_ns = self.geometry, self.beat_ns
        if geometry is None or not beat_ns:
            return []
        cursors = self._head[geometry.cursors_at + file_format.CURSOR_BYTES : geometry.counters_at]
        words = memoryview(cursors[: len(cursors) // 8 * 8]).cast("Q")[
            file_format.CURSOR_HEART :: file_format.CURSOR_BYTES // 8
        ]
        beat_ms = (beat_ns - self.wall_ns(0)) // 10**6
        known = [
            (
                (beat_ms - (word >> file_format.QUEUED_SHIFT)) & file_format.QUEUED_MASK,
                word & file_format.QUEUED_MASK,
            )
            for word in words
            if word
        ]
        return sorted((beat_ns - age_ms * 10**6, waited_us * 1000) for age_ms, waited_us in known)

    @property
    def progress(self) -> int:
        """A sum of its cursors and counters: another one as soon as something is recorded."""
        return (
            zlib.crc32(memoryview(self._head)[HEADER_BYTES * HEADER_COPIES : self.geometry.ring_at])
            if self.geometry
            else 0
        )

    def name(self, entry_id: int) -> str | None:
        entry = self.names.get(entry_id)
        return entry[1] if entry else None

    def value(self, entry_id: int) -> Any:
        """A JSON entry of the table, parsed once."""
        if entry_id not in self._json:
            self._json[entry_id] = loaded(self.name(entry_id))
        return self._json[entry_id]

    @property
    def lacks_counts(self) -> bool:
        """Whether the file was cut before the end of its counters, or the groups they count are
        lost with the table: what this rank has issued is not known then."""
        if self.geometry is None or not self._head:
            return False
        return len(self._head) < self.geometry.ring_at or any(
            who >> 40 not in self.names for who, *_ in self.counter_words()
        )

    def groups(self) -> dict[str, dict[str, Any]]:
        """The process groups this rank knew, by name; the latest entry of a name wins."""
        if self._groups is not None:
            return self._groups
        known = self._groups = {}
        for entry_id, (sort, _) in sorted(self.names.items()):
            value = self.value(entry_id) if sort == EntryType.GROUP else None
            if isinstance(value, dict) and isinstance(value.get("name"), str):
                known[value["name"]] = value
        return known

    def wall_ns(self, t_ns: int) -> int:
        offset = self.meta.get("clock_offset_ns", 0)
        return int(t_ns) + (offset if isinstance(offset, int) else 0)

    def text(self, start: int) -> str | None:
        """A text by its position, or None if it was overwritten since."""
        if self.geometry is None:
            return None
        if self._texts is None:
            self._texts = _section(self.path, self.geometry.texts_at, self.geometry.text_bytes)
        data, at = self._texts, start % self.geometry.text_bytes
        body = at + file_format.TEXT.size
        if body <= len(data):
            position, length, crc = file_format.TEXT.unpack_from(data, at)
            end = body + length
            if (
                position == start
                and end <= len(data)
                and _sealed(data[at : body - 4], data[body:end]) == crc
            ):
                return data[body : body + length].decode("utf-8", "replace")
        self._lost_texts.add(start)
        self.counts.lost_texts = len(self._lost_texts)
        return None

    def events(self, *, kinds: set[str] | None = None, last: int | None = None) -> Iterator[Event]:
        """The events in order, oldest first; only those of `kinds`, only the `last` so many."""
        records = self.records
        if kinds is not None:
            wanted = [int(k) for k in Kind if k.label in kinds]
            records = records[np.isin(records["kind"], wanted)]
        if last is not None:
            records = records[max(0, len(records) - last) :]
        for row in records:
            yield self._event(row)

    def event(self, index: int) -> Event:
        """One event, by its index among the records."""
        return self._event(self.records[index])

    def _event(self, row: Any) -> Event:
        kind = _KINDS[int(row["kind"])]
        return Event(
            kind=kind.label,
            number=int(row["number"]),
            t_ns=self.wall_ns(int(row["t_ns"])),
            place=self._place(row),
            fields=self._fields(kind, row),
        )

    def _place(self, row: Any) -> Place:
        call, step, pass_ = int(row["call"]), int(row["step"]), int(row["pass"])
        module = self.name(int(row["module"]))
        return Place(
            rank=self.rank,
            step=None if step == NO_STEP else step,
            pass_=PASS_LABELS.get(pass_, "outside"),
            module=module,
            call=None if module is None or call == NO_CALL else call,
            line=self.name(int(row["line"])),
            graph=self.name(int(row["graph"])),
            thread=self.thread(int(row["thread"])),
            certainty=self._certainty(row, module),
            param=self.name(int(row["param"])),
        )

    def _certainty(self, row: Any, module: str | None) -> Certainty:
        flags = int(row["flags"])
        # the name is not in the table: not the same as outside any module
        is_lost = row["module"] and module is None
        if flags & file_format.FLAG_UNKNOWN or is_lost or int(row["pass"]) not in PASS_LABELS:
            return Certainty.UNKNOWN
        return Certainty.INFERRED if flags & file_format.FLAG_INFERRED else Certainty.EXACT

    def thread(self, number: int) -> str | None:
        if self._threads is None:
            texts = [text for sort, text in self.names.values() if sort == EntryType.THREAD]
            self._threads = {
                found: name for found, _, name in (text.partition("\t") for text in texts)
            }
        return self._threads.get(str(number))

    def _fields(self, kind: Kind, row: Any) -> dict[str, Any]:
        if kind is Kind.COLLECTIVE:
            return self._collective_fields(row)
        if kind in TEXT_FIELD:
            return self._text_fields(kind, int(row["extra"]))
        if kind is Kind.PHASE_BEGIN:
            return {"phase": self.name(int(row["subject"]))}
        if kind is Kind.PHASE_END:
            return {"phase": self.name(int(row["subject"])), "duration_ns": int(row["extra"])}
        if kind in (Kind.OPTIMIZER, Kind.COMPILE_BEGIN, Kind.COMPILE_END):
            known = (
                loaded(self.text(int(row["extra"])))
                if kind is Kind.COMPILE_BEGIN and row["extra"]
                else None
            )
            return {"what": self.name(int(row["subject"]))} | (
                known if isinstance(known, dict) else {}
            )
        return {}

    def _text_fields(self, kind: Kind, start: int) -> dict[str, Any]:
        """A text is a JSON object: the text itself and the fields that came with it. One that was
        cut is given as it is."""
        text = self.text(start)
        fields = loaded(text)
        return fields if isinstance(fields, dict) else {TEXT_FIELD[kind]: text}

    def _collective_fields(self, row: Any) -> dict[str, Any]:
        signature = self.value(int(row["subject"]))
        fields = dict(signature) if isinstance(signature, dict) else dict.fromkeys(_SIGNATURE)
        group = self.groups().get(str(fields.get("group")), {})
        members = ranks if isinstance(ranks := group.get("ranks"), list) else []
        fields["group_desc"] = group.get("desc")
        fields["mesh_dim"] = group.get("mesh_dim")
        fields["backend"] = group.get("backend")
        fields["group_size"] = len(members) or None
        fields["group_ranks"] = members if len(members) <= _MOST_RANKS_SHOWN else None
        fields["number"] = int(row["extra"])
        fields["for"] = self.value(int(row["beneficiary"])) if row["beneficiary"] else None
        fields["async"] = bool(row["flags"] & file_format.FLAG_ASYNC)
        return fields

    def cursors(self) -> list[Cursor]:
        """Where each thread was, one per thread that was ever seen."""
        geometry = self.geometry
        if geometry is None:
            return []
        words = _rows(
            self._head, geometry.cursors_at, geometry.counters_at, file_format.CURSOR_BYTES
        ).view("<u8")
        used = np.flatnonzero(words[:, file_format.CURSOR_TIME]).tolist()
        return [self._cursor(slot, words[slot].tolist()) for slot in used]

    def _cursor(self, slot: int, row: Any) -> Cursor:
        word, call = (
            int(row[file_format.CURSOR_PLACE]),
            int(row[file_format.CURSOR_PLACE]) & file_format.CALL_MASK,
        )
        module, pass_ = (
            self.name(word >> file_format.MODULE_SHIFT),
            word >> file_format.PASS_SHIFT & file_format.PASS_MASK,
        )
        is_lost = pass_ not in PASS_LABELS or (word >> file_format.MODULE_SHIFT and module is None)
        place = Place(
            rank=self.rank,
            step=int(row[file_format.CURSOR_STEP]),
            pass_=PASS_LABELS.get(pass_, "outside"),
            module=module,
            # A recomputed call is not resolved in the cursor: what stands there is not a call
            # number.
            call=None if module is None or call == NO_CALL or pass_ == Pass.RECOMPUTE else call,
            line=self.name(int(row[file_format.CURSOR_LINE])),
            thread=self.thread(int(row[file_format.CURSOR_THREAD] or slot + 1) - 1),
            certainty=Certainty.UNKNOWN if is_lost else Certainty.EXACT,
        )
        return Cursor(
            place=place,
            t_ns=self.wall_ns(int(row[file_format.CURSOR_TIME])),
            phase=self.name(int(row[file_format.CURSOR_PHASE])),
            last_record=int(row[file_format.CURSOR_RECORD]),
        )

    def counters(self) -> dict[tuple[int, int, int], int]:
        """How many collectives were issued per stream: (group id, source, destination), -1 for a
        whole group."""
        found = {}
        for who, count, _, _ in self.counter_words():
            if self.names.get(who >> 40, (0, ""))[0] != EntryType.PHASE_PATH:
                found[who >> 40, (who >> 20 & 0xFFFFF) - 1, (who & 0xFFFFF) - 1] = count
        return found

    def counter_words(self) -> list[list[int]]:
        """The counters that are used, four words each; `phase_sums.py` knows those of phases."""
        if self._counter_words is None:
            geometry = self.geometry
            if geometry is None:
                return []
            words = _rows(
                self._head, geometry.counters_at, geometry.ring_at, file_format.COUNTER_BYTES
            ).view("<u8")
            self._counter_words = words[words[:, 0] != 0].tolist()
        return self._counter_words


def _section(path: Path, at: int, length: int) -> bytes:
    """A part of a file, or as much of it as there is."""
    try:
        with path.open("rb") as file:
            file.seek(at)
            return file.read(length)
    except OSError:
        return b""


def loaded(text: str | None) -> Any:
    """What a JSON text says; None where it says nothing."""
    try:
        return json.loads(text or "null")
    except (ValueError, RecursionError):
        return None


def _sealed(head: bytes, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(head))


def _rows(data: bytes, start: int, end: int, width: int) -> npt.NDArray[np.uint8]:
    """A section as rows of bytes, without a copy; of a file that was cut, the rows that are
    there."""
    section = memoryview(data)[start:end]
    return np.frombuffer(section[: len(section) // width * width], np.uint8).reshape(-1, width)
