"""Makes of one dump a box, as the doctor reads them: records, names, groups, how far each stream
has come.

What a dump cannot say stays open: module, pass and step are unknown, and where a rank is after its
last collective too. Where torchwhere wrote the dump itself, the place rides along in it and is read
back. Numbers are still the dump's own here; `dumps.py`, which sees all ranks, makes them
comparable.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchwhere.blackbox.box import Box, Cursor
from torchwhere.blackbox.file_format import (
    COUNTER_RANKS,
    FLAG_ASYNC,
    FLAG_UNKNOWN,
    NO_CALL,
    NO_STEP,
    EntryType,
)
from torchwhere.blackbox.ring import RECORD_DTYPE
from torchwhere.core.events import Kind
from torchwhere.core.place import Pass, Place
from torchwhere.flight_recorder.dump import Dump, DumpEntry, Shapes
from torchwhere.flight_recorder.schema import DTYPE_BYTES

# Done on one rank means that all have issued it. The root of a broadcast may be done before anybody
# has come.
_OF_ALL = re.compile(r"all_|reduce_scatter|barrier")
_PASSES = {pass_.label: pass_ for pass_ in Pass if pass_ is not Pass.SHAPE_INFERENCE}
_LARGEST = 1 << 62


@dataclass(slots=True)
class Account:
    """How far one rank has come in one group, by its dump. Numbers of collectives; -1: none."""

    issued: int = -1
    started: int = -1
    completed: int = -1
    joined: int = -1  # the last completed one that no rank can complete before all have issued it
    is_pending: bool = False  # its last one is known not to be done


@dataclass(slots=True)
class DumpBox(Box):
    """A box made of a dump."""

    dump_tallies: dict[tuple[int, int, int], int] = field(default_factory=dict)
    dump_cursors: list[Cursor] = field(default_factory=list)
    accounts: dict[str, Account] = field(default_factory=dict)
    has_lost: bool = False
    has_states: bool = False  # whether it says what is completed
    has_frames: bool = False
    is_of_gloo: bool = False
    is_own: bool = False  # written by torchwhere
    is_cut: bool = False
    lost_messages: set[str] = field(default_factory=set)  # groups whose first messages are gone
    descs: dict[str, str] = field(default_factory=dict)  # of the groups that were used
    group_ids: dict[str, int] = field(default_factory=dict)

    def counters(self) -> dict[tuple[int, int, int], int]:
        return self.dump_tallies

    def cursors(self) -> list[Cursor]:
        return self.dump_cursors

    def intern(self, sort: EntryType, text: str) -> int:
        entry_id = len(self.names) + 1
        self.names[entry_id] = int(sort), text
        return entry_id

    def add_group(self, name: str, ranks: tuple[int, ...], **texts: str | None) -> int:
        """A process group; one that is known already is taken as it is."""
        if name not in self.group_ids:
            self.group_ids[name] = self.intern(
                EntryType.GROUP, json.dumps({"name": name, "ranks": ranks, **texts})
            )
            self._groups = None
        return self.group_ids[name]

    def members(self, name: str) -> tuple[int, ...] | None:
        """The ranks of a group; None where this dump knows no such group."""
        group = self.groups().get(name)
        return tuple(group["ranks"]) if group is not None else None


def to_box(dump: Dump) -> DumpBox:
    """One dump as a box; the numbers of collectives are those of the dump."""
    return _Making(dump).box


class _Making:
    """One dump on its way into a box."""

    def __init__(self, dump: Dump) -> None:
        own = dump.own or {}
        self.dump = dump
        self.box = DumpBox(
            path=dump.path,
            meta={"rank": dump.rank, "source": "flight recorder", "version": dump.version},
            has_lost=dump.has_lost,
            has_states=not dump.is_of_gloo and dump.own is None,
            has_frames=dump.has_frames,
            is_of_gloo=dump.is_of_gloo,
            is_own=dump.own is not None,
            is_cut=dump.cut is not None,
        )
        if dump.cut is not None:
            self.box.problems.append(f"{dump.cut}: its newest entries are lost")
        self.box.counts.torn = dump.odd
        self.box.counts.overwritten = dump.entries[0].record_id if dump.entries else 0
        if type(lost := own.get("overwritten")) is int and 0 < lost < _LARGEST:
            self.box.counts.overwritten, self.box.has_lost = lost, True
        self._ids: dict[tuple[EntryType, str], int] = {}
        self._known: dict[tuple[Any, ...], int] = {}
        # what own entries share, by id; None if it is not sound
        self._same: dict[int, dict[str, Any] | None] = {}
        self._messages: Counter[tuple[str, int, int]] = Counter()
        self._first_message: set[str] = set()
        self._note_groups(own)
        self._note_calls()
        self._note_cursor(own.get("place"))

    # -- names -------------------------------------------------------------------------------------

    def _id(self, sort: EntryType, text: str) -> int:
        known = self._ids.get((sort, text))
        if known is None:
            known = self._ids[sort, text] = self.box.intern(sort, text)
        return known

    def _note_groups(self, own: dict[str, Any]) -> None:
        groups = own.get("groups")
        for group in groups if isinstance(groups, list) else ():
            if (found := _own_group(group)) is not None:
                self.box.add_group(**found)
        for name, (desc, ranks) in self.dump.groups.items() if not self.box.is_own else ():
            self.box.add_group(name, ranks, desc=desc)

    # -- calls -------------------------------------------------------------------------------------

    def _note_calls(self) -> None:
        calls = _calls(self.dump.entries)
        records = np.zeros(len(calls), RECORD_DTYPE)
        for row, call in enumerate(calls):
            self._note_call(records[row], row, call)
        self.box.records = records
        self.box.counts.good = len(records)

    def _note_call(self, record: Any, row: int, call: list[DumpEntry]) -> None:
        entry, own = call[-1], self._own_place(call[-1].place) if self.box.is_own else None
        what, group, number = self._what(call, own)
        record["number"], record["t_ns"], record["kind"] = row, call[0].t_ns, int(Kind.COLLECTIVE)
        record["subject"], record["extra"] = what, number
        if own is not None:
            self._note_place(record, own)
        else:
            line = call[0].line
            record["line"] = self._id(EntryType.LINE, line) if line else 0
            record["step"], record["call"] = NO_STEP, NO_CALL
            record["flags"] = FLAG_UNKNOWN | (FLAG_ASYNC if entry.backend != "gloo" else 0)
        self.box.descs.setdefault(group, entry.desc)
        if not entry.is_p2p:
            self._account(entry, group)

    def _own_place(self, value: Any) -> dict[str, Any] | None:
        """What rode along with an entry. What repeats from step to step is in the dump once, as
        `same`, and looked at once."""
        same = value.get("same") if type(value) is dict else None
        if type(same) is not dict:  # format 1: all of it each time
            return _own_place(value)
        if id(same) not in self._same:
            self._same[id(same)] = _own_place(same | {"step": None, "call": None, "number": 0})
        sound, step, at, number = (
            self._same[id(same)],
            value.get("step"),
            value.get("call"),
            value.get("number"),
        )
        is_sound = _is_number(number) and all(
            each is None or _is_number(each, NO_STEP) for each in (step, at)
        )
        return (
            sound | {"step": step, "call": at, "number": number, "id": id(same)}
            if sound is not None and is_sound
            else None
        )

    def _note_place(self, record: Any, own: dict[str, Any]) -> None:
        module, line, beneficiary = own["module"], own["line"], own["for"]
        record["step"] = NO_STEP if own["step"] is None else own["step"]
        record["call"] = NO_CALL if own["call"] is None else own["call"]
        record["pass"] = int(_PASSES[own["pass"]])
        record["module"] = self._id(EntryType.MODULE, module) if module is not None else 0
        record["line"] = self._id(EntryType.LINE, line) if line else 0
        record["beneficiary"] = (
            self._id(EntryType.BENEFICIARY, json.dumps(beneficiary))
            if beneficiary is not None
            else 0
        )
        record["flags"] = FLAG_ASYNC if own["async"] else 0

    def _what(self, call: list[DumpEntry], own: dict[str, Any] | None) -> tuple[int, str, int]:
        """The id of what repeats of a call, its group, and its number in its stream. What was there
        before is not remade."""
        entry = call[-1]
        if own is not None and ("own", own.get("id")) in self._known:
            return (
                self._known["own", own["id"]],
                own["group"],
                own["number"] if entry.is_p2p else entry.seq,
            )
        is_plain = own is None and len(call) == 1 and not entry.is_p2p
        key: tuple[Any, ...] | None = (
            (
                entry.backend,
                entry.recorded_op,
                entry.group,
                entry.dtype,
                entry.inputs,
                entry.outputs,
            )
            if is_plain
            else None
        )
        if key is not None and key in self._known:
            return self._known[key], entry.group, entry.seq
        signature, number = self._signature(call, own)
        what = self._id(EntryType.COLLECTIVE, json.dumps(signature))
        if own is not None and "id" in own:
            key = "own", own["id"]
        if key is not None:
            self._known[key] = what
        return what, str(signature["group"]), number

    def _signature(
        self, call: list[DumpEntry], own: dict[str, Any] | None
    ) -> tuple[dict[str, Any], int]:
        """What repeats of a call, as boxes have it, and its number in its stream."""
        entry = call[-1]
        if own is not None:
            signature = {
                name: own[name] for name in (*_OWN_TEXTS, "shapes", "out_shapes", "bytes", "peer")
            }
            return signature, own["number"] if entry.is_p2p else entry.seq
        inner = [each for each in call if not each.is_end_of_batch] or call
        inputs = tuple(shape for each in inner for shape in each.inputs)
        outputs = tuple(shape for each in inner for shape in each.outputs)
        peer, number = self._peer(entry) if entry.is_p2p else (None, entry.seq)
        signature = {
            "op": _op(call, inner),
            "raw_op": f"{entry.backend}:{entry.recorded_op}",
            "group": entry.group,
            "dtype": inner[0].dtype,
            "shapes": list(inputs or outputs),
            "out_shapes": list(outputs) if inputs and outputs != inputs else [],
            "bytes": _bytes(inner[0].dtype, inputs, outputs),
            "peer": peer,
            "reduce_op": None,
            "api": None,
        }
        return signature, number

    def _peer(self, entry: DumpEntry) -> tuple[int | None, int]:
        """The rank at the other end of a message, and its number among those from there to here."""
        if entry.group not in self._first_message:
            self._first_message.add(entry.group)
            if entry.seq > 1:
                self.box.lost_messages.add(entry.group)
        members = self.dump.groups.get(entry.group, ("", ()))[1]
        if entry.ends is None or max(entry.ends) >= len(members):
            return None, 0
        source, destination = (members[end] for end in entry.ends)
        number = self._messages[entry.group, source, destination]
        self._messages[entry.group, source, destination] += 1
        return destination if source == self.dump.rank else source, number

    def _account(self, entry: DumpEntry, group: str) -> None:
        account = self.box.accounts.setdefault(group, Account())
        account.issued = max(account.issued, entry.seq)
        if entry.backend == "gloo":
            account.is_pending = not entry.is_retired and not self.box.is_own
            return
        account.is_pending = self.box.has_states and entry.state != "completed"
        if self.box.has_states and entry.state != "scheduled":
            account.started = max(account.started, entry.seq)
        if self.box.has_states and entry.state == "completed":
            account.completed = max(account.completed, entry.seq)
            if _OF_ALL.match(entry.op):
                account.joined = max(account.joined, entry.seq)

    # -- place -------------------------------------------------------------------------------------

    def _note_cursor(self, value: Any) -> None:
        own = _own_place(value, is_cursor=True) if self.box.is_own else None
        if own is not None:
            names = ("step", "module", "call", "line")
            place = Place(
                rank=self.dump.rank,
                pass_=own["pass"],
                **{name: own[name] for name in names},
                thread="MainThread",
            )
            self.box.dump_cursors.append(Cursor(place, int(own["t_ns"]), None, 0))


def _calls(entries: list[DumpEntry]) -> list[list[DumpEntry]]:
    """Entries that are one call: the collectives of a batch have one number; what only ends a batch
    of messages is left out."""
    found: list[list[DumpEntry]] = []
    last: dict[str, list[DumpEntry]] = {}
    for entry in entries:
        before = last.get(entry.group)
        if entry.is_p2p:
            if not entry.is_end_of_batch:
                found.append([entry])
        elif before is not None and before[-1].seq == entry.seq:
            before.append(entry)
        else:
            last[entry.group] = [entry]
            found.append(last[entry.group])
    return found


def _op(call: list[DumpEntry], inner: list[DumpEntry]) -> str:
    names = {each.op for each in inner}
    if len(call) == 1:
        return call[0].op
    return f"{names.pop().removesuffix('_coalesced')}_coalesced" if len(names) == 1 else "coalesced"


def _bytes(dtype: str | None, inputs: Shapes, outputs: Shapes) -> int:
    items = max(sum(map(math.prod, inputs)), sum(map(math.prod, outputs)))
    return min(items * DTYPE_BYTES.get(dtype or "", 0), _LARGEST)


# -- what torchwhere wrote -------------------------------------------------------------------------

_OWN_TEXTS = ("op", "raw_op", "group", "dtype", "reduce_op", "api")


def _is_text(value: Any) -> bool:
    return type(value) is str and len(value) <= 4096


def _is_number(value: Any, below: int = _LARGEST) -> bool:
    return type(value) is int and 0 <= value < below


def _own_place(value: Any, *, is_cursor: bool = False) -> dict[str, Any] | None:
    """What rode along with an entry, if all of it has its form; else None, and the entry counts for
    what it is."""
    if type(value) is not dict:
        return None
    of = value.get
    is_place = (
        of("pass") in _PASSES
        and all(of(name) is None or _is_text(of(name)) for name in ("module", "line"))
        and all(of(name) is None or _is_number(of(name), NO_STEP) for name in ("step", "call"))
    )
    if is_cursor:
        return value if is_place and _is_number(of("t_ns")) else None
    is_call = (
        _is_text(of("op"))
        and _is_text(of("group"))
        and all(of(name) is None or _is_text(of(name)) for name in _OWN_TEXTS)
        and all(_is_shapes(of(name)) for name in ("shapes", "out_shapes"))
        and (of("peer") is None or _is_number(of("peer"), COUNTER_RANKS))
        and _is_number(of("number"))
        and _is_number(of("bytes"))
        and type(of("async")) is bool
    )
    beneficiary = of("for")
    is_aim = (
        beneficiary is None
        or _is_text(beneficiary)
        or (type(beneficiary) is list and all(map(_is_text, beneficiary)))
    )
    return value if is_place and is_call and is_aim else None


def _is_shapes(value: Any) -> bool:
    return type(value) is list and all(
        type(shape) is list and all(map(_is_number, shape)) for shape in value
    )


def _own_group(value: Any) -> dict[str, Any] | None:
    if (
        type(value) is not dict
        or not _is_text(value.get("name"))
        or type(value.get("ranks")) is not list
    ):
        return None
    texts = {
        name: value.get(name) if _is_text(value.get(name)) else None
        for name in ("desc", "backend", "mesh_dim")
    }
    ranks = tuple(value["ranks"])
    return (
        {"name": value["name"], "ranks": ranks, **texts}
        if all(_is_number(rank, COUNTER_RANKS) for rank in ranks)
        else None
    )
