"""The events of a rank as numbers that are equal on all ranks with equal events.

Takes a box, gives an `EventSequence`: arrays with one item for each event. Names are relative to
the rank: a group is known by its mesh dimension or description, a peer by its distance in the
group. So ranks with equal events in other groups, or elsewhere in a ring, get equal numbers. Each
distinct event is encoded once: about 1 ms a rank. Boxes are not kept in memory: a sequence takes
70 bytes an event, and the few events of the result are read again.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import NO_CALL, NO_STEP
from torchwhere.blackbox.string_table import (
    P2P,
    StreamName,
    ranks_of,
    shown_description,
    stream_ends,
    text_of,
)
from torchwhere.core.arrays import AnyArray, Ints
from torchwhere.core.events import TEXT_FIELD, Event, Kind
from torchwhere.core.grouping import Interner, per_distinct, row_ids
from torchwhere.core.place import PASS_LABELS
from torchwhere.diagnose.calls.keys import must_agree
from torchwhere.diagnose.diff.log_lines import Stripper, skeleton

Patterns = tuple[re.Pattern[str], ...]

_TEXTS = tuple(int(kind) for kind in TEXT_FIELD)
# these depend on the data: recompilation, and the memory of the device
_DATA_DEPENDENT = (int(Kind.COMPILE_BEGIN), int(Kind.COMPILE_END), int(Kind.MEMORY))
_IDENTITY = ("kind", "pass", "module", "call", "line", "subject", "beneficiary", "param")


class EventStream(NamedTuple):
    """Events with one order: those of one kind and, for collectives, of one group."""

    kind: Kind
    group: str = ""
    is_p2p: bool = False


@dataclass(slots=True)
class NumberedCalls:
    """The calls of one shared stream, in order."""

    numbers: Ints
    agreed: Ints  # ids of what all its ranks must agree on
    records: Ints  # record numbers in the box
    steps: Ints


@dataclass(slots=True)
class EventSequence:
    """The events of one rank in order, as arrays of one length."""

    rank: int
    boxes: Mapping[int, Box]  # of all ranks; may read a box on access
    records: Ints  # record numbers in the box
    steps: Ints
    streams: Ints
    flow: Ints  # id of the event without the numbers in its text
    value: Ints  # id of its text with the numbers; 0 without a text
    has_ended: bool
    first_step: int | None  # the first complete one
    is_cut: bool  # older events were overwritten
    groups: frozenset[str] = frozenset()  # labels of its groups
    calls: dict[StreamName, NumberedCalls] = field(default_factory=dict)
    # the first message of each step: step, op, peer
    messages: tuple[tuple[int, str, int], ...] = ()
    left_out: int = 0  # events of other threads
    compiled: int = 0

    def event(self, record: int) -> Event | None:
        """The event of a record; None if the job has overwritten it since."""
        box = self.boxes[self.rank]
        at = int(np.searchsorted(box.records["number"], record))
        if at < len(box.records) and int(box.records["number"][at]) == record:
            return box.event(at)
        return None

    def from_step(self, step: int) -> EventSequence:
        """Drop the events before a step."""
        is_later = self.steps >= step
        for name in ("records", "steps", "streams", "flow", "value"):
            setattr(self, name, getattr(self, name)[is_later])
        return self


class _CallFacts(NamedTuple):
    """The facts of a collective that all calls with the same fields share."""

    stream: EventStream
    relative: tuple[Any, ...]  # operation, group and peer as the rank sees them
    shared: StreamName
    agreed: int
    op: str
    peer: int


@dataclass(slots=True)
class _Reader:
    """Reads the sequence of one box."""

    box: Box
    boxes: Mapping[int, Box]
    ids: Interner[Hashable]
    streams: Interner[EventStream | None]
    strip: Stripper
    ignore: Patterns = ()
    labels: dict[str, str] = field(default_factory=dict)  # of groups, by name
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    facts: dict[int, _CallFacts] = field(default_factory=dict)  # by subject id
    last_lost_step: int = -1  # the last step with an overwritten text

    def read(self) -> EventSequence:
        self._name_groups()
        records = self.box.records
        threads = self._threads_in_order(records)
        at = np.flatnonzero(
            np.isin(records["thread"], threads)
            & ~np.isin(records["kind"], _DATA_DEPENDENT)
            & (records["step"] != NO_STEP)
        )
        streams, flow, value = self._columns(records[at])
        wanted = streams != 0
        at, streams, flow, value = at[wanted], streams[wanted], flow[wanted], value[wanted]
        rows = records[at]
        collectives = records["kind"] == Kind.COLLECTIVE
        return EventSequence(
            rank=self.box.rank,
            boxes=self.boxes,
            records=rows["number"].astype(np.int64),
            steps=rows["step"].astype(np.int64),
            streams=streams,
            flow=flow,
            value=value,
            has_ended=bool((records["kind"] == Kind.END).any()),
            first_step=self._first_step(records),
            is_cut=bool(self.box.counts.overwritten),
            groups=frozenset(self.labels.values()),
            calls=self._calls(np.flatnonzero(collectives)),
            messages=self._messages(at[rows["kind"] == Kind.COLLECTIVE]),
            left_out=int((~np.isin(records["thread"], threads) & ~collectives).sum()),
            compiled=int((records["kind"] == Kind.COMPILE_BEGIN).sum()),
        )

    def _name_groups(self) -> None:
        """Name each group by its dimension or description; groups with the same name are numbered
        in the order of their creation on this rank."""
        uses: dict[str, int] = {}
        for name, group in self.box.groups().items():
            members = self.members[name] = ranks_of(group.get("ranks"))
            label = str(group.get("mesh_dim") or "")
            if not label:
                desc = shown_description(str(group.get("desc") or ""))
                label = self.strip(desc) if desc else f"{len(members)} ranks"
            uses[label] = uses.get(label, 0) + 1
            self.labels[name] = label if uses[label] == 1 else f"{label} ({uses[label]})"

    def _threads_in_order(self, records: AnyArray) -> list[int]:
        """The training thread, and the threads of the autograd engine, which run while it waits.
        Events of other threads have no fixed order."""
        numbers, counts = np.unique(records["thread"], return_counts=True)
        if not len(numbers):
            return []
        training = int(numbers[np.argmax(counts)])
        return [
            number
            for number in map(int, numbers)
            if number == training or str(self.box.thread(number)).startswith("native-")
        ]

    def _first_step(self, records: AnyArray) -> int | None:
        steps = records["step"][records["step"] != NO_STEP]
        if not len(steps):
            return None
        is_complete = not self.box.counts.overwritten or records["kind"][0] == Kind.STEP_BEGIN
        return max(self.last_lost_step + 1, int(steps[0]) + (0 if is_complete else 1))

    # -- ids of events -----------------------------------------------------------------------------

    def _columns(self, rows: AnyArray) -> tuple[Ints, Ints, Ints]:
        """Stream, flow and value of each event. Events that differ only in time and number are
        encoded once."""
        has_text = np.isin(rows["kind"], _TEXTS)
        distinct = row_ids(rows[name] for name in _IDENTITY)
        distinct = np.where(has_text, -1 - np.arange(len(rows)), distinct)
        _, first, number_of = np.unique(distinct, return_index=True, return_inverse=True)
        fields = rows[[*_IDENTITY, "extra", "step"]][first]
        encoded = np.array([self._event(*row) for row in fields.tolist()], np.int64)
        columns = encoded.reshape(-1, 3)[number_of]
        return columns[:, 0], columns[:, 1], columns[:, 2]

    def _event(
        self,
        kind: int,
        pass_: int,
        module: int,
        call: int,
        line: int,
        subject: int,
        beneficiary: int,
        param: int,
        extra: int,
        step: int,
    ) -> tuple[int, int, int]:
        """Stream, flow and value of one event; zeros for an ignored one."""
        name, value = self.box.name, 0
        stream = EventStream(Kind(kind))
        details: tuple[Any, ...]
        if kind == Kind.COLLECTIVE:
            facts = self._facts(subject)
            stream, details = facts.stream, (*facts.relative, name(beneficiary))
        elif kind in _TEXTS:
            text = self.box.text(extra)
            if text is None:
                self.last_lost_step = max(self.last_lost_step, step)
            stripped = self.strip(text or "")
            details, value = (skeleton(stripped),), self.ids.id_of(stripped)
        else:
            details = (self.strip(name(subject) or ""),)
        words = f"{Kind(kind).label} {' '.join(map(str, details))} {name(module)} {name(line)}"
        if any(pattern.search(words) for pattern in self.ignore):
            return 0, 0, 0
        place = (
            kind,
            PASS_LABELS.get(pass_),
            name(module),
            None if call == NO_CALL or not module else call,
            self.strip(name(line) or ""),
            name(param),
        )
        return self.streams.id_of(stream), self.ids.id_of((*place, *details)), value

    # -- collectives -------------------------------------------------------------------------------

    def _facts(self, subject: int) -> _CallFacts:
        """The facts of a collective, computed once for each subject."""
        if subject not in self.facts:
            fields = self.box.value(subject)
            self.facts[subject] = self._new_facts(fields if isinstance(fields, dict) else {})
        return self.facts[subject]

    def _new_facts(self, fields: dict[str, Any]) -> _CallFacts:
        op, group, peer = str(fields.get("op")), str(fields.get("group")), fields.get("peer")
        label, is_p2p = self.labels.get(group, f"group {group}"), op in P2P
        peer_rank = peer if isinstance(peer, int) else -1
        relative = (op, label, self._relative_peer(peer, group, is_p2p=is_p2p))
        agreed: tuple[Any, ...] = tuple(
            repr(fields.get(key)) for key in must_agree(op) if key != "peer"
        )
        if not is_p2p:
            agreed = (*relative, *agreed)
        shared = StreamName(group, *stream_ends(op, rank=self.box.rank, peer=peer_rank))
        stream = EventStream(Kind.COLLECTIVE, label, is_p2p)
        return _CallFacts(stream, relative, shared, self.ids.id_of(agreed), op, peer_rank)

    def _relative_peer(self, peer: Any, group: str, *, is_p2p: bool) -> int | None:
        """The distance of a peer from this rank in the group; for a root, its index in it."""
        members = self.members.get(group, ())
        if peer not in members:
            return None
        at = members.index(peer)
        if is_p2p and self.box.rank in members:
            return (at - members.index(self.box.rank)) % len(members)
        return at

    def _calls(self, at: Ints) -> dict[StreamName, NumberedCalls]:
        """All collectives of all threads, by shared stream."""
        rows = self.box.records[at]
        streams = Interner[StreamName]()
        subjects = rows["subject"]
        stream_of = per_distinct(subjects, lambda entry: streams.id_of(self._facts(entry).shared))
        agreed = per_distinct(subjects, lambda entry: self._facts(entry).agreed)
        numbers, records, steps = (
            rows[name].astype(np.int64) for name in ("extra", "number", "step")
        )
        calls = {}
        for number, stream in enumerate(streams):
            own = np.flatnonzero(stream_of == number)
            calls[stream] = NumberedCalls(numbers[own], agreed[own], records[own], steps[own])
        return calls

    def _messages(self, at: Ints) -> tuple[tuple[int, str, int], ...]:
        """The first message of each step: a pipeline stage first waits for the stage before it."""
        rows = self.box.records[at]
        is_p2p = per_distinct(rows["subject"], lambda entry: self._facts(entry).stream.is_p2p, bool)
        rows = rows[is_p2p]
        steps, first = np.unique(rows["step"], return_index=True)
        facts = [self._facts(int(subject)) for subject in rows["subject"][first]]
        return tuple(
            (int(step), of_step.op, of_step.peer)
            for step, of_step in zip(steps, facts, strict=True)
            if of_step.peer >= 0
        )


def read_sequences(
    boxes: Mapping[int, Box], ranks: Iterable[int], *, strip: Patterns = (), ignore: Patterns = ()
) -> tuple[list[EventSequence], dict[int, EventStream]]:
    """The sequences of some ranks, and the streams by id. `strip` and `ignore` are patterns of the
    user."""
    # id 0 is that of an event that is not compared
    ids = Interner[Hashable]([None])
    streams = Interner[EventStream | None]([None])
    sequences = []
    for rank in ranks:
        box = boxes[rank]
        stripper = Stripper(rank, text_of(box.meta, "host"), strip)
        sequences.append(_Reader(box, boxes, ids, streams, stripper, ignore).read())
    return sequences, {at: stream for at, stream in enumerate(streams) if stream is not None}
