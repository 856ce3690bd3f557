"""Converts one dump to a box, as the doctor reads it: records, names, groups, counters.

Dumps lack module, pass and step, and the place of a rank after its last collective: these stay
unknown. A dump that torchwhere wrote contains the places, and they are read back. Numbers are still
those of the dump; `dumps.py`, which sees all ranks, makes them comparable.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any

import numpy as np

from torchwhere.blackbox.box import SIGNATURE_KEYS, Cursor
from torchwhere.blackbox.file_format import FLAG_ASYNC, FLAG_UNKNOWN, NO_CALL, NO_STEP, EntryType
from torchwhere.blackbox.ring import RECORD_DTYPE
from torchwhere.core.events import Kind
from torchwhere.core.place import Place, stored_line
from torchwhere.diagnose.dump_progress import MessageCount, PendingCall
from torchwhere.flight_recorder.batches import BatchStates
from torchwhere.flight_recorder.confirmation import confirmation_of
from torchwhere.flight_recorder.dump import Dump
from torchwhere.flight_recorder.dump_box import Account, DumpBox
from torchwhere.flight_recorder.dump_entry import DumpEntry, Shapes
from torchwhere.flight_recorder.limits import LARGEST, is_number
from torchwhere.flight_recorder.own_entries import (
    PASSES,
    is_optional_number,
    own_call,
    own_cursor,
    own_group,
)
from torchwhere.flight_recorder.schema import DTYPE_BYTES

# Collectives that complete on one rank only after all ranks have issued them. The root of a
# broadcast may complete before any other rank arrives.
_OF_ALL = re.compile(r"all_|reduce_scatter|barrier")


def to_box(dump: Dump) -> DumpBox:
    """Convert one dump; the numbers of collectives stay those of the dump."""
    return _Converter(dump).box


class _Converter:
    """Converts one dump to a box."""

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
            lists_only_active=dump.lists_only_active,
            has_timing=dump.has_timing and not dump.is_of_gloo,
            made_ns=dump.made_ns,
            confirmation=confirmation_of(dump),
        )
        names = dump.group_names
        self.box.status = {names[i]: status for i, status in dump.status.items() if i in names}
        self.box.has_all_names = len(self.box.status) == len(dump.status)
        if dump.cut is not None:
            self.box.problems.append(f"{dump.cut}: its newest entries are lost")
        self.box.counts.torn = dump.malformed
        is_ring = bool(dump.entries) and not dump.lists_only_active
        self.box.counts.overwritten = dump.entries[0].record_id if is_ring else 0
        overwritten = own.get("overwritten")
        if is_number(overwritten) and overwritten:
            self.box.counts.overwritten, self.box.has_lost = overwritten, True
        self._ids: dict[tuple[EntryType, str], int] = {}
        self._call_ids: dict[Any, int] = {}  # of signatures
        # checked data that own entries share, by id; None if malformed
        self._shared: dict[int, dict[str, Any] | None] = {}
        self._messages: Counter[tuple[str, int, int]] = Counter()
        self._first_messages: dict[str, int] = {}  # their numbers, by group
        self._states = BatchStates(dump, self.box.status)
        self._add_groups(own)
        self._add_calls()
        self._add_cursor(own.get("place"))

    # -- names -------------------------------------------------------------------------------------

    def _id(self, entry_type: EntryType, text: str | None) -> int:
        """The id of a text; 0 for None."""
        if text is None:
            return 0
        entry_id = self._ids.get((entry_type, text))
        if entry_id is None:
            entry_id = self._ids[entry_type, text] = self.box.intern(entry_type, text)
        return entry_id

    def _add_groups(self, own: dict[str, Any]) -> None:
        groups = own.get("groups")
        for value in groups if isinstance(groups, list) else ():
            group = own_group(value)
            if group is not None:
                self.box.add_group(**group)
        if not self.box.is_own:
            for name, (desc, ranks) in self.dump.groups.items():
                self.box.add_group(name, ranks, desc=desc)
                self.box.descs[name] = desc

    # -- calls -------------------------------------------------------------------------------------

    def _add_calls(self) -> None:
        calls = _calls(self.dump.entries)
        records = np.zeros(len(calls), RECORD_DTYPE)
        for row, call in enumerate(calls):
            self._add_call(records[row], row, call)
        self.box.records = records
        self.box.counts.good = len(records)

    def _add_call(self, record: Any, row: int, call: list[DumpEntry]) -> None:
        entry = call[-1]
        own = self._own_call(entry.place) if self.box.is_own else None
        call_id, group, number = self._call_id(call, own)
        record["number"], record["t_ns"], record["kind"] = row, call[0].t_ns, int(Kind.COLLECTIVE)
        record["subject"], record["extra"] = call_id, number
        if own is not None:
            self._set_place(record, own)
        else:
            record["line"] = self._id(EntryType.LINE, call[0].line)
            record["step"], record["call"] = NO_STEP, NO_CALL
            record["flags"] = FLAG_UNKNOWN | (FLAG_ASYNC if entry.backend != "gloo" else 0)
        self.box.descs.setdefault(group, entry.desc)
        if not entry.is_p2p:
            self._update_account(entry, group)
        if not self.box.is_own:
            self._add_progress(row, entry, number)

    def _own_call(self, value: Any) -> dict[str, Any] | None:
        """The data that torchwhere added to an entry. `same`, the part that repeats from step to
        step, is in the dump once and is checked once."""
        same = value.get("same") if type(value) is dict else None
        if type(same) is not dict:  # format 1: everything each time
            return own_call(value)
        if id(same) not in self._shared:
            self._shared[id(same)] = own_call(same | {"step": None, "call": None, "number": 0})
        shared = self._shared[id(same)]
        varying = {name: value.get(name) for name in ("step", "call", "number")}
        is_sound = (
            is_number(varying["number"])
            and is_optional_number(varying["step"])
            and is_optional_number(varying["call"])
        )
        if shared is None or not is_sound:
            return None
        return shared | varying | {"id": id(same)}

    def _set_place(self, record: Any, own: dict[str, Any]) -> None:
        line, beneficiary = own["line"], own["for"]
        record["step"] = NO_STEP if own["step"] is None else own["step"]
        record["call"] = NO_CALL if own["call"] is None else own["call"]
        record["pass"] = int(PASSES[own["pass"]])
        record["module"] = self._id(EntryType.MODULE, own["module"])
        stored = stored_line(line, own.get("framework_line")) if line else None
        record["line"] = self._id(EntryType.LINE, stored or None)
        text = json.dumps(beneficiary) if beneficiary is not None else None
        record["beneficiary"] = self._id(EntryType.BENEFICIARY, text)
        record["flags"] = FLAG_ASYNC if own["async"] else 0

    def _call_id(self, call: list[DumpEntry], own: dict[str, Any] | None) -> tuple[int, str, int]:
        """The id of a call's signature, its group, and its number in its stream. A known signature
        is not built again."""
        entry = call[-1]
        if own is not None:
            peer, number = None, own["number"] if entry.is_p2p else entry.seq
            group, key = own["group"], own.get("id")
        else:
            peer, number = self._peer(entry) if entry.is_p2p else (None, entry.seq)
            group, key = entry.group, (peer, *(part.signature for part in call))
        call_id = self._call_ids.get(key)
        if call_id is None:
            if own is not None:
                signature = {name: own[name] for name in SIGNATURE_KEYS}
            else:
                signature = _signature(call, peer)
            call_id = self._id(EntryType.COLLECTIVE, json.dumps(signature))
            if key is not None:
                self._call_ids[key] = call_id
        return call_id, group, number

    def _peer(self, entry: DumpEntry) -> tuple[int | None, int]:
        """The rank at the other end of a message, and its number among those in this direction."""
        if self._first_messages.setdefault(entry.group, entry.seq) > 1:
            self.box.lost_messages.add(entry.group)
        ends = self._ends(entry)
        if ends is None:
            return None, 0
        number = self._messages[entry.group, *ends]
        self._messages[entry.group, *ends] += 1
        return ends[1] if ends[0] == self.dump.rank else ends[0], number

    def _ends(self, entry: DumpEntry) -> tuple[int, int] | None:
        """Source and destination of a message as ranks of the job; None if they are unknown."""
        members = self.dump.groups.get(entry.group, ("", ()))[1]
        if entry.ends is None or max(entry.ends) >= len(members):
            return None
        return members[entry.ends[0]], members[entry.ends[1]]

    def _add_progress(self, row: int, entry: DumpEntry, number: int) -> None:
        """Add a call, by its last entry, to those that are pending and to the counts of
        messages."""
        state, ends = self._states.state(entry), None
        if entry.is_p2p:
            ends = self._ends(entry)
            if ends is None:
                return
            size = _bytes(entry.dtype, entry.inputs, entry.outputs)
            count = self.box.messages.get((entry.group, *ends), MessageCount())
            self.box.messages[entry.group, *ends] = count.with_message(state == "completed", size)
        has_started = state != "scheduled"
        call = PendingCall(row, entry.group, number, ends, has_started, _deadline_ns(entry))
        if state != "completed":
            self.box.pending.append(call)
        elif self._is_unconfirmed(entry):
            self.box.unconfirmed.append(call)

    def _is_unconfirmed(self, entry: DumpEntry) -> bool:
        if entry.is_p2p or entry.is_retired or not _OF_ALL.match(entry.op):
            return False
        completed = self.box.status.get(entry.group, (-1, -1, -1))[2]
        return entry.seq > completed

    def _update_account(self, entry: DumpEntry, group: str) -> None:
        account = self.box.accounts.setdefault(group, Account())
        account.issued = max(account.issued, entry.seq)
        account.has_root = account.has_root or not _OF_ALL.match(entry.op)
        if self.box.has_states and entry.state != "scheduled":
            account.started = max(account.started, entry.seq)
        if self.box.has_states and entry.state == "completed":
            account.completed = max(account.completed, entry.seq)
            if _OF_ALL.match(entry.op):
                account.joined = max(account.joined, entry.seq)

    # -- place -------------------------------------------------------------------------------------

    def _add_cursor(self, value: Any) -> None:
        own = own_cursor(value) if self.box.is_own else None
        if own is not None:
            names = ("step", "module", "call", "line")
            place = Place(
                rank=self.dump.rank,
                pass_=own["pass"],
                **{name: own[name] for name in names},
                framework_line=own.get("framework_line"),
                thread="MainThread",
            )
            self.box.dump_cursors.append(Cursor(place, int(own["t_ns"]), None, 0))


def _calls(entries: list[DumpEntry]) -> list[list[DumpEntry]]:
    """Group the entries into calls: those of a batch share a number. An entry that only ends a
    batch of messages is left out."""
    calls: list[list[DumpEntry]] = []
    last: dict[str, list[DumpEntry]] = {}
    for entry in entries:
        before = last.get(entry.group)
        if entry.is_p2p:
            if not entry.is_end_of_batch:
                calls.append([entry])
        elif before is not None and before[-1].seq == entry.seq:
            before.append(entry)
        else:
            last[entry.group] = [entry]
            calls.append(last[entry.group])
    return calls


def _deadline_ns(entry: DumpEntry) -> int:
    is_known = entry.t_ns and entry.timeout_ms
    return entry.t_ns + entry.timeout_ms * 1_000_000 if is_known else 0


def _signature(call: list[DumpEntry], peer: int | None) -> dict[str, Any]:
    """The signature of a call, as in boxes."""
    entry = call[-1]
    inner = [part for part in call if not part.is_end_of_batch] or call
    inputs = tuple(shape for part in inner for shape in part.inputs)
    outputs = tuple(shape for part in inner for shape in part.outputs)
    return {
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


def _op(call: list[DumpEntry], inner: list[DumpEntry]) -> str:
    names = {entry.op for entry in inner}
    if len(call) == 1:
        return call[0].op
    return f"{names.pop().removesuffix('_coalesced')}_coalesced" if len(names) == 1 else "coalesced"


def _bytes(dtype: str | None, inputs: Shapes, outputs: Shapes) -> int:
    items = max(sum(map(math.prod, inputs)), sum(map(math.prod, outputs)))
    return min(items * DTYPE_BYTES.get(dtype or "", 0), LARGEST)
