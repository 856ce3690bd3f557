"""Learns the call pattern of each rank, and finds where the rank deviated from it.

Takes the calls of one rank in order. At each call, the longest context before it that occurred
earlier predicts the next call: what had followed that context. A call that was not predicted is a
deviation if the predicted one occurs within the context itself: then the rank has completed at
least two rounds. Needs no steps and no other rank; the first round cannot be judged. A suffix
automaton finds the contexts in linear time.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchwhere.diagnose.calls import stream_calls
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.keys import CallSite, StreamKey
from torchwhere.diagnose.calls.rank_calls import RankCalls
from torchwhere.diagnose.calls.stream_calls import StreamCalls

# -- roles of streams ------------------------------------------------------------------------------
# The tensor-parallel pairs of a mesh are different groups with the same role. Groups of a mesh are
# identified by their dimension; others by their size and by the order in which torch created them,
# which is the same on all ranks.


class Role(NamedTuple):
    """Equal for streams that do the same for their ranks."""

    # its mesh dimension, or its place among the groups of this size that the rank is in
    group: str | int
    size: int
    offset: int = 0  # of a message, how far the peer is from the rank within the group
    direction: str = ""
    # of a message, the place of the rank within the group: stages of a pipeline differ
    stage: int = -1


class Roles:
    """The roles of all streams of a job."""

    def __init__(self, job_calls: JobCalls) -> None:
        self._job_calls = job_calls
        self._of_groups: defaultdict[int, dict[str, Role]] = defaultdict(dict)  # of each rank
        for group in sorted(
            job_calls.shared_ids.groups, key=lambda group: (len(group.name), group.name)
        ):
            for rank in group.ranks:
                mine, size = self._of_groups[rank], len(group.ranks)
                mine[group.name] = Role(
                    group.mesh_dim or sum(role.size == size for role in mine.values()), size
                )

    def of(self, rank: int, key: StreamKey) -> Role:
        group = self._job_calls.group(key)
        role = self._of_groups[rank].get(group.name, Role(-1, len(group.ranks)))
        if not key.is_p2p:
            return role
        peer, direction = (key.destination, "send") if key.source == rank else (key.source, "recv")
        if rank not in group.ranks or peer not in group.ranks:
            return role._replace(direction=direction, stage=rank)
        stage = group.ranks.index(rank)
        offset = (group.ranks.index(peer) - stage) % role.size
        return role._replace(offset=offset, direction=direction, stage=stage)

    def takes_part(self, rank: int, role: Role) -> bool:
        """Whether a rank is in a group with this role."""
        return role in self._of_groups[rank].values()

    def of_messages(self, rank: int) -> frozenset[Role]:
        """The roles in which a rank has sent or received messages."""
        keys = self._job_calls.by_rank[rank].counts
        return frozenset(self.of(rank, key) for key in keys if key.is_p2p)


MOST_CALLS = 4096  # newest calls of a rank
_MOST_OF_ALL = 400_000  # over all ranks that are asked for
_LEAST_CALLS = 64
_MOST_PREDICTIONS = 4  # predictions: with more, nothing is predicted
_MOST_DEVIATIONS = 64  # newest deviations that are kept

Call = tuple[StreamKey, int]


@dataclass(frozen=True, slots=True)
class Deviation:
    """A call that a rank issued where it had always issued another one."""

    rank: int
    record: int  # when
    # the predicted calls: mostly one
    due: tuple[Call, ...]
    issued: Call
    like: Call  # the last time that it issued what was due
    rounds: int  # earlier rounds with the predicted call, at least
    is_new: bool  # it had never issued this before: perhaps a new part of the program
    is_skip: bool  # the issued call used to follow the predicted one, which was skipped
    is_early: bool  # and then it issued what was due


@dataclass(frozen=True, slots=True)
class Pattern:
    """The predicted calls of one rank, and its deviations."""

    deviations: tuple[Deviation, ...] = ()
    expected: frozenset[Call] = frozenset()  # calls that were due when they came


class Patterns:
    """The patterns of some ranks, each computed once. `ranks` is about how many will be asked
    for."""

    def __init__(self, job_calls: JobCalls, *, ranks: int) -> None:
        self.job_calls = job_calls
        self._most = max(_LEAST_CALLS, min(MOST_CALLS, _MOST_OF_ALL // max(1, ranks)))
        self._known: dict[int, Pattern] = {}

    def of(self, rank: int) -> Pattern:
        if rank not in self._known:
            rank_calls = self.job_calls.by_rank.get(rank)
            self._known[rank] = (
                _pattern(rank_calls, self._most) if rank_calls is not None else Pattern()
            )
        return self._known[rank]

    @cached_property
    def roles(self) -> Roles:
        return Roles(self.job_calls)


class Unexpected(NamedTuple):
    """A token of a sequence that was not predicted."""

    at: int
    due: tuple[int, ...]  # what had ever come there
    context: int  # how many tokens before it had come in this order before


@dataclass(slots=True)
class _Past:
    """Suffix automaton of the sequence so far. State 0 is the empty context."""

    following: list[dict[int, int]] = field(default_factory=lambda: [{}])
    # the state of the longest suffix with other endings
    shorter: list[int] = field(default_factory=lambda: [-1])
    length: list[int] = field(default_factory=lambda: [0])
    last: int = 0

    def context(self) -> tuple[int, dict[int, int]]:
        """The length of the longest suffix that occurred before, and all tokens that have
        followed it."""
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
    """The tokens that were not predicted, and the positions of those that were."""
    past, unexpected, expected = _Past(), [], set()
    for at, token in enumerate(tokens):
        length, options = past.context()
        if token in options:
            expected.add(at)
        elif 0 < len(options) <= _MOST_PREDICTIONS:
            unexpected.append(Unexpected(at, tuple(sorted(options)), length))
        past.add(token)
    return unexpected, expected


# -- of a rank -------------------------------------------------------------------------------------


class Sequence(NamedTuple):
    """The calls of a rank in order."""

    keys: list[StreamKey]
    streams: list[int]  # of each call, which of the keys
    numbers: list[int]
    records: list[int]
    text: str  # one character per call, equal for calls of one stream and call site

    def call(self, at: int) -> Call:
        return self.keys[self.streams[at]], self.numbers[at]


def _pattern(rank_calls: RankCalls, most: int) -> Pattern:
    calls = sequence(rank_calls, most)
    unexpected, expected = unexpected_tokens([ord(character) for character in calls.text])
    newest = unexpected[-_MOST_DEVIATIONS:]
    deviations = (_deviation(rank_calls.rank, calls, token) for token in newest)
    return Pattern(
        tuple(deviation for deviation in deviations if deviation is not None),
        frozenset(map(calls.call, expected)),
    )


def _deviation(rank: int, calls: Sequence, unexpected: Unexpected) -> Deviation | None:
    text, at = calls.text, unexpected.at
    begin = at - unexpected.context
    rounds = {character: text.count(character, begin, at) for character in map(chr, unexpected.due)}
    due = [character for character, count in rounds.items() if count]
    # a deviation that is repeated later is a new pattern
    if not due or text.find(text[begin : at + 1], begin + 1) >= 0:
        return None
    first = max(due, key=lambda character: (rounds[character], text.rfind(character, 0, at)))
    like = text.rfind(first, 0, at)
    return Deviation(
        rank=rank,
        record=calls.records[at],
        due=tuple(_next(calls, text.rfind(character, 0, at), at) for character in due),
        issued=calls.call(at),
        like=calls.call(like),
        rounds=rounds[first] + 1,
        is_new=text.find(text[at], 0, at) < 0,
        is_skip=text.find(first + text[at], 0, at) >= 0,
        is_early=text[at + 1 : at + 2] in due,
    )


def _next(calls: Sequence, like: int, at: int) -> Call:
    """The next call, as of a position, of the stream of an earlier call."""
    stream = calls.streams[like]
    newest = max(i for i in range(like, at) if calls.streams[i] == stream)
    return calls.keys[stream], calls.numbers[newest] + 1


def sequence(rank_calls: RankCalls, most: int) -> Sequence:
    """The newest calls of a rank, only of the thread that issued the last one: the order of
    threads is not deterministic."""
    keys = list(rank_calls.calls)
    if not keys:
        return Sequence([], [], [], [], "")
    last = max(rank_calls.calls.values(), key=lambda calls: calls.record(calls.last))
    mine = last.of(last.last)[1]
    columns = [_column(index, calls, mine) for index, calls in enumerate(rank_calls.calls.values())]
    streams, numbers, records, site_ids = (
        np.concatenate(column) for column in zip(*columns, strict=True)
    )
    order = np.argsort(records, kind="stable")[-most:]
    streams, numbers, records = streams[order], numbers[order], records[order]
    _, tokens = np.unique(site_ids[order] * len(keys) + streams, return_inverse=True)
    text = "".join(map(chr, tokens.tolist()))
    return Sequence(keys, streams.tolist(), numbers.tolist(), records.tolist(), text)


def _column(index: int, calls: StreamCalls, mine: CallSite) -> tuple[npt.NDArray[np.int64], ...]:
    """Stream, number, record and call site of each call of one stream that belongs to the thread
    of `mine`."""
    codes, first_of, renamed = np.unique(calls.codes(), return_index=True, return_inverse=True)
    call_sites = [calls.of(calls.first + int(first_of[code]))[1] for code in range(len(codes))]
    is_ordered = np.array(
        [_has_fixed_order(call_site, mine) for call_site in call_sites], np.bool_
    )[renamed]
    numbers = np.arange(calls.first, calls.last + 1, dtype=np.int64)[is_ordered]
    return (
        np.full(len(numbers), index, np.int64),
        numbers,
        calls.records()[is_ordered],
        stream_calls.site_ids(calls.packed_ids())[is_ordered],
    )


def _has_fixed_order(call_site: CallSite, mine: CallSite) -> bool:
    """Whether the order of two calls is deterministic: autograd threads run while the thread
    that called backward waits."""
    return call_site.thread == mine.thread or call_site.is_of_engine or mine.is_of_engine
