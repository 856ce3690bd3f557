"""Untrusted dumps: nothing in them is executed, and none exceeds its limits."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostile_dumps import CROOKED, EXECUTES, GREEDY, HOSTILE, P
from torchwhere.flight_recorder.dump import parse_dump
from torchwhere.flight_recorder.limits import Caps, CutShortError, RefusedFileError
from torchwhere.flight_recorder.unpickle import loads
from torchwhere.flight_recorder.verdict import consult_dumps

ATOMS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text()
)
PLAIN = st.recursive(
    ATOMS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30
)

DUMP: dict[str, Any] = {
    "version": "2.10",
    "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
    "pg_status": {
        "0": {
            "last_enqueued_collective": 3,
            "last_started_collective": 3,
            "last_completed_collective": 2,
        }
    },
    "entries": [
        {
            "frames": [{"name": "step", "filename": "/home/user/train.py", "line": 9}],
            "record_id": number,
            "pg_id": 0,
            "process_group": ("0", "default_pg"),
            "collective_seq_id": number + 1,
            "p2p_seq_id": 0,
            "profiling_name": "nccl:all_reduce",
            "time_created_ns": 1_700_000_000_000_000_000 + number,
            "input_sizes": [[4, 8]],
            "output_sizes": [[4, 8]],
            "input_dtypes": ["Float"],
            "output_dtypes": ["Float"],
            "state": "completed",
            "retired": True,
            "is_p2p": False,
        }
        for number in range(3)
    ],
}


# -- plain data ------------------------------------------------------------------------------------


@given(value=PLAIN, protocol=st.sampled_from([2, 3, 4, 5]))
def test_plain_data_comes_back(value: Any, protocol: int) -> None:
    """What Python's own pickle makes of plain data is read back as it was, of every protocol that a
    dump may have."""
    assert loads(pickle.dumps(value, protocol)) == value


def test_shared_containers_are_read() -> None:
    """A container that is used many times, as PyTorch's frames are, is one object again."""
    frame = {"line": 9}
    found = loads(pickle.dumps([[frame], [frame]], protocol=2))
    assert found == [[frame], [frame]]
    assert found[0][0] is found[1][0]


@given(data=st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    """Whatever follows the protocol, it is read or refused, and nothing else happens."""
    with contextlib.suppress(RefusedFileError):
        loads(P + data)


def test_caps_are_kept() -> None:
    """A cap that is reached refuses; one item less is read."""
    data = pickle.dumps([[], [], []], protocol=2)
    assert loads(data, caps=Caps(containers=4)) == [[], [], []]
    with pytest.raises(
        RefusedFileError, match=r"^more than 3 lists, dicts and tuples, at byte \d+$"
    ):
        loads(data, caps=Caps(containers=3))
    with pytest.raises(RefusedFileError, match=rf"^{len(data)} bytes; at most 10 are read$"):
        loads(data, caps=Caps(bytes=10))


# -- hostile files ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "files", [EXECUTES, GREEDY, CROOKED], ids=["executes", "greedy", "crooked"]
)
def test_hostile_files(files: dict[str, tuple[bytes, str]]) -> None:
    """Each of these files is refused, with its reason, within seconds."""
    for name, (data, reason) in files.items():
        begin = time.process_time()
        with pytest.raises(RefusedFileError) as caught:
            parse_dump(data, 0)
        assert reason in str(caught.value), name
        assert len(str(caught.value)) < 200, name
        assert time.process_time() - begin < 20, name


def test_hostile_files_are_many() -> None:
    """At least 50 different ones."""
    assert len(HOSTILE) >= 50


BOUNDED = """
import resource
from hostile_dumps import HOSTILE
from torchwhere.flight_recorder.dump import parse_dump
from torchwhere.flight_recorder.limits import RefusedFileError
with open("/proc/self/statm") as statm:
    now = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (400 << 20), now + (400 << 20)))
refused = 0
for data, _ in HOSTILE.values():
    try:
        parse_dump(data, 0)
    except RefusedFileError:
        refused += 1
print(refused)
"""


def test_hostile_files_take_bounded_memory() -> None:
    """All of them are refused by a process that may use 400 MB more than it has."""
    done = subprocess.run(
        [sys.executable, "-c", BOUNDED],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert (done.stdout.strip(), done.stderr) == (str(len(HOSTILE)), "")


class _Planted:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_planted_command_does_not_run(tmp_path: Path) -> None:
    """A file that runs code when unpickled runs nothing here; the dumps of the other ranks are
    still read."""
    (tmp_path / "dumps").mkdir()
    planted = pickle.dumps({**DUMP, "entries": [_Planted(tmp_path / "ran")]}, protocol=2)
    (tmp_path / "dumps" / "trace_0").write_bytes(planted)
    (tmp_path / "dumps" / "trace_1").write_bytes(pickle.dumps(DUMP, protocol=2))
    verdict = consult_dumps(tmp_path / "dumps")
    assert not (tmp_path / "ran").exists()
    said = "\n".join(verdict.missing_data)
    refused = "it imports something: no dump does that, and torchwhere never executes it, at byte"
    assert f"trace_0: refused: {refused}" in said
    pickle.loads(planted)
    assert (tmp_path / "ran").exists()  # the file was a real one


# -- damage ----------------------------------------------------------------------------------------


def test_cut_at_every_byte() -> None:
    """Of a dump that was cut anywhere, the entries that are whole are read, or it is refused; none
    is invented."""
    for protocol in (2, 4):
        data = pickle.dumps(DUMP, protocol)
        whole = parse_dump(data, 0).entries
        found = set()
        for end in range(len(data)):
            try:
                dump = parse_dump(data[:end], 0)
            except RefusedFileError:
                continue
            assert dump.cut == f"cut short: it ends at byte {end}, in the middle of its data"
            assert dump.entries == whole[: len(dump.entries)]
            found.add(len(dump.entries))
        assert found == {0, 1, 2, 3}


def test_cut_says_what_is_whole() -> None:
    """What was finished before the cut is at hand; what was being built is not."""
    data = pickle.dumps({"a": [1], "b": [{"c": 1}, {"d": 2, "e": 3}]}, protocol=2)
    with pytest.raises(CutShortError) as caught:
        loads(data[:-8])
    assert caught.value.partial == {"a": [1], "b": [{"c": 1}]}


def test_any_byte_changed() -> None:
    """A dump with any byte changed is read or refused; a verdict's numbers stay in bounds."""
    data, dice = pickle.dumps(DUMP, protocol=2), random.Random(0)
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << dice.randrange(8)
        try:
            dump = parse_dump(bytes(changed), 0)
        except RefusedFileError:
            continue
        assert all(0 <= entry.seq < 1 << 62 and 0 <= entry.t_ns < 1 << 62 for entry in dump.entries)


ODD = [
    None,
    True,
    -1,
    1 << 70,
    float("nan"),
    "",
    "x" * 10_000,
    "1",
    [],
    {},
    [[]],
    [[[]]],
    {"a": 1},
    ("a", "b"),
    [None],
    [-1],
    [[-1]],
]


def test_wrong_types_in_an_entry(tmp_path: Path) -> None:
    """An entry with anything in a field is read or left out; the rest of the dump is read, and a
    verdict is given."""
    first, *others = DUMP["entries"]
    for number, (field, value) in enumerate(itertools.product([*first, "torchwhere"], ODD)):
        folder = tmp_path / str(number)
        folder.mkdir()
        data = pickle.dumps({**DUMP, "entries": [{**first, field: value}, *others]}, protocol=2)
        (folder / "trace_0").write_bytes(data)
        (folder / "trace_1").write_bytes(pickle.dumps(DUMP, protocol=2))
        dump = parse_dump(data, 0)
        assert len(dump.entries) + dump.malformed == 3, (field, value)
        assert len(dump.entries) >= 2, (field, value)
        assert str(consult_dumps(folder).kind) in ("healthy", "missing", "mismatch", "together")


def test_wrong_types_around_the_entries() -> None:
    """A dump with anything around its entries is read, or refused if it is not one any more."""
    for field, value in itertools.product([*DUMP, "torchwhere"], ODD):
        try:
            dump = parse_dump(pickle.dumps({**DUMP, field: value}, protocol=2), 0)
        except RefusedFileError:
            assert field in ("version", "entries"), (field, value)
            continue
        assert len(dump.entries) in (0, 3), (field, value)


def test_ranks_that_are_none() -> None:
    """A list of ranks is matched, never evaluated: any other text makes no group."""
    for ranks in (
        "[0, 1",
        "[0, 1]; 2",
        "__import__('os')",
        "[0, 0]",
        "[-1]",
        "[9999999]",
        "0-3",
        [0, "1"],
        [True],
        7,
        None,
    ):
        config = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
        assert (
            parse_dump(pickle.dumps({**DUMP, "pg_config": config}, protocol=2), 0).groups == {}
        ), ranks
