"""Reading many boxes: fast paths give the same result as the slow path."""

from __future__ import annotations

import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synthetic_boxes import make
from synthetic_job import Job
from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import RECORD, RECORD_BYTES, RECORD_CRC_AT, pack_entry
from torchwhere.blackbox.reader import BoxReader, read_box
from torchwhere.blackbox.ring import Ring, parse_ring
from torchwhere.blackbox.string_table import TableReader
from torchwhere.core.errors import TorchwhereError
from torchwhere.core.events import Kind, SideKind


@pytest.fixture(scope="module")
def boxes(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Sixteen ranks in two stages of a job, one of which died; their rings have wrapped."""
    folder = tmp_path_factory.mktemp("boxes")
    make(Job(32, steps=3, records=150, fault="dead", victim=5), folder)
    return sorted(folder.glob("*.box"))


# -- the ring --------------------------------------------------------------------------------------


def sealed(number: int, kind: int = int(Kind.NOTE)) -> bytes:
    data = RECORD.pack(number, 7 * number, kind, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    return data + zlib.crc32(data).to_bytes(4, "little")


def ring_of(written: int, capacity: int) -> bytearray:
    ring = bytearray(capacity * RECORD_BYTES)
    for number in range(max(0, written - capacity), written):
        at = number % capacity * RECORD_BYTES
        ring[at : at + RECORD_BYTES] = sealed(number)
    return ring


def slot_by_slot(ring: bytes, capacity: int) -> tuple[list[bytes], int, int, int]:
    """The slow path: the good records, and the numbers of torn, unknown and overwritten ones."""
    good, torn, unknown, whole, used = {}, 0, 0, [], 0
    slots = [
        ring[at : at + RECORD_BYTES]
        for at in range(0, len(ring) // RECORD_BYTES * RECORD_BYTES, RECORD_BYTES)
    ]
    filled = [slot for slot, data in enumerate(slots) if any(data)]
    for slot in filled:
        data = slots[slot]
        number = int.from_bytes(data[:8], "little")
        if (
            zlib.crc32(data[:RECORD_CRC_AT]) != int.from_bytes(data[RECORD_CRC_AT:], "little")
            or number % capacity != slot
        ):
            torn += 1
            continue
        whole.append(number)
        if data[16] in {*Kind, *SideKind}:
            good[number] = data
        else:
            unknown += 1
    written = max(whole, default=-1) + 1
    used = sum(slot < written for slot in filled)
    torn += min(written, capacity) - used
    return [good[number] for number in sorted(good)], torn, unknown, max(0, written - capacity)


def told(ring: Ring) -> tuple[list[bytes], int, int, int]:
    return [record.tobytes() for record in ring.records], ring.torn, ring.unknown, ring.overwritten


damage = st.one_of(
    st.tuples(st.just("flip"), st.integers(0, 1 << 20), st.integers(1, 255)),
    st.tuples(st.just("clear"), st.integers(0, 1 << 12), st.just(0)),
    st.tuples(st.just("unknown"), st.integers(0, 1 << 12), st.integers(15, 255)),
    st.tuples(st.just("elsewhere"), st.integers(0, 1 << 12), st.integers(1, 600)),
    st.tuples(st.just("cut"), st.integers(0, 1 << 20), st.just(0)),
)


@settings(max_examples=150, deadline=None)
@given(capacity=st.integers(1, 600), laps=st.floats(0, 2.5), done=st.lists(damage, max_size=6))
def test_ring_is_read_as_slot_by_slot(
    capacity: int, laps: float, done: list[tuple[str, int, int]]
) -> None:
    """For any state of a ring, the reader that checks whole blocks agrees with one that checks
    every slot."""
    ring = ring_of(int(laps * capacity), capacity)
    for what, where, value in done:
        slot = where % capacity * RECORD_BYTES
        if not len(ring) or slot >= len(ring):
            continue
        if what == "flip":
            ring[where % len(ring)] ^= value
        elif what == "clear":
            ring[slot : slot + RECORD_BYTES] = bytes(len(ring[slot : slot + RECORD_BYTES]))
        elif what == "cut":
            del ring[where % len(ring) :]
        elif len(ring) >= slot + RECORD_BYTES:
            record = (
                sealed(where % capacity, value)
                if what == "unknown"
                else sealed(where % capacity + value)
            )
            ring[slot : slot + RECORD_BYTES] = record
    assert told(parse_ring(memoryview(bytes(ring)), capacity)) == slot_by_slot(
        bytes(ring), capacity
    )


@pytest.mark.parametrize("torn", [0, 255, 256, 700, 999])
def test_one_torn_record_is_found_in_any_block(torn: int) -> None:
    """A record that was half overwritten by another one is left out, and no other."""
    ring = ring_of(1700, 1000)
    ring[torn * RECORD_BYTES : torn * RECORD_BYTES + 32] = sealed(torn + 3000)[:32]
    found = parse_ring(memoryview(bytes(ring)), 1000)
    assert (len(found.records), found.torn, found.overwritten) == (999, 1, 700)
    assert torn not in found.records["number"] % 1000


# -- the table -------------------------------------------------------------------------------------

entries = st.lists(
    st.tuples(st.integers(1, 80), st.integers(1, 12), st.binary(max_size=40)), max_size=70
)


@settings(max_examples=100, deadline=None)
@given(
    first=entries,
    changes=st.lists(st.tuples(st.integers(0, 69), st.binary(max_size=40)), max_size=5),
    cuts=st.data(),
)
def test_cached_names_change_nothing(
    first: list[tuple[int, int, bytes]], changes: list[tuple[int, bytes]], cuts: st.DataObject
) -> None:
    """A reader gives the same table after it has read others: equal, different, damaged or cut
    ones."""
    other = [*first]
    for at, payload in changes:
        if at < len(other):
            other[at] = (*other[at][:2], payload)
    one, two = (b"".join(pack_entry(*entry) for entry in table) for table in (first, other))
    damaged = bytearray(two)
    if damaged:
        damaged[cuts.draw(st.integers(0, len(damaged) - 1))] ^= 0x55
    reader = TableReader()
    for table in (
        one,
        two,
        bytes(damaged),
        two[: cuts.draw(st.integers(0, len(two)))],
        one + two,
        one,
    ):
        alone, among = TableReader().read(table), reader.read(table)
        assert (list(among.names.items()), among.torn) == (list(alone.names.items()), alone.torn)


def test_names_in_common_are_kept_once(boxes: list[Path]) -> None:
    """Two boxes of one stage share equal names as objects, above all the list of all ranks."""
    reader = BoxReader()
    one, two = reader.read(boxes[0]), reader.read(boxes[1])
    shared = sum(one.names[entry_id][1] is two.names[entry_id][1] for entry_id in one.names)
    assert shared > 0.8 * len(one.names)


# -- boxes -----------------------------------------------------------------------------------------


def everything(box: Box) -> dict[str, Any]:
    return {
        "meta": box.meta,
        "names": box.names,
        "records": box.records.tobytes(),
        "counts": box.counts,
        "problems": box.problems,
        "events": list(box.events()),
        "cursors": box.cursors(),
        "tallies": box.counters(),
        "checksum": box.checksum,
    }


def test_many_boxes_are_read_as_each_alone(boxes: list[Path]) -> None:
    """One reader for all boxes gives the same as one reader per box, texts too."""
    reader = BoxReader()
    for path in boxes:
        assert everything(reader.read(path)) == everything(read_box(path))
    reasons = [
        event.fields["reason"]
        for path in boxes
        for event in reader.read(path).events(kinds={"end"})
    ]
    assert reasons == ["exit 1"]


def test_cut_boxes_are_read_alike(boxes: list[Path], tmp_path: Path) -> None:
    """A cut box gives the same result both ways, also after complete ones."""
    reader, whole = BoxReader(), boxes[0].read_bytes()
    reader.read(boxes[1])
    chance = random.Random(0)
    for size in (0, 1, 2048, 4096, 5000, *(chance.randrange(len(whole)) for _ in range(40))):
        path = tmp_path / "cut.box"
        path.write_bytes(whole[:size])
        assert everything(reader.read(path)) == everything(read_box(path)), size


def test_a_text_that_is_gone_is_counted(boxes: list[Path], tmp_path: Path) -> None:
    """Texts stay in the file until they are needed; if the file is deleted by then, they are lost,
    and counted."""
    died = next(path for path in boxes if path.name == "rank5.box")
    path = tmp_path / "rank5.box"
    path.write_bytes(died.read_bytes())
    box = BoxReader().read(path)
    path.unlink()
    assert [event.fields for event in box.events(kinds={"end"})] == [{"reason": None}]
    assert box.counts.lost_texts == 1


def test_no_such_box(tmp_path: Path) -> None:
    """Reading a missing file raises an error."""
    with pytest.raises(
        TorchwhereError, match=r"^cannot read .*rank0.box: No such file or directory$"
    ):
        BoxReader().read(tmp_path / "rank0.box")


def test_progress_changes_with_a_record(boxes: list[Path], tmp_path: Path) -> None:
    """The progress counters of a file stay the same as long as nothing is written to it."""
    from torchwhere.blackbox.summary import read_checksum, summarize

    path = tmp_path / "rank0.box"
    path.write_bytes(boxes[0].read_bytes())
    known = summarize(BoxReader().read(path))
    assert read_checksum(path) == known.checksum != 0
    words = np.memmap(path, "<u8", mode="r+", offset=4096, shape=(8,))
    words[5] += 1
    words.flush()
    assert read_checksum(path) != known.checksum
    assert read_checksum(tmp_path / "gone.box") == 0
