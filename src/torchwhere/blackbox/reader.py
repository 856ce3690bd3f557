"""Reads one black box: while its process runs, is stuck, stopped, or long dead; whole, cut, or damaged.

Takes the bytes of a file once (no map: a file that shrinks under a reader's map would kill the reader) and gives back what
is good. It never raises on content: everything that is not good is counted in `Box.counts` and said in `Box.problems`.
Records are kept as a numpy array; `events()` turns them into `Event`s one at a time.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchwhere.blackbox import layout
from torchwhere.blackbox.layout import HEADER, HEADER_BYTES, HEADER_COPIES, NO_CALL, NO_STEP, RECORD_BYTES, Geometry, Sort
from torchwhere.errors import TorchwhereError
from torchwhere.events import TEXT_FIELD, Event, Kind
from torchwhere.place import Certainty, Pass, Place

RECORD_DTYPE = np.dtype(
    [("number", "<u8"), ("t_ns", "<u8"), ("kind", "u1"), ("pass", "u1"), ("flags", "u1"), ("thread", "u1")]
    + [(name, "<u4") for name in ("step", "module", "call", "line", "graph", "what", "aim", "param")]
    + [("more", "<u8"), ("crc", "<u4")]
)

_PASS_LABELS = {int(p): p.label for p in Pass}
_KINDS = {int(k): k for k in Kind}
_MOST_RANKS_SHOWN = 64  # a group's members in every one of its events; larger groups: `Box.groups`


@dataclass(slots=True)
class Counts:
    """An account of every record slot and table byte of a file."""

    good: int = 0
    torn: int = 0  # begun and not finished, or damaged
    unknown: int = 0  # of a kind this version does not know
    overwritten: int = 0  # older than the ring
    torn_entries: int = 0
    lost_texts: int = 0


@dataclass(slots=True)
class Cursor:
    """What a thread was doing when the file was read."""

    place: Place
    t_ns: int
    phase: str | None
    last_record: int


@dataclass(slots=True)
class Box:
    """What one rank's file holds."""

    path: Path
    meta: dict[str, Any] = field(default_factory=dict)
    records: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0, RECORD_DTYPE))
    names: dict[int, tuple[int, str]] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    problems: list[str] = field(default_factory=list)
    geometry: Geometry | None = None
    _data: bytes = b""
    _json: dict[int, Any] = field(default_factory=dict)
    _threads: dict[str, str] = field(default_factory=dict)
    _groups: dict[str, dict[str, Any]] | None = None

    @property
    def rank(self) -> int:
        rank = self.meta.get("rank")
        return rank if isinstance(rank, int) else -1

    @property
    def run(self) -> tuple[str, int]:
        """Which run this box belongs to: run id and restart count. Elastic restarts renumber ranks."""
        return str(self.meta.get("run_id", "")), int(self.meta.get("restart", 0) or 0)

    def name(self, entry_id: int) -> str | None:
        entry = self.names.get(entry_id)
        return entry[1] if entry else None

    def value(self, entry_id: int) -> Any:
        """A JSON entry of the table, parsed once."""
        if entry_id not in self._json:
            try:
                self._json[entry_id] = json.loads(self.name(entry_id) or "null")
            except ValueError:
                self._json[entry_id] = None
        return self._json[entry_id]

    def groups(self) -> dict[str, dict[str, Any]]:
        """The process groups this rank knew, by name; the latest entry of a name wins."""
        if self._groups is not None:
            return self._groups
        known = self._groups = {}
        for entry_id, (sort, _) in sorted(self.names.items()):
            value = self.value(entry_id) if sort == Sort.GROUP else None
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
        room = self.geometry.text_bytes
        at = self.geometry.texts_at + start % room
        length, crc = layout.TEXT.unpack(self._data[at : at + 8].ljust(8, b"\0"))
        payload = self._data[at + 8 : at + 8 + length] if length <= room else b""
        if start % room + 8 + length > room or zlib.crc32(payload) != crc or (not length and crc):
            self.counts.lost_texts += 1
            return None
        return payload.decode("utf-8", "replace")

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
        flags, call, step = int(row["flags"]), int(row["call"]), int(row["step"])
        certainty = Certainty.EXACT
        if flags & layout.FLAG_UNKNOWN:
            certainty = Certainty.UNKNOWN
        elif flags & layout.FLAG_INFERRED:
            certainty = Certainty.INFERRED
        module = self.name(int(row["module"])) if row["module"] else None
        return Place(
            rank=self.rank,
            step=None if step == NO_STEP else step,
            pass_=_PASS_LABELS.get(int(row["pass"]), "outside"),
            module=module,
            call=None if module is None or call == NO_CALL else call,
            line=self.name(int(row["line"])),
            graph=self.name(int(row["graph"])),
            thread=self.thread(int(row["thread"])),
            certainty=certainty,
            param=self.name(int(row["param"])),
        )

    def thread(self, number: int) -> str | None:
        if not self._threads:
            texts = [text for sort, text in self.names.values() if sort == Sort.THREAD]
            self._threads = {found: name for found, _, name in (text.partition("\t") for text in texts)}
        return self._threads.get(str(number))

    def _fields(self, kind: Kind, row: Any) -> dict[str, Any]:
        if kind is Kind.COLLECTIVE:
            return self._collective_fields(row)
        if kind in TEXT_FIELD:
            return self._text_fields(kind, int(row["more"]))
        if kind in (Kind.PHASE_BEGIN, Kind.PHASE_END):
            return {"phase": self.name(int(row["what"]))}
        if kind in (Kind.OPTIMIZER, Kind.COMPILE_BEGIN, Kind.COMPILE_END):
            return {"what": self.name(int(row["what"]))}
        return {}

    def _text_fields(self, kind: Kind, start: int) -> dict[str, Any]:
        """A text is a JSON object: the text itself and the fields that came with it."""
        try:
            fields = json.loads(self.text(start) or "null")
        except ValueError:
            fields = None
        return fields if isinstance(fields, dict) else {TEXT_FIELD[kind]: None}

    def _collective_fields(self, row: Any) -> dict[str, Any]:
        signature = self.value(int(row["what"]))
        fields = dict(signature) if isinstance(signature, dict) else {"op": None, "raw_op": None, "group": None}
        group = self.groups().get(str(fields.get("group")), {})
        members = group.get("ranks") or []
        fields["group_desc"] = group.get("desc")
        fields["mesh_dim"] = group.get("mesh_dim")
        fields["backend"] = group.get("backend")
        fields["group_size"] = len(members) or None
        fields["group_ranks"] = members if len(members) <= _MOST_RANKS_SHOWN else None
        fields["number"] = int(row["more"])
        fields["for"] = self.value(int(row["aim"])) if row["aim"] else None
        fields["async"] = bool(row["flags"] & layout.FLAG_ASYNC)
        return fields

    def cursors(self) -> list[Cursor]:
        """Where each thread was, one per thread that was ever seen."""
        geometry = self.geometry
        if geometry is None:
            return []
        slots = self._data[geometry.cursors_at : geometry.tallies_at]
        words = np.frombuffer(slots[: len(slots) // 64 * 64], "<u8").reshape(-1, 8)
        return [self._cursor(number, row) for number, row in enumerate(words) if row[layout.CURSOR_TIME]]

    def _cursor(self, number: int, row: Any) -> Cursor:
        word, call = int(row[layout.CURSOR_PLACE]), int(row[layout.CURSOR_PLACE]) & layout.CALL_MASK
        module, pass_ = self.name(word >> layout.MODULE_SHIFT), word >> layout.PASS_SHIFT & layout.PASS_MASK
        place = Place(
            rank=self.rank,
            step=int(row[layout.CURSOR_STEP]),
            pass_=_PASS_LABELS.get(pass_, "outside"),
            module=module,
            # A recomputed call is not resolved in the cursor: what stands there is not a call number.
            call=None if module is None or call == NO_CALL or pass_ == Pass.RECOMPUTE else call,
            line=self.name(int(row[layout.CURSOR_LINE])),
            thread=self.thread(number),
        )
        return Cursor(
            place=place,
            t_ns=self.wall_ns(int(row[layout.CURSOR_TIME])),
            phase=self.name(int(row[layout.CURSOR_PHASE])),
            last_record=int(row[layout.CURSOR_RECORD]),
        )

    def tallies(self) -> dict[tuple[int, int, int], int]:
        """How many collectives were issued per stream: (group id, source, destination), -1 for a whole group."""
        geometry = self.geometry
        if geometry is None:
            return {}
        slots = self._data[geometry.tallies_at : geometry.ring_at]
        words = np.frombuffer(slots[: len(slots) // 32 * 32], "<u8").reshape(-1, 4)
        found = {}
        for who, count, _, _ in words[words[:, 0] != 0].tolist():
            found[who >> 40, (who >> 20 & 0xFFFFF) - 1, (who & 0xFFFFF) - 1] = count
        return found


def read_box(path: str | Path) -> Box:
    """Read one file. Raises `TorchwhereError` only when there is no file to read; content never raises."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TorchwhereError(f"cannot read {path}: {error.strerror}") from error
    return parse_box(data, path=path)


def parse_box(data: bytes, *, path: Path = Path("<bytes>")) -> Box:
    box = Box(path=path, _data=data)
    _parse_header(box)
    if box.geometry is not None:
        _parse_table(box)
        _parse_ring(box)
        for sort, text in box.names.values():
            if sort == Sort.META and isinstance(meta := _loads(text), dict):
                box.meta = meta | box.meta
    return box


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _parse_header(box: Box) -> None:
    for copy in range(HEADER_COPIES):
        block = box._data[copy * HEADER_BYTES : (copy + 1) * HEADER_BYTES]
        if block[:8] != layout.MAGIC or len(block) < HEADER_BYTES:
            continue
        _, version, _, cursors, tallies, capacity, text_bytes, _, _, meta_bytes = HEADER.unpack(block[: HEADER.size])
        if zlib.crc32(block[:-4]) != int.from_bytes(block[-4:], "little"):
            continue
        if version != layout.VERSION:
            box.problems.append(f"written in format {version}, this torchwhere reads {layout.VERSION}: use the other version")
            return
        box.geometry = Geometry(capacity=max(capacity, 1), cursors=cursors, tallies=tallies, text_bytes=max(text_bytes, 1))
        meta = _loads(block[HEADER.size : HEADER.size + meta_bytes].decode("utf-8", "replace"))
        box.meta = meta if isinstance(meta, dict) else {}
        if len(box._data) < box.geometry.table_at:
            box.problems.append(f"cut short: {len(box._data)} of at least {box.geometry.table_at} bytes")
        return
    box.problems.append("no readable header: not a black box, or damaged")


def _parse_table(box: Box) -> None:
    data, mark, head = box._data, layout.ENTRY_MARK, layout.ENTRY.size
    assert box.geometry is not None
    at = box.geometry.table_at
    while at + head <= len(data):
        found_mark, entry_id, sort, length, crc = layout.ENTRY.unpack_from(data, at)
        payload = data[at + head : at + head + length]
        if found_mark == mark and len(payload) == length and zlib.crc32(payload, zlib.crc32(data[at : at + head - 4])) == crc:
            box.names[entry_id] = sort, payload.decode("utf-8", "replace")
            at += head + length
            continue
        box.counts.torn_entries += 1
        at = data.find(mark, at + 1)
        if at < 0:
            return
    box.counts.torn_entries += at < len(data)


def _parse_ring(box: Box) -> None:
    assert box.geometry is not None
    ring = box._data[box.geometry.ring_at : box.geometry.texts_at]
    rows = np.frombuffer(ring[: len(ring) // RECORD_BYTES * RECORD_BYTES], RECORD_DTYPE)
    used = np.flatnonzero(np.frombuffer(rows.tobytes(), np.uint8).reshape(-1, RECORD_BYTES).any(axis=1))
    rows = rows[used]
    whole = (_crcs(rows) == rows["crc"]) & (rows["number"] % box.geometry.capacity == used)
    known = np.isin(rows["kind"], list(_KINDS))
    box.counts.torn = int((~whole).sum())
    box.counts.unknown = int((whole & ~known).sum())
    good = rows[whole & known]
    box.records = good[np.argsort(good["number"], kind="stable")]
    box.counts.good = len(box.records)
    if len(box.records):
        box.counts.overwritten = int(box.records["number"][0])


@cache
def _crc_tables() -> tuple[npt.NDArray[np.uint32], int]:
    """A CRC is linear over GF(2): the CRC of a record is the xor of one table value per byte."""
    length = layout.RECORD_CRC_AT
    zero = zlib.crc32(bytes(length))
    tables = np.empty((length, 256), np.uint32)
    for position in range(length):
        tail = bytes(length - position - 1)
        head = bytes(position)
        tables[position] = [zlib.crc32(head + bytes([value]) + tail) ^ zero for value in range(256)]
    return tables, zero


def _crcs(rows: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """The CRC of every record at once, block by block so that the working set stays in the cache."""
    tables, zero = _crc_tables()
    found = np.full(len(rows), zero, np.uint32)
    columns = np.frombuffer(rows.tobytes(), np.uint8).reshape(-1, RECORD_BYTES)
    for start in range(0, len(rows), 8192):
        block = columns[start : start + 8192]
        out = found[start : start + 8192]
        for position in range(layout.RECORD_CRC_AT):
            out ^= tables[position][block[:, position]]
    return found
