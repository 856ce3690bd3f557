"""The events of a box as columns, for Parquet files and data frames.

Takes a box and indices of records, and returns a `Column` for each name in `COLUMNS`. Records hold
ids of table entries, so each text is looked up once, however many records use it. Only events with
their own text (notes, exceptions, starts and ends) are decoded one at a time. Nested values
(shapes, lists of names) become JSON text. Like the reader, this never raises on content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from torchwhere.blackbox import file_format
from torchwhere.blackbox.box import SIGNATURE_KEYS, Box
from torchwhere.blackbox.device import device_times, device_waits
from torchwhere.core.events import CUDA_GRAPH_KINDS, TEXT_FIELD, Event, Kind, json_text
from torchwhere.core.place import PASS_LABELS, Certainty, line_fields

TEXT, NUMBER, FLAG = "text", "number", "flag"
COLUMNS = {
    "record": NUMBER,
    "kind": TEXT,
    "step": NUMBER,
    "pass": TEXT,
    "module": TEXT,
    "call": NUMBER,
    "line": TEXT,
    "framework_line": TEXT,
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
    "reached_ns": NUMBER,
    "waited_ns": NUMBER,
    "done_ns": NUMBER,
    "replayed": FLAG,
    "phase": TEXT,
    "duration_ns": NUMBER,
    "what": TEXT,
    "text": TEXT,
    "reason": TEXT,
    "type": TEXT,
    "fields": TEXT,
}
_GROUP_KEYS = {"group_desc": "desc", "mesh_dim": "mesh_dim", "backend": "backend"}
_TEXT_KEYS = ("text", "reason", "type")
_SUBJECT_KINDS = {  # kinds whose subject is the name in a column
    "what": (Kind.OPTIMIZER, Kind.COMPILE_BEGIN, Kind.COMPILE_END),
    "phase": (Kind.PHASE_BEGIN, Kind.PHASE_END),
}
_HAS_TEXT = (*TEXT_FIELD, Kind.COMPILE_BEGIN, *CUDA_GRAPH_KINDS)
_LARGEST = (1 << 63) - 1

Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Texts:
    """Each text once, and for each row the index of its text; -1: none."""

    codes: npt.NDArray[np.int32]
    values: list[str]

    def __len__(self) -> int:
        return len(self.codes)


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers or booleans, and which rows have none."""

    values: npt.NDArray[Any]
    missing: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.values)


Column = Texts | Numbers


def columns(box: Box, rows: Rows) -> dict[str, Column]:
    """The columns of these records, in the order of `COLUMNS`."""
    records = box.records[rows]
    parts = (
        _place_columns(box, records),
        _collective_columns(box, records),
        _device_columns(box, rows),
        _subject_columns(box, records),
        _text_columns(box, records, rows),
    )
    by_name = dict(chain.from_iterable(parts))
    return {name: by_name[name] for name in COLUMNS}


def joined(parts: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
    """The columns of several boxes, one below the other."""
    by_name: dict[str, Column] = {}
    for name, column_type in COLUMNS.items():
        columns = [part[name] for part in parts]
        if column_type == TEXT:
            by_name[name] = _joined_texts(
                [column for column in columns if isinstance(column, Texts)]
            )
        else:
            dtype = np.bool_ if column_type == FLAG else np.int64
            numbers = [column for column in columns if isinstance(column, Numbers)]
            by_name[name] = Numbers(
                np.concatenate([np.empty(0, dtype), *(column.values for column in numbers)]),
                np.concatenate([np.empty(0, np.bool_), *(column.missing for column in numbers)]),
            )
    return by_name


def _joined_texts(columns: Sequence[Texts]) -> Texts:
    numbers: dict[str, int] = {}
    codes = [np.empty(0, np.int32)]
    for column in columns:
        lookup = [numbers.setdefault(text, len(numbers)) for text in column.values]
        codes.append(np.array([*lookup, -1], np.int32)[column.codes])
    return Texts(np.concatenate(codes), list(numbers))


# -- one text for many rows ------------------------------------------------------------------------


def _distinct(ids: npt.NDArray[Any], among: Rows | None = None) -> tuple[list[int], Rows]:
    """The distinct ids, and for each row the index of its id; -1 for rows that are not in
    `among`."""
    rows = slice(None) if among is None else among
    which = np.full(len(ids), -1)
    distinct, which[rows] = np.unique(ids[rows], return_inverse=True)
    return distinct.tolist(), which


def _texts(values: Sequence[Any], which: Rows) -> Texts:
    """The text of each row, given one value for each distinct id."""
    numbers: dict[str, int] = {}
    codes = []
    for value in values:
        text = _text(value)
        codes.append(-1 if text is None else numbers.setdefault(text, len(numbers)))
    return Texts(np.array([*codes, -1], np.int32)[which], list(numbers))


def _column(ids: npt.NDArray[Any], value: Callable[[int], Any], among: Rows | None = None) -> Texts:
    """The text of each row, given a function that looks up the value of an id."""
    distinct, which = _distinct(ids, among)
    return _texts([value(entry_id) for entry_id in distinct], which)


def _numbers(values: Sequence[Any], which: Rows) -> Numbers:
    """The number of each row, given one value for each distinct id."""
    missing = [type(value) is not int or abs(value) > _LARGEST for value in values]
    present = [
        0 if is_missing else value for value, is_missing in zip(values, missing, strict=True)
    ]
    return Numbers(np.array([*present, 0], np.int64)[which], np.array([*missing, True])[which])


def _text(value: Any) -> str | None:
    """A text without characters that UTF-8 lacks; any other value as JSON."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json_text(value)
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _some(values: npt.NDArray[Any], present: npt.NDArray[np.bool_]) -> Numbers:
    """Numbers of 64 bits. A number that does not fit into a signed one counts as missing."""
    present = present & (values <= _LARGEST)
    return Numbers(np.where(present, values, 0).astype(np.int64), ~present)


# -- where -----------------------------------------------------------------------------------------


def _place_columns(box: Box, records: npt.NDArray[Any]) -> Iterator[tuple[str, Column]]:
    """Columns of all events."""
    everywhere = np.ones(len(records), np.bool_)
    yield "record", _some(records["number"], everywhere)
    yield "kind", _column(records["kind"], lambda kind: Kind(kind).label)
    yield "step", _some(records["step"], records["step"] != file_format.NO_STEP)
    yield "pass", _column(records["pass"], lambda pass_: PASS_LABELS.get(pass_, "outside"))
    ids, which = _distinct(records["line"])
    lines = [line_fields(box.name(entry_id)) for entry_id in ids]
    for name in ("line", "framework_line"):
        yield name, _texts([line[name] for line in lines], which)
    for name in ("graph", "param"):
        yield name, _column(records[name], box.name)
    module = _column(records["module"], box.name)
    yield "module", module
    has_call = (module.codes >= 0) & (records["call"] != file_format.NO_CALL)
    yield "call", _some(records["call"], has_call)
    yield "certainty", _certainty(records, is_lost=(module.codes < 0) & (records["module"] != 0))
    yield "thread", _column(records["thread"], box.thread)
    yield "t_ns", Numbers(_wall_ns(box, records["t_ns"]), ~everywhere)


def _certainty(records: npt.NDArray[Any], *, is_lost: npt.NDArray[np.bool_]) -> Texts:
    flags = records["flags"]
    has_unknown_pass = ~np.isin(records["pass"], list(PASS_LABELS))
    codes = (flags & file_format.FLAG_INFERRED != 0).astype(np.int32)
    codes[(flags & file_format.FLAG_UNKNOWN != 0) | is_lost | has_unknown_pass] = 2
    return Texts(codes, list(map(str, (Certainty.EXACT, Certainty.INFERRED, Certainty.UNKNOWN))))


def _wall_ns(box: Box, t_ns: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Times by the wall clock of the rank's host. An absurd offset gives absurd times, not an
    error."""
    offset = np.array([box.wall_ns(0) & (2 * _LARGEST + 1)], np.uint64)
    times: npt.NDArray[np.int64] = (t_ns + offset).view(np.int64)
    return times


# -- collectives -----------------------------------------------------------------------------------


def _collective_columns(box: Box, records: npt.NDArray[Any]) -> Iterator[tuple[str, Column]]:
    """Columns of collectives."""
    is_collective = records["kind"] == Kind.COLLECTIVE
    among = np.flatnonzero(is_collective)
    ids, which = _distinct(records["subject"], among)
    values = [box.value(entry_id) for entry_id in ids]
    signatures = [value if isinstance(value, dict) else {} for value in values]
    for name in SIGNATURE_KEYS:
        make = _texts if COLUMNS[name] == TEXT else _numbers
        yield name, make([signature.get(name) for signature in signatures], which)
    groups = [box.groups().get(str(signature.get("group")), {}) for signature in signatures]
    for name, key in _GROUP_KEYS.items():
        yield name, _texts([group.get(key) for group in groups], which)
    yield "group_size", _numbers([_group_size(group) for group in groups], which)
    yield "number", _some(records["extra"], is_collective)
    yield "for", _column(records["beneficiary"], lambda at: box.value(at) if at else None, among)
    is_async = is_collective & (records["flags"] & file_format.FLAG_ASYNC != 0)
    yield "async", Numbers(is_async, ~is_collective)
    is_replayed = is_collective & (records["flags"] & file_format.FLAG_REPLAYED != 0)
    yield "replayed", Numbers(is_replayed, ~is_replayed)


def _group_size(group: Mapping[str, Any]) -> int | None:
    ranks = group.get("ranks")
    return len(ranks) or None if isinstance(ranks, list) else None


def _device_columns(box: Box, rows: Rows) -> Iterator[tuple[str, Column]]:
    """Columns of collectives on a device: when it reached them, came to wait for them, and when
    they were done."""
    is_collective = box.records["kind"][rows] == Kind.COLLECTIVE
    reached, done = device_times(box)
    times = {"reached_ns": reached, "waited_ns": device_waits(box)[0], "done_ns": done}
    for name, of_records in times.items():
        t_ns = of_records[rows]
        yield name, Numbers(_wall_ns(box, t_ns), ~is_collective | (t_ns == 0))


# -- the other kinds -------------------------------------------------------------------------------


def _subject_columns(box: Box, records: npt.NDArray[Any]) -> Iterator[tuple[str, Column]]:
    """Names of optimizers, compiled graphs and phases, and durations of phases."""
    for name, kinds in _SUBJECT_KINDS.items():
        among = np.flatnonzero(np.isin(records["kind"], [int(kind) for kind in kinds]))
        yield name, _column(records["subject"], box.name, among)
    yield "duration_ns", _some(records["extra"], records["kind"] == Kind.PHASE_END)


def _text_columns(box: Box, records: npt.NDArray[Any], rows: Rows) -> Iterator[tuple[str, Column]]:
    """Fields of the texts: those with their own column, and the others as JSON."""
    among = np.flatnonzero(np.isin(records["kind"], [int(kind) for kind in _HAS_TEXT]))
    fields = [_text_fields(box.event(int(row))) for row in rows[among]]
    which = np.full(len(records), -1)
    which[among] = np.arange(len(among))
    for name in _TEXT_KEYS:
        yield name, _texts([event_fields.pop(name, None) for event_fields in fields], which)
    yield "fields", _texts([event_fields or None for event_fields in fields], which)


def _text_fields(event: Event) -> dict[str, Any]:
    """The fields of an event, without the `what` of a compiled graph, which has its own column."""
    fields = dict(event.fields)
    if event.kind == Kind.COMPILE_BEGIN.label:
        fields.pop("what", None)
    return fields
