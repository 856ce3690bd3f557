"""Records in JSON: what is read back, and what damaged files give."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

from torchwhere.core.records import read_record
from torchwhere.processes.observation import RankObservation


@dataclass(frozen=True, slots=True)
class Part:
    number: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class Whole:
    ratio: float = 0.0
    limit: int | None = None
    is_new: bool = True
    lines: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    first: Part | None = None
    texts: dict[str, str] = field(default_factory=dict)


def test_round_trip() -> None:
    """A record is the same after it was written as a dictionary."""
    whole = Whole(0.5, 7, False, ("a",), (Part(1, "x"), Part(2)), Part(3), {"a": "b"})
    assert read_record(Whole, asdict(whole)) == whole


@pytest.mark.parametrize(
    "value", [None, 3, "x", [], {}, True, float("nan"), float("inf"), 10**400, -(10**400)]
)
def test_wrong_types(value: Any) -> None:
    """A field keeps its default if the file has a value of another type, or an absurd number."""
    wrong = dict.fromkeys(asdict(Whole()), value)
    for name in asdict(Whole()):
        record = read_record(Whole, {name: value})
        assert record is not None
        assert getattr(record, name) in (getattr(Whole(), name), value)
    assert read_record(Whole, wrong) is not None


def test_missing_values() -> None:
    """A record without a value that has no default is left out, also within another one."""
    assert read_record(Part, {"name": "x"}) is None
    assert read_record(Part, [1, "x"]) is None
    whole = read_record(Whole, {"parts": [{"name": "x"}, {"number": 1}, 7], "first": {}})
    assert whole == Whole(parts=(Part(1),))
    assert read_record(Whole, {"texts": {"a": 1, "b": "c"}, "lines": ["a", 1]}) == Whole(
        lines=("a",), texts={"b": "c"}
    )


def test_lists_are_bounded() -> None:
    """Of a long list, the first texts and the last records are kept: files of other hosts may
    contain any number."""
    whole = read_record(
        Whole,
        {"lines": list(map(str, range(10_000))), "parts": [{"number": n} for n in range(999)]},
    )
    assert whole is not None
    assert whole.lines == tuple(map(str, range(4096)))
    assert whole.parts == tuple(map(Part, range(999 - 256, 999)))


def test_negative_numbers_in_an_observation() -> None:
    """A negative number in the file of another host counts as unknown; a negative rank is none."""
    value = {"rank": 0, "pid": -7, "seen_ns": -5, "seconds": -3.0, "world_size": -4}
    assert RankObservation.from_dict(value) == RankObservation(0)
    assert RankObservation.from_dict({"rank": -1}) is None
