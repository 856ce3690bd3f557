"""Reads exit records and exceptions: how a rank ended, and whether it ended by itself.

A `KeyboardInterrupt` on several ranks was not raised by one of them. On a single rank it may have
been, unless others had waited long for that rank: a rank that hangs in Python is often the only one
that Ctrl-C can interrupt. A rank that catches SIGTERM says so in its exit record; most ranks do not
catch it and leave no record.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torchwhere.core.device_errors import DeviceError, device_error
from torchwhere.core.errors import FAILED
from torchwhere.core.events import Event
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.rank_calls import RankCalls
from torchwhere.diagnose.doctor.waits import waiting_for, waits
from torchwhere.processes.fault_handler import IN_NATIVE_THREAD
from torchwhere.processes.status import ProcessStatus

_NEARBY = 64  # records before a call in which an exception may be its cause
WATCH_ENDED = "stop"  # end reason of a watch whose process continues
_INTERRUPT = "KeyboardInterrupt"
_TERMINATED = re.compile(
    r"(?:exit|exception: SystemExit:) (?:143|-15)|exception: .*(?:\bSIGTERM|\bsignal:? 15\b).*",
    re.IGNORECASE | re.DOTALL,
)
# Messages of gloo, NCCL and the store when the process of a peer is gone, or has aborted the
# communicator. Timeouts have others.
_CANNOT_CONNECT = (
    "connectFullMesh failed|connection refused|timed out connecting|client socket has timed out"
)
_CONNECTING = re.compile(_CANNOT_CONNECT, re.IGNORECASE)
_PEER_LOST = re.compile(
    r"closed by peer|connection reset|connection closed|connection was likely closed|broken"
    r" pipe|remote process exited|communicator (?:was|has been) aborted|ncclRemoteError"
    rf"|\bActor(?:Died|Unavailable)Error\b|{_CANNOT_CONNECT}",  # of Ray
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


# -- messages --------------------------------------------------------------------------------------


def is_lost_peer(message: str) -> bool:
    """Whether a message says that the process of a peer was gone."""
    return _PEER_LOST.search(message) is not None


def is_timeout(message: str) -> bool:
    """Whether a message says that a collective timed out."""
    return _TIMED_OUT.search(message) is not None


def is_failed_connection(message: str) -> bool:
    """Whether a message says that a rank could not connect to a peer."""
    return _CONNECTING.search(message) is not None


def is_out_of_memory(message: str) -> bool:
    return _OUT_OF_MEMORY.search(message.partition("\n")[0]) is not None


def is_unexplained_abort(message: str) -> bool:
    """Whether a thread without Python ended a process, and left no message."""
    return message.endswith(IN_NATIVE_THREAD) and "\n" not in message


def named_ranks(message: str) -> set[int]:
    """The ranks that raised an exception first, if its message names them."""
    return {
        int(rank) for match in _OF_RANKS.finditer(message) for rank in re.findall(r"\d+", match[0])
    }


# -- records ---------------------------------------------------------------------------------------


def ended_well(end: Event) -> bool:
    return str(end.fields.get("reason")) in (WATCH_ENDED, "exit", "exit 0")


def last_exception(rank_calls: RankCalls) -> str | None:
    """The text of an exception that is a rank's last record."""
    error = rank_calls.exception
    if error is None or error.number != rank_calls.rank_summary.records - 1:
        return None
    return str(error.fields.get("text"))


def was_terminated(rank_calls: RankCalls) -> bool:
    """Whether the exit record of a rank says that SIGTERM ended it."""
    end = rank_calls.end
    return end is not None and _TERMINATED.fullmatch(str(end.fields.get("reason"))) is not None


def interrupted(job_calls: JobCalls, *, waited_s: float) -> dict[int, int]:
    """The ranks that were ended from outside, and when, by their wall clocks.

    A single rank counts only if others had waited for it longer than `waited_s`: it hung before.
    """
    times = {rank: _interrupted_ns(own) for rank, own in job_calls.by_rank.items()}
    interrupted_ns = {rank: t_ns for rank, t_ns in times.items() if t_ns is not None}
    if len(interrupted_ns) != 1:
        return interrupted_ns
    ((rank, t_ns),) = interrupted_ns.items()
    others = waiting_for(waits(job_calls), [rank])
    issued = (job_calls.by_rank[wait.rank].issued_ns(*wait.call) for wait in others)
    since = min(filter(None, issued), default=t_ns)
    return interrupted_ns if t_ns - since > waited_s * 1e9 else {}


def _interrupted_ns(rank_calls: RankCalls) -> int | None:
    end, error = rank_calls.end, rank_calls.exception
    reason = str(end.fields.get("reason")) if end is not None else ""
    has_interrupt = error is not None and str(error.fields.get("text")).startswith(_INTERRUPT)
    if error is not None and has_interrupt and (end is None or FAILED in reason):
        return error.t_ns
    is_external = reason.startswith(f"{FAILED}{_INTERRUPT}") or was_terminated(rank_calls)
    return end.t_ns if end is not None and is_external else None


def survived_exception(rank_calls: RankCalls, record: int) -> Event | None:
    """An exception shortly before a record that the rank survived."""
    near = [
        error
        for error in rank_calls.rank_summary.exceptions
        if record - _NEARBY <= error.number < record
    ]
    return near[-1] if near else None


# -- the exit of each rank -------------------------------------------------------------------------
# From its exit record and the status of its process.


SAME_EXIT_NS = 1_000_000_000  # exits within a second count as simultaneous
_UNSEEN = ProcessStatus()
_NEVER = 1 << 63


class ExitReason(NamedTuple):
    """How a rank exited: what was recorded about it; if nothing was, its exit code, if known."""

    recorded: str | None = None
    exit_code: int | None = None
    is_out_of_memory: bool = False


@dataclass(frozen=True)
class RankExits:
    """How each rank of a job exited."""

    job_calls: JobCalls
    statuses: Mapping[int, ProcessStatus]
    # when a rank was last alive, by a monitor, this look or its own heartbeat
    now_ns: int | None
    # ranks that were interrupted from outside, and when
    ended_externally: Mapping[int, int] = field(default_factory=dict)

    @property
    def by_rank(self) -> dict[int, RankCalls]:
        return self.job_calls.by_rank

    def status(self, rank: int) -> ProcessStatus:
        return self.statuses.get(rank, _UNSEEN)

    def has_failed(self, rank: int) -> bool:
        """Whether a rank failed, by its exit record or by what its crash left."""
        end = self.by_rank[rank].end
        if self.was_ended_externally(rank):
            return False
        if end is not None:
            return not ended_well(end)
        return self.status(rank).ended is not None or self.unfinished(rank) is not None

    def how(self, rank: int) -> ExitReason:
        """How a rank exited."""
        end, status = self.by_rank[rank].end, self.status(rank)
        unfinished = self.unfinished(rank)
        if end is not None:
            reason = str(end.fields.get("reason"))
        elif unfinished is not None:
            reason = f"{FAILED}{unfinished}"
        elif status.out_of_memory or status.ended:
            return ExitReason(status.out_of_memory or status.ended)
        else:
            return ExitReason(exit_code=status.exit_code)
        return ExitReason(reason, is_out_of_memory=is_out_of_memory(reason))

    def outlived_its_watch(self, rank: int) -> bool:
        """Whether a rank ended its watch and its process continued: later calls are not
        recorded."""
        end, status = self.by_rank[rank].end, self.status(rank)
        if end is None or end.fields.get("reason") != WATCH_ENDED:
            return False
        seen_ns = max(status.alive_ns or 0, status.stack_ns or 0)
        return status.alive is True or seen_ns - end.t_ns > SAME_EXIT_NS

    def was_ended_externally(self, rank: int) -> bool:
        """Whether a rank was interrupted with the others, or noticed that they were."""
        if rank in self.ended_externally or not self.ended_externally:
            return rank in self.ended_externally
        error = self.by_rank[rank].exception
        return (
            error is not None
            and error.t_ns > self._first_external_ns - SAME_EXIT_NS
            and self.lost_its_peer(rank)
        )

    def lost_its_peer(self, rank: int) -> bool:
        """Whether a rank failed because the process of a peer was gone."""
        return is_lost_peer(self.exit_message(rank))

    def timed_out(self, rank: int) -> bool:
        """Whether a rank failed because a collective timed out: it waited for another rank."""
        return is_timeout(self.exit_message(rank))

    def device_error(self, rank: int) -> DeviceError | None:
        """What failed on the device of a rank, if that ended the rank."""
        return device_error(self.exit_message(rank))

    def exit_message(self, rank: int) -> str:
        """What a rank recorded about its exit, or what its crash left; empty if nothing.

        The watchdog of NCCL aborts the communicator before it ends the process: then the rank
        records only that, and the message of the crash says why.
        """
        rank_calls, status = self.by_rank[rank], self.status(rank)
        if rank_calls.end is not None:
            recorded = str(rank_calls.end.fields.get("reason"))
        else:
            recorded = (last_exception(rank_calls) or "") if status.alive is not True else ""
        if status.ended is None or status.alive or (recorded and not is_lost_peer(recorded)):
            return recorded
        return f"{recorded}\n{status.ended}".strip()

    def unfinished(self, rank: int) -> str | None:
        """An exception that is the last record of a process that is gone: it left no exit
        record."""
        return last_exception(self.by_rank[rank]) if self.status(rank).alive is False else None

    # -- all ranks ---------------------------------------------------------------------------------

    def failed(self) -> list[int]:
        return [rank for rank in self.by_rank if self.has_failed(rank)]

    def killed(self) -> list[int]:
        """Ranks whose process is gone and that left no exit record."""
        return [rank for rank in self.by_rank if self.was_killed(rank)]

    def terminated(self) -> list[int]:
        """Ranks that SIGTERM ended, by their exit record or their exit code."""
        return [
            rank
            for rank, rank_calls in self.by_rank.items()
            if was_terminated(rank_calls) or (rank_calls.end is None and self.got_sigterm(rank))
        ]

    @cached_property
    def is_over(self) -> bool:
        return not any(status.alive for status in self.statuses.values())

    @cached_property
    def was_interrupted(self) -> bool:
        """Whether Ctrl-C ended the job."""
        return not all(was_terminated(self.by_rank[rank]) for rank in self.ended_externally)

    # -- order -------------------------------------------------------------------------------------

    def got_sigterm(self, rank: int) -> bool:
        return self.status(rank).exit_code == -signal.SIGTERM

    def was_killed(self, rank: int) -> bool:
        status = self.status(rank)
        is_silent = (
            status.alive is False and self.left_no_exit_record(rank) and status.exit_code != 0
        )
        return is_silent and not self.has_failed(rank) and not self.was_ended_externally(rank)

    def left_no_exit_record(self, rank: int) -> bool:
        """Whether a box that is readable to its end has no exit record. False for any other box."""
        rank_calls = self.by_rank.get(rank)
        if rank_calls is None or rank in self.job_calls.from_snapshot:
            return False
        return rank_calls.end is None and not rank_calls.has_lost_its_newest

    def was_seen_to_exit(self, rank: int) -> bool:
        """Whether the exit was observed from outside, not only concluded from the box."""
        status = self.status(rank)
        return (
            self.was_seen_exited(rank)
            or status.exit_code is not None
            or status.out_of_memory is not None
        )

    def was_seen_exited(self, rank: int) -> bool:
        """Whether others are alive, or were seen alive after this rank was gone or last seen."""
        status = self.status(rank)
        if self.now_ns is None or status.alive is not False:
            return False
        if not self.is_over:
            return True
        is_earlier = status.gone_ns is not None and status.gone_ns <= self.now_ns
        return is_earlier or (
            status.alive_ns is not None and self.looked_ns - status.alive_ns > SAME_EXIT_NS
        )

    def exited_before_sigterm(self, rank: int) -> bool:
        """Whether a rank without an exit record exited before SIGTERM ended others, and not by
        SIGTERM.

        A rank that does not obey SIGTERM is killed later, and sends heartbeats until then.
        """
        status = self.status(rank)
        if self.got_sigterm(rank) or self.was_interrupted:
            return False
        code_ns, recorded_ns = self._sigterm_ns
        is_by_code = status.exit_code is not None and (status.gone_ns or 0) <= code_ns < _NEVER
        return is_by_code or 0 < self.last_record_ns(rank) <= recorded_ns < _NEVER

    @cached_property
    def _sigterm_ns(self) -> tuple[int, int]:
        """When SIGTERM first ended a rank: by exit codes that a monitor saw; by exit records."""
        gone = [self.status(rank).gone_ns or 0 for rank in self.by_rank if self.got_sigterm(rank)]
        ends = [own.end.t_ns for own in self.by_rank.values() if own.end and was_terminated(own)]
        return min(gone, default=_NEVER), min(ends, default=_NEVER)

    @cached_property
    def _first_external_ns(self) -> int:
        return min(self.ended_externally.values())

    @cached_property
    def looked_ns(self) -> int:
        """When a monitor last saw one of the processes alive."""
        return max((status.alive_ns or 0 for status in self.statuses.values()), default=0)

    def last_record_ns(self, rank: int) -> int:
        """When a rank last wrote to its box: a record or a heartbeat."""
        summary = self.by_rank[rank].box_summary
        return max(summary.last_ns, summary.beat_ns)

    def alive_ns(self, rank: int) -> int:
        """When a rank was last known alive, by a monitor, its records or its heartbeats; 0 if
        never."""
        in_box_ns = self.last_record_ns(rank) if rank in self.by_rank else 0
        return max(self.status(rank).alive_ns or 0, in_box_ns, 0)

    def failed_ns(self, failed: list[int]) -> list[int]:
        """When ranks failed, for those that recorded an exception."""
        errors = (self.by_rank[rank].exception for rank in failed)
        return [error.t_ns for error in errors if error is not None]
