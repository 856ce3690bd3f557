"""Who died, and who died of it: when one process ends, those who are in a collective with it fail a
moment later.

Takes what ranks said last and what was seen of their processes. A rank that says a peer hung up on
it, or that crashed in C while it stood in a collective, reacts to another one. Where nobody failed
by himself, the one to blame is a rank that left nothing to read, or one that went without a word;
where several may have, nobody is blamed. Several that go without a word, unless somebody saw one of
them go first, were killed together: that is the end of a job, and not what was wrong with it. A
launcher that finds one rank dead ends the others with SIGTERM: a rank that ended otherwise, and not
later, went first.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torchwhere.core.events import Event
from torchwhere.diagnose.calls.rank_calls import JobCalls, RankCalls
from torchwhere.diagnose.doctor.interruption import was_terminated
from torchwhere.diagnose.doctor.verdict import VerdictKind
from torchwhere.diagnose.doctor.waits import has_lost_its_newest
from torchwhere.processes.status import ProcessStatus

# What gloo, NCCL and the store say when the process at the other end is gone; a wait that took too
# long says something else.
_NEVER_MET = (
    "connectFullMesh failed|connection refused|timed out connecting|client socket has timed out"
)
_CONNECTING = re.compile(_NEVER_MET, re.IGNORECASE)
_HUNG_UP = re.compile(
    r"closed by peer|connection reset|connection closed|broken pipe|remote process"
    rf" exited|{_NEVER_MET}",
    re.IGNORECASE,
)
# And when nobody came for too long, and they gave up.
_GAVE_UP = re.compile(
    r"timed out waiting \d+ ?ms for|collective operation timeout|failed to pass"
    r" monitoredBarrier|wait timeout",
    re.IGNORECASE,
)
# One rank's failure that a checkpoint raises again on all of them, with the ranks it was of.
_OF_RANKS = re.compile(
    r"Exception ranks:dict_keys\(\[([\d, ]+)\]\)|^Traceback .*\(RANK (\d+)\)$", re.MULTILINE
)
_OUT_OF_MEMORY = re.compile(
    r"\bMemoryError\b|OutOfMemoryError|\bout of memory\b|can't allocate memory|cannot allocate"
    r" memory",
    re.IGNORECASE,
)
_LEFT = "stop"  # the reason that a watch ended for which the process goes on
_SAME_DEATH_NS = 1_000_000_000  # who went within a second of the last one went with it
NO_EXIT_RECORD = (
    "left no exit record: killed by a signal (perhaps the OOM killer), os._exit(), or a native"
    " crash"
)
_UNSEEN = ProcessStatus()
_NEVER = 1 << 63


class _Sigterm(NamedTuple):
    """When SIGTERM first ended a rank: by the exit records of ranks, and by the exit codes that a
    monitor saw."""

    recorded_ns: int
    seen_ns: int


@dataclass(slots=True)
class Exits:
    """How the ranks of a job ended, those that have."""

    job_calls: JobCalls
    statuses: Mapping[int, ProcessStatus]
    # the last moment at which one of them was alive, by whoever saw it or by its own heart
    now_ns: int | None
    # ranks that somebody interrupted, and when
    by_hand: Mapping[int, int] = field(default_factory=dict)
    _somebody_hung_up: bool | None = None
    _together: bool | None = None
    _is_over: bool | None = None
    _looked: int | None = None
    _first_by_hand: int | None = None
    _first_sigterm: _Sigterm | None = None
    _has_cause: bool | None = None

    def has_failed(self, rank: int) -> bool:
        """Whether a rank ended, and not well: by its own last words, or by those that its crash
        left."""
        end = self.job_calls.by_rank[rank].end
        if self.was_ended_by_hand(rank):
            return False
        if end is not None:
            return not ended_well(end)
        return self._status(rank).ended is not None or self._unfinished(rank) is not None

    def is_dead(self, rank: int) -> bool:
        """Whether a rank has failed, was killed for want of memory, or went without a word while
        the others went on."""
        return (
            self.has_failed(rank)
            or self._status(rank).out_of_memory is not None
            or self._is_gone_first(rank)
        )

    def has_left(self, rank: int) -> bool:
        """Whether a rank ended its watch, and went on: what it does since is not recorded."""
        end, status = self.job_calls.by_rank[rank].end, self._status(rank)
        if end is None or end.fields.get("reason") != _LEFT:
            return False
        seen_ns = max(status.alive_ns or 0, status.stack_ns or 0)
        return status.alive is True or seen_ns - end.t_ns > _SAME_DEATH_NS

    @property
    def were_killed_together(self) -> bool:
        """Whether no process is left, several went without a word, and nobody saw one of them go
        first.

        Others may have noticed that a peer was gone, but did not come to say that they end: whoever
        does had time to.
        """
        if self._together is None:
            is_over = not any(status.alive is not False for status in self.statuses.values())
            failed = set(self.failed())
            silent = [
                rank
                for rank in self.statuses
                if rank not in failed and self._has_said_nothing(rank)
            ]
            self._together = (
                is_over
                and len(silent) > 1
                and all(
                    self.job_calls.by_rank[rank].end is None and self.was_hung_up_on(rank)
                    for rank in failed
                )
                and not any(
                    self._was_seen_gone(rank) or self.statuses[rank].out_of_memory
                    for rank in silent
                )
                and not any(map(self._went_before_sigterm, silent))
            )
        return self._together

    # -- without an exit record --------------------------------------------------------------------

    def killed(self) -> list[int]:
        """Ranks whose process is gone and that left no exit record."""
        return [rank for rank in self.job_calls.by_rank if self._was_killed(rank)]

    def terminated(self) -> list[int]:
        """Ranks that SIGTERM ended, by their exit record or their exit code."""
        said = self.job_calls.by_rank.items()
        return [
            rank
            for rank, each in said
            if was_terminated(each) or (each.end is None and self._got_sigterm(rank))
        ]

    def went_first(self) -> list[int]:
        """Of ranks without an exit record, those that were seen to go before the others, or that
        went before SIGTERM ended the others."""
        gone = [rank for rank in self.killed() if self._is_gone_first(rank)]
        return [
            rank for rank in gone if self._was_seen_gone(rank) or self._went_before_sigterm(rank)
        ]

    @property
    def ended_unfinished(self) -> bool:
        """Whether no process is left, and ranks left no exit record, or SIGTERM ended them. Not so
        with Ctrl-C."""
        is_over = not any(status.alive for status in self.statuses.values())
        return is_over and not self._was_interrupted and bool(self.terminated() or self.killed())

    def outside_said(self, kind: VerdictKind) -> tuple[str, ...]:
        """That a job was ended from outside after what the verdict says."""
        if not self.by_hand or kind is VerdictKind.HEALTHY:
            return ()
        if self._was_interrupted:
            return ("Then Ctrl-C interrupted the job.",)
        return ("Then SIGTERM ended the job.",) if kind is not VerdictKind.DEAD else ()

    def was_seen_to_go(self, rank: int) -> bool:
        """Whether somebody saw that a rank was gone, or how it ended: not only its box says so."""
        status = self._status(rank)
        return (
            self._was_seen_gone(rank)
            or status.exit_code is not None
            or status.out_of_memory is not None
        )

    @property
    def _was_interrupted(self) -> bool:
        """With Ctrl-C."""
        return not all(was_terminated(self.job_calls.by_rank[rank]) for rank in self.by_hand)

    def _was_killed(self, rank: int) -> bool:
        status = self._status(rank)
        is_silent = status.alive is False and self._has_said_nothing(rank) and status.exit_code != 0
        return is_silent and not self.has_failed(rank) and not self.was_ended_by_hand(rank)

    def _got_sigterm(self, rank: int) -> bool:
        return self._status(rank).exit_code == -signal.SIGTERM

    def _went_before_sigterm(self, rank: int) -> bool:
        """Whether a rank without an exit record ended otherwise than by SIGTERM, and not after
        others were ended by it. A rank that cannot obey SIGTERM is killed later, and its heart
        beats until then."""
        status, label = self._status(rank), self.job_calls.by_rank[rank].label
        if self._got_sigterm(rank) or self._was_interrupted:
            return False
        first = self._sigterm()
        is_by_code = (
            status.exit_code is not None and (status.gone_ns or 0) <= first.seen_ns < _NEVER
        )
        return is_by_code or 0 < max(label.last_ns, label.beat_ns) <= first.recorded_ns < _NEVER

    def _was_ended_by_launcher(self, rank: int) -> bool:
        """Whether SIGTERM ended a rank after another one had gone by itself."""
        if not self._got_sigterm(rank):
            return False
        if self._has_cause is None:
            self._has_cause = any(not self._got_sigterm(other) for other in self.killed()) or bool(
                self.failed()
            )
        return self._has_cause

    def _sigterm(self) -> _Sigterm:
        if self._first_sigterm is None:
            said = self.job_calls.by_rank.values()
            recorded = [
                each.end.t_ns for each in said if each.end is not None and was_terminated(each)
            ]
            seen = [
                self._status(rank).gone_ns or 0
                for rank in self.job_calls.by_rank
                if self._got_sigterm(rank)
            ]
            self._first_sigterm = _Sigterm(min(recorded, default=_NEVER), min(seen, default=_NEVER))
        return self._first_sigterm

    # -- causes ------------------------------------------------------------------------------------

    def was_ended_by_hand(self, rank: int) -> bool:
        """Whether a rank was interrupted with the others, or noticed that these were."""
        if rank in self.by_hand or not self.by_hand:
            return rank in self.by_hand
        if self._first_by_hand is None:
            self._first_by_hand = min(self.by_hand.values())
        error = self.job_calls.by_rank[rank].exception
        return (
            error is not None
            and error.t_ns > self._first_by_hand - _SAME_DEATH_NS
            and self.was_hung_up_on(rank)
        )

    @property
    def failed_unseen(self) -> bool:
        """Whether ranks failed, and nobody has looked at the processes since: how many were there
        then is not known."""
        failed = self.failed()
        return bool(failed) and self._looked_ns() <= min(self._failed_ns(failed), default=0)

    def is_only_candidate(self, rank: int) -> bool:
        """Whether all other ranks without an exit record were alive after a rank had failed: they
        did not go before."""
        return not self._not_outliving([other for other in self.killed() if other != rank])

    def is_doubtful(self, rank: int) -> bool:
        """Whether a rank is taken for dead only because others were hung up on, and that may have
        been another rank."""
        is_known = (
            self._was_seen_gone(rank)
            or self._went_before_sigterm(rank)
            or self._status(rank).out_of_memory is not None
        )
        return self._was_killed(rank) and not is_known and not self.is_only_candidate(rank)

    def _looked_ns(self) -> int:
        """When somebody who looks again and again last saw one of them alive."""
        if self._looked is None:
            self._looked = max(
                (status.alive_ns or 0 for status in self.statuses.values()), default=0
            )
        return self._looked

    def died_of_the_end(self, rank: int) -> bool:
        """Whether a rank only noticed that the others were killed, and was killed with them."""
        return self.were_killed_together and self.has_failed(rank)

    def was_hung_up_on(self, rank: int) -> bool:
        """Whether a rank ended because the process at the other end was gone."""
        return _HUNG_UP.search(self._last_words(rank)) is not None

    def gave_up(self, rank: int) -> bool:
        """Whether a rank ended because a collective took too long: it waited for somebody."""
        return _GAVE_UP.search(self._last_words(rank)) is not None

    def _last_words(self, rank: int) -> str:
        rank_calls = self.job_calls.by_rank[rank]
        if rank_calls.end is not None:
            return str(rank_calls.end.fields.get("reason"))
        return (last_exception(rank_calls) or "") if self._status(rank).alive is not True else ""

    def _is_victim(self, rank: int) -> bool:
        said = self.job_calls.by_rank[rank]
        return (
            self.was_hung_up_on(rank)
            or self.gave_up(rank)
            or self._failed_of_others(rank)
            or was_terminated(said)
        )

    def _failed_of_others(self, rank: int) -> bool:
        """Whether what a rank raised was raised by others first: it says of which ranks it is, and
        is none of them."""
        named = {
            int(one)
            for match in _OF_RANKS.finditer(self._last_words(rank))
            for one in re.findall(r"\d+", match[0])
        }
        return bool(named) and rank not in named

    def crashed_in_it(self, rank: int) -> bool:
        """Whether a rank crashed in C while it stood in a collective: it may have been given what
        it could not take."""
        return rank in self.job_calls.by_rank and not self._is_victim(rank) and self._reacted(rank)

    def first_of_awaited(self, awaited: list[int], no_data: list[int]) -> list[int]:
        """Of dead ranks that others wait for, those that went by themselves; where all were hung up
        on, those of which nothing is known."""
        own = [rank for rank in awaited if not self._is_victim(rank)]
        return own or no_data or awaited

    def first(self, no_data: list[int]) -> list[int]:
        """Where nobody waits for the dead, as all had come to one collective: those that failed by
        themselves; else those of which nothing is known; else, if it is clear, the one that crashed
        or fell silent."""
        failed = self.failed()
        own = [rank for rank in failed if not self._reacted(rank)]
        if own or no_data:
            return own or self._not_outliving(no_data) or self._silent() or no_data
        crashed = [rank for rank in failed if not self._is_victim(rank)]
        # Who could not connect ended before there was a group: those who went without a word may
        # have been ended because of it.
        return crashed or ([] if self.never_met(failed) else self._silent())

    def never_met(self, failed: list[int]) -> bool:
        """Whether ranks failed because they could not connect to another one."""
        return all(_CONNECTING.search(self._last_words(rank)) for rank in failed)

    def failed(self) -> list[int]:
        return [rank for rank in self.job_calls.by_rank if self.has_failed(rank)]

    def how(self, rank: int) -> str:
        """How a dead rank ended."""
        rank_calls, status = self.job_calls.by_rank[rank], self._status(rank)
        if rank_calls.end is not None:
            said = str(rank_calls.end.fields.get("reason"))
        elif (unfinished := self._unfinished(rank)) is not None:
            said = f"exception: {unfinished}"
        else:
            return status.out_of_memory or status.ended or self._exit_said(rank) or NO_EXIT_RECORD
        return f"out of memory: {said}" if _OUT_OF_MEMORY.search(said.partition("\n")[0]) else said

    def _exit_said(self, rank: int) -> str | None:
        """How a process ended, by the exit code that a monitor saw."""
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
        """An exception that was the last thing a rank recorded before it was gone: it did not come
        to say that it ends."""
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

    def _is_gone_first(self, rank: int) -> bool:
        """Whether a process that is gone, without a word, went by itself and not when all was over.

        It did if others were seen alive when it was gone already, or if they say that a peer hung
        up on them, and none of those who ended by themselves, as of waiting too long, can be that
        peer.
        """
        if self._status(rank).alive is not False or self.job_calls.by_rank[rank].end is not None:
            return False
        if self._was_ended_by_launcher(rank):
            return False
        if self._was_seen_gone(rank) or self._went_before_sigterm(rank):
            return True
        if self.were_killed_together:
            return False
        if self._somebody_hung_up is None:
            failed = {rank: self._is_reaction(rank) for rank in self.failed()}
            self._somebody_hung_up = bool(failed) and all(failed.values())
        return self._somebody_hung_up

    def _is_reaction(self, rank: int) -> bool:
        return self.was_hung_up_on(rank) or was_terminated(self.job_calls.by_rank[rank])

    def _has_said_nothing(self, rank: int) -> bool:
        """Whether a box that can be read to its end has no last word; of any other one that is not
        known."""
        rank_calls = self.job_calls.by_rank.get(rank)
        if rank_calls is None or rank in self.job_calls.recalled or has_lost_its_newest(rank_calls):
            return False
        return rank_calls.end is None

    def _was_seen_gone(self, rank: int) -> bool:
        """Whether others are alive, or were seen alive when this one was gone already, or long
        after it was last seen."""
        status = self._status(rank)
        if self.now_ns is None or status.alive is not False:
            return False
        if self._is_over is None:
            self._is_over = not any(other.alive for other in self.statuses.values())
        if not self._is_over:
            return True
        is_earlier = status.gone_ns is not None and status.gone_ns <= self.now_ns
        return is_earlier or (
            status.alive_ns is not None and self._looked_ns() - status.alive_ns > _SAME_DEATH_NS
        )

    def _not_outliving(self, ranks: list[int]) -> list[int]:
        """Of some ranks, those that gave no sign of life after a rank had failed."""
        failed_ns = min(self._failed_ns(self.failed()), default=_NEVER)
        return [rank for rank in ranks if self._alive_ns(rank) <= failed_ns]

    def _alive_ns(self, rank: int) -> int:
        """When a rank last gave a sign of life: to a monitor, or by its records and heartbeats; 0
        if it never did."""
        said = self.job_calls.by_rank.get(rank)
        signs = (said.label.last_ns, said.label.beat_ns) if said is not None else ()
        return max(self._status(rank).alive_ns or 0, *signs, 0)

    def _failed_ns(self, failed: list[int]) -> list[int]:
        """When ranks failed, those that could still say so."""
        return [
            error.t_ns
            for rank in failed
            if (error := self.job_calls.by_rank[rank].exception) is not None
        ]

    def _silent(self) -> list[int]:
        """Those that went without a word, the first of them; nobody, where there are several and no
        one saw when they went."""
        silent = [
            rank
            for rank in self.job_calls.by_rank
            if not self.has_failed(rank) and self._is_gone_first(rank)
        ]
        seen = {rank: ns for rank in silent if (ns := self._status(rank).alive_ns) is not None}
        if len(silent) < 2 or len(seen) < len(silent):
            return silent if len(silent) < 2 else []
        first = min(seen.values())
        return [rank for rank in silent if seen[rank] - first <= _SAME_DEATH_NS]


def ended_well(end: Event) -> bool:
    return str(end.fields.get("reason")) in (_LEFT, "exit", "exit 0")


def last_exception(rank_calls: RankCalls) -> str | None:
    """The text of an exception that is a rank's last record."""
    error = rank_calls.exception
    return (
        str(error.fields.get("text"))
        if error is not None and error.number == rank_calls.rank_summary.records - 1
        else None
    )
