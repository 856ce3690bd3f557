"""Encoding boxes as batches and decoding them again gives what the boxes hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from synthetic_boxes import make
from synthetic_job import Job
from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import EntryType
from torchwhere.blackbox.reader import BoxReader, read_box
from torchwhere.blackbox.ring import RECORD_DTYPE
from torchwhere.blackbox.run import BoxRun
from torchwhere.blackbox.summary import summarize
from torchwhere.core.events import Kind
from torchwhere.core.place import Place
from torchwhere.diagnose.calls.encode import Encoder
from torchwhere.diagnose.calls.job_calls import JobCalls, calls_of_run
from torchwhere.diagnose.calls.keys import SignatureParser
from torchwhere.diagnose.calls.order import narrow
from torchwhere.diagnose.calls.rank_calls import RankCalls
from torchwhere.diagnose.doctor.verdict import RankReport, State, Verdict, VerdictKind


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty-two ranks in two stages, in a deadlock."""
    folder = tmp_path_factory.mktemp("boxes")
    make(Job(32, steps=4, records=180, fault="deadlock", victim=20), folder)
    return folder


def encoded(box: Box) -> RankCalls:
    return JobCalls().add_box(box.rank, box)


def test_events_come_back(folder: Path) -> None:
    """Every collective of every rank is decoded as its box has it: number, time, place and
    fields."""
    seen = 0
    for path in sorted(folder.glob("*.box")):
        box = read_box(path)
        rank_calls = encoded(box)
        by_record = {event.number: event for event in box.events(kinds={"collective"})}
        for key, calls in rank_calls.calls.items():
            for number in range(calls.first, calls.last + 1):
                event = rank_calls.issued(key, number)
                assert event == by_record[calls.record(number)]
                seen += 1
        assert rank_calls.last_collective == by_record[max(by_record)]
    assert seen > 32 * 100


def test_encoders_agree(folder: Path) -> None:
    """A box gives the same calls alone and among others, in any order."""
    paths = sorted(folder.glob("*.box"), reverse=True)
    paths = [*paths[::3], *paths[1::3], *paths[2::3]]
    reader, encoder, job_calls = BoxReader(), Encoder(), JobCalls()
    for start in range(0, len(paths), 5):
        batch = encoder.encode(reader.read(path) for path in paths[start : start + 5])
        job_calls.add_batch(batch, encoder=0, wanted=set(paths))
    for path in paths:
        alone = encoded(read_box(path))
        among = job_calls.by_rank[alone.rank]
        assert all_calls(among) == all_calls(alone)
        assert among.rank_summary.last_line == alone.rank_summary.last_line
        assert (among.rank_summary.steps_per_s, among.rank_summary.last_step) == (
            *(alone.rank_summary.steps_per_s, alone.rank_summary.last_step),
        )


def all_calls(rank_calls: RankCalls) -> dict[Any, Any]:
    """All calls, as events, which do not depend on ids."""
    by_stream = {}
    for key, calls in rank_calls.calls.items():
        stream = (rank_calls.shared_ids.group(key), key.source, key.destination)
        by_stream[stream] = [
            rank_calls.issued(key, number) for number in range(calls.first, calls.last + 1)
        ]
    return by_stream


# -- numbers that do not simply follow each other --------------------------------------------------


def box_of(numbers: list[int]) -> Box:
    """A box of one group, with collectives of these numbers."""
    box = Box(path=Path("rank0.box"), meta={"rank": 0})
    box.names[1] = (
        int(EntryType.GROUP),
        json.dumps({"name": "0", "ranks": [0, 1], "desc": "default_pg"}),
    )
    box.names[2] = (
        int(EntryType.COLLECTIVE),
        json.dumps({"op": "all_reduce", "group": "0", "dtype": "float32", "shapes": [[1]]}),
    )
    box.records = np.zeros(len(numbers), RECORD_DTYPE)
    box.records["number"] = np.arange(len(numbers))
    box.records["kind"], box.records["subject"], box.records["extra"] = (
        int(Kind.COLLECTIVE),
        2,
        numbers,
    )
    return box


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([], []),
        ([5], [5]),
        ([3, 4, 5, 6], [3, 4, 5, 6]),
        ([3, 4, 6, 7], [6, 7]),
        ([0, 2, 3, 9], [9]),
        ([1, 2, 4, 3, 5], [1, 2, 3, 4, 5]),
        ([200, 201, 202, 0, 1, 2], [0, 1, 2]),
        ([7, 8, 8, 9], [7, 8, 9]),
    ],
    ids=["none", "one", "whole", "hole", "holes", "swapped", "anew", "twice"],
)
def test_numbers(numbers: list[int], expected: list[int]) -> None:
    """A stream keeps its newest calls without a gap: swapped ones in order, and for a recreated
    group only the new ones."""
    rank_calls = encoded(box_of(numbers))
    readable = [
        number
        for calls in rank_calls.calls.values()
        for number in range(calls.first, calls.last + 1)
    ]
    assert readable == expected
    assert all(
        rank_calls.issued(key, number) is not None
        for key in rank_calls.calls
        for number in expected
    )
    assert all(
        rank_calls.issued(key, -1) is None and rank_calls.order(key, 10**6) == -1
        for key in rank_calls.calls
    )


def test_a_torn_record_costs_what_is_before_it(folder: Path, tmp_path: Path) -> None:
    """With a record damaged in the middle, its stream is kept from there on, the others
    completely."""
    whole = read_box(folder / "rank3.box")
    data = bytearray((folder / "rank3.box").read_bytes())
    calls = [
        event for event in whole.events(kinds={"collective"}) if event.fields["mesh_dim"] == "tp"
    ]
    torn = calls[len(calls) // 2]
    assert whole.geometry is not None
    at = whole.geometry.ring_at + torn.number % whole.geometry.capacity * 64
    data[at + 20] ^= 0xFF
    (tmp_path / "rank3.box").write_bytes(data)
    before, after = encoded(whole), encoded(read_box(tmp_path / "rank3.box"))
    for key, calls_before in before.calls.items():
        is_torn_stream = before.shared_ids.group(key).mesh_dim == "tp" and key.source == -1
        first = torn.fields["number"] + 1 if is_torn_stream else calls_before.first
        assert (after.calls[key].first, after.calls[key].last) == (first, calls_before.last)
        assert after.counts[key] == before.counts[key]


def test_counts_without_names(folder: Path) -> None:
    """A box whose table is cut off has counts without names: its summary says so, and it is not
    read."""
    box = read_box(folder / "rank3.box")
    assert not summarize(box).lacks_counts
    box.names.clear()
    assert summarize(box).lacks_counts
    assert (encoded(box).counts, encoded(box).calls) == ({}, {})
    run = BoxRun(folder, {3: box, 4: read_box(folder / "rank4.box")})
    assert list(calls_of_run(run).by_rank) == [4]


def test_times_keep_their_order_over_hours() -> None:
    """Times are stored with a precision of one part in four thousand million of the ring's span."""
    box = box_of([0, 1, 2, 3])
    box.records["t_ns"] = [0, 10**9, 3600 * 10**9, 3600 * 10**9 + 5_000]
    rank_calls = encoded(box)
    (key,) = rank_calls.calls
    assert [rank_calls.issued_ns(key, number) for number in range(4)] == pytest.approx(
        box.records["t_ns"].tolist(), abs=1_000
    )


# -- words -----------------------------------------------------------------------------------------

FIELDS = {
    "op": "send",
    "raw_op": "c10d::send",
    "group": "7",
    "dtype": "float32",
    "shapes": [[4]],
    "peer": 3,
    "reduce_op": None,
}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"peer": None},
        {"op": "broadcast", "peer": 9},
        {"group": 'with "quotes", "peer": 5, '},
        {"group": "dtype\\"},
        {"dtype": 'x", "peer": 8, "y": "'},
        {"op": 'odd "op"'},
    ],
    ids=["message", "no peer", "root", "quotes", "backslash", "misleading", "odd op"],
)
def test_signatures_are_read_as_json(change: dict[str, Any]) -> None:
    """The fast path for signatures that differ in group and peer gives the same as JSON, also for
    misleading names."""
    fields = FIELDS | change
    parser = SignatureParser()
    for _ in range(2):
        signature, group = parser.parse(json.dumps(fields))
        assert signature is not None
        assert (signature.op, group, signature.peer) == (
            fields["op"],
            fields["group"],
            -1 if fields["peer"] is None else fields["peer"],
        )
        backwards, _ = SignatureParser().parse(json.dumps(dict(reversed(fields.items()))))
        assert backwards is not None
        assert signature.signature_id == backwards.signature_id


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{", '{"op": "send", "group": "1", "dtype": }, "peer": 1, }']
)
def test_invalid_signatures(text: str) -> None:
    """An entry that is not a JSON object is not a collective."""
    assert SignatureParser().parse(text) == (None, "")


def test_roots_must_agree_and_peers_need_not() -> None:
    """Ranks must agree on the root; source and destination of a message may differ."""
    parser = SignatureParser()

    def signature_id(**change: Any) -> Any:
        signature, _ = parser.parse(json.dumps(FIELDS | change))
        assert signature is not None
        return signature.signature_id

    assert signature_id(peer=1) == signature_id(peer=2) == signature_id(op="recv", peer=2)
    assert signature_id(op="broadcast", peer=1) != signature_id(op="broadcast", peer=2)
    assert signature_id(shapes=[[2, 2]]) == signature_id(shapes=[[4]]) != signature_id(bytes=20)


@pytest.mark.parametrize(
    ("values", "kind"),
    [([7, 9], "uint8"), ([0, 256], "uint16"), ([5, 70_000], "uint32"), ([0, 1 << 40], "uint64")],
)
def test_narrow(values: list[int], kind: str) -> None:
    """Numbers use as few bytes as they need, and come back unchanged."""
    narrowed, base = narrow(np.array(values, np.uint64))
    assert (narrowed.dtype.name, (narrowed.astype(np.uint64) + base).tolist()) == (kind, values)


# -- folding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "alike_in"),
    [
        (
            lambda rank: "layers.0",
            ["state", "pass", "module", "call", "line", "detail", "op", "group", "number"],
        ),
        (lambda rank: f"layers.{rank}", ["state", "pass", "op"]),
    ],
    ids=["alike", "all different"],
)
def test_folding_has_an_end(module: Callable[[int], str], alike_in: list[str]) -> None:
    """However different ranks are, at most a few hundred are stored completely, and 16,384 ranks
    take less than 2 MB."""
    last = {
        "op": "all_reduce",
        "number": 5,
        "shapes": [[4096, 8192]],
        "dtype": "bfloat16",
        "group": "tp",
    }
    ranks = {
        rank: RankReport(
            State.WAITING,
            Place(rank, 3, "forward", module=module(rank), line="train.py:12"),
            last=last,
        )
        for rank in range(16_384)
    }
    value = Verdict(VerdictKind.MISSING, culprits=tuple(range(5, 9000)), ranks=ranks).to_dict()
    whole = [rank for rank, report in value["ranks"].items() if "like" not in report]
    assert value["alike_in"] == alike_in
    assert {"5", "6"} <= set(whole)
    assert len(whole) <= 256 + 64
    assert len(json.dumps(value)) < 2_000_000
