"""What one rank says: the collectives it issued, where it is now, and how it ended.

Takes a box, gives a `Testimony`. Ids are a box's own; here they become numbers that mean the same on every rank, so that the
testimonies of thousands of ranks are compared as arrays. Names, places and texts stay in the box and are read when asked for.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchwhere.blackbox.reader import Box, Cursor
from torchwhere.events import Event, Kind
from torchwhere.place import Certainty, Place

# What ranks must agree on in one collective, beyond its name. Ranks may give all_to_all different shapes, and only one rank of
# a gather or scatter has the list of tensors.
_MUST_AGREE = {
    "all_gather": ("dtype", "out_shapes"),
    "all_to_all": ("dtype",),
    "all_to_all_single": ("dtype",),
    "gather": ("dtype", "peer"),
    "scatter": ("dtype", "peer"),
    "reduce_scatter": ("dtype", "shapes", "reduce_op"),
    "barrier": (),
    "monitored_barrier": (),
    "send": ("dtype", "shapes"),
    "recv": ("dtype", "shapes"),
}
_MUST_AGREE_ELSE = ("dtype", "shapes", "out_shapes", "reduce_op", "peer")
_SAME_MOMENT_NS = 1_000_000
P2P = frozenset({"send", "recv"})


class StreamKey(NamedTuple):
    """What is counted in one sequence: the collectives of a group, or the messages from one rank to another (else -1)."""

    group: int
    source: int = -1
    destination: int = -1


@dataclass(frozen=True, slots=True)
class Group:
    """A process group, the same on all its ranks."""

    name: str
    ranks: tuple[int, ...]
    desc: str = field(default="", compare=False)
    backend: str | None = field(default=None, compare=False)
    mesh_dim: str | None = field(default=None, compare=False)

    @property
    def title(self) -> str:
        """What people call it: its mesh dimension, its description, or its name."""
        if self.mesh_dim:
            return self.mesh_dim
        if self.desc in ("default_pg", "") and self.name in ("0", ""):
            return "default"
        return self.desc if self.desc not in ("", "undefined") else self.name


class Lexicon:
    """One number for each thing that ranks may have in common."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._things: list[Any] = []

    def number(self, thing: Hashable) -> int:
        known = self._numbers.get(thing)
        if known is None:
            known = self._numbers[thing] = len(self._things)
            self._things.append(thing)
        return known

    def thing(self, number: int) -> Any:
        return self._things[number]


@dataclass(frozen=True, slots=True)
class Calls:
    """The collectives that one rank issued in one stream, as far as its ring goes back. Arrays of one length, in order."""

    numbers: npt.NDArray[np.int64]
    forms: npt.NDArray[np.int32]  # what ranks must agree on
    meanings: npt.NDArray[np.int32]  # module, pass, line and beneficiary: what they agree on in a sound program
    rows: npt.NDArray[np.int64]  # where each stands among the records of its box

    def at(self, number: int) -> int | None:
        """The index of a number; None where the ring does not have it."""
        index = int(np.searchsorted(self.numbers, number))
        return index if index < len(self.numbers) and self.numbers[index] == number else None


_NO_CALLS = Calls(np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int64))


@dataclass(slots=True)
class Testimony:
    """What one rank's box says."""

    rank: int
    box: Box
    counts: dict[StreamKey, int] = field(default_factory=dict)  # issued ever, per stream
    calls: dict[StreamKey, Calls] = field(default_factory=dict)
    end: Event | None = None
    exception: Event | None = None

    def event(self, row: int) -> Event:
        return self.box.event(row)

    def issued(self, key: StreamKey, number: int) -> Event | None:
        """One collective of this rank; None where the ring no longer has it."""
        calls = self.calls.get(key, _NO_CALLS)
        index = calls.at(number)
        return None if index is None else self.event(int(calls.rows[index]))

    def order(self, key: StreamKey, number: int) -> int:
        """When a collective came among all this rank did. What the ring has lost was before everything it still has."""
        calls = self.calls.get(key, _NO_CALLS)
        index = calls.at(number)
        return -1 if index is None else int(calls.rows[index])

    @property
    def last_collective(self) -> Event | None:
        rows = np.flatnonzero(self.box.records["kind"] == int(Kind.COLLECTIVE))
        return self.event(int(rows[-1])) if len(rows) else None

    @property
    def cursor(self) -> Cursor | None:
        """Where the main thread is; of a program that trains in another thread, the thread that moved last."""
        cursors = self.box.cursors()
        main = [cursor for cursor in cursors if cursor.place.thread == "MainThread"]
        return max(main or cursors, key=lambda cursor: cursor.t_ns, default=None)

    @property
    def is_compiling(self) -> bool:
        kinds = self.box.records["kind"]
        return int((kinds == int(Kind.COMPILE_BEGIN)).sum()) > int((kinds == int(Kind.COMPILE_END)).sum())

    @property
    def in_collective_since_ns(self) -> int | None:
        """Wall clock of its last record, if that is a collective and no cursor has moved since; else None."""
        records = self.box.records
        if not len(records) or records["kind"][-1] != int(Kind.COLLECTIVE):
            return None
        issued = self.box.wall_ns(int(records["t_ns"][-1]))
        return None if any(cursor.t_ns > issued + _SAME_MOMENT_NS for cursor in self.box.cursors()) else issued

    @property
    def place(self) -> Place:
        """Where it is: the cursor's module and pass; the line of the last event, where the cursor has none."""
        cursor = self.cursor
        if cursor is None:
            return Place(rank=self.rank, step=None, pass_="outside", certainty=Certainty.UNKNOWN)
        return cursor.place


@dataclass(slots=True)
class Hearing:
    """All testimonies of a run, in one language."""

    testimonies: dict[int, Testimony] = field(default_factory=dict)
    groups: Lexicon = field(default_factory=Lexicon)
    forms: Lexicon = field(default_factory=Lexicon)
    meanings: Lexicon = field(default_factory=Lexicon)

    def hear(self, rank: int, box: Box) -> Testimony:
        found = self.testimonies[rank] = Testimony(rank, box)
        groups = {name: self.groups.number(_group(value)) for name, value in box.groups().items()}
        for (entry_id, source, destination), count in box.tallies().items():
            value = box.value(entry_id)
            if isinstance(value, dict) and value.get("name") in groups:
                found.counts[StreamKey(groups[value["name"]], source, destination)] = count
        self._hear_calls(found, groups)
        found.end, found.exception = _last_of(box, Kind.END), _last_of(box, Kind.EXCEPTION)
        return found

    def group(self, key: StreamKey) -> Group:
        found: Group = self.groups.thing(key.group)
        return found

    def _hear_calls(self, found: Testimony, groups: dict[str, int]) -> None:
        box = found.box
        rows = np.flatnonzero(box.records["kind"] == int(Kind.COLLECTIVE))
        records = box.records[rows]
        signatures = _each(records["what"], lambda entry_id: self._signature(box, entry_id, groups, found.rank))
        forms = np.array([form for form, _ in signatures], np.int32)
        meanings = self._meanings(box, records)
        keys: dict[StreamKey, list[int]] = {}
        for index, (_, key) in enumerate(signatures):
            if key is not None:
                keys.setdefault(key, []).append(index)
        for key, indices in keys.items():
            chosen = np.array(indices)
            numbers = records["more"][chosen].astype(np.int64)
            found.calls[key] = Calls(numbers, forms[chosen], meanings[chosen], rows[chosen])
            found.counts[key] = max(found.counts.get(key, 0), int(numbers[-1]) + 1)

    def _signature(self, box: Box, entry_id: int, groups: dict[str, int], rank: int) -> tuple[int, StreamKey | None]:
        signature = box.value(entry_id)
        if not isinstance(signature, dict) or str(signature.get("group")) not in groups:
            return self.forms.number(None), None
        op, group, peer = str(signature.get("op")), groups[str(signature["group"])], signature.get("peer")
        agreed = {name: signature.get(name) for name in _MUST_AGREE.get(op, _MUST_AGREE_ELSE)}
        form = self.forms.number(("p2p" if op in P2P else op, json.dumps(agreed, sort_keys=True)))
        if op not in P2P:
            return form, StreamKey(group)
        other = -1 if peer is None else int(peer)
        return form, StreamKey(group, rank, other) if op == "send" else StreamKey(group, other, rank)

    def _meanings(self, box: Box, records: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        columns = np.stack([records[name].astype(np.uint32) for name in ("module", "pass", "line", "aim")], axis=1)
        unique, inverse = np.unique(columns, axis=0, return_inverse=True)
        numbers = [
            self.meanings.number((box.name(int(m)), int(p), box.name(int(line)), box.name(int(aim))))
            for m, p, line, aim in unique
        ]
        return np.array(numbers, np.int32)[inverse.reshape(-1)] if len(numbers) else np.empty(0, np.int32)


def _each(column: npt.NDArray[Any], look_up: Any) -> list[Any]:
    """`look_up` for every value of a column, asked once for each different one."""
    unique, inverse = np.unique(column, return_inverse=True)
    found = [look_up(int(value)) for value in unique]
    return [found[index] for index in inverse.reshape(-1)]


def _group(value: dict[str, Any]) -> Group:
    ranks = value.get("ranks")
    members = tuple(rank for rank in ranks if isinstance(rank, int)) if isinstance(ranks, list) else ()
    return Group(
        str(value.get("name")),
        members,
        desc=str(value.get("desc") or ""),
        backend=value.get("backend"),
        mesh_dim=value.get("mesh_dim"),
    )


def _last_of(box: Box, kind: Kind) -> Event | None:
    rows = np.flatnonzero(box.records["kind"] == int(kind))
    return box.event(int(rows[-1])) if len(rows) else None
