"""Snapshots that monitors exchange: they contain everything that a verdict needs, and no received
bytes do harm."""

from __future__ import annotations

import copy
import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diagnosing import diagnose
from synthetic_boxes import make
from synthetic_job import Job
from torchwhere.blackbox.box import Box
from torchwhere.blackbox.reader import read_box
from torchwhere.blackbox.run import RunSummary
from torchwhere.blackbox.summary import BoxSummary
from torchwhere.core.events import Event
from torchwhere.core.place import Place
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.rank_calls import RankCalls
from torchwhere.processes.status import ProcessStatus
from torchwhere.snapshots.decode import InvalidSnapshot, decode_snapshot
from torchwhere.snapshots.encode import (
    HEAD,
    MAGIC,
    SEAL,
    HostSnapshot,
    encode_snapshot,
    rank_runs,
    recent_calls,
)

RANKS = range(8, 16)


@pytest.fixture(scope="module")
def boxes(tmp_path_factory: pytest.TempPathFactory) -> list[Box]:
    """The second of four hosts, in a deadlock."""
    folder = tmp_path_factory.mktemp("boxes")
    make(Job(32, steps=4, records=180, fault="deadlock", victim=20), folder)
    return [read_box(folder / f"rank{rank}.box") for rank in RANKS]


@pytest.fixture(scope="module")
def snapshot(boxes: list[Box]) -> HostSnapshot:
    statuses = {
        8: ProcessStatus(alive=True, state="S", stack=("train.py:3 in main",), alive_ns=5 * 10**9),
        9: ProcessStatus(alive=False),
    }
    return HostSnapshot("b", recent_calls(boxes)[0], statuses, answers=7, is_last=True)


def decoded(data: bytes) -> HostSnapshot:
    snapshot = decode_snapshot(data)
    assert isinstance(snapshot, HostSnapshot), snapshot
    return snapshot


def calls_of_snapshot(snapshot: HostSnapshot) -> JobCalls:
    job_calls = JobCalls()
    job_calls.add_batch(
        snapshot.batch,
        encoder=1,
        wanted={summary.box_summary.path for summary in snapshot.batch.rank_summaries},
    )
    return job_calls


def issued_calls(rank_calls: RankCalls) -> dict[Any, Any]:
    """All calls of a rank, independent of the ids that an encoder gave them."""
    by_stream = {}
    for key, calls in rank_calls.calls.items():
        stream = (rank_calls.shared_ids.group(key), key.source, key.destination)
        by_stream[stream] = [
            rank_calls.issued(key, number) for number in range(calls.first, calls.last + 1)
        ]
    return by_stream


# -- there and back --------------------------------------------------------------------------------


def test_everything_comes_through(boxes: list[Box], snapshot: HostSnapshot) -> None:
    """A snapshot has, for every rank, the calls with place and fields, the counts, the last call,
    the place and the pace, as its box has them."""
    back = decoded(encode_snapshot(snapshot))
    assert (back.host, back.statuses, back.answers) == ("b", snapshot.statuses, 7)
    assert (back.is_last, back.is_cut, back.ahead_ns) == (True, False, 0)
    job_calls = calls_of_snapshot(back)
    assert sorted(job_calls.by_rank) == list(RANKS)
    for box in boxes:
        direct, sent = JobCalls().add_box(box.rank, box), job_calls.by_rank[box.rank]
        assert issued_calls(sent) == issued_calls(direct)
        assert sent.last_collective == direct.last_collective
        assert {sent.shared_ids.group(key).name: count for key, count in sent.counts.items()} == {
            direct.shared_ids.group(key).name: count for key, count in direct.counts.items()
        }
        # Cut arrays start at another number; every other field of a summary is equal.
        own = {"box_summary", "parts", "last", "pairs_at"}
        assert {
            name: value for name, value in sent.rank_summary._asdict().items() if name not in own
        } == {
            name: value for name, value in direct.rank_summary._asdict().items() if name not in own
        }
        assert sent.box_summary.path == Path(f"b:{box.path}")
        assert (sent.box_summary.rank, sent.box_summary.run, sent.box_summary.counts) == (
            box.rank,
            box.run,
            box.counts,
        )
        assert (sent.box, sent.box_summary.meta["source_host"]) == (None, "b")


def test_the_end_comes_through(snapshot: HostSnapshot) -> None:
    """A snapshot has how a rank ended and its exception; a text of a megabyte is shortened."""
    place = Place(8, 3, "forward", module="a.b", call=1, line="train.py:9")
    error = Event("exception", 4, 50, place, {"text": "x" * 1_000_000, "fields": [1, 2]})
    end = Event("end", 5, 60, place, {"reason": "exception: ValueError: no"})
    summary = snapshot.batch.rank_summaries[0]._replace(end=end, exceptions=(error,), place=place)
    changed = replace(
        snapshot, batch=replace(snapshot.batch, rank_summaries=[summary]), statuses={}
    )
    (sent,) = decoded(encode_snapshot(changed)).batch.rank_summaries
    assert (sent.end, sent.place) == (end, place)
    assert sent.exceptions[0].fields == {"text": "x" * 2000}


def test_clocks(snapshot: HostSnapshot) -> None:
    """Times are on the reader's clock: the offset of the sender's clock is subtracted."""
    before, after = (
        decoded(encode_snapshot(snapshot)),
        decoded(encode_snapshot(replace(snapshot, ahead_ns=10**9))),
    )
    first, second = (
        calls_of_snapshot(decoded_snapshot).by_rank[8] for decoded_snapshot in (before, after)
    )
    key, calls = next(iter(first.calls.items()))
    assert (
        first.issued_ns(key, calls.last) - second.issued_ns(next(iter(second.calls)), calls.last)
        == 10**9
    )
    assert first.box_summary.last_ns - second.box_summary.last_ns == 10**9
    assert after.statuses[8].alive_ns == 4 * 10**9


@pytest.mark.parametrize("calls", [1, 7, 64, 100])
def test_cut(boxes: list[Box], calls: int) -> None:
    """A cut snapshot has the newest calls of each rank, at least a few of every stream, full
    counts, and a flag that it is cut."""
    batch, is_cut = recent_calls(boxes, calls=calls)
    assert is_cut
    job_calls = calls_of_snapshot(decoded(encode_snapshot(HostSnapshot("b", batch, is_cut=is_cut))))
    for box in boxes:
        direct, sent = JobCalls().add_box(box.rank, box), job_calls.by_rank[box.rank]
        whole, cut = issued_calls(direct), issued_calls(sent)
        newest = sorted(
            (event.number for events in whole.values() for event in events), reverse=True
        )[:calls]
        for stream, events in whole.items():
            assert cut[stream] == events[len(events) - len(cut[stream]) :]
            assert len(cut[stream]) >= min(8, len(events))
            assert {event.number for event in events} & set(newest) <= {
                event.number for event in cut[stream]
            }
        assert sorted(sent.counts.values()) == sorted(direct.counts.values())
        assert sent.last_collective == direct.last_collective


def test_no_boxes() -> None:
    """A host without a readable box writes a snapshot too."""
    back = decoded(encode_snapshot(HostSnapshot("b", recent_calls([])[0])))
    assert (back.host, back.batch.rank_summaries) == ("b", [])


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((), []),
        ((5,), [[5, 1, 0]]),
        (tuple(range(16_384)), [[0, 16_384, 1]]),
        ((3, 11, 19), [[3, 3, 8]]),
        ((9, 6, 3), [[9, 3, -3]]),
        ((0, 1, 2, 7, 9), [[0, 3, 1], [7, 2, 2]]),
        ((4, 4), [[4, 1, 0], [4, 1, 0]]),
    ],
    ids=["none", "one", "world", "row", "backwards", "two", "twice"],
)
def test_runs(ranks: tuple[int, ...], expected: list[list[int]]) -> None:
    """The members of a group are encoded as a few rows of numbers."""
    assert rank_runs(ranks) == expected
    assert (
        tuple(first + step * index for first, count, step in expected for index in range(count))
        == ranks
    )


# -- from anybody ----------------------------------------------------------------------------------


def sealed(head: Any, arrays: bytes = b"") -> bytes:
    text = json.dumps(head).encode() if not isinstance(head, bytes) else head
    body = zlib.compress(HEAD.pack(len(text)) + text + arrays)
    return SEAL.pack(MAGIC, len(body), zlib.crc32(body)) + body


def taken_apart(data: bytes) -> tuple[dict[str, Any], bytes]:
    body = zlib.decompress(data[SEAL.size :])
    (length,) = HEAD.unpack_from(body)
    return json.loads(body[HEAD.size : HEAD.size + length]), body[HEAD.size + length :]


@given(data=st.data())
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_damage_is_refused(snapshot: HostSnapshot, data: st.DataObject) -> None:
    """A snapshot that is cut, or has one changed byte, is refused: no rank is invented."""
    whole = encode_snapshot(snapshot)
    at = data.draw(st.integers(0, len(whole) - 1))
    flipped = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    for changed in (whole[:at], flipped, whole + b"x"):
        assert isinstance(decode_snapshot(changed), InvalidSnapshot)


@given(st.binary(max_size=400))
@settings(max_examples=200, deadline=None)
def test_noise_is_refused(noise: bytes) -> None:
    """Random bytes, also packed and sealed like a snapshot, are refused with a reason."""
    packed = zlib.compress(noise)
    for data in (
        noise,
        SEAL.pack(MAGIC, len(packed), zlib.crc32(packed)) + packed,
        sealed(noise, noise),
    ):
        outcome = decode_snapshot(data)
        assert isinstance(outcome, InvalidSnapshot)
        assert outcome.reason


ODD = [[], {}, 1 << 31, 1 << 40, 1 << 62, 1 << 63, -(1 << 63), [[0, 1 << 40, 1]], [[]], {"a": 1}]
HOSTILE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 40),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(ODD).map(copy.deepcopy),
)


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, list):
        value = dict(enumerate(value))
    children = value.items() if isinstance(value, dict) else ()
    return [path] * bool(path) + [
        below for name, child in children for below in paths(child, (*path, name))
    ]


@pytest.fixture(scope="module")
def head(snapshot: HostSnapshot) -> tuple[dict[str, Any], bytes, list[tuple[Any, ...]]]:
    fields, arrays = taken_apart(encode_snapshot(snapshot))
    return fields, arrays, paths(fields)


@given(data=st.data())
@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_wrong_content_does_no_harm(
    head: tuple[dict[str, Any], bytes, list[tuple[Any, ...]]], data: st.DataObject
) -> None:
    """A snapshot with a valid seal and arbitrary content is refused, or the doctor can give a
    verdict on it."""
    fields, arrays, everywhere = head
    changed = json.loads(json.dumps(fields))
    for path in data.draw(st.lists(st.sampled_from(everywhere), min_size=1, max_size=2)):
        into = changed
        try:
            for name in path[:-1]:
                into = into[name]
            into[path[-1]] = data.draw(HOSTILE)
        except (
            TypeError,
            KeyError,
            IndexError,
        ):  # an earlier change replaced a value above this one
            continue
    if data.draw(st.booleans()):
        arrays = bytes(data.draw(st.binary(min_size=1, max_size=8))) + arrays[8:]
    outcome = decode_snapshot(sealed(changed, arrays))
    if isinstance(outcome, HostSnapshot):
        boxes: dict[int, BoxSummary] = {
            summary.box_summary.rank: summary.box_summary
            for summary in outcome.batch.rank_summaries
        }
        run = RunSummary(Path("run"), {rank: boxes[rank] for rank in sorted(boxes)})
        if boxes:
            assert diagnose(
                run, statuses=outcome.statuses, now_ns=10**18, job_calls=calls_of_snapshot(outcome)
            ).kind


def changed_by(change: Callable[[dict[str, Any]], None]) -> Callable[[HostSnapshot], bytes]:
    def change_snapshot(snapshot: HostSnapshot) -> bytes:
        fields, arrays = taken_apart(encode_snapshot(snapshot))
        change(fields)
        return sealed(fields, arrays)

    return change_snapshot


def bomb(_: HostSnapshot) -> bytes:
    body = zlib.compress(bytes(65 << 20))
    return SEAL.pack(MAGIC, len(body), zlib.crc32(body)) + body


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda snapshot: b"", "not a snapshot"),
        (
            lambda snapshot: b"TWLETTR1" + encode_snapshot(snapshot)[8:],
            (
                "written by an older torchwhere (format 1); this version reads format 2. Install"
                " the same version on all hosts and record the run again."
            ),
        ),
        (
            lambda snapshot: b"TWSNAP03" + encode_snapshot(snapshot)[8:],
            (
                "written by a newer torchwhere (format 3); this version reads format 2. Install the"
                " same version on all hosts and record the run again."
            ),
        ),
        (lambda snapshot: encode_snapshot(snapshot)[:-1], "cut short"),
        (lambda snapshot: encode_snapshot(snapshot)[:-1] + b"\0", "damaged"),
        (lambda snapshot: bytes(5 << 20), "larger than 4194304 bytes"),
        (bomb, "more than 67108864 bytes when unpacked"),
        (lambda snapshot: sealed(b"[" * 100_000), "not a snapshot: RecursionError"),
        (lambda snapshot: sealed({}), "not a snapshot: KeyError"),
        (changed_by(lambda head: head["ranks"].append(head["ranks"][0])), "it lists a rank twice"),
        (
            changed_by(
                lambda head: head["groups"].append(["x", [[0, 1 << 30, 0]], "", None, None])
            ),
            "its groups are too large",
        ),
        (
            changed_by(lambda head: head["statuses"].update({"99": {}})),
            "it has the status of a rank that it does not list",
        ),
        (
            changed_by(lambda head: head["ranks"][0]["parts"][0].__setitem__(0, 999)),
            "a collective has no group",
        ),
        (
            changed_by(lambda head: head["ranks"][0]["parts"][0].__setitem__(6, 10**9)),
            "calls of a stream are missing",
        ),
        (
            changed_by(lambda head: head["ranks"][0].update(last=[0, -1, -1, 10**6])),
            "the last call of a rank is missing",
        ),
        (
            changed_by(lambda head: head["ranks"][0].update(pairs_at=10**6)),
            "a call has no signature or call site",
        ),
        (
            changed_by(lambda head: head["signatures"].clear()),
            "a call has no signature or call site",
        ),
        (
            changed_by(lambda head: head["signatures"].insert(0, ["[]", 0])),
            "a signature is not a collective",
        ),
        (
            changed_by(lambda head: head["arrays"][0].__setitem__(1, 3)),
            "there are bytes after its end",
        ),
        (changed_by(lambda head: head.update(host="x" * 1000)), "a text is missing or too long"),
        (
            changed_by(lambda head: head["ranks"][0]["box_summary"].update(rank=True)),
            "a number is missing or out of range",
        ),
    ],
)
def test_reasons(
    snapshot: HostSnapshot, made: Callable[[HostSnapshot], bytes], reason: str
) -> None:
    """The error says what is wrong with a snapshot."""
    assert decode_snapshot(made(snapshot)) == InvalidSnapshot(reason)


def test_size(boxes: list[Box]) -> None:
    """A thousand collectives per rank, at irregular times, take a few KB per rank."""
    for box in boxes:
        box.records["t_ns"] = np.sort(
            np.random.default_rng(box.rank).integers(0, 10**10, len(box.records))
        )
    data = encode_snapshot(HostSnapshot("b", recent_calls(boxes)[0]))
    assert len(data) / len(boxes) < 6_000
    assert struct.calcsize("<8sII") == SEAL.size
