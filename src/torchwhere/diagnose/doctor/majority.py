"""Finds ranks that issued another call than most ranks with the same calls before it.

Takes the calls of some ranks in order. A call is compared by the role of its group and by its
number, so that ranks of parallel groups (the tensor-parallel pairs of a mesh) can be compared
although they share no group. Ranks with the same last calls vote on the next one. A rank that most
of them contradict, and that never issued their call, is outvoted. Limits: a sample of the ranks
votes, only ranks of the same pipeline stage are compared, and a tie decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.rank_calls import RankCalls
from torchwhere.diagnose.doctor.call_patterns import Role, Roles, sequence
from torchwhere.diagnose.doctor.waits import Wait, links

_VOTERS = 64  # ranks, spread over the job
_CALLS = 1024  # of each rank, the newest
_CONTEXT = 8  # calls before the one in question that must be the same
_LEAST_CONTEXT = 2


_Token = tuple[Role, int]  # a call: the role of its stream, and its number


@dataclass(frozen=True, slots=True)
class _Path:
    """The newest calls of a rank in order."""

    tokens: list[_Token]
    at: dict[_Token, int]
    is_whole: bool  # it begins with the first call of the rank
    messages: frozenset[Role]


class Majority:
    """The calls of a sample of ranks, read once. `ranks` are those in question."""

    def __init__(self, job_calls: JobCalls, roles: Roles, *, ranks: Iterable[int]) -> None:
        complete = [
            rank
            for rank, rank_calls in job_calls.by_rank.items()
            if job_calls.has_data(rank) and not rank_calls.has_lost_its_newest
        ]
        sample = complete[:: max(1, len(complete) // _VOTERS)][:_VOTERS]
        wanted = {*sample, *(rank for rank in ranks if rank in job_calls.by_rank)}
        self._roles = roles
        self._paths = {rank: _path(job_calls.by_rank[rank], self._roles) for rank in sorted(wanted)}
        self._voters = frozenset(complete)

    def outvoted(self, cycle: list[Wait]) -> list[int]:
        """The ranks of a cycle that most others contradict since their last call in the awaited
        stream."""
        return sorted(
            {own.rank for wait, own in links(cycle) if self.is_outvoted(own, awaited_in=wait)}
        )

    def is_outvoted(self, wait: Wait, *, awaited_in: Wait | None = None) -> bool:
        """Whether a waiting rank took a different path than most: to the call it waits in, or
        since its last call in the stream in which another rank waits for it."""
        path = self._paths.get(wait.rank)
        if path is None:
            return False
        own = path.at.get((self._roles.of(wait.rank, wait.key), wait.number))
        if own is None:
            return False
        start = own
        if awaited_in is not None and awaited_in.number == 0:
            start = 0
        elif awaited_in is not None:
            before = self._roles.of(wait.rank, awaited_in.key), awaited_in.number - 1
            start = min(own, path.at.get(before, own) + 1)
        return any(self._loses(wait.rank, index) for index in range(start, len(path.tokens)))

    def _loses(self, rank: int, index: int) -> bool:
        """Whether most issued another call here, in which this rank takes part and which it has not
        issued since."""
        path = self._paths[rank]
        votes = Counter(self._votes(rank, index))
        own = 1 + votes.pop(path.tokens[index], 0)
        token, most = max(votes.items(), key=lambda vote: vote[1], default=(path.tokens[index], 0))
        return most > own and token not in path.at and self._roles.takes_part(rank, token[0])

    def _votes(self, rank: int, index: int) -> Iterator[_Token]:
        """What the other ranks with the same calls before issued next, if they could have issued
        what this rank did."""
        path = self._paths[rank]
        role, _ = path.tokens[index]
        for other, theirs in self._paths.items():
            at = theirs.at.get(path.tokens[index - 1], len(theirs.tokens)) + 1 if index else 0
            if other == rank or other not in self._voters or at >= len(theirs.tokens):
                continue
            has_choice = path.messages == theirs.messages and (
                role.direction or self._roles.takes_part(other, role)
            )
            if has_choice and _has_same_context(path, index, theirs, at):
                yield theirs.tokens[at]


def _has_same_context(path: _Path, index: int, theirs: _Path, at: int) -> bool:
    """Whether two ranks issued the same calls before: some, or none at the start of a job."""
    length = min(_CONTEXT, index, at)
    if path.tokens[index - length : index] != theirs.tokens[at - length : at]:
        return False
    return length >= _LEAST_CONTEXT or (index == at and path.is_whole and theirs.is_whole)


def _path(rank_calls: RankCalls, roles: Roles) -> _Path:
    calls = sequence(rank_calls, _CALLS)
    streams = [roles.of(rank_calls.rank, key) for key in calls.keys]
    tokens = [
        (streams[stream], number)
        for stream, number in zip(calls.streams, calls.numbers, strict=True)
    ]
    return _Path(
        tokens,
        {token: index for index, token in enumerate(tokens)},
        is_whole=len(tokens) == sum(rank_calls.counts.values()),
        messages=roles.of_messages(rank_calls.rank),
    )
