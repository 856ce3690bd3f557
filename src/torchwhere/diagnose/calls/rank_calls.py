"""What one rank says: the collectives it issued, where it is now, and how it ended.

Takes transcripts, gives a `RankCalls` for each rank. What clerks have numbered for themselves gets
numbers here that mean the same on every rank, so that the testimonies of thousands of ranks are
compared as arrays. An event is put together when it is asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import NO_STEP
from torchwhere.blackbox.reader import read_box
from torchwhere.blackbox.run import RunSummary
from torchwhere.blackbox.summary import BoxSummary
from torchwhere.core.errors import TorchwhereError
from torchwhere.core.events import Event, Kind
from torchwhere.core.place import PASS_LABELS, Certainty, Place
from torchwhere.diagnose.calls.encode import CallBatch, Encoder, RankSummary
from torchwhere.diagnose.calls.job_calls import (
    FORM_SHIFT,
    Counted,
    DecodedBatch,
    IdMap,
    StreamCalls,
)
from torchwhere.diagnose.calls.keys import Group as Group
from torchwhere.diagnose.calls.keys import StreamKey as StreamKey
from torchwhere.diagnose.calls.keys import parsed

_MOST_RANKS_SHOWN = 64
_OWN = -2  # the clerk who writes down single boxes


class Interner:
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

    def __iter__(self) -> Iterator[Any]:
        return iter(self._things)


class SharedIds:
    """What groups, forms and meanings are called, by all alike."""

    def __init__(self) -> None:
        self.groups = Interner()
        self.signature_ids = Interner()
        self.site_ids = Interner()
        self.site_ids.number(None)  # 0: a place that says nothing of what was issued
        self._parsed: dict[str, Any] = {}

    def group(self, key: StreamKey) -> Group:
        found: Group = self.groups.thing(key.group)
        return found

    def parsed(self, text: str) -> Any:
        """What a JSON text says, parsed once. It is not to be changed."""
        if text not in self._parsed:
            self._parsed[text] = parsed(text)
        return self._parsed[text]


@dataclass(slots=True)
class RankCalls:
    """What one rank's box says."""

    rank: int
    rank_summary: RankSummary
    counts: dict[StreamKey, int]  # issued ever, per stream
    calls: dict[StreamKey, StreamCalls]
    shared_ids: SharedIds = field(repr=False)
    last: tuple[StreamKey, int] | None = None  # its last collective
    _box: Box | None = None

    @property
    def label(self) -> BoxSummary:
        return self.rank_summary.label

    @property
    def end(self) -> Event | None:
        return self.rank_summary.end

    @property
    def exception(self) -> Event | None:
        """The last one."""
        return self.rank_summary.exceptions[-1] if self.rank_summary.exceptions else None

    @property
    def is_compiling(self) -> bool:
        return self.rank_summary.is_compiling

    @property
    def in_collective_since_ns(self) -> int | None:
        """Wall clock of its last record, if that is a collective and no cursor has moved since;
        else None."""
        return self.rank_summary.in_collective_since_ns

    @property
    def place(self) -> Place:
        """Where it is: the module and pass of the main thread; of a program that trains in another
        one, of that."""
        return self.rank_summary.place or Place(
            rank=self.rank, step=None, pass_="outside", certainty=Certainty.UNKNOWN
        )

    @property
    def box(self) -> Box | None:
        """All that it recorded. Of a job that runs, newer than the rest; None if the file is
        gone."""
        if self._box is None:
            try:
                self._box = read_box(self.label.path)
            except TorchwhereError:
                return None
        return self._box

    def issued(self, key: StreamKey, number: int) -> Event | None:
        """One collective of this rank; None where the ring no longer has it."""
        calls = self.calls.get(key)
        if calls is None or calls.at(number) is None:
            return None
        t_ns, place = int(calls.times_ns(number, number + 1)[0]), self._place(calls, number)
        return Event(
            Kind.COLLECTIVE.label, calls.record(number), t_ns, place, self.fields(key, number)
        )

    @property
    def last_collective(self) -> Event | None:
        return None if self.last is None else self.issued(*self.last)

    def order(self, key: StreamKey, number: int) -> int:
        """When a collective came among all this rank did. What the ring has lost was before
        everything it still has."""
        calls = self.calls.get(key)
        return -1 if calls is None or calls.at(number) is None else calls.record(number)

    def is_async(self, key: StreamKey, number: int) -> bool | None:
        """Whether a collective returned at once; None where the ring no longer has it."""
        calls = self.calls.get(key)
        return None if calls is None or calls.at(number) is None else calls.of(number)[1].is_async

    def issued_ns(self, key: StreamKey, number: int) -> int:
        """Wall clock; 0 where the ring no longer has it."""
        calls = self.calls.get(key)
        return (
            0
            if calls is None or calls.at(number) is None
            else int(calls.times_ns(number, number + 1)[0])
        )

    def place_of(self, key: StreamKey, number: int) -> Place | None:
        """Where a collective was issued; None where the ring no longer has it."""
        calls = self.calls.get(key)
        return None if calls is None or calls.at(number) is None else self._place(calls, number)

    def fields(self, key: StreamKey, number: int) -> dict[str, Any]:
        """What a collective is, as an event has it. It must be one that the ring still has."""
        signature, call_site = self.calls[key].of(number)
        group = self.shared_ids.group(key)
        known: dict[str, Any] = self.shared_ids.parsed(signature.text)
        return known | {
            "group_desc": group.desc,
            "mesh_dim": group.mesh_dim,
            "backend": group.backend,
            "group_size": len(group.ranks) or None,
            "group_ranks": list(group.ranks) if len(group.ranks) <= _MOST_RANKS_SHOWN else None,
            "number": number,
            "for": self.shared_ids.parsed(call_site.site_id[3]) if call_site.site_id[3] else None,
            "async": call_site.is_async,
        }

    def _place(self, calls: StreamCalls, number: int) -> Place:
        call_site, step = calls.of(number)[1], int(calls.steps(number, number + 1)[0])
        module, pass_, line, _ = call_site.site_id
        return Place(
            rank=self.rank,
            step=None if step == NO_STEP else step,
            pass_=PASS_LABELS.get(pass_, "outside"),
            module=module,
            call=call_site.call,
            line=line,
            graph=call_site.graph,
            thread=call_site.thread,
            certainty=Certainty(call_site.certainty),
            param=call_site.param,
        )


class JobCalls:
    """All testimonies of a run, in one language."""

    def __init__(self) -> None:
        self.by_rank: dict[int, RankCalls] = {}
        self.unnamed_counts: dict[
            int, tuple[int, ...]
        ] = {}  # how many a rank issued in each of its groups, where no more is known
        # ranks whose box is gone or cut, and was read before
        self.recalled: frozenset[int] = frozenset()
        self.past: frozenset[int] = frozenset()  # of these, those who may have done more since
        self.shared_ids = SharedIds()
        self.kept: dict[str, Any] = {}  # what was found out once and is asked for again
        self.extras: list[Any] = []  # what somebody else took from the boxes as they were read
        self._keys: dict[StreamKey, StreamKey] = {}
        self._clerks: dict[int, IdMap] = {}
        self._own_clerk = Encoder()

    def hear(self, rank: int, box: Box) -> RankCalls:
        """One box, here and now."""
        ((said, page),) = self._pages(self._own_clerk.encode([box]), _OWN)
        found = self.by_rank[rank] = self._rank_calls(rank, said, page)
        found._box = box
        return found

    def group(self, key: StreamKey) -> Group:
        return self.shared_ids.group(key)

    def has_data(self, rank: int) -> bool:
        """Whether it is known of a rank what it did last."""
        return rank in self.by_rank and rank not in self.past

    def copy(self) -> JobCalls:
        """The same testimonies; others may be added without changing these."""
        found = copy.copy(self)
        found.by_rank, found.kept = dict(self.by_rank), {}
        return found

    def admit(self, batch: CallBatch, *, encoder: int, wanted: Container[Path]) -> None:
        """What a clerk has written down of the wanted boxes. Of one clerk, transcripts come in the
        order they were made in."""
        for said, page in self._pages(batch, encoder):
            if said.label.path in wanted and said.label.lacks_counts:
                self._note(said)
            elif said.label.path in wanted:
                self.by_rank[said.label.rank] = self._rank_calls(said.label.rank, said, page)

    def note(self, box: Box) -> None:
        """A box that was cut before its counts, or before the names of what they count."""
        for said, _ in self._pages(self._own_clerk.encode([box]), _OWN):
            self._note(said)

    def _note(self, said: RankSummary) -> None:
        if said.unnamed is not None:
            self.unnamed_counts[said.label.rank] = said.unnamed

    def has_come(self, rank: int, key: StreamKey, number: int) -> bool | None:
        """Whether a rank that is not heard has issued a collective of a whole group: by its bare
        counts, if they leave no doubt which of them is that group's. None where they do."""
        counts = self.unnamed_counts.get(rank)
        if counts is None or key.source != -1 or key.destination != -1:
            return None
        come = {count > number for count in counts}
        return come.pop() if len(come) == 1 else None

    def counted(self, steps: Mapping[int, tuple[int, int]]) -> Iterator[Counted]:
        """All calls that the rings still have without a hole, counted; and those in the first to
        the last step of each rank."""
        pages = {
            id(calls._page): calls._page
            for said in self.by_rank.values()
            for calls in list(said.calls.values())[:1]
        }
        for page in pages.values():
            yield self._counted(page, steps)

    def _counted(self, page: DecodedBatch, steps: Mapping[int, tuple[int, int]]) -> Counted:
        told, said = page.batch, page.batch.rank_summaries
        lengths = [sum(part.length for part in each.parts) for each in said]
        ends = [*(each.pairs_at for each in said[1:]), len(told.pairs)]
        is_ours = [
            (own := self.by_rank.get(each.label.rank)) is not None and own.rank_summary is each
            for each in said
        ]
        spans = np.array([steps.get(each.label.rank, (1, 0)) for each in said], np.int64) - [
            [each.step] for each in said
        ]
        first, last = np.repeat(spans, lengths, axis=0).T
        pair = told.codes.astype(np.int64) + np.repeat([each.pairs_at for each in said], lengths)
        counts = np.bincount(pair, minlength=len(told.pairs))
        within = np.bincount(
            pair[(told.steps >= first) & (told.steps <= last)], minlength=len(told.pairs)
        )
        room = [end - each.pairs_at for end, each in zip(ends, said, strict=True)]
        kept = (counts > 0) & np.repeat(is_ours, room)
        ranks = np.repeat([each.label.rank for each in said], room)
        encoder = page.encoder
        columns = (ranks[kept], told.pairs[kept], counts[kept], within[kept])
        return Counted(*columns, encoder.signatures, encoder.call_sites, encoder.groups)

    def _pages(self, batch: CallBatch, encoder: int) -> Iterator[tuple[RankSummary, DecodedBatch]]:
        known = self._clerks.setdefault(encoder, IdMap())
        self._learn(known, batch)
        pairs = batch.pairs + 1
        site_ids = known.site_ids[pairs[:, 1]] * known.has_site_id[pairs[:, 0]]
        page = DecodedBatch(batch, known, known.signature_ids[pairs[:, 0]] << FORM_SHIFT | site_ids)
        return ((said, page) for said in batch.rank_summaries)

    def _learn(self, known: IdMap, batch: CallBatch) -> None:
        known.groups += [self.shared_ids.groups.number(group) for group in batch.groups]
        known.signatures += batch.signatures
        known.call_sites += batch.call_sites
        new_forms = [
            self.shared_ids.signature_ids.number(signature.signature_id)
            for signature in batch.signatures
        ]
        has_site_id = [not signature.is_bookkeeping for signature in batch.signatures]
        known.has_site_id = np.concatenate([known.has_site_id, np.array(has_site_id, np.bool_)])
        new_meanings = [
            self.shared_ids.site_ids.number(call_site.compared) for call_site in batch.call_sites
        ]
        known.signature_ids = np.concatenate([known.signature_ids, np.array(new_forms, np.uint64)])
        known.site_ids = np.concatenate([known.site_ids, np.array(new_meanings, np.uint64)])

    def _rank_calls(self, rank: int, said: RankSummary, page: DecodedBatch) -> RankCalls:
        found = RankCalls(rank, said, {}, {}, self.shared_ids)
        groups, signature_ids, keys = page.encoder.groups, page.encoder.signature_ids, self._keys
        for part in said.parts:
            key = StreamKey(groups[part.key.group], part.key.source, part.key.destination)
            key = keys.setdefault(key, key)  # one object for all ranks
            found.counts[key] = part.issued
            if part.length:
                signature_id = int(signature_ids[part.signature + 1]) if part.signature >= 0 else -1
                found.calls[key] = StreamCalls(
                    part.first, signature_id, part.length, part.at, said, page
                )
            if said.last is not None and part.key == said.last[0]:
                found.last = key, said.last[1]
        return found


def heard(run: RunSummary[Any]) -> JobCalls:
    """All boxes of a run that was read whole. One that was cut before its counts has nothing to
    say."""
    job_calls = JobCalls()
    for rank, box in run.in_order():
        if box.lacks_counts:
            job_calls.note(box)
        else:
            job_calls.hear(rank, box)
    return job_calls
