"""What one rank says: the collectives it issued, where it is now, and how it ended.

Takes transcripts, gives a `Testimony` for each rank. What clerks have numbered for themselves gets numbers here that mean the
same on every rank, so that the testimonies of thousands of ranks are compared as arrays. An event is put together when it is
asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from torchwhere.blackbox.box import PASS_LABELS, Box
from torchwhere.blackbox.file_format import NO_STEP
from torchwhere.blackbox.reader import read_box
from torchwhere.blackbox.run import Roster
from torchwhere.blackbox.summary import Label
from torchwhere.core.errors import TorchwhereError
from torchwhere.core.events import Event, Kind
from torchwhere.core.place import Certainty, Place
from torchwhere.diagnose.calls.encode import Clerk, Statement, Transcript
from torchwhere.diagnose.calls.job_calls import FORM_SHIFT, Calls, Clerks, Counted, Page
from torchwhere.diagnose.calls.keys import Group as Group
from torchwhere.diagnose.calls.keys import StreamKey as StreamKey
from torchwhere.diagnose.calls.keys import parsed

_MOST_RANKS_SHOWN = 64
_OWN = -2  # the clerk who writes down single boxes


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

    def __iter__(self) -> Iterator[Any]:
        return iter(self._things)


class Language:
    """What groups, forms and meanings are called, by all alike."""

    def __init__(self) -> None:
        self.groups = Lexicon()
        self.forms = Lexicon()
        self.meanings = Lexicon()
        self.meanings.number(None)  # 0: a place that says nothing of what was issued
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
class Testimony:
    """What one rank's box says."""

    rank: int
    statement: Statement
    counts: dict[StreamKey, int]  # issued ever, per stream
    calls: dict[StreamKey, Calls]
    language: Language = field(repr=False)
    last: tuple[StreamKey, int] | None = None  # its last collective
    _box: Box | None = None

    @property
    def label(self) -> Label:
        return self.statement.label

    @property
    def end(self) -> Event | None:
        return self.statement.end

    @property
    def exception(self) -> Event | None:
        """The last one."""
        return self.statement.exceptions[-1] if self.statement.exceptions else None

    @property
    def is_compiling(self) -> bool:
        return self.statement.is_compiling

    @property
    def in_collective_since_ns(self) -> int | None:
        """Wall clock of its last record, if that is a collective and no cursor has moved since; else None."""
        return self.statement.in_collective_since_ns

    @property
    def place(self) -> Place:
        """Where it is: the module and pass of the main thread; of a program that trains in another one, of that."""
        return self.statement.place or Place(rank=self.rank, step=None, pass_="outside", certainty=Certainty.UNKNOWN)

    @property
    def box(self) -> Box | None:
        """All that it recorded. Of a job that runs, newer than the rest; None if the file is gone."""
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
        return Event(Kind.COLLECTIVE.label, calls.record(number), t_ns, place, self.fields(key, number))

    @property
    def last_collective(self) -> Event | None:
        return None if self.last is None else self.issued(*self.last)

    def order(self, key: StreamKey, number: int) -> int:
        """When a collective came among all this rank did. What the ring has lost was before everything it still has."""
        calls = self.calls.get(key)
        return -1 if calls is None or calls.at(number) is None else calls.record(number)

    def is_async(self, key: StreamKey, number: int) -> bool | None:
        """Whether a collective returned at once; None where the ring no longer has it."""
        calls = self.calls.get(key)
        return None if calls is None or calls.at(number) is None else calls.of(number)[1].is_async

    def issued_ns(self, key: StreamKey, number: int) -> int:
        """Wall clock; 0 where the ring no longer has it."""
        calls = self.calls.get(key)
        return 0 if calls is None or calls.at(number) is None else int(calls.times_ns(number, number + 1)[0])

    def place_of(self, key: StreamKey, number: int) -> Place | None:
        """Where a collective was issued; None where the ring no longer has it."""
        calls = self.calls.get(key)
        return None if calls is None or calls.at(number) is None else self._place(calls, number)

    def fields(self, key: StreamKey, number: int) -> dict[str, Any]:
        """What a collective is, as an event has it. It must be one that the ring still has."""
        signature, spot = self.calls[key].of(number)
        group = self.language.group(key)
        known: dict[str, Any] = self.language.parsed(signature.text)
        return known | {
            "group_desc": group.desc,
            "mesh_dim": group.mesh_dim,
            "backend": group.backend,
            "group_size": len(group.ranks) or None,
            "group_ranks": list(group.ranks) if len(group.ranks) <= _MOST_RANKS_SHOWN else None,
            "number": number,
            "for": self.language.parsed(spot.meaning[3]) if spot.meaning[3] else None,
            "async": spot.is_async,
        }

    def _place(self, calls: Calls, number: int) -> Place:
        spot, step = calls.of(number)[1], int(calls.steps(number, number + 1)[0])
        module, pass_, line, _ = spot.meaning
        return Place(
            rank=self.rank,
            step=None if step == NO_STEP else step,
            pass_=PASS_LABELS.get(pass_, "outside"),
            module=module,
            call=spot.call,
            line=line,
            graph=spot.graph,
            thread=spot.thread,
            certainty=Certainty(spot.certainty),
            param=spot.param,
        )


class Hearing:
    """All testimonies of a run, in one language."""

    def __init__(self) -> None:
        self.testimonies: dict[int, Testimony] = {}
        self.nameless: dict[int, tuple[int, ...]] = {}  # how many a rank issued in each of its groups, where no more is known
        self.recalled: frozenset[int] = frozenset()  # ranks whose box is gone or cut, and was read before
        self.past: frozenset[int] = frozenset()  # of these, those who may have done more since
        self.language = Language()
        self.kept: dict[str, Any] = {}  # what was found out once and is asked for again
        self.asides: list[Any] = []  # what somebody else took from the boxes as they were read
        self._keys: dict[StreamKey, StreamKey] = {}
        self._clerks: dict[int, Clerks] = {}
        self._own_clerk = Clerk()

    def hear(self, rank: int, box: Box) -> Testimony:
        """One box, here and now."""
        ((said, page),) = self._pages(self._own_clerk.write_down([box]), _OWN)
        found = self.testimonies[rank] = self._testimony(rank, said, page)
        found._box = box
        return found

    def group(self, key: StreamKey) -> Group:
        return self.language.group(key)

    def hears(self, rank: int) -> bool:
        """Whether it is known of a rank what it did last."""
        return rank in self.testimonies and rank not in self.past

    def copy(self) -> Hearing:
        """The same testimonies; others may be added without changing these."""
        found = copy.copy(self)
        found.testimonies, found.kept = dict(self.testimonies), {}
        return found

    def admit(self, transcript: Transcript, *, clerk: int, wanted: Container[Path]) -> None:
        """What a clerk has written down of the wanted boxes. Of one clerk, transcripts come in the order they were made in."""
        for said, page in self._pages(transcript, clerk):
            if said.label.path in wanted and said.label.lacks_counts:
                self._note(said)
            elif said.label.path in wanted:
                self.testimonies[said.label.rank] = self._testimony(said.label.rank, said, page)

    def note(self, box: Box) -> None:
        """A box that was cut before its counts, or before the names of what they count."""
        for said, _ in self._pages(self._own_clerk.write_down([box]), _OWN):
            self._note(said)

    def _note(self, said: Statement) -> None:
        if said.unnamed is not None:
            self.nameless[said.label.rank] = said.unnamed

    def has_come(self, rank: int, key: StreamKey, number: int) -> bool | None:
        """Whether a rank that is not heard has issued a collective of a whole group: by its bare counts, if they leave no doubt
        which of them is that group's. None where they do."""
        counts = self.nameless.get(rank)
        if counts is None or key.source != -1 or key.destination != -1:
            return None
        come = {count > number for count in counts}
        return come.pop() if len(come) == 1 else None

    def counted(self, steps: Mapping[int, tuple[int, int]]) -> Iterator[Counted]:
        """All calls that the rings still have without a hole, counted; and those in the first to the last step of each rank."""
        pages = {id(calls._page): calls._page for said in self.testimonies.values() for calls in list(said.calls.values())[:1]}
        for page in pages.values():
            yield self._counted(page, steps)

    def _counted(self, page: Page, steps: Mapping[int, tuple[int, int]]) -> Counted:
        told, said = page.transcript, page.transcript.statements
        lengths = [sum(part.length for part in each.parts) for each in said]
        ends = [*(each.pairs_at for each in said[1:]), len(told.pairs)]
        is_ours = [(own := self.testimonies.get(each.label.rank)) is not None and own.statement is each for each in said]
        spans = np.array([steps.get(each.label.rank, (1, 0)) for each in said], np.int64) - [[each.step] for each in said]
        first, last = np.repeat(spans, lengths, axis=0).T
        pair = told.codes.astype(np.int64) + np.repeat([each.pairs_at for each in said], lengths)
        counts = np.bincount(pair, minlength=len(told.pairs))
        within = np.bincount(pair[(told.steps >= first) & (told.steps <= last)], minlength=len(told.pairs))
        room = [end - each.pairs_at for end, each in zip(ends, said, strict=True)]
        kept = (counts > 0) & np.repeat(is_ours, room)
        ranks = np.repeat([each.label.rank for each in said], room)
        clerk = page.clerk
        columns = (ranks[kept], told.pairs[kept], counts[kept], within[kept])
        return Counted(*columns, clerk.signatures, clerk.spots, clerk.groups)

    def _pages(self, transcript: Transcript, clerk: int) -> Iterator[tuple[Statement, Page]]:
        known = self._clerks.setdefault(clerk, Clerks())
        self._learn(known, transcript)
        pairs = transcript.pairs + 1
        meanings = known.meanings[pairs[:, 1]] * known.has_meaning[pairs[:, 0]]
        page = Page(transcript, known, known.forms[pairs[:, 0]] << FORM_SHIFT | meanings)
        return ((said, page) for said in transcript.statements)

    def _learn(self, known: Clerks, transcript: Transcript) -> None:
        known.groups += [self.language.groups.number(group) for group in transcript.groups]
        known.signatures += transcript.signatures
        known.spots += transcript.spots
        new_forms = [self.language.forms.number(signature.form) for signature in transcript.signatures]
        has_meaning = [not signature.is_bookkeeping for signature in transcript.signatures]
        known.has_meaning = np.concatenate([known.has_meaning, np.array(has_meaning, np.bool_)])
        new_meanings = [self.language.meanings.number(spot.compared) for spot in transcript.spots]
        known.forms = np.concatenate([known.forms, np.array(new_forms, np.uint64)])
        known.meanings = np.concatenate([known.meanings, np.array(new_meanings, np.uint64)])

    def _testimony(self, rank: int, said: Statement, page: Page) -> Testimony:
        found = Testimony(rank, said, {}, {}, self.language)
        groups, forms, keys = page.clerk.groups, page.clerk.forms, self._keys
        for part in said.parts:
            key = StreamKey(groups[part.key.group], part.key.source, part.key.destination)
            key = keys.setdefault(key, key)  # one object for all ranks
            found.counts[key] = part.issued
            if part.length:
                form = int(forms[part.signature + 1]) if part.signature >= 0 else -1
                found.calls[key] = Calls(part.first, form, part.length, part.at, said, page)
            if said.last is not None and part.key == said.last[0]:
                found.last = key, said.last[1]
        return found


def heard(run: Roster[Any]) -> Hearing:
    """All boxes of a run that was read whole. One that was cut before its counts has nothing to say."""
    hearing = Hearing()
    for rank, box in run.in_order():
        if box.lacks_counts:
            hearing.note(box)
        else:
            hearing.hear(rank, box)
    return hearing
