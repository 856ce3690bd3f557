"""The content of one rank's box: records, names, cursors, counters, and a count of bad records.

`events()` decodes the records into `Event`s one at a time. Nothing here raises on content.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchwhere.blackbox import file_format
from torchwhere.blackbox.file_format import (
    COUNTER_BYTES,
    CPU_DELAY_MASK,
    CPU_DELAY_SHIFT,
    CURSOR_BYTES,
    CURSOR_HEARTBEAT,
    DONE_MASK,
    NO_CALL,
    NO_STEP,
    TIMES_DONE,
    TIMES_NUMBER,
    TIMES_NUMBER_MASK,
    TIMES_REACHED,
    TIMES_WAITED,
    WAITED_MASK,
    EntryType,
    Geometry,
    certainty_of,
    cursor_place,
    sealed_crc,
    unpack_stream,
)
from torchwhere.blackbox.ring import RECORD_DTYPE, Counts, read_section
from torchwhere.blackbox.string_table import json_int, json_object, json_value
from torchwhere.core.events import CUDA_GRAPH_KINDS, TEXT_FIELD, Event, Kind
from torchwhere.core.place import PASS_LABELS, Place, line_fields
from torchwhere.core.results import Shown

_KINDS = {int(k): k for k in Kind}
SIGNATURE_KEYS = (  # of a COLLECTIVE entry
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
_MAX_RANKS_SHOWN = 64  # in every event of a group; `Box.groups` has the ranks of larger groups

NO_GEOMETRY = Geometry(capacity=0, cursors=0, counters=0, text_bytes=0)  # without a header


@dataclass(slots=True)
class Cursor:
    """What a thread did when the file was read."""

    place: Place
    t_ns: int
    phase: str | None
    last_record: int


@dataclass(slots=True, repr=False)
class Box(Shown):
    """The content of one rank's file."""

    path: Path
    meta: dict[str, Any] = field(default_factory=dict)
    records: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0, RECORD_DTYPE))
    side_records: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0, RECORD_DTYPE))
    names: dict[int, tuple[int, str]] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    problems: list[str] = field(default_factory=list)
    geometry: Geometry | None = None
    _head: bytes = b""  # the sections before the ring of texts
    _texts: bytes | None = b""  # None: not read yet
    _device: bytes = b""  # the device sections
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
        """The run of this box: run id and restart count. Elastic restarts renumber ranks."""
        return str(self.meta.get("run_id", "")), json_int(self.meta, "restart")

    @property
    def is_readable(self) -> bool:
        return self.geometry is not None and self.rank >= 0

    @property
    def last_ns(self) -> int:
        """Wall clock of its last record, or of its start."""
        last = self.wall_ns(int(self.records["t_ns"].max())) if len(self.records) else 0
        return max(last, json_int(self.meta, "started_ns"))

    @property
    def beat_ns(self) -> int:
        """Wall clock of its last heartbeat; 0 without one."""
        beats = self._cursor_words()[:1, CURSOR_HEARTBEAT]
        return self.wall_ns(beats[0]) if beats.any() else 0

    def cpu_delays(self) -> list[tuple[int, int]]:
        """How long the main thread waited for a CPU: (wall clock of a heartbeat, ns since the one
        before), for the last heartbeats. Empty if the kernel does not report it."""
        beat_ns = self.beat_ns
        beat_ms = (beat_ns - self.wall_ns(0)) // 10**6
        delays = []
        for word in self._cursor_words()[1:, CURSOR_HEARTBEAT].tolist():
            if word and beat_ns:
                age_ms = (beat_ms - (word >> CPU_DELAY_SHIFT)) & CPU_DELAY_MASK
                delays.append((beat_ns - age_ms * 10**6, (word & CPU_DELAY_MASK) * 1000))
        return sorted(delays)

    @property
    def checksum(self) -> int:
        """Checksum of the cursors and counters: it changes whenever the box is written."""
        if self.geometry is None:
            return 0
        return zlib.crc32(memoryview(self._head)[self.geometry.cursors_at : self.geometry.ring_at])

    def name(self, entry_id: int) -> str | None:
        entry = self.names.get(entry_id)
        return entry[1] if entry else None

    def entry_type(self, entry_id: int) -> int:
        """Type of a table entry; 0 if it is lost."""
        return self.names.get(entry_id, (0, ""))[0]

    def value(self, entry_id: int) -> Any:
        """A JSON entry of the table, parsed once."""
        if entry_id not in self._json:
            self._json[entry_id] = json_value(self.name(entry_id))
        return self._json[entry_id]

    @property
    def lacks_counts(self) -> bool:
        """Whether it is unknown how many collectives this rank has issued: the file ends inside
        the counters, or the table has lost their groups."""
        if self.geometry is None or not self._head:
            return False
        if len(self._head) < self.geometry.ring_at:
            return True
        return any(unpack_stream(words[0])[0] not in self.names for words in self.counter_words())

    def groups(self) -> dict[str, dict[str, Any]]:
        """The process groups of this rank, by name; the latest entry of a name wins."""
        if self._groups is None:
            self._groups = {}
            for entry_id, (entry_type, _) in sorted(self.names.items()):
                value = self.value(entry_id) if entry_type == EntryType.GROUP else None
                if isinstance(value, dict) and isinstance(value.get("name"), str):
                    self._groups[value["name"]] = value
        return self._groups

    def wall_ns(self, t_ns: int) -> int:
        return int(t_ns) + json_int(self.meta, "clock_offset_ns")

    def text(self, start: int) -> str | None:
        """The text at a position; None if it was overwritten or is damaged."""
        if self.geometry is None:
            return None
        if self._texts is None:
            self._texts = read_section(self.path, self.geometry.texts_at, self.geometry.text_bytes)
        data, at = self._texts, start % self.geometry.text_bytes
        body = at + file_format.TEXT.size
        if body <= len(data):
            position, length, crc = file_format.TEXT.unpack_from(data, at)
            payload = data[body : body + length]
            is_whole = position == start and len(payload) == length
            if is_whole and sealed_crc(data[at : body - 4], payload) == crc:
                return payload.decode("utf-8", "replace")
        self._lost_texts.add(start)
        self.counts.lost_texts = len(self._lost_texts)
        return None

    def events(self, *, kinds: set[str] | None = None, last: int | None = None) -> Iterator[Event]:
        """The events in order, oldest first; only of these kinds, only the last ones."""
        records = self.records if kinds is None else self.records[self.rows(kinds)]
        if last is not None:
            records = records[max(0, len(records) - last) :]
        for row in records:
            yield self._event(row)

    def rows(self, kinds: set[str] | None = None) -> npt.NDArray[np.intp]:
        """Indices of the records of these kinds; of all records for None."""
        numbers = [int(kind) for kind in Kind if kinds is None or kind.label in kinds]
        return np.flatnonzero(np.isin(self.records["kind"], numbers))

    def event(self, index: int) -> Event:
        """The event of the record at an index."""
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
        # a module whose name is not in the table is not the same as "outside any module"
        has_lost_name = bool(row["module"]) and module is None
        is_lost = has_lost_name or pass_ not in PASS_LABELS
        return Place(
            rank=self.rank,
            step=None if step == NO_STEP else step,
            pass_=PASS_LABELS.get(pass_, "outside"),
            module=module,
            call=None if module is None or call == NO_CALL else call,
            **line_fields(self.name(int(row["line"]))),
            graph=self.name(int(row["graph"])),
            thread=self.thread(int(row["thread"])),
            certainty=certainty_of(int(row["flags"]), is_lost=is_lost),
            param=self.name(int(row["param"])),
        )

    def thread(self, number: int) -> str | None:
        if self._threads is None:
            self._threads = {}
            for entry_type, text in self.names.values():
                if entry_type == EntryType.THREAD:
                    thread, _, name = text.partition("\t")
                    self._threads[thread] = name
        return self._threads.get(str(number))

    def _fields(self, kind: Kind, row: Any) -> dict[str, Any]:
        if kind is Kind.COLLECTIVE:
            return self._collective_fields(row)
        if kind in TEXT_FIELD:
            return self._text_fields(kind, int(row["extra"]))
        if kind in (Kind.PHASE_BEGIN, Kind.PHASE_END):
            has_ended = {"duration_ns": int(row["extra"])} if kind is Kind.PHASE_END else {}
            return {"phase": self.name(int(row["subject"]))} | has_ended
        if kind in CUDA_GRAPH_KINDS:
            return self._cuda_graph_fields(kind, row)
        if kind in (Kind.OPTIMIZER, Kind.COMPILE_END):
            return {"what": self.name(int(row["subject"]))}
        if kind is Kind.MEMORY:
            return file_format.memory_fields(row)
        if kind is Kind.COMPILE_BEGIN:
            fields = json_object(self.text(int(row["extra"]))) if row["extra"] else {}
            return {"what": self.name(int(row["subject"]))} | fields
        return {}

    def _cuda_graph_fields(self, kind: Kind, row: Any) -> dict[str, Any]:
        """The CUDA graph and its number of collectives; None for what is unknown."""
        graph = self.value(int(row["subject"]))
        fields = graph if isinstance(graph, dict) else {"cuda_graph": None, "captured_at": None}
        if kind is Kind.CAPTURE_BEGIN:
            return dict(fields)
        return fields | {"collectives": int(row["extra"]) if row["subject"] else None}

    def _text_fields(self, kind: Kind, start: int) -> dict[str, Any]:
        """The JSON object of a text: the text itself and its fields. A text that was cut is not
        JSON and is returned as it is."""
        text = self.text(start)
        fields = json_value(text)
        return fields if isinstance(fields, dict) else {TEXT_FIELD[kind]: text}

    def _collective_fields(self, row: Any) -> dict[str, Any]:
        signature = self.value(int(row["subject"]))
        fields = dict(signature) if isinstance(signature, dict) else dict.fromkeys(SIGNATURE_KEYS)
        group = self.groups().get(str(fields.get("group")), {})
        ranks = group.get("ranks")
        members = ranks if isinstance(ranks, list) else []
        fields["group_desc"] = group.get("desc")
        fields["mesh_dim"] = group.get("mesh_dim")
        fields["backend"] = group.get("backend")
        fields["group_size"] = len(members) or None
        fields["group_ranks"] = members if len(members) <= _MAX_RANKS_SHOWN else None
        fields["number"] = int(row["extra"])
        fields["for"] = self.value(int(row["beneficiary"])) if row["beneficiary"] else None
        fields["async"] = bool(row["flags"] & file_format.FLAG_ASYNC)
        if row["flags"] & file_format.FLAG_REPLAYED:
            fields["replayed"] = True
        return fields | self._device_times(int(row["number"]))

    def _device_times(self, number: int) -> dict[str, int]:
        """When a device reached the collective of a record, and when it was done, if known."""
        if self.geometry is None or not self.has_device:
            return {}
        slots, slot = self.times_slots(), number % self.geometry.capacity
        words = slots[slot].tolist() if slot < len(slots) else [0]
        if words[TIMES_NUMBER] & TIMES_NUMBER_MASK != number + 1:
            return {}
        waited_ns = words[TIMES_WAITED] & WAITED_MASK if len(words) > TIMES_WAITED else 0
        times = {
            "reached_ns": words[TIMES_REACHED],
            "waited_ns": waited_ns,
            "done_ns": words[TIMES_DONE] & DONE_MASK,
        }
        return {name: self.wall_ns(t_ns) for name, t_ns in times.items() if t_ns}

    @property
    def has_device(self) -> bool:
        """Whether it has sections for a device."""
        return self.geometry is not None and self.geometry.lanes > 0

    def times_slots(self) -> npt.NDArray[np.uint64]:
        """The slots of the times of a device, which are rows of words."""
        geometry = self.geometry or NO_GEOMETRY
        start = geometry.times_at - geometry.lanes_at
        end = geometry.table_at - geometry.lanes_at
        return _rows(self._device, start, end, geometry.times_bytes)

    def _cursor_words(self) -> npt.NDArray[np.uint64]:
        """The cursors, which are rows of words."""
        geometry = self.geometry or NO_GEOMETRY
        return _rows(self._head, geometry.cursors_at, geometry.counters_at, CURSOR_BYTES)

    def cursors(self) -> list[Cursor]:
        """Where each thread was, for each thread with a cursor."""
        words = self._cursor_words()
        used = np.flatnonzero(words[:, file_format.CURSOR_TIME]).tolist()
        return [self._cursor(slot, words[slot].tolist()) for slot in used]

    def _cursor(self, slot: int, words: list[int]) -> Cursor:
        place = Place(
            rank=self.rank,
            step=words[file_format.CURSOR_STEP],
            **line_fields(self.name(words[file_format.CURSOR_LINE])),
            thread=self.thread((words[file_format.CURSOR_THREAD] or slot + 1) - 1),
            **cursor_place(words[file_format.CURSOR_PLACE], name=self.name),
        )
        return Cursor(
            place=place,
            t_ns=self.wall_ns(words[file_format.CURSOR_TIME]),
            phase=self.name(words[file_format.CURSOR_PHASE]),
            last_record=words[file_format.CURSOR_RECORD],
        )

    def counters(self) -> dict[tuple[int, int, int], int]:
        """Number of issued collectives by stream: (group id, source, destination), -1 for the whole
        group."""
        counts = {}
        for stream, count, _, _ in self.counter_words():
            key = unpack_stream(stream)
            if self.entry_type(key[0]) != EntryType.PHASE_PATH:
                counts[key] = count
        return counts

    def counter_words(self) -> list[list[int]]:
        """The used counters, four words each. `phase_sums.py` decodes the counters of phases."""
        if self._counter_words is None:
            geometry = self.geometry or NO_GEOMETRY
            words = _rows(self._head, geometry.counters_at, geometry.ring_at, COUNTER_BYTES)
            self._counter_words = words[words[:, 0] != 0].tolist()
        return self._counter_words


def _rows(data: bytes, start: int, end: int, width: int) -> npt.NDArray[np.uint64]:
    """A section as rows of words, without a copy; of a truncated file, the rows that exist."""
    section = memoryview(data)[start:end]
    rows = np.frombuffer(section[: len(section) // width * width], "<u8")
    return rows.reshape(-1, width // 8)


def training_cursor(box: Box, cursors: Sequence[Cursor]) -> Cursor | None:
    """The cursor of the thread that trains, among the cursors of a box: it began the last step.

    Without it the cursor of the main thread, and without that one the cursor that moved last. A
    worker of Ray Train trains in a thread of its own, while its main thread waits.
    """
    steps = np.flatnonzero(box.records["kind"] == int(Kind.STEP_BEGIN))
    trains = box.thread(int(box.records["thread"][steps[-1]])) if len(steps) else None
    names = [cursor.place.thread for cursor in cursors]
    thread = next((name for name in (trains, "MainThread") if name in names), None)
    found = [cursor for cursor in cursors if thread in (None, cursor.place.thread)]
    return max(found, key=lambda cursor: cursor.t_ns, default=None)
