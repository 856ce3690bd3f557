"""The progress of the ranks of a job, from their dumps: issued, pending and completed calls.

`JobProgress` answers, for a call that is pending on one rank, which of the other ranks have not
issued it. A group completes its calls in the order of issue, so only its first pending call
counts. A dump that is older than the others proves nothing about the end: `outdated`. A rank that
has issued what all others have completed, and has not completed it, may have an older dump or a
device that failed: `behind`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from torchwhere.core.grouping import grouped

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
    deadline_ns: int = 0  # when it times out; 0: not known

    @property
    def meeting(self) -> Meeting:
        return (self.group, self.number, -1) if self.ends is None else (self.group, *self.ends)


@dataclass(frozen=True, slots=True)
class DumpTimes:
    """What a dump shows about the time of its rank's last progress."""

    made_ns: int | None = None  # when the rank made the dump, or later
    # by group: when the watchdog saw the end of the last call that completed in time
    completed_ns: Mapping[str, int] = field(default_factory=dict)
    has_new_ends: bool = False  # calls ended that the watchdog has not seen


@dataclass(frozen=True)
class RankProgress:
    """The progress of one rank."""

    pending: tuple[PendingCall, ...]  # in the order of issue
    issued: Mapping[str, int]  # the number of issued collectives of each group, where known
    completed: Mapping[str, int]  # the same of those that are complete
    messages: Mapping[MessageStream, MessageCount]
    has_timing: bool
    is_of_gloo: bool  # the CPU itself waits in a call, so a pending call is one that it has reached
    counts_messages: bool  # whether it lists all messages, from the first to the last one
    # groups whose last calls it does not list, and that no watchdog saw complete: if they were
    # aborted, the rank issues no more calls although it is healthy
    unsure: frozenset[str] = frozenset()
    times: DumpTimes = DumpTimes()

    @property
    def has_reached(self) -> bool:
        """Whether the call that it is in is one that it has reached."""
        return self.has_timing or self.is_of_gloo

    @cached_property
    def first_pending(self) -> dict[Meeting, PendingCall]:
        """The first pending call of each meeting, in the order of issue."""
        first: dict[Meeting, PendingCall] = {}
        for call in self.pending:
            first.setdefault(call.meeting, call)
        return first

    @cached_property
    def fronts(self) -> list[PendingCall]:
        """The first pending call of each group and direction: later ones wait behind it."""
        fronts: dict[tuple[str, tuple[int, int] | None], PendingCall] = {}
        for call in self.pending:
            fronts.setdefault((call.group, call.ends), call)
        return list(fronts.values())


@dataclass(frozen=True)
class JobProgress:
    """The progress of all ranks with a dump."""

    ranks: Mapping[int, RankProgress]
    members: Mapping[str, tuple[int, ...]]
    # by group: so many collectives need all ranks and are complete on at least one
    joined: Mapping[str, int]
    incomplete: frozenset[int] = frozenset()  # ranks whose dump was cut while it was written
    unwatched: frozenset[int] = frozenset()  # ranks without a dump, or with an empty one
    unconfirmed: tuple[int, ...] = ()  # ranks whose last calls ended, and may have been aborted

    @cached_property
    def outdated(self) -> dict[int, frozenset[str]]:
        """For each rank, the groups in which others completed calls after its dump."""
        return {rank: frozenset(self._outdated(progress)) for rank, progress in self.ranks.items()}

    def _outdated(self, progress: RankProgress) -> Iterator[str]:
        for name, count in progress.issued.items():
            if count < self.joined.get(name, 0):
                yield name
        for call in progress.pending:
            if call.ends is None and call.number < self.joined.get(call.group, 0):
                yield call.group

    def with_pending(self) -> dict[int, RankProgress]:
        """The ranks with pending calls, without calls that other ranks have completed."""
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

    # -- ranks behind the others -------------------------------------------------------------------

    @cached_property
    def behind(self) -> dict[str, tuple[int, ...]]:
        """For each group, the ranks that have issued all calls that others have completed, and have
        not completed one of them. Their device has failed, or their dump is older."""
        ranks = grouped(
            (group, rank)
            for rank, groups in sorted(self.outdated.items())
            for group in sorted(groups)
            if self.ranks[rank].issued.get(group, 0) >= self.joined[group]
            and not self._has_completed(rank, self.first_behind(rank, group))
        )
        return {group: tuple(ranks[group]) for group in ranks}

    def first_behind(self, rank: int, group: str) -> PendingCall:
        """The first pending collective of a rank that is behind in a group."""
        return next(
            call for call in self.ranks[rank].fronts if (call.group, call.ends) == (group, None)
        )

    def furthest_behind(self, group: str) -> tuple[PendingCall, tuple[int, ...]]:
        """The earliest call that ranks behind in a group have not completed, and these ranks. Other
        ranks that are behind may have completed it."""
        first = {rank: self.first_behind(rank, group) for rank in self.behind[group]}
        call = min(first.values(), key=lambda call: call.number)
        return call, tuple(rank for rank in first if first[rank].number == call.number)

    def group_of_failed_device(self) -> str | None:
        """A group in which one rank is behind, the only one of the job, and all others agree.

        All others have completed the same calls: if the job progressed while the dumps were
        written, they would be at different calls. One rank against one proves nothing.
        """
        ranks = {rank for behind in self.behind.values() for rank in behind}
        groups = (group for group in self.behind if self._all_others_agree(group))
        return next(groups, None) if len(ranks) == 1 else None

    def _all_others_agree(self, group: str) -> bool:
        rank, *_ = self.behind[group]
        call, joined = self.first_behind(rank, group), self.joined[group]
        others = [
            other for other in self.taking_part(call) if other in self.ranks and other != rank
        ]
        if len(others) < 2 or any(
            self.ranks[other].completed.get(group, 0) < joined for other in others
        ):
            return False
        # In the last call that the others have completed, the rank may wait for a rank without a
        # dump. It does not if its device has not reached that call, or if the others have completed
        # a later one, which needs all ranks.
        has_not_reached = self.ranks[rank].has_timing and not call.has_started
        has_dumps = len(others) + 1 == len(self.taking_part(call))
        return has_dumps or has_not_reached or self._is_stale(rank, group)

    def _is_stale(self, rank: int, group: str) -> bool:
        """Whether a rank has progressed after its dump, or after its device failed: others have
        completed a call that it has not issued, or a later one than its first pending one."""
        if rank not in self.behind.get(group, ()):
            return group in self.outdated[rank]
        return self.first_behind(rank, group).number < self.joined[group] - 1

    @cached_property
    def has_progressed(self) -> bool:
        """Whether the job progressed while the dumps were written: in a group, one rank is ahead of
        all others, and these are at different calls."""
        return any(map(self._has_progressed, self.joined))

    def _has_progressed(self, group: str) -> bool:
        completed = {
            rank: progress.completed[group]
            for rank, progress in self.ranks.items()
            if group in progress.completed
        }
        newest = [rank for rank in completed if completed[rank] >= self.joined[group]]
        stale = {completed[rank] for rank in completed if self._is_stale(rank, group)}
        return len(newest) == 1 and len(stale) > 1

    # -- one call ----------------------------------------------------------------------------------

    def taking_part(self, call: PendingCall) -> tuple[int, ...]:
        return call.ends or self.members.get(call.group, ())

    def absent(self, call: PendingCall) -> tuple[int, ...]:
        """The ranks of a call that have no dump."""
        with_dump = self.ranks.keys() | self.incomplete
        return tuple(rank for rank in self.taking_part(call) if rank not in with_dump)

    def completed_by(self, call: PendingCall) -> tuple[int, ...]:
        """The ranks that have completed a collective."""
        return tuple(rank for rank in self.taking_part(call) if self._has_completed(rank, call))

    def _has_completed(self, rank: int, call: PendingCall) -> bool:
        progress = self.ranks.get(rank)
        return progress is not None and progress.completed.get(call.group, 0) > call.number

    def not_issued(self, call: PendingCall) -> tuple[int, ...]:
        """The ranks of a call whose CPU has not issued it."""
        return tuple(
            rank
            for rank in self.taking_part(call)
            if rank in self.ranks and self._has(rank, call) is False
        )

    def unknown(self, call: PendingCall) -> tuple[int, ...]:
        """The ranks of a call whose dump does not show whether they have issued it."""
        return tuple(
            rank
            for rank in self.taking_part(call)
            if rank in self.incomplete or (rank in self.ranks and self._has(rank, call) is None)
        )

    def _has(self, rank: int, call: PendingCall) -> bool | None:
        """Whether the CPU of a rank has issued a call; None if its dump does not show it."""
        progress = self.ranks[rank]
        if call.ends is not None:
            return self._has_message(rank, call, call.ends)
        if call.group in self.outdated[rank] or call.group not in progress.issued:
            return None
        has_issued = progress.issued[call.group] > call.number
        # a dump that is outdated in any group does not show the last calls of its rank
        may_have = bool(self.outdated[rank]) or call.group in progress.unsure
        return None if not has_issued and may_have else has_issued

    def _has_message(self, rank: int, call: PendingCall, ends: tuple[int, int]) -> bool | None:
        progress = self.ranks[rank]
        if call.meeting in progress.first_pending:
            return True
        if self.count_messages(ends):
            return progress.messages.get(call.meeting, MessageCount()).issued > call.number
        # A complete send may be in a buffer, as long as no device has started to receive it. A
        # receive is not complete before its send.
        is_shown = rank == ends[1] or call.has_started
        return False if is_shown and self._is_idle(rank) else None

    def _is_idle(self, rank: int) -> bool:
        """Whether all calls of a rank are complete for certain."""
        is_current = rank not in (*self.unwatched, *self.unconfirmed) and not self.outdated[rank]
        return is_current and not self.ranks[rank].pending and not self.ranks[rank].unsure

    def count_messages(self, ranks: tuple[int, ...]) -> bool:
        """Whether all these ranks have a dump that lists their messages from the first one on."""
        return all(rank in self.ranks and self.ranks[rank].counts_messages for rank in ranks)

    def messages_of(self, rank: int, stream: MessageStream) -> MessageCount:
        return self.ranks[rank].messages.get(stream, MessageCount())

    def unreceived(self, stream: MessageStream) -> int | None:
        """How many completed sends of a stream have not been received; None if unknown."""
        _, source, destination = stream
        if not self.count_messages((source, destination)):
            return None
        received = self.messages_of(destination, stream).completed
        return self.messages_of(source, stream).completed - received
