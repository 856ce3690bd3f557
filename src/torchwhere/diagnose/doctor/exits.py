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

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torchwhere.core.events import Event
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.rank_calls import RankCalls
from torchwhere.diagnose.doctor.interruption import was_terminated
from torchwhere.diagnose.doctor.verdict import VerdictKind
from torchwhere.processes.status import ProcessStatus

# Messages of gloo, NCCL and the store when the process of a peer is gone. Timeouts have others.
_CANNOT_CONNECT = (
    "connectFullMesh failed|connection refused|timed out connecting|client socket has timed out"
)
_CONNECTING = re.compile(_CANNOT_CONNECT, re.IGNORECASE)
_PEER_LOST = re.compile(
    r"closed by peer|connection reset|connection closed|broken pipe|remote process"
    rf" exited|{_CANNOT_CONNECT}",
    re.IGNORECASE,
)
# Messages of a collective that timed out.
_TIMED_OUT = re.compile(
    r"timed out waiting \d+ ?ms for|collective operation timeout|failed to pass"
    r" monitoredBarrier|wait timeout",
    re.IGNORECASE,
)
# A failure that a checkpoint raises again on all ranks, with the ranks that it came from.
_OF_RANKS = re.compile(
    r"Exception ranks:dict_keys\(\[([\d, ]+)\]\)|^Traceback .*\(RANK (\d+)\)$", re.MULTILINE
)
_OUT_OF_MEMORY = re.compile(
    r"\bMemoryError\b|OutOfMemoryError|\bout of memory\b|can't allocate memory|cannot allocate"
    r" memory",
    re.IGNORECASE,
)
_WATCH_ENDED = "stop"  # end reason of a watch whose process continues
_SAME_EXIT_NS = 1_000_000_000  # exits within a second count as simultaneous
NO_EXIT_RECORD = (
    "left no exit record: killed by a signal (perhaps the OOM killer), os._exit(), or a native"
    " crash"
)
_UNSEEN = ProcessStatus()
_NEVER = 1 << 63


class _Sigterm(NamedTuple):
    """When SIGTERM first ended a rank: by exit records, and by exit codes that a monitor saw."""

    recorded_ns: int
    seen_ns: int


@dataclass(slots=True)
class Exits:
    """How the ranks of a job exited."""

    job_calls: JobCalls
    statuses: Mapping[int, ProcessStatus]
    # when a rank was last alive, by a monitor, this look or its own heartbeat
    now_ns: int | None
    # ranks that were interrupted from outside, and when
    ended_externally: Mapping[int, int] = field(default_factory=dict)
    _peers_were_lost: bool | None = None
    _together: bool | None = None
    _is_over: bool | None = None
    _looked: int | None = None
    _first_external_ns: int | None = None
    _first_sigterm: _Sigterm | None = None
    _has_cause: bool | None = None

    def has_failed(self, rank: int) -> bool:
        """Whether a rank failed, by its exit record or by what its crash left."""
        end = self.job_calls.by_rank[rank].end
        if self.was_ended_externally(rank):
            return False
        if end is not None:
            return not ended_well(end)
        return self._status(rank).ended is not None or self._unfinished(rank) is not None

    def is_dead(self, rank: int) -> bool:
        """Whether a rank failed, was killed for lack of memory, or vanished while others
        continued."""
        return (
            self.has_failed(rank)
            or self._status(rank).out_of_memory is not None
            or self._exited_by_itself(rank)
        )

    def outlived_its_watch(self, rank: int) -> bool:
        """Whether a rank ended its watch and its process continued: later calls are not
        recorded."""
        end, status = self.job_calls.by_rank[rank].end, self._status(rank)
        if end is None or end.fields.get("reason") != _WATCH_ENDED:
            return False
        seen_ns = max(status.alive_ns or 0, status.stack_ns or 0)
        return status.alive is True or seen_ns - end.t_ns > _SAME_EXIT_NS

    @property
    def were_killed_together(self) -> bool:
        """Whether no process is left, several left no exit record, and none was seen to exit first.

        Other ranks may have noticed a lost peer, but left no exit record either: a rank that fails
        by itself has time to write one.
        """
        if self._together is None:
            is_over = not any(status.alive is not False for status in self.statuses.values())
            failed = set(self.failed())
            unrecorded = [
                rank
                for rank in self.statuses
                if rank not in failed and self._left_no_exit_record(rank)
            ]
            self._together = (
                is_over
                and len(unrecorded) > 1
                and all(
                    self.job_calls.by_rank[rank].end is None and self.lost_its_peer(rank)
                    for rank in failed
                )
                and not any(
                    self._was_seen_exited(rank) or self.statuses[rank].out_of_memory
                    for rank in unrecorded
                )
                and not any(map(self._exited_before_sigterm, unrecorded))
            )
        return self._together

    # -- without an exit record --------------------------------------------------------------------

    def killed(self) -> list[int]:
        """Ranks whose process is gone and that left no exit record."""
        return [rank for rank in self.job_calls.by_rank if self._was_killed(rank)]

    def terminated(self) -> list[int]:
        """Ranks that SIGTERM ended, by their exit record or their exit code."""
        ranks = self.job_calls.by_rank.items()
        return [
            rank
            for rank, rank_calls in ranks
            if was_terminated(rank_calls) or (rank_calls.end is None and self._got_sigterm(rank))
        ]

    def exited_first(self) -> list[int]:
        """Ranks without an exit record that exited before the others, or before SIGTERM ended
        the others."""
        gone = [rank for rank in self.killed() if self._exited_by_itself(rank)]
        return [
            rank
            for rank in gone
            if self._was_seen_exited(rank) or self._exited_before_sigterm(rank)
        ]

    @property
    def ended_unfinished(self) -> bool:
        """Whether no process is left, and ranks left no exit record or SIGTERM ended them.

        False after Ctrl-C.
        """
        is_over = not any(status.alive for status in self.statuses.values())
        return is_over and not self._was_interrupted and bool(self.terminated() or self.killed())

    def external_end_text(self, kind: VerdictKind) -> tuple[str, ...]:
        """Says that the job was ended from outside after the fault."""
        if not self.ended_externally or kind is VerdictKind.HEALTHY:
            return ()
        if self._was_interrupted:
            return ("Then Ctrl-C interrupted the job.",)
        return ("Then SIGTERM ended the job.",) if kind is not VerdictKind.DEAD else ()

    def was_seen_to_exit(self, rank: int) -> bool:
        """Whether the exit was observed from outside, not only concluded from the box."""
        status = self._status(rank)
        return (
            self._was_seen_exited(rank)
            or status.exit_code is not None
            or status.out_of_memory is not None
        )

    @property
    def _was_interrupted(self) -> bool:
        """Whether Ctrl-C ended the job."""
        return not all(
            was_terminated(self.job_calls.by_rank[rank]) for rank in self.ended_externally
        )

    def _was_killed(self, rank: int) -> bool:
        status = self._status(rank)
        is_silent = (
            status.alive is False and self._left_no_exit_record(rank) and status.exit_code != 0
        )
        return is_silent and not self.has_failed(rank) and not self.was_ended_externally(rank)

    def _got_sigterm(self, rank: int) -> bool:
        return self._status(rank).exit_code == -signal.SIGTERM

    def _exited_before_sigterm(self, rank: int) -> bool:
        """Whether a rank without an exit record exited before SIGTERM ended others, and not by
        SIGTERM.

        A rank that does not obey SIGTERM is killed later, and sends heartbeats until then.
        """
        status, label = self._status(rank), self.job_calls.by_rank[rank].label
        if self._got_sigterm(rank) or self._was_interrupted:
            return False
        first = self._sigterm()
        is_by_code = (
            status.exit_code is not None and (status.gone_ns or 0) <= first.seen_ns < _NEVER
        )
        return is_by_code or 0 < max(label.last_ns, label.beat_ns) <= first.recorded_ns < _NEVER

    def _was_ended_by_launcher(self, rank: int) -> bool:
        """Whether SIGTERM ended a rank after another rank had exited by itself."""
        if not self._got_sigterm(rank):
            return False
        if self._has_cause is None:
            self._has_cause = any(not self._got_sigterm(other) for other in self.killed()) or bool(
                self.failed()
            )
        return self._has_cause

    def _sigterm(self) -> _Sigterm:
        if self._first_sigterm is None:
            ranks = self.job_calls.by_rank.values()
            recorded = [
                rank_calls.end.t_ns
                for rank_calls in ranks
                if rank_calls.end is not None and was_terminated(rank_calls)
            ]
            seen = [
                self._status(rank).gone_ns or 0
                for rank in self.job_calls.by_rank
                if self._got_sigterm(rank)
            ]
            self._first_sigterm = _Sigterm(min(recorded, default=_NEVER), min(seen, default=_NEVER))
        return self._first_sigterm

    # -- causes ------------------------------------------------------------------------------------

    def was_ended_externally(self, rank: int) -> bool:
        """Whether a rank was interrupted with the others, or noticed that they were."""
        if rank in self.ended_externally or not self.ended_externally:
            return rank in self.ended_externally
        if self._first_external_ns is None:
            self._first_external_ns = min(self.ended_externally.values())
        error = self.job_calls.by_rank[rank].exception
        return (
            error is not None
            and error.t_ns > self._first_external_ns - _SAME_EXIT_NS
            and self.lost_its_peer(rank)
        )

    @property
    def failed_unseen(self) -> bool:
        """Whether ranks failed after the last look at the processes: it is unknown which were
        alive then."""
        failed = self.failed()
        return bool(failed) and self._looked_ns() <= min(self._failed_ns(failed), default=0)

    def is_only_candidate(self, rank: int) -> bool:
        """Whether all other ranks without an exit record were alive after a rank had failed."""
        return not self._silent_since_failure([other for other in self.killed() if other != rank])

    def is_doubtful(self, rank: int) -> bool:
        """Whether a rank counts as exited only because others lost a peer, which may have been
        another rank."""
        is_known = (
            self._was_seen_exited(rank)
            or self._exited_before_sigterm(rank)
            or self._status(rank).out_of_memory is not None
        )
        return self._was_killed(rank) and not is_known and not self.is_only_candidate(rank)

    def _looked_ns(self) -> int:
        """When a monitor last saw one of the processes alive."""
        if self._looked is None:
            self._looked = max(
                (status.alive_ns or 0 for status in self.statuses.values()), default=0
            )
        return self._looked

    def exited_with_the_job(self, rank: int) -> bool:
        """Whether a rank only noticed that the others were killed, and was killed with them."""
        return self.were_killed_together and self.has_failed(rank)

    def lost_its_peer(self, rank: int) -> bool:
        """Whether a rank failed because the process of a peer was gone."""
        return _PEER_LOST.search(self._exit_message(rank)) is not None

    def timed_out(self, rank: int) -> bool:
        """Whether a rank failed because a collective timed out: it waited for another rank."""
        return _TIMED_OUT.search(self._exit_message(rank)) is not None

    def _exit_message(self, rank: int) -> str:
        rank_calls = self.job_calls.by_rank[rank]
        if rank_calls.end is not None:
            return str(rank_calls.end.fields.get("reason"))
        return (last_exception(rank_calls) or "") if self._status(rank).alive is not True else ""

    def _is_victim(self, rank: int) -> bool:
        rank_calls = self.job_calls.by_rank[rank]
        return (
            self.lost_its_peer(rank)
            or self.timed_out(rank)
            or self._raised_again(rank)
            or was_terminated(rank_calls)
        )

    def _raised_again(self, rank: int) -> bool:
        """Whether a rank raised again what other ranks raised first: the message names ranks,
        but not this one."""
        named = {
            int(one)
            for match in _OF_RANKS.finditer(self._exit_message(rank))
            for one in re.findall(r"\d+", match[0])
        }
        return bool(named) and rank not in named

    def crashed_in_collective(self, rank: int) -> bool:
        """Whether a rank crashed in native code inside a collective: it may have received bad
        data."""
        return rank in self.job_calls.by_rank and not self._is_victim(rank) and self._reacted(rank)

    def first_of_awaited(self, awaited: list[int], no_data: list[int]) -> list[int]:
        """Of exited ranks that others wait for, those that exited by themselves.

        If all of them lost a peer, the ranks without data.
        """
        own = [rank for rank in awaited if not self._is_victim(rank)]
        return own or no_data or awaited

    def first(self, no_data: list[int]) -> list[int]:
        """The ranks that exited first, where all ranks had reached one collective.

        Those that failed by themselves; else ranks without data; else, if it is unambiguous, the
        rank that crashed or left no exit record.
        """
        failed = self.failed()
        own = [rank for rank in failed if not self._reacted(rank)]
        if own or no_data:
            return (
                own or self._silent_since_failure(no_data) or self._without_exit_record() or no_data
            )
        crashed = [rank for rank in failed if not self._is_victim(rank)]
        # A rank that could not connect exited before there was a group: ranks without an exit
        # record may have been ended because of it.
        return crashed or ([] if self.could_not_connect(failed) else self._without_exit_record())

    def could_not_connect(self, failed: list[int]) -> bool:
        """Whether ranks failed because they could not connect to a peer."""
        return all(_CONNECTING.search(self._exit_message(rank)) for rank in failed)

    def failed(self) -> list[int]:
        return [rank for rank in self.job_calls.by_rank if self.has_failed(rank)]

    def how(self, rank: int) -> str:
        """How a rank exited."""
        rank_calls, status = self.job_calls.by_rank[rank], self._status(rank)
        if rank_calls.end is not None:
            reason = str(rank_calls.end.fields.get("reason"))
        elif (unfinished := self._unfinished(rank)) is not None:
            reason = f"exception: {unfinished}"
        else:
            return (
                status.out_of_memory or status.ended or self._exit_code_text(rank) or NO_EXIT_RECORD
            )
        return (
            f"out of memory: {reason}"
            if _OUT_OF_MEMORY.search(reason.partition("\n")[0])
            else reason
        )

    def _exit_code_text(self, rank: int) -> str | None:
        """How a process exited, by the exit code that a monitor saw."""
        code = self._status(rank).exit_code
        if code is None:
            return None
        if code >= 0:
            return f"exit code {code} without an exit record: os._exit(), or an exit in native code"
        names = {int(number): number.name for number in signal.Signals}
        return f"killed by {names.get(-code, f'signal {-code}')}"

    def _status(self, rank: int) -> ProcessStatus:
        return self.statuses.get(rank, _UNSEEN)

    def _unfinished(self, rank: int) -> str | None:
        """An exception that is the last record of a process that is gone: it left no exit
        record."""
        return (
            last_exception(self.job_calls.by_rank[rank])
            if self._status(rank).alive is False
            else None
        )

    def _reacted(self, rank: int) -> bool:
        rank_calls = self.job_calls.by_rank[rank]
        is_crash = (
            rank_calls.end is None
            and self._unfinished(rank) is None
            and self._status(rank).out_of_memory is None
        )
        return self._is_victim(rank) or (is_crash and rank_calls.in_collective_since_ns is not None)

    def _exited_by_itself(self, rank: int) -> bool:
        """Whether a process without an exit record exited by itself, and not with the whole job.

        True if others were seen alive after it was gone, or if others report a lost peer and no
        rank that exited by itself (by a timeout, say) can be that peer.
        """
        if self._status(rank).alive is not False or self.job_calls.by_rank[rank].end is not None:
            return False
        if self._was_ended_by_launcher(rank):
            return False
        if self._was_seen_exited(rank) or self._exited_before_sigterm(rank):
            return True
        if self.were_killed_together:
            return False
        if self._peers_were_lost is None:
            failed = {rank: self._is_reaction(rank) for rank in self.failed()}
            self._peers_were_lost = bool(failed) and all(failed.values())
        return self._peers_were_lost

    def _is_reaction(self, rank: int) -> bool:
        return self.lost_its_peer(rank) or was_terminated(self.job_calls.by_rank[rank])

    def _left_no_exit_record(self, rank: int) -> bool:
        """Whether a box that is readable to its end has no exit record. False for any other box."""
        rank_calls = self.job_calls.by_rank.get(rank)
        if (
            rank_calls is None
            or rank in self.job_calls.from_snapshot
            or rank_calls.has_lost_its_newest
        ):
            return False
        return rank_calls.end is None

    def _was_seen_exited(self, rank: int) -> bool:
        """Whether others are alive, or were seen alive after this rank was gone or last seen."""
        status = self._status(rank)
        if self.now_ns is None or status.alive is not False:
            return False
        if self._is_over is None:
            self._is_over = not any(other.alive for other in self.statuses.values())
        if not self._is_over:
            return True
        is_earlier = status.gone_ns is not None and status.gone_ns <= self.now_ns
        return is_earlier or (
            status.alive_ns is not None and self._looked_ns() - status.alive_ns > _SAME_EXIT_NS
        )

    def _silent_since_failure(self, ranks: list[int]) -> list[int]:
        """The ranks that gave no sign of life after a rank had failed."""
        failed_ns = min(self._failed_ns(self.failed()), default=_NEVER)
        return [rank for rank in ranks if self._alive_ns(rank) <= failed_ns]

    def _alive_ns(self, rank: int) -> int:
        """When a rank was last known alive, by a monitor, its records or its heartbeats; 0 if
        never."""
        rank_calls = self.job_calls.by_rank.get(rank)
        signs = (
            (rank_calls.label.last_ns, rank_calls.label.beat_ns) if rank_calls is not None else ()
        )
        return max(self._status(rank).alive_ns or 0, *signs, 0)

    def _failed_ns(self, failed: list[int]) -> list[int]:
        """When ranks failed, for those that recorded an exception."""
        return [
            error.t_ns
            for rank in failed
            if (error := self.job_calls.by_rank[rank].exception) is not None
        ]

    def _without_exit_record(self) -> list[int]:
        """The first rank without an exit record; none if there are several and their order is
        unknown."""
        unrecorded = [
            rank
            for rank in self.job_calls.by_rank
            if not self.has_failed(rank) and self._exited_by_itself(rank)
        ]
        seen = {rank: ns for rank in unrecorded if (ns := self._status(rank).alive_ns) is not None}
        if len(unrecorded) < 2 or len(seen) < len(unrecorded):
            return unrecorded if len(unrecorded) < 2 else []
        first = min(seen.values())
        return [rank for rank in unrecorded if seen[rank] - first <= _SAME_EXIT_NS]


def ended_well(end: Event) -> bool:
    return str(end.fields.get("reason")) in (_WATCH_ENDED, "exit", "exit 0")


def last_exception(rank_calls: RankCalls) -> str | None:
    """The text of an exception that is a rank's last record."""
    error = rank_calls.exception
    return (
        str(error.fields.get("text"))
        if error is not None and error.number == rank_calls.rank_summary.records - 1
        else None
    )
