"""Each rank's own habit: where it did something else than it had always done next.

Takes the calls of one rank in the order it issued them. At each call the longest stretch before it
that the rank had gone through before says what is due: what had come after that stretch. A call
that is not what was due is a departure, if what was due had its turn within the stretch itself:
then the rank has gone round at least twice. Steps are not needed, and no other rank; of a first
round nothing can be said. The stretches are those of a suffix automaton: the time is linear.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchwhere.diagnose.calls import job_calls as issued
from torchwhere.diagnose.calls.job_calls import StreamCalls
from torchwhere.diagnose.calls.keys import CallSite, StreamKey
from torchwhere.diagnose.calls.rank_calls import JobCalls, RankCalls

MOST_CALLS = 4096  # of a rank, the newest
_MOST_OF_ALL = 400_000  # of all ranks that are asked for, together
_LEAST_CALLS = 64
_MOST_WAYS = 4  # to go on: where there are more, nothing is due
_MOST_DEPARTURES = 64  # the newest: where there are more, it has no habits

Call = tuple[StreamKey, int]


@dataclass(frozen=True, slots=True)
class Deviation:
    """A call that a rank issued where it had always issued another one."""

    rank: int
    record: int  # when
    # mostly one; several where it had gone on in several ways, of which this is none
    due: tuple[Call, ...]
    issued: Call
    like: Call  # the last time that it issued what was due
    rounds: int  # that it had gone through in the same way, at the least
    is_new: bool  # it had never issued this before: the program went on to something else
    is_skip: bool  # what it issued used to come after what was due: one was left out
    is_early: bool  # and then it issued what was due


@dataclass(frozen=True, slots=True)
class Pattern:
    """What one rank used to do, and where it did not."""

    deviations: tuple[Deviation, ...] = ()
    expected: frozenset[Call] = frozenset()  # calls that were due when they came


class Patterns:
    """The habits of some ranks, each found once. `ranks` is how many will be asked for, about."""

    def __init__(self, job_calls: JobCalls, *, ranks: int) -> None:
        self._job_calls = job_calls
        self._most = max(_LEAST_CALLS, min(MOST_CALLS, _MOST_OF_ALL // max(1, ranks)))
        self._known: dict[int, Pattern] = {}

    def of(self, rank: int) -> Pattern:
        if rank not in self._known:
            said = self._job_calls.by_rank.get(rank)
            self._known[rank] = _pattern(said, self._most) if said is not None else Pattern()
        return self._known[rank]


class Unexpected(NamedTuple):
    """A token of a sequence that was not the one due."""

    at: int
    due: tuple[int, ...]  # what had ever come there
    context: int  # how many tokens before it had come in this order before


@dataclass(slots=True)
class _Past:
    """All stretches of a sequence so far: its suffix automaton. State 0 is the empty stretch."""

    following: list[dict[int, int]] = field(default_factory=lambda: [{}])
    # the state of the longest suffix with other endings
    shorter: list[int] = field(default_factory=lambda: [-1])
    length: list[int] = field(default_factory=lambda: [0])
    last: int = 0

    def context(self) -> tuple[int, dict[int, int]]:
        """The length of the longest suffix that was there before, and what has ever come after
        it."""
        state = self.shorter[self.last]
        return (self.length[state], self.following[state]) if state > 0 else (0, {})

    def add(self, token: int) -> None:
        new = self._state(self.length[self.last] + 1, {})
        state = self.last
        while state >= 0 and token not in self.following[state]:
            self.following[state][token] = new
            state = self.shorter[state]
        self.last = new
        if state < 0:
            self.shorter[new] = 0
            return
        target = self.following[state][token]
        if self.length[target] == self.length[state] + 1:
            self.shorter[new] = target
            return
        copy = self._state(self.length[state] + 1, dict(self.following[target]))
        self.shorter[copy] = self.shorter[target]
        while state >= 0 and self.following[state].get(token) == target:
            self.following[state][token] = copy
            state = self.shorter[state]
        self.shorter[target] = self.shorter[new] = copy

    def _state(self, length: int, following: dict[int, int]) -> int:
        self.following.append(following)
        self.shorter.append(0)
        self.length.append(length)
        return len(self.length) - 1


def unexpected_tokens(tokens: list[int]) -> tuple[list[Unexpected], set[int]]:
    """The tokens that were not what had ever come after the longest stretch before them; and where
    those are that were."""
    past, found, expected = _Past(), [], set()
    for at, token in enumerate(tokens):
        length, options = past.context()
        if token in options:
            expected.add(at)
        elif 0 < len(options) <= _MOST_WAYS:
            found.append(Unexpected(at, tuple(sorted(options)), length))
        past.add(token)
    return found, expected


# -- of a rank -------------------------------------------------------------------------------------


class Sequence(NamedTuple):
    """The calls of a rank in order."""

    keys: list[StreamKey]
    streams: list[int]  # of each call, which of the keys
    numbers: list[int]
    records: list[int]
    text: str  # a letter for each call, the same for calls of one stream from one place


def _pattern(said: RankCalls, most: int) -> Pattern:
    calls = sequence(said, most)
    found, expected = unexpected_tokens([ord(snapshot) for snapshot in calls.text])
    return Pattern(
        deviations=tuple(
            deviation
            for each in found[-_MOST_DEPARTURES:]
            if (deviation := _deviation(said.rank, calls, each)) is not None
        ),
        expected=frozenset((calls.keys[calls.streams[at]], calls.numbers[at]) for at in expected),
    )


def _deviation(rank: int, calls: Sequence, found: Unexpected) -> Deviation | None:
    text, at = calls.text, found.at
    begin = at - found.context
    rounds = {snapshot: text.count(snapshot, begin, at) for snapshot in map(chr, found.due)}
    due = [snapshot for snapshot, count in rounds.items() if count]
    # what it did again after that became its habit
    if not due or text.find(text[begin : at + 1], begin + 1) >= 0:
        return None
    first = max(due, key=lambda snapshot: (rounds[snapshot], text.rfind(snapshot, 0, at)))
    like = text.rfind(first, 0, at)
    return Deviation(
        rank=rank,
        record=calls.records[at],
        due=tuple(_next(calls, text.rfind(snapshot, 0, at), at) for snapshot in due),
        issued=(calls.keys[calls.streams[at]], calls.numbers[at]),
        like=(calls.keys[calls.streams[like]], calls.numbers[like]),
        rounds=rounds[first] + 1,
        is_new=text.find(text[at], 0, at) < 0,
        is_skip=text.find(first + text[at], 0, at) >= 0,
        is_early=text[at + 1 : at + 2] in due,
    )


def _next(calls: Sequence, like: int, at: int) -> Call:
    """The next call of the stream of an earlier one, as of a position."""
    stream = calls.streams[like]
    newest = max(i for i in range(like, at) if calls.streams[i] == stream)
    return calls.keys[stream], calls.numbers[newest] + 1


def sequence(said: RankCalls, most: int) -> Sequence:
    """The newest calls of a rank, of the thread that issued the last one: how threads take turns is
    chance."""
    keys = list(said.calls)
    if not keys:
        return Sequence([], [], [], [], "")
    last = max(said.calls.values(), key=lambda calls: calls.record(calls.last))
    mine = last.of(last.last)[1]
    columns = [_column(index, calls, mine) for index, calls in enumerate(said.calls.values())]
    streams, numbers, records, site_ids = (
        np.concatenate(column) for column in zip(*columns, strict=True)
    )
    order = np.argsort(records, kind="stable")[-most:]
    tokens = np.unique(site_ids[order] * len(keys) + streams[order], return_inverse=True)[
        1
    ].tolist()
    text = "".join(map(chr, tokens))
    return Sequence(
        keys, streams[order].tolist(), numbers[order].tolist(), records[order].tolist(), text
    )


def _column(index: int, calls: StreamCalls, mine: CallSite) -> tuple[npt.NDArray[np.int64], ...]:
    """Of the calls of one stream that belong to the thread of `mine`: the stream, number, record
    and meaning of each."""
    codes, first_of, renamed = np.unique(calls.codes(), return_index=True, return_inverse=True)
    call_sites = [calls.of(calls.first + int(first_of[code]))[1] for code in range(len(codes))]
    kept = np.array([_is_of_one_thread(spot, mine) for spot in call_sites], np.bool_)[renamed]
    numbers = np.arange(calls.first, calls.last + 1, dtype=np.int64)[kept]
    return (
        np.full(len(numbers), index, np.int64),
        numbers,
        calls.records()[kept],
        issued.site_ids(calls.packed_ids())[kept],
    )


def _is_of_one_thread(spot: CallSite, mine: CallSite) -> bool:
    """Whether two calls come in an order that is no chance: the engine's threads run while the one
    that called it waits."""
    return spot.thread == mine.thread or spot.is_of_engine or mine.is_of_engine
