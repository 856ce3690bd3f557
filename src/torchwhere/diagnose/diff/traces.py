"""What a rank did, in numbers that mean the same on every rank: the basis for comparing the events
of many ranks.

Takes a box, gives a `EventSequence`: arrays with an item for each event. Names are seen from the
rank: a group is the one of that dimension or description that the rank is in, a peer is so many
ranks further on. So ranks that do the same in other groups, or at other places of a ring, have the
same numbers. What repeats of an event is looked at once: about 1 ms a rank. Boxes are not kept: a
trace is 70 bytes an event, and the few events that are told of are read again.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import NO_CALL, NO_STEP
from torchwhere.core.events import TEXT_FIELD, Event, Kind
from torchwhere.core.place import Pass
from torchwhere.diagnose.calls.keys import P2P, must_agree
from torchwhere.diagnose.diff.log_lines import Stripper, skeleton

Numbers = npt.NDArray[np.int64]
Patterns = tuple[re.Pattern[str], ...]

_PASS_LABELS = {int(pass_): pass_.label for pass_ in Pass}
_TEXTS = tuple(int(kind) for kind in TEXT_FIELD)
_COMPILES = (int(Kind.COMPILE_BEGIN), int(Kind.COMPILE_END))  # data decides what is compiled anew
_ALIKE = (
    "kind",
    "pass",
    "module",
    "call",
    "line",
    "subject",
    "beneficiary",
    "param",
    "extra",
    "step",
)  # the last two do not count


class Interner:
    """A number for everything that is compared, from 1 on; the same for equal things, on all
    ranks."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def number(self, thing: Hashable) -> int:
        return self._numbers.setdefault(thing, len(self._numbers) + 1)

    def things(self) -> dict[int, Any]:
        return {number: thing for thing, number in self._numbers.items()}


class EventStream(NamedTuple):
    """Events that come in one order: those of one kind, and of one group."""

    kind: Kind
    group: str = ""
    is_p2p: bool = False


class SharedStream(NamedTuple):
    """What is counted in one sequence on all its ranks: the collectives of a group, or the messages
    between two ranks."""

    group: str
    source: int = -1
    destination: int = -1


@dataclass(slots=True)
class NumberedCalls:
    """The collectives of one wire, by number."""

    numbers: Numbers
    agreed: Numbers  # what all its ranks must agree on
    records: Numbers  # their numbers in the box
    steps: Numbers


@dataclass(slots=True)
class EventSequence:
    """What one rank did, in order. Arrays of one length."""

    rank: int
    boxes: Mapping[int, Box]  # those of all ranks, which may be read when they are asked for
    records: Numbers  # their numbers in the box
    steps: Numbers
    streams: Numbers
    flow: Numbers  # what it is
    value: Numbers  # of texts: with the values in it; else 0
    has_ended: bool
    first_step: int | None  # the first that is there as a whole
    is_cut: bool  # older events were overwritten
    groups: frozenset[str] = frozenset()  # labels of the groups it is in
    calls: dict[SharedStream, NumberedCalls] = field(default_factory=dict)
    # the first message of each step: step, op, peer
    messages: tuple[tuple[int, str, int], ...] = ()
    left_out: int = 0  # events of other threads
    compiled: int = 0

    def event(self, record: int) -> Event | None:
        """The event of a record; None if it was overwritten meanwhile."""
        box = self.boxes[self.rank]
        at = int(np.searchsorted(box.records["number"], record))
        return (
            box.event(at)
            if at < len(box.records) and int(box.records["number"][at]) == record
            else None
        )

    def from_step(self, step: int) -> EventSequence:
        """What is left of it from a step on."""
        kept = self.steps >= step
        self.records, self.steps, self.streams = (
            self.records[kept],
            self.steps[kept],
            self.streams[kept],
        )
        self.flow, self.value = self.flow[kept], self.value[kept]
        return self


class _Fact(NamedTuple):
    """What repeats of a collective."""

    stream: EventStream
    seen: tuple[Any, ...]  # operation, group and peer as the rank sees them
    wire: SharedStream
    agreed: int
    op: str
    peer: int


@dataclass(slots=True)
class _Reader:
    """Reads one box."""

    box: Box
    boxes: Mapping[int, Box]
    lexicon: Interner
    streams: Interner
    strip: Stripper
    ignore: Patterns = ()
    labels: dict[str, str] = field(default_factory=dict)  # of groups by name
    members: dict[str, list[int]] = field(default_factory=dict)
    facts: dict[int, _Fact] = field(default_factory=dict)  # of collectives by what repeats of them
    lost: int = -1  # the last step of which a text was overwritten

    def read(self) -> EventSequence:
        self._name_groups()
        records = self.box.records
        threads = self._threads_in_order(records)
        kept = np.flatnonzero(
            np.isin(records["thread"], threads)
            & ~np.isin(records["kind"], _COMPILES)
            & (records["step"] != NO_STEP)
        )
        streams, flow, value = self._columns(records[kept])
        heeded = streams != 0
        kept, streams, flow, value = kept[heeded], streams[heeded], flow[heeded], value[heeded]
        rows = records[kept]
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
            messages=self._messages(kept[rows["kind"] == Kind.COLLECTIVE]),
            left_out=int((~np.isin(records["thread"], threads) & ~collectives).sum()),
            compiled=int((records["kind"] == Kind.COMPILE_BEGIN).sum()),
        )

    def _name_groups(self) -> None:
        """Each group by its dimension or description; those that share it, by the order in which
        this rank met them."""
        seen: dict[str, int] = {}
        for name, group in self.box.groups().items():
            ranks = group.get("ranks")
            self.members[name] = members = (
                [rank for rank in ranks if isinstance(rank, int)] if isinstance(ranks, list) else []
            )
            desc = str(group.get("desc") or "")
            label = str(
                group.get("mesh_dim")
                or (self.strip(desc) if desc not in ("", "undefined") else f"{len(members)} ranks")
            )
            seen[label] = seen.get(label, 0) + 1
            self.labels[name] = label if seen[label] == 1 else f"{label} ({seen[label]})"

    def _threads_in_order(self, records: npt.NDArray[Any]) -> list[int]:
        """The thread that trains, and those of the autograd engine, which work while it waits.
        Others come at any time."""
        numbers, counts = np.unique(records["thread"], return_counts=True)
        if not len(numbers):
            return []
        leading = int(numbers[np.argmax(counts)])
        return [
            n
            for n in map(int, numbers)
            if n == leading or str(self.box.thread(n)).startswith("native-")
        ]

    def _first_step(self, records: npt.NDArray[Any]) -> int | None:
        steps = records["step"][records["step"] != NO_STEP]
        if not len(steps):
            return None
        is_whole = not self.box.counts.overwritten or records["kind"][0] == Kind.STEP_BEGIN
        return max(self.lost + 1, int(steps[0]) if is_whole else int(steps[0]) + 1)

    # -- what an event is --------------------------------------------------------------------------

    def _columns(self, rows: npt.NDArray[Any]) -> tuple[Numbers, Numbers, Numbers]:
        """Stream, flow and value of each event. Those that are alike but for time and number are
        looked at once."""
        has_text = np.isin(rows["kind"], _TEXTS)
        alike = _numbered(rows[name] for name in _ALIKE[:-2])
        alike = np.where(has_text, -1 - np.arange(len(rows)), alike)
        _, first, which = np.unique(alike, return_index=True, return_inverse=True)
        found = np.array(
            [self._event(*row) for row in rows[list(_ALIKE)][first].tolist()], np.int64
        ).reshape(-1, 3)[which]
        return found[:, 0], found[:, 1], found[:, 2]

    def _event(
        self,
        kind: int,
        pass_: int,
        module: int,
        call: int,
        line: int,
        what: int,
        beneficiary: int,
        param: int,
        more: int,
        step: int,
    ) -> tuple[int, int, int]:
        """Stream, flow and value of one event; 0 for one that is to be ignored."""
        name, value = self.box.name, 0
        if kind == Kind.COLLECTIVE:
            fact = self._fact(what)
            stream, detail = fact.stream, (*fact.seen, name(beneficiary))
        elif kind in _TEXTS:
            text = self.box.text(more)
            self.lost = max(self.lost, step) if text is None else self.lost
            said = self.strip(text or "")
            stream, detail, value = (
                EventStream(Kind(kind)),
                (skeleton(said),),
                self.lexicon.number(said),
            )
        else:
            stream, detail = EventStream(Kind(kind)), (self.strip(name(what) or ""),)
        place = (
            *(
                kind,
                _PASS_LABELS.get(pass_),
                name(module),
                None if call == NO_CALL or not module else call,
            ),
            *(self.strip(name(line) or ""), name(param)),
        )
        if self.ignore and self._is_ignored(
            f"{Kind(kind).label} {' '.join(map(str, detail))} {name(module)} {name(line)}"
        ):
            return 0, 0, 0
        return self.streams.number(stream), self.lexicon.number((*place, *detail)), value

    def _is_ignored(self, text: str) -> bool:
        return any(pattern.search(text) for pattern in self.ignore)

    # -- collectives -------------------------------------------------------------------------------

    def _fact(self, what: int) -> _Fact:
        """What repeats of a collective, as this rank sees it. Found once."""
        known = self.facts.get(what)
        if known is None:
            fields = self.box.value(what)
            known = self.facts[what] = self._look_at(fields if isinstance(fields, dict) else {})
        return known

    def _look_at(self, fields: dict[str, Any]) -> _Fact:
        op, group, peer = str(fields.get("op")), str(fields.get("group")), fields.get("peer")
        label, is_p2p = self.labels.get(group, f"group {group}"), op in P2P
        seen = (op, label, self._seen(peer, group, is_p2p=is_p2p))
        agreed: tuple[Any, ...] = tuple(
            repr(fields.get(key)) for key in must_agree(op) if key != "peer"
        )
        wire = SharedStream(group)
        if is_p2p:
            ends = (self.box.rank, peer) if op == "send" else (peer, self.box.rank)
            wire = SharedStream(group, *(end if isinstance(end, int) else -1 for end in ends))
        else:
            agreed = (*seen, *agreed)
        known_peer = peer if isinstance(peer, int) else -1
        return _Fact(
            EventStream(Kind.COLLECTIVE, label, is_p2p),
            seen,
            wire,
            self.lexicon.number(agreed),
            op,
            known_peer,
        )

    def _seen(self, peer: Any, group: str, *, is_p2p: bool) -> int | None:
        """A peer as this rank sees it: how many ranks further on in the group; a root: which one of
        the group."""
        members = self.members.get(group, [])
        if peer not in members:
            return None
        at = members.index(peer)
        return (
            (at - members.index(self.box.rank)) % len(members)
            if is_p2p and self.box.rank in members
            else at
        )

    def _calls(self, at: Numbers) -> dict[SharedStream, NumberedCalls]:
        """All collectives, whichever thread issued them, by what they are counted in."""
        rows = self.box.records[at]
        packed_ids, which = np.unique(rows["subject"], return_inverse=True)
        facts = [self._fact(int(what)) for what in packed_ids]
        wires = list(dict.fromkeys(fact.wire for fact in facts))
        number = {wire: index for index, wire in enumerate(wires)}
        wire_of = np.array([number[fact.wire] for fact in facts], np.int64)[which]
        agreed = np.array([fact.agreed for fact in facts], np.int64)[which]
        numbers, records, steps = (
            rows[name].astype(np.int64) for name in ("extra", "number", "step")
        )
        calls = {}
        for index, wire in enumerate(wires):
            mine = np.flatnonzero(wire_of == index)
            calls[wire] = NumberedCalls(numbers[mine], agreed[mine], records[mine], steps[mine])
        return calls

    def _messages(self, at: Numbers) -> tuple[tuple[int, str, int], ...]:
        """The first message of each step: a stage of a pipeline begins with waiting for the one
        before it."""
        rows = self.box.records[at]
        packed_ids, which = np.unique(rows["subject"], return_inverse=True)
        rows = rows[
            np.array([self._fact(int(what)).stream.is_p2p for what in packed_ids], bool)[which]
        ]
        steps, first = np.unique(rows["step"], return_index=True)
        facts = [self._fact(int(rows["subject"][one])) for one in first]
        return tuple(
            (int(step), fact.op, fact.peer)
            for step, fact in zip(steps, facts, strict=True)
            if fact.peer >= 0
        )


def read_sequences(
    boxes: Mapping[int, Box], ranks: Iterable[int], *, strip: Patterns = (), ignore: Patterns = ()
) -> tuple[list[EventSequence], dict[int, EventStream]]:
    """The traces of some ranks, and the streams by number. With the user's own patterns of what to
    strip and to ignore."""
    lexicon, streams = Interner(), Interner()
    sequences = []
    for rank in ranks:
        box = boxes[rank]
        host = box.meta.get("host")
        of_rank = Stripper(rank, host if isinstance(host, str) else None, strip)
        sequences.append(_Reader(box, boxes, lexicon, streams, of_rank, ignore).read())
    return sequences, streams.things()


def _numbered(columns: Iterable[Any]) -> Any:
    """A number for each row, the same for equal rows."""
    numbers: Any = 0
    for column in columns:
        _, which = np.unique(column, return_inverse=True)
        numbers = numbers * (int(which.max(initial=0)) + 1) + which
        _, numbers = np.unique(numbers, return_inverse=True)
    return numbers
