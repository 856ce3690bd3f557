"""How far the ranks of a job got, by their dumps: issued, pending and completed calls.

`JobProgress` answers, for a call that is pending on one rank, which of the other ranks have not
reached it. A group completes its calls in the order of issue, so only its first pending call counts.
A dump that is older than the others proves nothing about the end: `is_outdated`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

MessageStream = tuple[str, int, int]  # group, source, destination
# what ranks meet in: a collective by its number, or the messages in one direction
Meeting = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class MessageCount:
    """The messages of one rank in one direction."""

    issued: int = 0
    completed: int = 0
    largest_bytes: int = 0

    def with_message(self, is_complete: bool, size: int) -> MessageCount:
        largest = max(self.largest_bytes, size)
        return MessageCount(self.issued + 1, self.completed + is_complete, largest)


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A call that a rank has issued and its device has not completed."""

    record: int  # in the box of the rank
    group: str
    number: int  # in its group, or among the listed messages in its direction
    ends: tuple[int, int] | None  # of a message: source and destination
    has_started: bool  # whether the device has reached it; known only with timing

    @property
    def meeting(self) -> Meeting:
        return (self.group, self.number, -1) if self.ends is None else (self.group, *self.ends)


@dataclass(frozen=True)
class RankProgress:
    """The progress of one rank."""

    rank: int
    pending: tuple[PendingCall, ...]  # in the order of issue
    issued: Mapping[str, int]  # the number of issued collectives of each group, where known
    completed: Mapping[str, int]  # of which so many are complete for certain
    messages: Mapping[MessageStream, MessageCount]
    has_timing: bool
    counts_messages: bool  # whether it lists all messages from the first one

    @cached_property
    def first_pending(self) -> dict[Meeting, PendingCall]:
        """The first pending call of each meeting, in the order of issue."""
        first: dict[Meeting, PendingCall] = {}
        for call in self.pending:
            first.setdefault(call.meeting, call)
        return first


@dataclass(frozen=True)
class JobProgress:
    """The progress of all ranks with a dump."""

    ranks: Mapping[int, RankProgress]
    members: Mapping[str, tuple[int, ...]]
    # by group: so many collectives need all ranks and are complete on at least one
    joined: Mapping[str, int]

    def taking_part(self, call: PendingCall) -> tuple[int, ...]:
        return call.ends or self.members.get(call.group, ())

    def absent(self, call: PendingCall) -> tuple[int, ...]:
        """The ranks of a call that have no dump."""
        return tuple(rank for rank in self.taking_part(call) if rank not in self.ranks)

    def is_outdated(self, rank: int, group: str) -> bool:
        """Whether other ranks completed calls of a group after the dump of this rank."""
        progress, joined = self.ranks[rank], self.joined.get(group, 0)
        waits = any(
            call.group == group and call.ends is None and call.number < joined
            for call in progress.pending
        )
        return waits or progress.issued.get(group, joined) < joined

    def current(self) -> dict[int, RankProgress]:
        """The ranks with pending calls, without calls that others have completed."""
        ranks = {}
        for rank, progress in self.ranks.items():
            pending = tuple(
                call
                for call in progress.pending
                if call.ends is not None or call.number >= self.joined.get(call.group, 0)
            )
            if pending:
                ranks[rank] = replace(progress, pending=pending)
        return ranks

    def not_issued(self, rank: int, call: PendingCall) -> Iterator[int]:
        """The other ranks of a call whose CPU has not issued it."""
        for member in self.taking_part(call):
            if member != rank and member in self.ranks and self._has_issued(member, call) is False:
                yield member

    def _has_issued(self, rank: int, call: PendingCall) -> bool | None:
        """Whether the CPU of a rank has issued a call; None if its dump does not show it."""
        progress = self.ranks[rank]
        if call.ends is not None:
            if call.meeting in progress.first_pending:
                return True
            if not progress.counts_messages:
                return None
            return progress.messages.get(call.meeting, MessageCount()).issued > call.number
        if self.is_outdated(rank, call.group) or call.group not in progress.issued:
            return None
        return progress.issued[call.group] > call.number

    def is_unknown(self, rank: int, call: PendingCall) -> bool:
        """Whether the dump of a rank does not show how far it is with a call."""
        return self._has_issued(rank, call) is None
