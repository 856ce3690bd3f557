"""The events of a box as columns: what Parquet files and data frames are made of.

Takes a box and which of its records, gives a `Column` for each name in `COLUMNS`. Nothing is done
event by event where it can be helped: a record holds numbers that point into the box's table, so
each text is looked up once, whatever the number of records that use it. Only events with a text of
their own (notes, exceptions, starts and ends) are read one at a time. A nested value (shapes,
several names) is its JSON text. Like the reader, this never raises on content.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from torchwhere.blackbox import file_format
from torchwhere.blackbox.box import PASS_LABELS, Box
from torchwhere.core.events import TEXT_FIELD, Event, Kind, json_text
from torchwhere.core.place import Certainty

TEXT, NUMBER, FLAG = "text", "number", "flag"
COLUMNS = {
    "record": NUMBER,
    "kind": TEXT,
    "step": NUMBER,
    "pass": TEXT,
    "module": TEXT,
    "call": NUMBER,
    "line": TEXT,
    "graph": TEXT,
    "thread": TEXT,
    "certainty": TEXT,
    "param": TEXT,
    "t_ns": NUMBER,
    "op": TEXT,
    "raw_op": TEXT,
    "group": TEXT,
    "group_desc": TEXT,
    "mesh_dim": TEXT,
    "backend": TEXT,
    "group_size": NUMBER,
    "number": NUMBER,
    "dtype": TEXT,
    "shapes": TEXT,
    "out_shapes": TEXT,
    "bytes": NUMBER,
    "peer": NUMBER,
    "reduce_op": TEXT,
    "api": TEXT,
    "for": TEXT,
    "async": FLAG,
    "phase": TEXT,
    "duration_ns": NUMBER,
    "what": TEXT,
    "text": TEXT,
    "reason": TEXT,
    "type": TEXT,
    "fields": TEXT,
}
_OF_CALL = (
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
_OF_GROUP = {"group_desc": "desc", "mesh_dim": "mesh_dim", "backend": "backend"}
_OF_TEXT = ("text", "reason", "type")
_NAMED = {
    Kind.OPTIMIZER: "what",
    Kind.COMPILE_BEGIN: "what",
    Kind.COMPILE_END: "what",
} | dict.fromkeys((Kind.PHASE_BEGIN, Kind.PHASE_END), "phase")
_HAS_TEXT = (*TEXT_FIELD, Kind.COMPILE_BEGIN)
_LARGEST = (1 << 63) - 1

Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Texts:
    """Each text once, and for each row the number of its own; -1: it has none."""

    codes: npt.NDArray[np.int32]
    values: list[str]

    def __len__(self) -> int:
        return len(self.codes)


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers, or truth values, and which rows have none."""

    values: npt.NDArray[Any]
    missing: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.values)


Column = Texts | Numbers


def rows_of(box: Box, *, kinds: set[str] | None = None) -> Rows:
    """Which records are of some kinds; all of them for None."""
    if kinds is None:
        return np.arange(len(box.records))
    found: Rows = np.flatnonzero(
        np.isin(box.records["kind"], [int(kind) for kind in Kind if kind.label in kinds])
    )
    return found


def columns(box: Box, rows: Rows) -> dict[str, Column]:
    """The columns of some records of a box, each in the order of `COLUMNS`."""
    records = box.records[rows]
    found: dict[str, Column] = dict(_place(box, records))
    found |= _call(box, records)
    found |= _named(box, records)
    found |= _told(box, records, rows)
    return {name: found[name] for name in COLUMNS}


def joined(parts: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
    """The columns of several boxes, one below the other."""
    found: dict[str, Column] = {}
    for name, sort in COLUMNS.items():
        columns = [part[name] for part in parts]
        if sort == TEXT:
            found[name] = _joined_texts([one for one in columns if isinstance(one, Texts)])
        else:
            numbers, dtype = (
                [one for one in columns if isinstance(one, Numbers)],
                np.bool_ if sort == FLAG else np.int64,
            )
            values = np.concatenate([np.empty(0, dtype), *(one.values for one in numbers)])
            found[name] = Numbers(
                values, np.concatenate([np.empty(0, np.bool_), *(one.missing for one in numbers)])
            )
    return found


def _joined_texts(columns: Sequence[Texts]) -> Texts:
    numbers: dict[str, int] = {}
    codes = [np.empty(0, np.int32)]
    for column in columns:
        lookup = [numbers.setdefault(text, len(numbers)) for text in column.values]
        codes.append(np.array([*lookup, -1], np.int32)[column.codes])
    return Texts(np.concatenate(codes), list(numbers))


# -- one text for many rows ------------------------------------------------------------------------


def _distinct(ids: npt.NDArray[Any], among: Rows | None = None) -> tuple[list[int], Rows]:
    """The ids that occur, and for each row which of them it has; -1 in rows that are not `among`
    those looked at."""
    if among is None:
        seen, which = np.unique(ids, return_inverse=True)
        return seen.tolist(), which
    which = np.full(len(ids), -1)
    seen, which[among] = np.unique(ids[among], return_inverse=True)
    return seen.tolist(), which


def _texts(found: Sequence[Any], which: Rows) -> Texts:
    """What was found for each id, as the texts of the rows that have it."""
    numbers: dict[str, int] = {}
    codes = [
        -1 if (text := _text(value)) is None else numbers.setdefault(text, len(numbers))
        for value in found
    ]
    return Texts(np.array([*codes, -1], np.int32)[which], list(numbers))


def _numbers(found: Sequence[Any], which: Rows) -> Numbers:
    known = [
        value if type(value) is int and -_LARGEST <= value <= _LARGEST else None for value in found
    ]
    values = np.array([*(0 if value is None else value for value in known), 0], np.int64)
    return Numbers(values[which], np.array([*(value is None for value in known), True])[which])


def _text(value: Any) -> str | None:
    """A text as UTF-8 can hold it; anything else as JSON."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json_text(value)
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _some(values: npt.NDArray[Any], present: npt.NDArray[np.bool_]) -> Numbers:
    """Numbers of 64 bits; one that is too large for a sign is not known."""
    present = present & (values <= _LARGEST)
    return Numbers(np.where(present, values, 0).astype(np.int64), ~present)


# -- where -----------------------------------------------------------------------------------------


def _place(box: Box, records: npt.NDArray[Any]) -> Iterator[tuple[str, Column]]:
    """What every event has."""
    everywhere = np.ones(len(records), np.bool_)
    yield "record", _some(records["number"], everywhere)
    kinds, which = _distinct(records["kind"])
    yield "kind", _texts([Kind(kind).label for kind in kinds], which)
    yield "step", _some(records["step"], records["step"] != file_format.NO_STEP)
    fast_path, which = _distinct(records["pass"])
    yield "pass", _texts([PASS_LABELS.get(one, "outside") for one in fast_path], which)
    for name in ("line", "graph", "param"):
        ids, which = _distinct(records[name])
        yield name, _texts([box.name(one) for one in ids], which)
    ids, which = _distinct(records["module"])
    module = _texts([box.name(one) for one in ids], which)
    yield "module", module
    yield (
        "call",
        _some(records["call"], (module.codes >= 0) & (records["call"] != file_format.NO_CALL)),
    )
    yield "certainty", _certainty(records, is_lost=(module.codes < 0) & (records["module"] != 0))
    threads, which = _distinct(records["thread"])
    yield "thread", _texts([box.thread(one) for one in threads], which)
    yield "t_ns", Numbers(_wall_ns(box, records), ~everywhere)


def _certainty(records: npt.NDArray[Any], *, is_lost: npt.NDArray[np.bool_]) -> Texts:
    flags = records["flags"]
    unknown = (
        (flags & file_format.FLAG_UNKNOWN != 0)
        | is_lost
        | ~np.isin(records["pass"], list(PASS_LABELS))
    )
    codes = np.where(unknown, 2, np.where(flags & file_format.FLAG_INFERRED != 0, 1, 0)).astype(
        np.int32
    )
    return Texts(
        codes, [str(one) for one in (Certainty.EXACT, Certainty.INFERRED, Certainty.UNKNOWN)]
    )


def _wall_ns(box: Box, records: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """By the wall clock of the rank's host. An absurd offset gives absurd times and not an
    error."""
    offset = np.array([box.wall_ns(0) & (2 * _LARGEST + 1)], np.uint64)
    times: npt.NDArray[np.int64] = (records["t_ns"] + offset).view(np.int64)
    return times


# -- collectives -----------------------------------------------------------------------------------


def _call(box: Box, records: npt.NDArray[Any]) -> Iterator[tuple[str, Column]]:
    """What a collective has."""
    is_call = records["kind"] == Kind.COLLECTIVE
    among = np.flatnonzero(is_call)
    ids, which = _distinct(records["subject"], among)
    calls = [value if isinstance(value := box.value(one), dict) else {} for one in ids]
    for name in _OF_CALL:
        make = _texts if COLUMNS[name] == TEXT else _numbers
        yield name, make([call.get(name) for call in calls], which)
    groups = [box.groups().get(str(call.get("group")), {}) for call in calls]
    for name, key in _OF_GROUP.items():
        yield name, _texts([group.get(key) for group in groups], which)
    members = [
        len(ranks) if isinstance(ranks := group.get("ranks"), list) else 0 for group in groups
    ]
    yield "group_size", _numbers([size or None for size in members], which)
    yield "number", _some(records["extra"], is_call)
    beneficiaries, which = _distinct(records["beneficiary"], among)
    yield "for", _texts([box.value(one) if one else None for one in beneficiaries], which)
    yield "async", Numbers(is_call & (records["flags"] & file_format.FLAG_ASYNC != 0), ~is_call)


# -- the other kinds -------------------------------------------------------------------------------


def _named(box: Box, records: npt.NDArray[Any]) -> Iterator[tuple[str, Column]]:
    """What is named by a number: optimizers, compiled graphs, phases; and how long a phase took."""
    for name in ("what", "phase"):
        kinds = [int(kind) for kind, field in _NAMED.items() if field == name]
        ids, which = _distinct(records["subject"], np.flatnonzero(np.isin(records["kind"], kinds)))
        yield name, _texts([box.name(one) for one in ids], which)
    yield "duration_ns", _some(records["extra"], records["kind"] == Kind.PHASE_END)


def _told(box: Box, records: npt.NDArray[Any], rows: Rows) -> Iterator[tuple[str, Column]]:
    """What is in the texts: those of fields that have a column, and the rest as JSON."""
    among = np.flatnonzero(np.isin(records["kind"], [int(kind) for kind in _HAS_TEXT]))
    fields = [_own(box.event(int(row))) for row in rows[among]]
    which = np.full(len(records), -1)
    which[among] = np.arange(len(among))
    for name in _OF_TEXT:
        yield name, _texts([one.pop(name, None) for one in fields], which)
    yield "fields", _texts([one or None for one in fields], which)


def _own(event: Event) -> dict[str, Any]:
    """The fields of an event; a compiled graph's `what` is in its record, and has its column
    already."""
    is_compile = event.kind == Kind.COMPILE_BEGIN.label
    return {
        name: value for name, value in event.fields.items() if not (is_compile and name == "what")
    }
