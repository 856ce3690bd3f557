"""The collectives of one rank in one stream, as array views into a batch, with ids that all ranks
of the job share. An `IdMap` translates the local ids of one encoder to them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import numpy as np

from torchwhere.blackbox.string_table import Group, json_value
from torchwhere.core.arrays import AnyArray, Bools, Ints, Words
from torchwhere.core.grouping import Interner, grouped
from torchwhere.diagnose.calls import stream_calls
from torchwhere.diagnose.calls.encode import CallBatch, RankSummary
from torchwhere.diagnose.calls.keys import CallSite, NewValues, Signature, StreamKey

# A packed id holds the shared signature id in its upper half, the shared site id in its lower half.
_SIGNATURE_SHIFT = np.uint64(32)
_SITE_MASK = np.uint64(0xFFFFFFFF)


class SharedIds:
    """Ids of groups, signatures and call sites that mean the same on all ranks of a job."""

    def __init__(self) -> None:
        self.groups = Interner[Group]()
        self.signature_ids = Interner[tuple[str, str]]()
        # id 0: a place that says nothing about the call (`CallSite.compared`)
        self.site_ids = Interner[Any]([None])
        # parses a JSON text once; callers must not change the result
        self.parsed = cache(json_value)

    def group(self, key: StreamKey) -> Group:
        return self.groups[key.group]


@dataclass(slots=True)
class IdMap:
    """Translates the local ids of one encoder to shared ids."""

    groups: list[int] = field(default_factory=list)
    signatures: list[Signature] = field(default_factory=list)  # by local id
    call_sites: list[CallSite] = field(default_factory=list)  # by local id
    # The shared id of local id i is at i + 1: a call of an unknown group has the local id -1.
    signature_ids: Words = field(default_factory=lambda: np.zeros(1, np.uint64))
    site_ids: Words = field(default_factory=lambda: np.zeros(1, np.uint64))
    # for each signature, whether its call site is compared
    has_site_id: Bools = field(default_factory=lambda: np.ones(1, np.bool_))

    def extend(self, new_values: NewValues, shared: SharedIds) -> None:
        """Adds the next local ids of the encoder."""
        groups, signatures, call_sites = new_values
        self.groups += map(shared.groups.id_of, groups)
        self.signatures += signatures
        self.call_sites += call_sites
        signature_ids = [shared.signature_ids.id_of(own.signature_id) for own in signatures]
        site_ids = [shared.site_ids.id_of(site.compared) for site in call_sites]
        has_site_id = [not signature.is_bookkeeping for signature in signatures]
        self.signature_ids = np.append(self.signature_ids, np.array(signature_ids, np.uint64))
        self.site_ids = np.append(self.site_ids, np.array(site_ids, np.uint64))
        self.has_site_id = np.append(self.has_site_id, np.array(has_site_id, np.bool_))


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """A batch together with the shared ids of its pairs."""

    batch: CallBatch
    id_map: IdMap
    packed_ids: Words  # of each pair

    @classmethod
    def decode(cls, batch: CallBatch, id_map: IdMap) -> DecodedBatch:
        """Translates the local ids of a batch. The map must already hold the batch's new ids."""
        signatures, call_sites = (batch.pairs + 1).T  # local id -1 is at index 0
        site_ids = id_map.site_ids[call_sites] * id_map.has_site_id[signatures]
        packed_ids = id_map.signature_ids[signatures] << _SIGNATURE_SHIFT | site_ids
        return cls(batch, id_map, packed_ids)


# Not frozen: a frozen dataclass takes four times as long to create, and a job has hundreds of
# thousands of these.
@dataclass(slots=True)
class StreamCalls:
    """The newest calls of one rank in one stream, as far as their numbers have no gap."""

    first: int  # number of the first call
    signature_id: int  # the shared id that all these calls have; -1 if they have several
    _length: int
    _at: int  # index of the first call in the arrays
    _summary: RankSummary
    _decoded: DecodedBatch

    def __len__(self) -> int:
        return self._length

    @property
    def last(self) -> int:
        """Number of the last call."""
        return self.first + self._length - 1

    def at(self, number: int) -> int | None:
        """Returns the index of a call; None if the ring has lost it."""
        return number - self.first if self.first <= number <= self.last else None

    def _rows(self, first: int | None, end: int | None) -> slice:
        """Returns where the arrays have the calls from number `first` to before `end`."""
        begin = self._at + (0 if first is None else first - self.first)
        return slice(begin, self._at + (self._length if end is None else end - self.first))

    def packed_ids(self, first: int | None = None, end: int | None = None) -> Words:
        """Returns signature id and site id of each call in one integer.

        Equal integers mean that two ranks issued the same call. `signature_ids` and `site_ids`
        unpack them.
        """
        codes = self._decoded.batch.codes[self._rows(first, end)]
        own_ids = self._decoded.packed_ids[self._summary.pairs_at :]
        packed_ids: Words = own_ids[codes]
        return packed_ids

    def codes(self) -> AnyArray:
        """Returns codes that are equal if two calls of this rank have equal signature and site."""
        codes: AnyArray = self._decoded.batch.codes[self._rows(None, None)]
        return codes

    def steps(self, first: int | None = None, end: int | None = None) -> Ints:
        steps = self._decoded.batch.steps[self._rows(first, end)]
        return steps.astype(np.int64) + self._summary.step

    def times_ns(self, first: int | None = None, end: int | None = None) -> Ints:
        """Returns when the calls were issued, by the wall clock of the rank's host."""
        ticks = self._decoded.batch.ticks[self._rows(first, end)]
        return ticks.astype(np.int64) * self._summary.tick_ns + self._summary.start_ns

    @property
    def has_device_delays(self) -> bool:
        return self._decoded.batch.delays.dtype.itemsize > 1

    def device_delays_ns(self, first: int, end: int) -> Ints:
        """Returns how long after their issue the device reached some calls; negative: unknown."""
        delays = self._decoded.batch.delays[self._rows(first, end)].astype(np.int64)
        return (delays - 1) * 1000

    def set_back(self, by_ns: int) -> StreamCalls:
        """Returns the same calls with times that are earlier by `by_ns`."""
        if not by_ns:
            return self
        start_ns = self._summary.start_ns - by_ns
        return replace(self, _summary=self._summary._replace(start_ns=start_ns))

    def in_step(self, first: int, end: int) -> tuple[Bools, Bools]:
        """Returns two flags for each call from number `first` to before `end`.

        The first flag says whether the recorded step is the call's own (`CallSite.is_counted_by`).
        The second flag marks shadow calls, which belong to a step of other ranks.
        """
        call_sites, which = self._call_sites(first, end)
        steppers = self._summary.steppers
        is_counted = np.array([site.is_counted_by(steppers) for site in call_sites], np.bool_)
        is_shadow = np.array([site.is_shadow for site in call_sites], np.bool_)
        return is_counted[which], is_shadow[which]

    def are_async(self, first: int, end: int) -> Bools:
        """Returns which calls from number `first` to before `end` were asynchronous."""
        call_sites, which = self._call_sites(first, end)
        return np.array([site.is_async for site in call_sites], np.bool_)[which]

    def _call_sites(self, first: int, end: int) -> tuple[list[CallSite], Ints]:
        """Returns the distinct call sites of some calls, and the index of each call's site."""
        batch = self._decoded.batch
        codes, which = np.unique(batch.codes[self._rows(first, end)], return_inverse=True)
        sites = batch.pairs[self._summary.pairs_at + codes.astype(np.int64), 1]
        return [self._decoded.id_map.call_sites[site] for site in sites.tolist()], which

    def record(self, number: int) -> int:
        """Returns the record number of a call: its position among everything the rank did."""
        record = self._decoded.batch.records[self._at + number - self.first]
        return int(record) + self._summary.record

    def records(self) -> Ints:
        """Returns the record numbers of all calls."""
        records = self._decoded.batch.records[self._rows(None, None)]
        return records.astype(np.int64) + self._summary.record

    def until(self, record: int) -> StreamCalls:
        """Returns the calls up to a record number."""
        length = int(np.searchsorted(self.records(), record, side="right"))
        return replace(self, _length=length)

    def of(self, number: int) -> tuple[Signature, CallSite]:
        """Returns signature and call site of a call."""
        batch, id_map = self._decoded.batch, self._decoded.id_map
        code = int(batch.codes[self._at + number - self.first])
        signature, call_site = batch.pairs[self._summary.pairs_at + code]
        return id_map.signatures[signature], id_map.call_sites[call_site]


def signature_ids(packed_ids: Words) -> Ints:
    """Unpacks what all ranks must agree on."""
    return (packed_ids >> _SIGNATURE_SHIFT).astype(np.int64)


def site_ids(packed_ids: Words) -> Ints:
    """Unpacks module, pass, line and beneficiary, on which the ranks of a correct program agree.

    0 stands for a place that says nothing about the call.
    """
    return (packed_ids & _SITE_MASK).astype(np.int64)


# -- windows ---------------------------------------------------------------------------------------
# The part of a stream that all its ranks still have, as matrices: one row for each class of ranks,
# one column for each call.


@dataclass(frozen=True)
class CallWindow:
    """The numbers of a stream that all its ranks still have.

    Ranks that issued the same calls in the same steps form a class. Rows of matrices are classes,
    columns are numbers.
    """

    key: StreamKey
    ranks: tuple[int, ...]
    calls: tuple[StreamCalls, ...]  # of each rank
    first: int
    end: int
    classes: Ints  # of each rank
    heads: tuple[int, ...]  # index of the first rank of each class

    @cached_property
    def sizes(self) -> Ints:
        """How many ranks each class has."""
        return np.bincount(self.classes)

    @cached_property
    def _packed_ids(self) -> Words:
        return np.stack([self.calls[head].packed_ids(self.first, self.end) for head in self.heads])

    @cached_property
    def signature_ids(self) -> Ints:
        return stream_calls.signature_ids(self._packed_ids)

    @cached_property
    def site_ids(self) -> Ints:
        return stream_calls.site_ids(self._packed_ids)

    @cached_property
    def steps(self) -> Ints:
        return np.stack([self.calls[head].steps(self.first, self.end) for head in self.heads])

    @cached_property
    def _in_step(self) -> tuple[Bools, Bools]:
        flags = [self.calls[head].in_step(self.first, self.end) for head in self.heads]
        is_counted, is_shadow = (np.stack(rows) for rows in zip(*flags, strict=True))
        shadows: Bools = np.logical_or.reduce(is_shadow)
        return np.logical_and.reduce(is_counted) & ~shadows, shadows

    @property
    def has_steps(self) -> Bools:
        """For each number, whether the recorded step is the call's own on all ranks."""
        return self._in_step[0]

    @property
    def is_shadow(self) -> Bools:
        """For each number, whether it is a shadow call on some rank (`CallSite.is_shadow`)."""
        return self._in_step[1]

    @cached_property
    def differs(self) -> Ints:
        """The columns in which ranks have different call sites. Site 0 differs from no other."""
        low = np.where(self.site_ids > 0, self.site_ids, np.iinfo(np.int64).max).min(axis=0)
        return np.flatnonzero(low < self.site_ids.max(axis=0))

    @cached_property
    def usuals(self) -> Ints:
        """The call site that most ranks have, for each column."""
        usuals: Ints = self.site_ids.max(axis=0)
        for column in self.differs.tolist():
            usuals[column] = self.usual(self.site_ids[:, column])
        return usuals

    def odd_at(self, column: int) -> Bools:
        """Returns the classes whose call site is not the one that most ranks have."""
        here = self.site_ids[:, column]
        is_odd: Bools = (here != self.usuals[column]) & (here > 0)
        return is_odd

    def agrees_at(self, column: int) -> bool:
        here = self.site_ids[:, column]
        return bool(((here == here.max()) | (here == 0)).all())

    def members_of(self, rows: Bools) -> tuple[int, ...]:
        """Returns the ranks of some classes."""
        return tuple(
            rank for rank, row in zip(self.ranks, self.classes.tolist(), strict=True) if rows[row]
        )

    def cohorts(self, values: AnyArray) -> tuple[tuple[int, ...], ...]:
        """Groups ranks by the value of their class, the largest group first."""
        by_value = grouped(zip(values[self.classes].tolist(), self.ranks, strict=True))
        largest_first = sorted(by_value.values(), key=lambda cohort: (-len(cohort), cohort[0]))
        return tuple(map(tuple, largest_first))

    def usual(self, values: AnyArray) -> int:
        """Returns the value (not 0) that most ranks have; of several, that of the first rank."""
        counts: dict[int, int] = {}
        for value, size in zip(values.tolist(), self.sizes.tolist(), strict=True):
            if value:
                counts[value] = counts.get(value, 0) + size
        return max(counts, key=lambda value: counts[value])

    def without(self, ranks: Collection[int]) -> CallWindow | None:
        """Returns the window of the other ranks, which may be longer; None if there is none."""
        rest = [
            (rank, calls)
            for rank, calls in zip(self.ranks, self.calls, strict=True)
            if rank not in ranks
        ]
        return call_window(self.key, rest, members=self.ranks)


def call_window(
    key: StreamKey, rank_calls: Sequence[tuple[int, StreamCalls]], *, members: Sequence[int]
) -> CallWindow | None:
    """Compares the calls of the members of a stream.

    Returns None if fewer than two ranks have data, if they have no number in common, or if they are
    messages that all have one signature.
    """
    is_member = frozenset(members)
    rank_calls = [(rank, calls) for rank, calls in rank_calls if rank in is_member]
    if len(rank_calls) < 2:
        return None
    ranks, calls = zip(*rank_calls, strict=True)
    is_message = key.source != key.destination
    if is_message and calls[0].signature_id == calls[1].signature_id >= 0:
        return None
    first = max(own.first for own in calls)
    end = min(own.last for own in calls) + 1
    if first >= end:
        return None
    class_of: dict[bytes, int] = {}
    heads: list[int] = []
    classes = np.empty(len(calls), np.int64)
    for index, own in enumerate(calls):
        content = _content(own, first, end, is_message=is_message)
        number = classes[index] = class_of.setdefault(content, len(class_of))
        if number == len(heads):
            heads.append(index)
    return CallWindow(key, ranks, calls, first, end, classes, tuple(heads))


def _content(calls: StreamCalls, first: int, end: int, *, is_message: bool) -> bytes:
    """Returns what is compared. Of a message only the signature: its ends have different sites."""
    packed_ids = calls.packed_ids(first, end)
    if is_message:
        return stream_calls.signature_ids(packed_ids).tobytes()
    return packed_ids.tobytes() + calls.steps(first, end).tobytes()
