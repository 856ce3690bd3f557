"""A damaged black box: whatever happens to the bytes, the reader does not raise and shows nothing
that was not written."""

from __future__ import annotations

import json
import struct
import tempfile
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchwhere.blackbox import file_format
from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import EntryType, Geometry, pack_entry, pack_header
from torchwhere.blackbox.reader import parse_box, read_box
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.events import TEXT_FIELD, Kind

CAPACITY = 40
META = {
    "rank": 2,
    "world_size": 4,
    "clock_offset_ns": 1000,
    "run_id": "run",
    "restart": 1,
    "argv": ["train.py"] * 300,
}


@dataclass(frozen=True)
class Sample:
    """A box as it is on disk, and everything that was put into it."""

    data: bytes
    geometry: Geometry
    records: dict[int, tuple[int, ...]]  # number to all fields
    names: dict[int, tuple[int, str]]
    texts: dict[int, str]  # position to text


@cache
def sample() -> Sample:
    """A box that has gone round: records of every kind, names of every sort, texts, cursors,
    counters."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank2.box"
        box = BoxWriter(path, meta=META, records=CAPACITY)
        names = {1: (int(EntryType.META), json.dumps(META))}
        records, texts = {}, {}
        for number in range(100):
            kind = list(Kind)[number % len(Kind)]
            sort = EntryType(number % 9 + 2)
            name = name_of(sort, number)
            entry = box.intern(sort, name)
            names[entry] = int(sort), name
            more = number
            if kind in TEXT_FIELD:
                text = json.dumps({TEXT_FIELD[kind]: f"text {number}" * 20})
                more = box.text(text)
                texts[more] = text
            ids = [number % 110 for _ in range(5)]
            fields = (
                1 + number,
                int(kind),
                number % 12,
                number % 8,
                number % 4,
                number,
                ids[0],
                7,
                *ids,
                more,
            )
            box.record(fields[1], fields[0], *fields[2:])
            records[number] = (number, *fields)
            cursor = box.cursor_at(number)
            for word in range(7):
                box.words[cursor + word] = (number << 32) + number * word + 1
            counter = box.counter_at((number % 110 + 1, number % 5 - 1, -1))
            assert counter is not None
            box.words[counter + file_format.COUNTER_COUNT] = number
        box.close()
        return Sample(path.read_bytes(), box.geometry, records, names, texts)


def name_of(sort: EntryType, number: int) -> str:
    if sort is EntryType.GROUP:
        return json.dumps(
            {
                "name": str(number),
                "desc": "pg",
                "ranks": [0, 1],
                "backend": "gloo",
                "mesh_dim": None,
            }
        )
    if sort is EntryType.COLLECTIVE:
        return json.dumps(
            {"op": "all_reduce", "group": str(number - 1), "bytes": number, "n": number}
        )
    if sort is EntryType.BENEFICIARY:
        return json.dumps([f"layers.{number}.weight"])
    return f"{number}\tthread {number}" if sort is EntryType.THREAD else f"{sort.name} {number}"


def look_at_everything(box: Box) -> list[dict[str, Any]]:
    """Call every way there is to look into a box; none may raise."""
    box.cursors()
    box.counters()
    box.groups()
    assert isinstance(box.run, tuple)
    assert isinstance(box.rank, int)
    list(box.events(kinds={"collective", "note"}, last=3))
    events = [event.to_dict() for event in box.events()]
    json.dumps(events)
    return events


def assert_nothing_invented(box: Box, written: Sample) -> None:
    """Every record, name, text and fact in `box` is one that was written, and no record is there
    twice."""
    events = look_at_everything(box)
    assert (
        len(events)
        == len(box.records)
        == box.counts.good
        == len(set(box.records["number"].tolist()))
    )
    for row in box.records.tolist():
        assert row[:-1] == written.records[row[0]]
    for entry_id, name in box.names.items():
        assert name == written.names[entry_id]
    for position, text in written.texts.items():
        assert box.text(position) in (text, None)
    assert box.meta.items() <= META.items()


def sections() -> list[tuple[int, int]]:
    g = sample().geometry
    starts = [
        0,
        file_format.HEADER_BYTES,
        g.cursors_at,
        g.counters_at,
        g.ring_at,
        g.texts_at,
        g.texts_at + 3000,
        g.table_at,
    ]
    ends = [*starts[1:6], g.texts_at + 3000, g.table_at, len(sample().data)]
    return list(zip(starts, ends, strict=True))


@st.composite
def offsets(draw: st.DrawFn) -> int:
    """Any place in the file; every section as likely as any other."""
    start, end = draw(st.sampled_from(sections()))
    return draw(st.integers(start, end - 1))


def test_sample_is_whole() -> None:
    """The box that the other tests damage holds what was written, so that they have something to
    lose."""
    written = sample()
    box = parse_box(written.data)
    assert_nothing_invented(box, written)
    assert (box.meta, box.names, box.problems) == (META, written.names, [])
    assert (box.counts.good, box.counts.overwritten, box.counts.torn, box.counts.torn_entries) == (
        CAPACITY,
        60,
        0,
        0,
    )
    assert [box.text(position) for position in written.texts] == list(written.texts.values())
    assert len(box.cursors()) == file_format.CURSORS
    assert len(box.counters()) == 100
    assert len(box.groups()) == 11


@settings(max_examples=300, deadline=None)
@given(end=offsets())
def test_cut_anywhere(end: int) -> None:
    """A file cut at any byte gives what is left, and says that it is cut."""
    written = sample()
    box = parse_box(written.data[:end])
    assert_nothing_invented(box, written)
    if end < written.geometry.table_at:
        assert box.problems
    if end >= file_format.HEADER_BYTES:
        assert box.rank == 2
        whole = (
            max(0, min(end, written.geometry.texts_at) - written.geometry.ring_at)
            // file_format.RECORD_BYTES
        )
        assert box.counts.good == whole


@settings(max_examples=400, deadline=None)
@given(flips=st.lists(st.tuples(offsets(), st.integers(1, 255)), min_size=1, max_size=12))
def test_flip_any_bytes(flips: list[tuple[int, int]]) -> None:
    """With any bytes changed, what is damaged is counted and not shown, and the rest is there."""
    written = sample()
    data = bytearray(written.data)
    for at, value in flips:
        data[at] ^= value
    box = parse_box(bytes(data))
    assert_nothing_invented(box, written)
    in_header = {
        at // file_format.HEADER_BYTES
        for at, _ in flips
        if at < file_format.HEADER_BYTES * file_format.HEADER_COPIES
    }
    if len(in_header) < file_format.HEADER_COPIES:
        ring = range(written.geometry.ring_at, written.geometry.texts_at)
        hit = {
            (at - ring.start) // file_format.RECORD_BYTES
            for at, _ in flips
            if at in ring and data[at] != written.data[at]
        }
        assert box.counts.good == CAPACITY - len(hit)
        assert box.counts.torn == len(hit)


@settings(max_examples=400, deadline=None)
@given(at=offsets(), removed=st.integers(0, 9000), garbage=st.binary(max_size=400))
def test_splice_garbage(at: int, removed: int, garbage: bytes) -> None:
    """With any stretch replaced by other bytes, so that all behind it is moved, nothing is shown
    that was not written."""
    written = sample()
    assert_nothing_invented(
        parse_box(written.data[:at] + garbage + written.data[at + removed :]), written
    )


@settings(max_examples=400, deadline=None)
@given(source=offsets(), to=offsets(), length=st.integers(1, 5000), insert=st.booleans())
def test_splice_parts_of_itself(source: int, to: int, length: int, insert: bool) -> None:
    """A stretch of the file copied elsewhere in it, with all its valid CRCs, makes no record or
    name that was not written."""
    written = sample()
    data, part = written.data, written.data[source : source + length]
    assert_nothing_invented(
        parse_box(data[:to] + part + data[to + (0 if insert else len(part)) :]), written
    )


def test_record_in_a_wrong_slot() -> None:
    """A whole record in a slot that is not its own is torn: it is never shown twice."""
    written, size = sample(), file_format.RECORD_BYTES
    ring_at = written.geometry.ring_at
    data = bytearray(written.data)
    data[ring_at + 3 * size : ring_at + 4 * size] = data[ring_at : ring_at + size]
    box = parse_box(bytes(data))
    assert_nothing_invented(box, written)
    assert (box.counts.good, box.counts.torn) == (CAPACITY - 1, 1)


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=6000), is_marked=st.booleans())
def test_foreign_bytes(data: bytes, is_marked: bool) -> None:
    """A file that is no black box gives an empty box that says so, even if it begins like one."""
    box = parse_box(file_format.MAGIC + data if is_marked else data)
    assert look_at_everything(box) == []
    assert box.problems == ["no readable header: not a black box, or damaged"]
    assert box.rank == -1


def test_empty_file(tmp_path: Path) -> None:
    """An empty file is not a black box, and says so."""
    (tmp_path / "rank0.box").write_bytes(b"")
    box = read_box(tmp_path / "rank0.box")
    assert box.problems == ["no readable header: not a black box, or damaged"]
    assert look_at_everything(box) == []


@pytest.mark.parametrize("copy", range(file_format.HEADER_COPIES))
def test_one_header_is_enough(copy: int) -> None:
    """With either copy of the header destroyed, the other serves."""
    written = sample()
    data = bytearray(written.data)
    data[copy * file_format.HEADER_BYTES : (copy + 1) * file_format.HEADER_BYTES] = bytes(
        file_format.HEADER_BYTES
    )
    box = parse_box(bytes(data))
    assert_nothing_invented(box, written)
    assert (box.meta, box.counts.good, box.problems) == (META, CAPACITY, [])


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        (
            1,
            (
                "written by an older torchwhere (format 1); this version reads format 2. Record the"
                " run again."
            ),
        ),
        (
            3,
            (
                "written by a newer torchwhere (format 3); this version reads format 2. Update"
                " torchwhere."
            ),
        ),
    ],
)
def test_other_version(version: int, problem: str) -> None:
    """A box of another format is not read; one sentence names the format and says what to do."""
    data = bytearray(sample().data)
    for copy in range(file_format.HEADER_COPIES):
        at = copy * file_format.HEADER_BYTES
        struct.pack_into("<I", data, at + 8, version)
        end = at + file_format.HEADER_BYTES - 4
        struct.pack_into("<I", data, end, zlib.crc32(data[at:end]))
    box = parse_box(bytes(data))
    assert look_at_everything(box) == []
    assert box.problems == [problem]


@pytest.mark.parametrize("capacity", [0, 1, 2**32 - 1])
def test_headers_that_promise_too_much(capacity: int) -> None:
    """A valid header in front of too little, or nothing, is a box that is cut short."""
    header = pack_header(
        Geometry(capacity=capacity, cursors=0, counters=2**32 - 1, text_bytes=0), b'{"rank": 1}'
    )
    box = parse_box(header * 2 + b"\xff" * 100)
    assert look_at_everything(box) == []
    assert box.rank == 1
    assert box.problems[0].startswith("cut short: 4196 of at least ")


STRANGE = [
    "",
    "null",
    "[]",
    "{}",
    "3",
    '"x"',
    "[" * 50_000,
    '{"a":' * 50_000,
    "9" * 5000,
    "NaN",
    "\0",
    "{'a': 1}",
]
KEYS = (
    "name",
    "ranks",
    "desc",
    "group",
    "op",
    "rank",
    "restart",
    "run_id",
    "clock_offset_ns",
    "world_size",
    "text",
)
STRANGE += [
    json.dumps(dict.fromkeys(KEYS, value))
    for value in (None, 3, -1, "x", [], {}, [None], True, 1.5, 10**30)
]


def test_strange_json() -> None:
    """JSON that is valid by its CRC and not what the format says is no reason to raise, wherever it
    stands."""
    geometry = Geometry(capacity=len(Kind), text_bytes=1 << 18)
    ring = bytearray()
    for number, kind in enumerate(Kind):
        record = file_format.RECORD.pack(
            number, 1, kind, 1, 0, 0, 0, 3, 0, 4, 9, 6 if number % 2 else 5, 7, 8, 0
        )
        ring += record + file_format.CRC.pack(zlib.crc32(record))
    for text in map(str.encode, STRANGE):
        entries = b"".join(pack_entry(sort + 1, sort, text) for sort in range(12))
        meta = text if len(text) <= file_format.META_BYTES else b"{}"
        middle = bytes(geometry.ring_at - geometry.cursors_at)
        texts = file_format.pack_text(0, text).ljust(geometry.text_bytes, b"\0")
        box = parse_box(pack_header(geometry, meta) * 2 + middle + ring + texts + entries)
        assert len(look_at_everything(box)) == len(Kind)
        assert box.counts.torn_entries == 0
