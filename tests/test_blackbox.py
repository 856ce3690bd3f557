"""The black box as it should be: what is written comes back, names are never mixed up, files are
never fought over."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import struct
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rank_pool import Pool
from torchwhere import Certainty, TorchwhereError
from torchwhere.blackbox import file_format
from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import NO_CALL, NO_STEP, EntryType
from torchwhere.blackbox.file_names import box_name
from torchwhere.blackbox.phase_sums import phase_sums
from torchwhere.blackbox.reader import parse_box, read_box
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.events import Kind, SideKind

FORMAT_PAGE = Path(__file__).parent.parent / "docs" / "format.md"

# kind, t_ns, pass, flags, thread, step, module, call, line, graph, subject, beneficiary, param,
# extra: the arguments of `record`
U8, U32, U64 = (st.integers(0, 2**bits - 1) for bits in (8, 32, 64))
KNOWN = st.sampled_from([int(kind) for kind in Kind])
RECORDS = st.tuples(KNOWN, U64, U8, U8, U8, *[U32] * 8, U64)
FIELDS = (
    "kind",
    "t_ns",
    "pass",
    "flags",
    "thread",
    "step",
    "module",
    "call",
    "line",
    "graph",
    "subject",
    "beneficiary",
    "param",
    "extra",
)
MODULE_ENTER, NOTE, COLLECTIVE = int(Kind.MODULE_ENTER), int(Kind.NOTE), int(Kind.COLLECTIVE)


@pytest.fixture
def box(tmp_path: Path) -> Iterator[BoxWriter]:
    writer = BoxWriter(tmp_path / "rank0.box", meta={"rank": 0}, records=64)
    yield writer
    writer.close()


def rows(found: Box) -> dict[int, tuple[int, ...]]:
    """The records by number, as the arguments of `record`."""
    return {int(row["number"]): tuple(int(row[name]) for name in FIELDS) for row in found.records}


# -- what is written comes back --------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    records=st.lists(RECORDS, max_size=50),
    capacity=st.integers(1, 20),
    texts=st.lists(st.text(), max_size=10),
    names=st.lists(
        st.tuples(
            st.sampled_from([int(sort) for sort in EntryType if sort is not EntryType.META]),
            st.text(),
        ),
        max_size=20,
    ),
)
def test_round_trip(
    records: list[tuple[int, ...]], capacity: int, texts: list[str], names: list[tuple[int, str]]
) -> None:
    """Any records, texts and names come back equal: the last `capacity` records, all texts, all
    names."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "new" / "rank3.box"
        writer = BoxWriter(path, meta={"rank": 3, "clock_offset_ns": 5}, records=capacity)
        positions = [writer.text(text) for text in texts]
        ids = [writer.intern(*name) for name in names]
        numbers = [writer.record(*record) for record in records]
        writer.close()
        found = read_box(path)
    assert numbers == list(range(len(records)))
    assert rows(found) == dict(list(enumerate(records))[-capacity:])
    assert [found.text(position) for position in positions] == texts
    assert [found.names[entry_id] for entry_id in ids] == names
    assert len(found.names) == len(set(names))
    assert (found.rank, found.problems) == (3, [])
    assert found.counts.overwritten == max(0, len(records) - capacity)
    assert found.counts.good == min(len(records), capacity)
    assert (found.counts.torn, found.counts.unknown, found.counts.torn_entries) == (0, 0, 0)
    assert [event.number for event in found.events()] == sorted(rows(found))
    assert [event.t_ns for event in found.events()] == [
        t_ns + 5 for _, t_ns, *_ in records[-capacity:]
    ]


def test_records_of_unknown_kinds_are_counted(box: BoxWriter) -> None:
    """A record of a kind that this version does not know is counted as unknown and not shown."""
    for kind in (MODULE_ENTER, 17, 255):
        box.record(kind, 1)
    found = read_box(box.path or "")
    assert list(rows(found)) == [0]
    assert (found.counts.good, found.counts.unknown, found.counts.torn) == (1, 2, 0)


def test_a_number_taken_and_not_stored_is_torn(box: BoxWriter) -> None:
    """A record that was begun and never stored is accounted for, and those after it are shown."""
    box.record(MODULE_ENTER, 1)
    with pytest.raises(struct.error):
        box.record(MODULE_ENTER, -1)
    box.record(MODULE_ENTER, 3)
    found = read_box(box.path or "")
    assert list(rows(found)) == [0, 2]
    assert (found.counts.good, found.counts.torn, found.counts.overwritten) == (2, 1, 0)


def test_overwritten_texts_are_never_mistaken(box: BoxWriter) -> None:
    """When the ring of texts has gone round, an old note has no text; it never shows that of a
    newer one."""
    written = {}
    for number in range(3 * 64):
        # equal lengths: every lap hits the same offsets
        position = box.text(json.dumps({"text": f"{number:05d}" * 1000}))
        written[box.record(NOTE, number + 1, extra=position)] = f"{number:05d}" * 1000
    found = read_box(box.path or "")
    shown = {event.number: event.fields["text"] for event in found.events()}
    lost = [number for number, text in shown.items() if text is None]
    assert lost, "the ring of texts did not go round"
    assert lost == list(range(min(shown), min(shown) + len(lost)))
    assert all(shown[number] == written[number] for number in shown if number not in lost)
    list(found.events())
    assert found.counts.lost_texts == len(lost)


def test_huge_texts_are_cut_between_characters(box: BoxWriter) -> None:
    """A text too long for its ring, or a name too long for the table, is kept up to its limit,
    without half a character."""
    for size in (65_535, 65_536, 65_537, 70_000, 3_000_000):
        text = "x" + "é" * (size // 2)
        position, entry = box.text(text), box.intern(EntryType.LINE, text)
        read = read_box(box.path or "")
        assert read.text(position) == "x" + "é" * min(size // 2, 32_767)
        assert read.name(entry) == "x" + "é" * min(size // 2, 524_287)


def test_a_cut_note_shows_what_is_left(box: BoxWriter) -> None:
    """A note whose JSON was cut is shown as it stands in the file."""
    box.record(NOTE, 1, extra=box.text(json.dumps({"text": "a" * 100_000})))
    (event,) = read_box(box.path or "").events()
    assert event.fields["text"].startswith('{"text": "aaaa')


def test_a_lost_name_is_not_outside(box: BoxWriter) -> None:
    """A module whose name is not in the table is unknown; only module 0 is outside any module."""
    box.record(MODULE_ENTER, 1, module=77)
    box.record(MODULE_ENTER, 1, module=0)
    box.words[box.cursor_at(0)] = 77 << file_format.MODULE_SHIFT
    box.words[box.cursor_at(0) + file_format.CURSOR_TIME] = 1
    found = read_box(box.path or "")
    assert [event.place.certainty for event in found.events()] == [
        Certainty.UNKNOWN,
        Certainty.EXACT,
    ]
    assert found.cursors()[0].place.certainty == Certainty.UNKNOWN


def test_places_come_back(box: BoxWriter) -> None:
    """Every part of a place is resolved: names from the table, steps and calls that are not known
    as None."""
    ids = {
        sort: box.intern(sort, f"the {sort.name}")
        for sort in (EntryType.MODULE, EntryType.LINE, EntryType.GRAPH, EntryType.PARAM)
    }
    box.intern(EntryType.THREAD, "7\tpin memory")
    known = (
        ids[EntryType.MODULE],
        2,
        ids[EntryType.LINE],
        ids[EntryType.GRAPH],
        0,
        0,
        ids[EntryType.PARAM],
    )
    box.record(MODULE_ENTER, 1, 2, file_format.FLAG_INFERRED, 7, 3, *known)
    box.record(MODULE_ENTER, 1, 0, 0, 8, NO_STEP, ids[EntryType.MODULE], NO_CALL)
    first, second = (event.place.to_dict() for event in read_box(box.path or "").events())
    place = {
        "rank": 0,
        "step": 3,
        "pass": "backward",
        "module": "the MODULE",
        "call": 2,
        "line": "the LINE",
        "framework_line": None,
    }
    assert first == place | {
        "graph": "the GRAPH",
        "thread": "pin memory",
        "certainty": "inferred",
        "param": "the PARAM",
    }
    nothing = dict.fromkeys(("step", "call", "line", "framework_line", "graph", "thread", "param"))
    assert (
        second
        == {
            "rank": 0,
            "pass": "outside",
            "module": "the MODULE",
            "certainty": "exact",
        }
        | nothing
    )


def test_long_meta_goes_to_the_table(tmp_path: Path) -> None:
    """Facts too long for the header come back whole, and what was rewritten later wins."""
    argv = [f"--option-{number}" for number in range(1000)]
    box = BoxWriter(tmp_path / "rank0.box", meta={"rank": 0, "argv": argv, "host": "a"}, records=16)
    box.meta = {"rank": 1, "argv": argv[:500], "host": "a"}
    box.write_meta()
    box.close()
    found = read_box(tmp_path / "rank0.box")
    assert found.meta == {"rank": 1, "argv": argv[:500], "host": "a"}


def test_box_in_memory_has_the_same_interface(tmp_path: Path) -> None:
    """With no path everything can be called, and nothing is written anywhere."""
    box = BoxWriter(None, meta={"rank": 0, "long": "x" * 5000}, records=16)
    assert [box.record(MODULE_ENTER, 1) for _ in range(40)] == list(range(40))
    assert box.intern(EntryType.MODULE, "a") == box.intern(EntryType.MODULE, "a") > 0
    assert box.text("a") < box.text("b")
    box.check_file()
    box.rename(tmp_path / "rank1.box")
    box.close()
    box.close()
    assert list(tmp_path.iterdir()) == []


# -- cursors and counters --------------------------------------------------------------------------


def test_cursors_say_what_each_thread_does(box: BoxWriter) -> None:
    """A cursor gives module, pass, call, step, line, phase and last record of a thread; unused
    slots are not shown."""
    module, line, phase = (
        box.intern(sort, sort.name) for sort in (EntryType.MODULE, EntryType.LINE, EntryType.PHASE)
    )
    box.intern(EntryType.THREAD, "2\tslot two")
    box.intern(EntryType.THREAD, "30\ttook slot five")
    for slot, thread, pass_ in ((2, 0, 1), (5, 31, 9)):
        place = module << file_format.MODULE_SHIFT | pass_ << file_format.PASS_SHIFT | 6
        at = box.cursor_at(slot)
        for word, value in enumerate((place, 1234, 8, thread, line, 99, phase)):
            box.words[at + word] = value
    first, second = read_box(box.path or "").cursors()
    assert (first.place.module, first.place.pass_, first.place.call, first.place.step) == (
        "MODULE",
        "forward",
        6,
        8,
    )
    assert (first.place.line, first.phase, first.last_record, first.t_ns) == (
        "LINE",
        "PHASE",
        99,
        1234,
    )
    assert (second.place.pass_, second.place.call) == ("recompute", None)
    assert (first.place.thread, second.place.thread) == ("slot two", "took slot five")


def test_threads_beyond_the_last_cursor_share_it(box: BoxWriter) -> None:
    """The 17th thread and all after it write to the last cursor, inside the section."""
    slots = [box.cursor_at(slot) for slot in range(40)]
    assert len(set(slots)) == file_format.CURSORS
    assert slots[15:] == [slots[15]] * 25
    assert (slots[15] << 3) + file_format.CURSOR_BYTES == box.geometry.counters_at


def test_tallies_of_more_streams_than_slots(box: BoxWriter) -> None:
    """Each of 512 streams has its own counter, the next ones have none, and asking again gives the
    same."""
    streams = [
        (3, source, destination) for source in range(-1, 25) for destination in range(-1, 24)
    ]
    given = [box.counter_at(stream) for stream in streams]
    assert given == [box.counter_at(stream) for stream in streams]
    assert given[file_format.COUNTERS :] == [None] * (len(streams) - file_format.COUNTERS)
    for count, at in enumerate(given[: file_format.COUNTERS]):
        assert at is not None
        box.words[at + file_format.COUNTER_COUNT] = count
    assert read_box(box.path or "").counters() == {
        stream: count for count, stream in enumerate(streams[: file_format.COUNTERS])
    }


def test_streams_that_no_word_can_hold_have_no_tally(box: BoxWriter) -> None:
    """A group without an id and ranks out of range get no counter and disturb no other."""
    for who in ((0, -1, -1), (1, -2, 0), (1, 0, -3), (1, 2**20, 0), (1, 0, 2**20 - 1)):
        assert box.counter_at(who) is None
    box.counter_at((1, 2**20 - 2, -1))
    assert read_box(box.path or "").counters() == {(1, 2**20 - 2, -1): 0}


# -- many threads ----------------------------------------------------------------------------------


def in_threads(count: int, work: Any) -> None:
    """Run `work(index)` on many threads that all begin at once; the first error is raised here."""
    start, errors = threading.Barrier(count), []

    def run(index: int) -> None:
        start.wait()
        try:
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]


def test_records_of_16_threads(tmp_path: Path) -> None:
    """100,000 records from each of 16 threads at once: none is lost, none is torn, each thread's
    are in its own order."""
    count, threads = 100_000, 16
    box = BoxWriter(tmp_path / "rank0.box", meta={"rank": 0}, records=1 << 21)

    def work(thread: int) -> None:
        record = box.record
        for number in range(count):
            record(
                MODULE_ENTER,
                number,
                1,
                2,
                thread,
                thread,
                thread,
                thread,
                thread,
                thread,
                number,
                thread,
                thread,
                number,
            )

    try:
        in_threads(threads, work)
        found = read_box(tmp_path / "rank0.box")
    finally:
        box.close()
    (tmp_path / "rank0.box").unlink()
    records = found.records
    assert (found.counts.good, found.counts.torn, found.counts.overwritten) == (
        threads * count,
        0,
        0,
    )
    for thread in range(threads):
        own = records[records["thread"] == thread]
        assert (own["subject"] == range(count)).all()
        for name in ("step", "module", "call", "line", "graph", "beneficiary", "param"):
            assert (own[name] == thread).all()
        for name in ("t_ns", "extra"):
            assert (own[name] == own["subject"]).all()


def test_names_and_texts_of_many_threads(box: BoxWriter) -> None:
    """Threads that intern the same names get the same ids, each already in the file, and no text
    runs into another."""
    ids: list[dict[str, int]] = [{} for _ in range(8)]
    texts: list[dict[int, str]] = [{} for _ in range(8)]
    assert box.path is not None

    def work(thread: int) -> None:
        with open(str(box.path), "rb", buffering=0) as file:
            for number in range(200):
                name = f"<{number}>"
                ids[thread][name] = box.intern(EntryType.MODULE, name)
                file.seek(box.geometry.table_at)
                assert name.encode() in file.read()
                texts[thread][box.text(f"{thread} {number}")] = f"{thread} {number}"

    in_threads(8, work)
    found = read_box(box.path)
    assert all(of_thread == ids[0] for of_thread in ids)
    assert {found.name(entry_id): entry_id for entry_id in ids[0].values()} == ids[0]
    assert len(found.names) == 200
    assert all(
        found.text(position) == text for of_thread in texts for position, text in of_thread.items()
    )
    assert len({position for of_thread in texts for position in of_thread}) == 8 * 200


def test_names_are_in_the_file_before_anybody_uses_them(box: BoxWriter) -> None:
    """While one thread is writing a long name, another that asks for it waits until it is in the
    file."""
    names = [f"{number:04d}" * (1 << 17) for number in range(40)]
    begun = [threading.Event() for _ in names]

    def work(thread: int) -> None:
        for number, name in enumerate(names):
            if thread == 0:
                begun[number].set()
            else:
                begun[number].wait()
                for _ in range(random.randrange(20_000)):
                    pass
            box.intern(EntryType.LINE, name)
            assert os.path.getsize(box.path or "") >= box.geometry.table_at + (number + 1) * (
                file_format.ENTRY.size + len(name)
            )

    in_threads(4, work)


def test_tallies_of_many_threads() -> None:
    """Threads that meet different streams at once get different counters."""
    boxes = [BoxWriter(None, meta={}, records=16) for _ in range(100)]
    given: list[dict[tuple[int, int], int | None]] = [{} for _ in boxes]

    def work(thread: int) -> None:
        for box, of_box in zip(boxes, given, strict=True):
            for number in range(60):
                of_box[thread, number] = box.counter_at((1, thread, number))

    in_threads(8, work)
    for box, of_box in zip(boxes, given, strict=True):
        box.close()
        assert len(set(of_box.values())) == 8 * 60


def test_full_table_gives_0(box: BoxWriter) -> None:
    """When the table is full, further names get id 0, those already there keep theirs, and records
    go on."""
    big = [box.intern(EntryType.LINE, f"{number:2d}" * (1 << 19)) for number in range(70)]
    assert big[0] == 1
    assert big[-1] == 0
    small = box.intern_many(EntryType.MODULE, [f"{number}" * 1000 for number in range(1000)])
    assert small[-1] == 0
    assert box.intern(EntryType.LINE, " 0" * (1 << 19)) == 1
    box.record(MODULE_ENTER, 1, module=small[-1], line=big[0])
    found = read_box(box.path or "")
    (event,) = found.events()
    assert event.place.module is None
    assert event.place.line == " 0" * (1 << 19)
    assert len(found.names) == sum(map(bool, big + small))
    assert os.path.getsize(box.path or "") <= box.geometry.table_at + (1 << 26)


def test_intern_many(box: BoxWriter) -> None:
    """Many names at once get the ids that one after the other would get, names that repeat the same
    one."""
    first = box.intern(EntryType.MODULE, "b")
    ids = box.intern_many(EntryType.MODULE, iter(["a", "b", "c", "a"]))
    assert ids == [2, first, 3, 2]
    assert box.intern(EntryType.PARAM, "a") == 4
    assert read_box(box.path or "").names == {1: (2, "b"), 2: (2, "a"), 3: (2, "c"), 4: (7, "a")}


# -- files -----------------------------------------------------------------------------------------


def test_two_writers_on_one_file(box: BoxWriter) -> None:
    """A second writer on a live box is refused with what to do, and the first is not disturbed."""
    box.record(MODULE_ENTER, 1)
    assert box.path is not None
    with pytest.raises(TorchwhereError) as caught:
        BoxWriter(box.path, meta={"rank": 0}, records=16)
    assert (
        str(caught.value)
        == f"{box.path} is being written by another process. Give every job its own folder"
        " (out=..., --out)."
    )
    box.record(MODULE_ENTER, 1)
    assert os.listdir(box.path.parent) == ["rank0.box"]
    assert list(rows(read_box(box.path))) == [0, 1]


def test_old_boxes_are_set_aside(tmp_path: Path) -> None:
    """A box of a dead writer is kept under a name that says when it was last written, and stays
    readable."""
    for run in range(3):
        box = BoxWriter(
            tmp_path / "rank0.box", meta={"rank": 0, "run_id": f"run {run}"}, records=16
        )
        box.record(MODULE_ENTER, run + 1)
        box.close()
    found = {read_box(path).meta["run_id"]: path.name for path in tmp_path.iterdir()}
    assert found.pop("run 2") == "rank0.box"
    assert sorted(found) == ["run 0", "run 1"]
    assert all(re.fullmatch(r"rank0\.\d{8}T\d{6}(\.\d)?\.box", name) for name in found.values())


def test_rename(box: BoxWriter) -> None:
    """A renamed box keeps its records and goes on; a dead box of that name is set aside, a live one
    is an error."""
    assert box.path is not None
    folder = box.path.parent
    other = BoxWriter(folder / "rank1.box", meta={"rank": 1}, records=16)
    box.record(MODULE_ENTER, 1)
    with pytest.raises(TorchwhereError, match=r"rank1\.box is being written by another process"):
        box.rename(folder / "rank1.box")
    other.close()
    box.rename(folder / "rank1.box")
    box.record(MODULE_ENTER, 2)
    box.rename(folder / "rank1.box")
    assert box.path == folder / "rank1.box"
    assert rows(read_box(box.path)).keys() == {0, 1}
    assert len(os.listdir(folder)) == 2
    with pytest.raises(TorchwhereError):
        BoxWriter(box.path, meta={"rank": 1}, records=16)


def test_box_name() -> None:
    """A box is called after its rank."""
    assert box_name(12) == "rank12.box"


def test_unreadable_path_says_why(tmp_path: Path) -> None:
    """A file that is not there is the one thing the reader raises for, and it says so."""
    with pytest.raises(
        TorchwhereError, match=r"cannot read .*rank9\.box: No such file or directory"
    ):
        read_box(tmp_path / "rank9.box")


# -- docs/format.md --------------------------------------------------------------------------------


def train(folder: Path) -> None:
    """On one rank: a small real training that records a bit of everything, and more than its ring
    holds."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    import torchwhere

    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torchwhere.watch(model, out=folder, module_events=True, records=100):
        for _ in range(6):
            with torchwhere.phase("compute"):
                model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        torchwhere.note("größer", loss=0.5)
        torchwhere.note("long" * 50_000)
        thread = threading.Thread(target=torchwhere.note, args=("from a thread",), name="helper")
        thread.start()
        thread.join()
        with contextlib.suppress(RuntimeError):
            nn.Linear(2, 2)(torch.ones(2, 5))
        (dist.send if rank == 0 else dist.recv)(torch.ones(3), 1 - rank)
        dist.all_reduce(torch.ones(3, dtype=torch.int64), async_op=True).wait()
        dist.barrier()


@pytest.fixture(scope="module")
def real_box(tmp_path_factory: pytest.TempPathFactory, two_ranks: Pool) -> Path:
    """The box of rank 1 of a small real training."""
    folder = tmp_path_factory.mktemp("real")
    two_ranks.run(train, folder)
    return folder / "rank1.box"


class PageReader:
    """A reader written from docs/format.md alone: nothing of torchwhere is used here."""

    KINDS = (
        "start end step_begin step_end optimizer module_enter module_exit collective note"
        " phase_begin phase_end exception"
    )
    NO_EVENTS = (25, 26)
    PASSES = {  # noqa: RUF012
        0: "outside",
        1: "forward",
        2: "backward",
        4: "optimizer",
        9: "recompute",
        13: "forward",
    }
    NAMES = (
        "number t_ns kind pass flags thread step module call line graph subject beneficiary param"
        " extra"
    )

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.kinds = dict(enumerate([*self.KINDS.split(), "compile_begin", "compile_end"], 1))
        for at in (0, 2048):
            block = data[at : at + 2048]
            if (
                block[:8] == b"TRCHWHRE"
                and zlib.crc32(block[:2044]) == struct.unpack("<I", block[2044:2048])[0]
            ):
                break
        version, _, cursors, counters, self.capacity, self.text_bytes = struct.unpack_from(
            "<6I", block, 8
        )
        assert version == 2
        table_at, meta_bytes = struct.unpack_from("<QI", block, 36)
        self.cursors_at = 4096
        self.counters_at = 4096 + 64 * cursors
        self.ring_at = self.counters_at + 32 * counters
        self.texts_at = self.ring_at + 64 * self.capacity
        self.table_at = self.texts_at + self.text_bytes
        assert self.table_at == table_at
        self.read_table()
        whole: dict[str, Any] = {}
        for sort, payload in self.table.values():
            whole |= json.loads(payload) if sort == 1 else {}
        self.meta = whole | json.loads(block[48 : 48 + meta_bytes])
        self.read_ring()

    def read_table(self) -> None:
        data, at, self.table, self.torn_entries = self.data, self.table_at, {}, 0
        while at >= 0 and len(data) - at >= 20:
            mark, entry_id, sort, length, crc = struct.unpack_from("<4sIIII", data, at)
            end = at + 20 + length
            if mark == b"\xa7\x74\x77\xb6" and end <= len(data) and length <= 1048576:
                payload = data[at + 20 : end]
                if zlib.crc32(data[at : at + 16] + payload) == crc:
                    self.table[entry_id] = sort, payload.decode("utf-8", "replace")
                    at = end
                    continue
            self.torn_entries += 1
            at = data.find(b"\xa7\x74\x77\xb6", at + 1)
        self.torn_entries += 0 <= at < len(data)

    def read_ring(self) -> None:
        self.torn = self.unknown = 0
        self.records, numbers, zeros = [], [], []
        for slot in range(self.capacity):
            raw = self.data[self.ring_at + 64 * slot : self.ring_at + 64 * slot + 64]
            if len(raw) < 64 or raw == bytes(64):
                zeros.append(slot)
                continue
            record = dict(
                zip(self.NAMES.split(), struct.unpack_from("<QQBBBBIIIIIIIIQ", raw), strict=True)
            )
            if (
                zlib.crc32(raw[:60]) != struct.unpack_from("<I", raw, 60)[0]
                or record["number"] % self.capacity != slot
            ):
                self.torn += 1
                continue
            numbers.append(record["number"])
            if record["kind"] in self.kinds:
                self.records.append(record)
            else:
                self.unknown += record["kind"] not in self.NO_EVENTS
        written = max(numbers) + 1 if numbers else 0
        self.torn += sum(slot < min(written, self.capacity) for slot in zeros)
        self.overwritten = max(0, written - self.capacity)
        self.records.sort(key=lambda record: record["number"])

    def text(self, position: int) -> str | None:
        at = self.texts_at + position % self.text_bytes
        found, length, crc = struct.unpack("<QII", self.data[at : at + 16].ljust(16, b"\0"))
        payload = self.data[at + 16 : at + 16 + length]
        inside = at + 16 + length <= self.table_at and len(payload) == length
        if found != position or not inside or zlib.crc32(self.data[at : at + 12] + payload) != crc:
            return None
        return payload.decode("utf-8", "replace")

    def name(self, entry_id: int) -> str | None:
        return self.table[entry_id][1] if entry_id in self.table else None

    def threads(self) -> dict[str, str]:
        return dict(payload.split("\t", 1) for sort, payload in self.table.values() if sort == 9)

    def groups(self) -> dict[str, Any]:
        groups = [
            json.loads(payload) for _, (sort, payload) in sorted(self.table.items()) if sort == 4
        ]
        return {group["name"]: group for group in groups}

    def events(self) -> list[dict[str, Any]]:
        return [self.event(record) for record in self.records]

    def lines(self, entry: int) -> tuple[str | None, str | None]:
        """The user's line, and the framework's line."""
        text = self.name(entry)
        if text is None:
            return None, None
        line, tab, framework_line = text.partition("\t")
        return line, framework_line if tab else None

    def event(self, record: dict[str, int]) -> dict[str, Any]:
        module = self.name(record["module"])
        lost = (record["module"] and module is None) or record["pass"] not in self.PASSES
        certainty = "inferred" if record["flags"] & 2 else "exact"
        if record["flags"] & 4 or lost:
            certainty = "unknown"
        return {
            "kind": self.kinds[record["kind"]],
            "rank": self.meta.get("rank", -1),
            "step": None if record["step"] == 0xFFFFFFFF else record["step"],
            "pass": self.PASSES.get(record["pass"], "outside"),
            "module": module,
            "call": None if module is None or record["call"] == 0xFFFFFFFF else record["call"],
            "line": self.lines(record["line"])[0],
            "framework_line": self.lines(record["line"])[1],
            "graph": self.name(record["graph"]),
            "thread": self.threads().get(str(record["thread"])),
            "t_ns": record["t_ns"] + self.meta.get("clock_offset_ns", 0),
            "certainty": certainty,
            "param": self.name(record["param"]),
        } | self.fields(self.kinds[record["kind"]], record)

    def fields(self, kind: str, record: dict[str, int]) -> dict[str, Any]:
        if kind in ("start", "end", "note", "exception"):
            text = self.text(record["extra"])
            try:
                found = json.loads(text or "")
            except ValueError:
                found = None
            if isinstance(found, dict):
                return found
            return {"reason" if kind == "end" else "text": text}
        if kind in ("phase_begin", "phase_end"):
            return {"phase": self.name(record["subject"])} | (
                {"duration_ns": record["extra"]} if kind == "phase_end" else {}
            )
        if kind in ("optimizer", "compile_begin", "compile_end"):
            return {"what": self.name(record["subject"])}
        return self.collective(record) if kind == "collective" else {}

    def collective(self, record: dict[str, int]) -> dict[str, Any]:
        payload, beneficiary = self.name(record["subject"]), self.name(record["beneficiary"])
        keys = (
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
        found = dict.fromkeys(keys) if payload is None else json.loads(payload)
        group = self.groups().get(found["group"], {})
        ranks = group.get("ranks", [])
        return found | {
            "number": record["extra"],
            "for": None if beneficiary is None else json.loads(beneficiary),
            "async": bool(record["flags"] & 1),
            "group_desc": group.get("desc"),
            "mesh_dim": group.get("mesh_dim"),
            "backend": group.get("backend"),
            "group_size": len(ranks) or None,
            "group_ranks": ranks if len(ranks) <= 64 else None,
        }

    def cursors(self) -> list[dict[str, Any]]:
        found = []
        for slot in range((self.counters_at - self.cursors_at) // 64):
            raw = self.data[self.cursors_at + 64 * slot : self.cursors_at + 64 * slot + 64]
            place, t_ns, step, thread, line, record, phase, _ = struct.unpack(
                "<8Q", raw if len(raw) == 64 else bytes(64)
            )
            if t_ns:
                module, pass_, call = self.name(place >> 36), place >> 32 & 0xF, place & 0xFFFFFFFF
                unknown = module is None or pass_ == 9 or call == 0xFFFFFFFF
                found.append(
                    {
                        "module": module,
                        "pass": self.PASSES.get(pass_, "outside"),
                        "call": None if unknown else call,
                        "step": step,
                        "line": self.lines(line)[0],
                        "framework_line": self.lines(line)[1],
                        "thread": self.threads().get(str((thread or slot + 1) - 1)),
                        "phase": self.name(phase),
                        "record": record,
                        "t_ns": t_ns + self.meta.get("clock_offset_ns", 0),
                    }
                )
        return found

    def slots(self) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
        """Every counter that is used: id, source, destination, and the other words."""
        for at in range(self.counters_at, min(self.ring_at, len(self.data) - 31), 32):
            who, *words = struct.unpack_from("<4Q", self.data, at)
            if who:
                yield who >> 40, (who >> 20) % 2**20 - 1, who % 2**20 - 1, tuple(words)

    def is_phase(self, entry_id: int) -> bool:
        return entry_id in self.table and self.table[entry_id][0] == 11

    def counters(self) -> dict[tuple[int, int, int], int]:
        return {
            (i, source, destination): words[0]
            for i, source, destination, words in self.slots()
            if not self.is_phase(i)
        }

    def phases(self) -> dict[tuple[tuple[str, ...], bool], list[tuple[int, ...]]]:
        """By path, and whether on the main thread: what has ended, what is running."""
        found: dict[tuple[tuple[str, ...], bool], list[tuple[int, ...]]] = {}
        for entry_id, which, none, words in self.slots():
            if self.is_phase(entry_id) and none == -1 and 0 <= which <= 3:
                path = tuple(json.loads(self.table[entry_id][1]))
                found.setdefault((path, which < 2), [(0, 0, 0), (0, 0, 0)])[which % 2] = words
        return found


def as_on_the_page(box: Box) -> list[dict[str, Any]]:
    found = []
    for cursor in box.cursors():
        place = cursor.place.to_dict()
        names = ("module", "pass", "call", "step", "line", "framework_line", "thread")
        kept = {key: place[key] for key in names}
        found.append(
            kept | {"phase": cursor.phase, "record": cursor.last_record, "t_ns": cursor.t_ns}
        )
    return found


def assert_page_holds(data: bytes) -> None:
    ours, page = parse_box(data), PageReader(data)
    assert page.meta == ours.meta
    assert page.table == ours.names
    assert page.events() == [event.to_dict() for event in ours.events()]
    assert page.cursors() == as_on_the_page(ours)
    assert page.counters() == ours.counters()
    sums = {
        key: ((found.count, found.total_ns, found.max_ns), (found.running, found.begun_ns))
        for key, found in phase_sums(ours).items()
    }
    assert {key: (ended, running[:2]) for key, (ended, running) in page.phases().items()} == sums
    assert page.groups() == ours.groups()
    counts = ours.counts
    assert (page.torn, page.unknown, page.overwritten) == (
        counts.torn,
        counts.unknown,
        counts.overwritten,
    )
    assert page.torn_entries == counts.torn_entries


def test_format_page_is_enough_to_read_a_real_box(real_box: Path) -> None:
    """A reader written from docs/format.md alone finds in a real box exactly what the library's
    reader finds."""
    data = real_box.read_bytes()
    assert_page_holds(data)
    page = PageReader(data)
    kinds = {event["kind"] for event in page.events()}
    assert {
        "end",
        "step_begin",
        "optimizer",
        "module_enter",
        "collective",
        "note",
        "phase_end",
        "exception",
    } <= kinds
    assert page.overwritten > 0
    assert {"MainThread", "helper"} <= set(page.threads().values())
    assert (0, 1) in [who[1:] for who in page.counters()]
    assert page.phases()[(), True][0][0] == page.phases()[("compute",), True][0][0] == 6
    assert {"0", "", None} <= {
        event["for"] for event in page.events() if event["kind"] == "collective"
    }


def test_format_page_is_enough_to_read_a_damaged_box(real_box: Path) -> None:
    """Both readers also agree on a box that is cut, holed and overwritten with other bytes."""
    data, page = real_box.read_bytes(), PageReader(real_box.read_bytes())
    middles = [
        page.cursors_at + 8,
        page.counters_at,
        page.ring_at + 6400 // 2,
        page.texts_at + 20,
        page.table_at + 200,
    ]
    for middle in middles:
        assert_page_holds(data[:middle] + b"\xff" * 5 + data[middle + 5 :])
        assert_page_holds(data[:middle] + bytes(300) + data[middle + 300 :])
    for end in (
        4096 + 100,
        page.counters_at + 20,
        page.ring_at + 1000,
        page.texts_at + 100,
        page.table_at + 10,
        len(data) - 3,
    ):
        assert_page_holds(data[:end])
    assert_page_holds(b"\0" * 100 + data[100:])
    assert_page_holds(data + b"\xa7\x74\x77\xb6 and more")


def test_format_page_lists_all_numbers() -> None:
    """Every kind of record and every sort of table entry is on the page, with its number."""
    page = FORMAT_PAGE.read_text()
    for kind in (*Kind, *SideKind):
        assert f"| {int(kind)} | {kind.label} |" in page
    for sort in EntryType:
        assert f"| {int(sort)} | {sort.name} |" in page
