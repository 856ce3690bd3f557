"""Finds which ranks exited by themselves, and which only as a consequence.

When a process exits, the ranks in a collective with it fail a moment later. A rank that reports a
closed connection, or that crashed in native code inside a collective, reacts to another rank. If no
rank failed by itself, the culprit is a rank without data, or one that left no exit record; if
several qualify, no rank is blamed. Several ranks without an exit record were killed together,
unless one was seen to exit first: that is how the job ended, not what was wrong with it. A launcher
that sees one rank exit ends the others with SIGTERM: a rank that exited in another way, and not
later, was first.
"""

from __future__ import annotations

import signal
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from torchwhere.core.errors import FAILED
from torchwhere.core.events import Event
from torchwhere.core.grouping import grouped
from torchwhere.diagnose.doctor.exit_records import (
    SAME_EXIT_NS,
    RankExits,
    ended_well,
    is_failed_connection,
    is_unexplained_abort,
    named_ranks,
    was_terminated,
)
from torchwhere.gpus.samples import devices_of, host_name

_NEVER = 1 << 63


class Reaction(StrEnum):
    """Why a rank exited because of another one."""

    TIMED_OUT = "timed out"
    LOST_PEER = "lost peer"
    RAISED_AGAIN = "raised again"
    TERMINATED = "terminated"
    SHARED_DEVICE = "shared device"


@dataclass(frozen=True)
class Exits(RankExits):
    """Which exits are causes, and which are consequences."""

    def is_dead(self, rank: int) -> bool:
        """Whether a rank failed, was killed for lack of memory, or vanished while others
        continued."""
        return (
            self.has_failed(rank)
            or self.status(rank).out_of_memory is not None
            or self._exited_by_itself(rank)
        )

    @cached_property
    def held(self) -> frozenset[int]:
        """Ranks that are stopped, or that exited while others continued."""
        return frozenset(
            rank
            for rank in self.by_rank
            if self.status(rank).is_stopped
            or (self.is_dead(rank) and not self.exited_with_the_job(rank))
        )

    @cached_property
    def were_killed_together(self) -> bool:
        """Whether no process is left, several left no exit record, and none was seen to exit first.

        Other ranks may have noticed a lost peer, but left no exit record either: a rank that fails
        by itself has time to write one.
        """
        if any(status.alive is not False for status in self.statuses.values()):
            return False
        failed = set(self.failed())
        unrecorded = [
            rank for rank in self.statuses if rank not in failed and self.left_no_exit_record(rank)
        ]
        if len(unrecorded) < 2 or any(map(self._was_first, unrecorded)):
            return False
        return all(self.by_rank[rank].end is None and self.lost_its_peer(rank) for rank in failed)

    def _was_first(self, rank: int) -> bool:
        """Whether a rank without an exit record is known to have exited before others."""
        return (
            self.was_seen_exited(rank)
            or self.status(rank).out_of_memory is not None
            or self.exited_before_sigterm(rank)
        )

    def exited_first(self) -> list[int]:
        """Ranks without an exit record that exited before the others, or before SIGTERM ended
        the others."""
        return [
            rank
            for rank in self.killed()
            if self._exited_by_itself(rank)
            and (self.was_seen_exited(rank) or self.exited_before_sigterm(rank))
        ]

    @property
    def ended_unfinished(self) -> bool:
        """Whether no process is left, and ranks left no exit record or SIGTERM ended them.

        False after Ctrl-C.
        """
        is_unfinished = bool(self.terminated() or self.killed())
        return self.is_over and not self.was_interrupted and is_unfinished

    def _exited_by_itself(self, rank: int) -> bool:
        """Whether a process without an exit record exited by itself, and not with the whole job.

        True if others were seen alive after it was gone, or if others report a lost peer and no
        rank that exited by itself (by a timeout, say) can be that peer.
        """
        if self.status(rank).alive is not False or self.by_rank[rank].end is not None:
            return False
        if self.got_sigterm(rank) and self._has_own_exit:  # the launcher ended it
            return False
        if self.was_seen_exited(rank) or self.exited_before_sigterm(rank):
            return True
        if self.were_killed_together:
            return False
        return self._were_peers_lost

    @cached_property
    def _were_peers_lost(self) -> bool:
        """Whether all ranks that failed reacted to the exit of another one."""
        failed = self.failed()
        return bool(failed) and all(
            self.lost_its_peer(rank)
            or was_terminated(self.by_rank[rank])
            or self.reaction(rank) is Reaction.SHARED_DEVICE
            for rank in failed
        )

    @cached_property
    def _has_own_exit(self) -> bool:
        """Whether a rank exited by itself."""
        return any(not self.got_sigterm(rank) for rank in self.killed()) or bool(self.failed())

    # -- causes ------------------------------------------------------------------------------------

    @property
    def failed_unseen(self) -> bool:
        """Whether ranks failed after the last look at the processes: it is unknown which were
        alive then."""
        failed = self.failed()
        return bool(failed) and self.looked_ns <= min(self.failed_ns(failed), default=0)

    def is_only_candidate(self, rank: int) -> bool:
        """Whether all other ranks without an exit record were alive after a rank had failed."""
        return not self._silent_since_failure([other for other in self.killed() if other != rank])

    def is_doubtful(self, rank: int) -> bool:
        """Whether a rank counts as exited only because others lost a peer, which may have been
        another rank."""
        is_unproven = self.was_killed(rank) and not self._was_first(rank)
        return is_unproven and not self.is_only_candidate(rank)

    def exited_with_the_job(self, rank: int) -> bool:
        """Whether a rank only noticed that the others were killed, and was killed with them."""
        return self.were_killed_together and self.has_failed(rank)

    def reaction(self, rank: int) -> Reaction | None:
        """Why a rank exited, if the cause was another rank."""
        if self.device_error(rank) is not None:
            return Reaction.SHARED_DEVICE if self._lost_its_device(rank) else None
        if self.timed_out(rank):
            return Reaction.TIMED_OUT
        if self.lost_its_peer(rank):
            return Reaction.LOST_PEER
        if self._raised_again(rank):
            return Reaction.RAISED_AGAIN
        has_caught = was_terminated(self.by_rank[rank]) or self._exited_after_kill(rank)
        return Reaction.TERMINATED if has_caught else None

    def _lost_its_device(self, rank: int) -> bool:
        """Whether another process on the device of a rank was gone before that device failed. If
        processes share a device through MPS, the end of one of them may make the others fail.

        Process states do not count: the driver may keep a killed process for longer than the
        others need to fail. Only of a rank without a box they are all that is known: it may have
        used a device that several ranks share.
        """
        failed_ns, sharing = min(self.failed_ns([rank]), default=0), self.on_same_device(rank)
        if any(self.last_record_ns(own) <= failed_ns and self._vanished(own) for own in sharing):
            return True
        killed_ns = [
            status.gone_ns or _NEVER
            for other, status in self.statuses.items()
            if other not in self.by_rank and status.exit_code == -signal.SIGKILL
        ]
        return bool(sharing) and min(killed_ns, default=_NEVER) <= failed_ns + SAME_EXIT_NS

    def _vanished(self, rank: int) -> bool:
        """Whether a process left no exit record, and nothing shows why it exited."""
        return (
            self.status(rank).alive is False
            and self.by_rank[rank].end is None
            and not self.got_sigterm(rank)
            and self.device_error(rank) is None
            and self.reaction(rank) is None
            and not self._aborted_unexplained(rank)
        )

    def on_same_device(self, rank: int) -> list[int]:
        """The other ranks whose boxes name a device of this rank."""
        own = self._devices.get(rank, frozenset())
        return [
            other for other, devices in self._devices.items() if other != rank and devices & own
        ]

    @cached_property
    def _devices(self) -> dict[int, frozenset[tuple[str, str]]]:
        """The host and the UUID of the devices of each rank, as far as they are known."""
        metas = {rank: own.box_summary.meta for rank, own in self.by_rank.items()}
        return {
            rank: frozenset(
                (host_name(meta), str(device["uuid"]))
                for device in devices_of(meta)
                if device.get("uuid")
            )
            for rank, meta in metas.items()
        }

    def _exited_after_kill(self, rank: int) -> bool:
        """Whether a rank ended itself with an exit code after a monitor had seen that another rank
        was killed: a handler of SIGTERM may end a rank with any code."""
        end = self.by_rank[rank].end
        return end is not None and _has_exit_code(end) and self._first_kill_ns <= end.t_ns

    @cached_property
    def _first_kill_ns(self) -> int:
        """When a monitor saw that a rank was gone which SIGTERM did not end, and which left no exit
        record."""
        killed = (self.status(rank) for rank in self.killed() if not self.got_sigterm(rank))
        return min((status.gone_ns for status in killed if status.gone_ns), default=_NEVER)

    def may_have_caught_sigterm(self, ranks: list[int]) -> bool:
        """Whether ranks ended themselves with one exit code while another rank may have been
        killed: a handler of SIGTERM may have ended them because of it.

        One rank alone counts only if a signal is known to have killed the other at that time.
        """
        ends = [end for rank in ranks if (end := self.by_rank[rank].end) is not None]
        reasons = {str(end.fields.get("reason")) for end in ends}
        if len(ends) < len(ranks) or len(reasons) != 1 or not _has_exit_code(ends[0]):
            return False
        times = [end.t_ns for end in ends]
        killed = [self.status(rank) for rank in self.killed() if not self.got_sigterm(rank)]
        if len(ranks) > 1:
            return bool(killed) and max(times) - min(times) <= SAME_EXIT_NS
        return any(
            (status.exit_code or 0) < 0 and abs((status.gone_ns or 0) - times[0]) <= SAME_EXIT_NS
            for status in killed
        )

    def reactions(self, *, besides: Collection[int] = ()) -> dict[Reaction, list[int]]:
        """The ranks that failed because of another one, by reaction."""
        failed = ((self.reaction(rank), rank) for rank in self.failed() if rank not in besides)
        return grouped((reaction, rank) for reaction, rank in failed if reaction is not None)

    def may_be_first(self, rank: int) -> bool:
        """Whether a rank exited, and nothing shows that this was because of another rank."""
        return (
            self.is_dead(rank)
            and self.reaction(rank) is None
            and not self._aborted_unexplained(rank)
        )

    def _is_victim(self, rank: int) -> bool:
        return self.reaction(rank) is not None

    def _raised_again(self, rank: int) -> bool:
        """Whether a rank raised again what other ranks raised first: the message names ranks,
        but not this one."""
        named = named_ranks(self.exit_message(rank))
        return bool(named) and rank not in named

    def crashed_in_collective(self, rank: int) -> bool:
        """Whether a rank crashed in native code inside a collective: it may have received bad
        data."""
        return rank in self.by_rank and not self._is_victim(rank) and self.reacted(rank)

    def first_of_awaited(self, awaited: list[int], no_data: list[int]) -> list[int]:
        """Of exited ranks that others wait for, those that exited by themselves.

        If all of them lost a peer, the ranks without data.
        """
        own = [rank for rank in awaited if not self._is_victim(rank)]
        explained = [rank for rank in own if not self._aborted_unexplained(rank)]
        return self._with_device_errors(own) or explained or own or no_data or awaited

    def first(self, no_data: list[int]) -> list[int]:
        """The ranks that exited first, where all ranks had reached one collective.

        Those that failed by themselves; else ranks without data; else, if it is unambiguous, the
        rank that crashed or left no exit record.
        """
        failed = self.failed()
        own = [rank for rank in failed if not self.reacted(rank)]
        # A monitor, or a rank that exits, may look between two exits of one SIGTERM.
        after = [rank for rank in failed if rank not in own and self._exited_after_kill(rank)]
        if own and self.may_have_caught_sigterm(own + after):
            return []
        if own or no_data:
            return (
                self._with_device_errors(own)
                or own
                or self._silent_since_failure(no_data)
                or self._without_exit_record()
                or no_data
            )
        crashed = [rank for rank in failed if not self._is_victim(rank)]
        if all(map(self._aborted_unexplained, crashed)):
            crashed = self._aborted_first(crashed)
        # A rank that could not connect exited before there was a group: ranks without an exit
        # record may have been ended because of it.
        return crashed or ([] if self.could_not_connect(failed) else self._without_exit_record())

    def could_not_connect(self, failed: list[int]) -> bool:
        """Whether ranks failed because they could not connect to a peer."""
        return all(is_failed_connection(self.exit_message(rank)) for rank in failed)

    def reacted(self, rank: int) -> bool:
        """Whether a rank failed because of another one, or may have: it crashed in a collective, or
        a native thread ended it without a message."""
        rank_calls = self.by_rank[rank]
        is_crash = (
            rank_calls.end is None
            and self.unfinished(rank) is None
            and self.status(rank).out_of_memory is None
            and self.device_error(rank) is None
        )
        may_react = rank_calls.in_collective_since_ns is not None or self._aborted_unexplained(rank)
        return self._is_victim(rank) or (is_crash and may_react)

    def _with_device_errors(self, ranks: list[int]) -> list[int]:
        return [rank for rank in ranks if self.device_error(rank) is not None]

    def _aborted_unexplained(self, rank: int) -> bool:
        """Whether a native thread ended a rank, and left no message.

        The watchdog of NCCL does so after an error of the rank's own device, and also after a
        timeout.
        """
        return is_unexplained_abort(self.exit_message(rank))

    def _aborted_first(self, aborted: list[int]) -> list[int]:
        """The rank that aborted clearly before the others; none if there is no such rank."""
        gone_ns = sorted((self.status(rank).gone_ns or 0, rank) for rank in aborted)
        if len(gone_ns) < 2:
            return aborted
        (first_ns, first), (second_ns, _) = gone_ns[:2]
        return [first] if first_ns and second_ns - first_ns > SAME_EXIT_NS else []

    def _silent_since_failure(self, ranks: list[int]) -> list[int]:
        """The ranks that gave no sign of life after a rank had failed."""
        failed_ns = min(self.failed_ns(self.failed()), default=_NEVER)
        return [rank for rank in ranks if self.alive_ns(rank) <= failed_ns]

    def _without_exit_record(self) -> list[int]:
        """The first rank without an exit record; none if there are several and their order is
        unknown."""
        unrecorded = [
            rank
            for rank in self.by_rank
            if not self.has_failed(rank) and self._exited_by_itself(rank)
        ]
        if len(unrecorded) < 2:
            return unrecorded
        alive_ns = [self.status(rank).alive_ns for rank in unrecorded]
        times = [t_ns for t_ns in alive_ns if t_ns is not None]
        if len(times) < len(unrecorded):
            return []
        first = min(times)
        return [
            rank
            for rank, t_ns in zip(unrecorded, times, strict=True)
            if t_ns - first <= SAME_EXIT_NS
        ]


def _has_exit_code(end: Event) -> bool:
    """Whether a process ended itself with an exit code other than 0: `exit 3`, or a `SystemExit`
    that left the watch."""
    is_own = str(end.fields.get("reason")).startswith(("exit ", f"{FAILED}SystemExit"))
    return is_own and not ended_well(end)
