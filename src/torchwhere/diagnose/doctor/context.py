"""What is known about a job and each of its ranks. All rules share it, and no rule changes it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from torchwhere.blackbox.run import RunSummary
from torchwhere.core.device_place import DevicePlace
from torchwhere.core.events import Event
from torchwhere.core.place import Place, line_fields
from torchwhere.core.stall import BEAT_S, ENDED_AGAIN, ENDED_S
from torchwhere.diagnose.calls.encode import GroupCreation
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.calls.rank_calls import RankCalls
from torchwhere.diagnose.clocks.host_clocks import HostClocks
from torchwhere.diagnose.doctor.exit_records import ExitReason, ended_well
from torchwhere.diagnose.doctor.exits import Exits
from torchwhere.diagnose.doctor.finding import CallRef
from torchwhere.diagnose.doctor.stacks import Hold, holding, is_in_collective, stack_lines
from torchwhere.diagnose.doctor.verdict import State
from torchwhere.diagnose.doctor.waits import Wait, waiting_for
from torchwhere.gpus.samples import HostGpus
from torchwhere.processes.status import ProcessStatus

_UNUSUAL = 10  # times the usual
_UNSEEN_S = 2.0  # a stall may be this much longer than monitor or heartbeats show
# a blocked rank has saved its stack, and a snapshot of the others, by then
_TIME_TO_TELL_S = 3.0
_HEARTBEAT_STOPPED_S = 3.0


@dataclass(frozen=True)
class Timing:
    """The times of a job."""

    exits: Exits
    stall_s: float

    @property
    def by_rank(self) -> dict[int, RankCalls]:
        return self.exits.by_rank

    @property
    def seen_ns(self) -> int | None:
        """The wall clock when the job was last seen alive, if it was."""
        return self.exits.now_ns

    @property
    def is_live(self) -> bool:
        """Whether the verdict is as of a moment at which the job was alive: now, or the last one
        that a monitor saw or a heartbeat shows."""
        return self.seen_ns is not None

    @property
    def is_over(self) -> bool:
        """Whether no process of the job is known to be alive."""
        return self.exits.is_over

    @cached_property
    def recorded_ns(self) -> int:
        """The time of the newest record of any box."""
        return max((self._recorded_ns(rank) for rank in self.by_rank), default=0)

    @cached_property
    def now_ns(self) -> int | None:
        """The last time the job was alive; a record proves that its rank was."""
        return max(self.seen_ns, self.recorded_ns) if self.seen_ns is not None else None

    @property
    def end_ns(self) -> int:
        """The last time the job was alive; if that is unknown, the newest record."""
        return self.recorded_ns if self.now_ns is None else self.now_ns

    def _recorded_ns(self, rank: int) -> int:
        """When a rank last recorded something, apart from being ended from outside."""
        rank_calls = self.by_rank[rank]
        if not self.exits.was_ended_externally(rank):
            return rank_calls.box_summary.last_ns
        return rank_calls.issued_ns(*rank_calls.last) if rank_calls.last is not None else 0

    def since_s(self, t_ns: int) -> float | None:
        """Seconds from a time to the last time the job was alive; None if that is unknown."""
        return (self.now_ns - t_ns) / 1e9 if self.now_ns is not None else None

    # -- waits -------------------------------------------------------------------------------------

    def issued_ns(self, wait: Wait) -> int:
        return self.by_rank[wait.rank].issued_ns(wait.key, wait.number)

    def waited_s(self, wait: Wait) -> float | None:
        issued = self.issued_ns(wait)
        return self.since_s(issued) if issued else None

    def recorded_s(self, wait: Wait) -> float:
        """How long a wait had lasted at the last record of any box: a lower bound."""
        return (self.recorded_ns - self.issued_ns(wait)) / 1e9

    def is_stalled(self, wait: Wait) -> bool:
        """Whether a wait has lasted too long.

        If the job is over and nothing shows since when, every wait may have. If that is known, the
        wait is compared with the pace of the job: it cannot be given more time.
        """
        waited = self.waited_s(wait)
        if waited is None:
            return True
        patience = self.patience_s(wait.rank, wait.key)
        # flight recorder dumps come without processes, and are written when something is wrong
        if not self.is_over or not self.exits.statuses:
            return waited >= patience
        # A rank without data may have arrived, and the others may have continued: after this time,
        # their stacks would show it.
        least = _TIME_TO_TELL_S if not wait.missing else 0.0
        return waited >= max(patience, least, ENDED_AGAIN * self.paused_s(wait))

    # -- patience ----------------------------------------------------------------------------------

    def patience_s(self, rank: int, key: StreamKey | None = None) -> float:
        """How long a wait may last.

        A job that is over cannot be given more time: ten times the usual interval, but at least
        `ENDED_S`, or half of `stall_s` if that is less. A healthy job pauses too, to save or to
        evaluate.
        """
        if not self.is_over:
            return self.stall_s
        least = min(ENDED_S, self.stall_s / 2)
        return max(least, min(self.stall_s - _UNSEEN_S, self._usual_s(rank, key) * _UNUSUAL))

    def unusual_s(self, rank: int) -> float:
        """How long a rank must be in a collective to count as blocked after a mismatch."""
        return min(self.stall_s, self._usual_s(rank) * _UNUSUAL) if self.is_live else 0.0

    def was_moving(self) -> bool:
        """Whether a job that is over was still recording when it was last seen."""
        lasted = self.since_s(self.recorded_ns)
        if lasted is None or not self.by_rank:
            return False
        return lasted < min(map(self.patience_s, self.by_rank))

    def silent_s(self, rank: int) -> float:
        """How long before the end of a job that is over the heartbeat of a rank had stopped: its
        process could not run. 0 if the heartbeat lasted, or if that is unknown."""
        rank_calls = self.by_rank[rank]
        beat_ns = rank_calls.box_summary.beat_ns
        if not self.is_over or not beat_ns or rank_calls.end is not None:
            return 0.0
        earlier_s = self.since_s(beat_ns) or 0.0
        return earlier_s if earlier_s >= _HEARTBEAT_STOPPED_S else 0.0

    @cached_property
    def unable_to_run(self) -> frozenset[int]:
        """Ranks whose process cannot run, or could not before it was ended: it is stopped, or had
        no heartbeat. NCCL sends data from threads of the process, so its collectives cannot
        complete."""
        return frozenset(
            rank
            for rank in self.by_rank
            if self.exits.status(rank).is_stopped
            or (self.silent_s(rank) and not self.exits.is_dead(rank))
        )

    def paused_s(self, wait: Wait) -> float:
        """The longest time between an earlier call at the same call site and the next one:
        saving or evaluating may take as long each time."""
        calls = self.by_rank[wait.rank].calls.get(wait.key)
        at = calls.at(wait.number) if calls is not None else None
        if calls is None or not at:
            return 0.0
        alike = np.flatnonzero(calls.codes()[:at] == calls.codes()[at])
        return float(np.diff(calls.times_ns()[: at + 1])[alike].max(initial=0)) / 1e9

    def _usual_s(self, rank: int, key: StreamKey | None = None) -> float:
        """Median seconds between two collectives of a rank, at least 0.1. If the stream has too
        few calls, that of its busiest stream."""
        streams = self.by_rank[rank].calls
        calls = streams.get(key) if key is not None else None
        if calls is None or len(calls) < 2:
            calls = max(streams.values(), key=len, default=None)
        if calls is None or len(calls) < 2:
            return 1.0
        return max(0.1, float(np.median(np.diff(calls.times_ns()))) / 1e9)


class Condition(StrEnum):
    """A state of a process that explains why its rank does not progress."""

    OUTLIVED_WATCH = "outlived watch"  # the watch has ended, the process still runs
    STOPPED_BY_SIGNAL = "stopped by signal"


class StoppedHeartbeat(NamedTuple):
    """The heartbeat of a rank stopped long before those of the others."""

    earlier_s: float


Detail = Condition | ExitReason | Hold | StoppedHeartbeat


@dataclass(frozen=True)
class Context:
    """A run, the state of its processes, and which rank waits for which."""

    run: RunSummary[Any]
    job_calls: JobCalls
    exits: Exits
    timing: Timing
    waits: Mapping[int, Wait]
    align_clocks: Callable[[], HostClocks]  # of the hosts; called only if they are compared
    is_suspicion: bool = False  # the suspects have not been asked for their stacks yet
    gpus: Sequence[HostGpus] = ()  # as monitors sampled them

    @property
    def by_rank(self) -> dict[int, RankCalls]:
        """The ranks that have a box, and their calls."""
        return self.job_calls.by_rank

    def status(self, rank: int) -> ProcessStatus:
        return self.exits.status(rank)

    def title(self, key: StreamKey) -> str:
        """How a verdict names the group of a stream."""
        return self.job_calls.group(key).title

    def issued(self, call: CallRef | Wait) -> Event | None:
        """The call that a rank issued, or waits in; None if the ring has lost it."""
        return self.by_rank[call.rank].issued(call.key, call.number)

    # -- data --------------------------------------------------------------------------------------

    @cached_property
    def no_data(self) -> frozenset[int]:
        """Ranks whose last calls are unknown: no box, or a box that was cut before its counters."""
        ranks = range(self.run.world_size)
        return frozenset(rank for rank in ranks if not self.job_calls.has_data(rank))

    @cached_property
    def incomplete(self) -> list[int]:
        """Ranks without data, or without their newest calls."""
        cut = [rank for rank, rank_calls in self.by_rank.items() if rank_calls.has_lost_its_newest]
        return sorted([*self.no_data, *cut])

    @cached_property
    def last_call(self) -> CallRef | None:
        """The last collective of a group."""
        last: tuple[int, CallRef] | None = None
        for rank, rank_calls in self.by_rank.items():
            for key, calls in rank_calls.calls.items():
                order = calls.record(calls.last)
                if (last is None or order > last[0]) and len(self.job_calls.members(key)) > 1:
                    last = order, CallRef(key, calls.last, rank)
        return last[1] if last is not None else None

    def first_wait_for(self, ranks: Iterable[int]) -> Wait | None:
        """The wait for one of these ranks that began first."""
        return min(waiting_for(self.waits, ranks), key=self.timing.issued_ns, default=None)

    # -- one rank ----------------------------------------------------------------------------------

    def state(self, rank: int, *, blocked: Collection[int] = ()) -> State:
        """The state of a rank. Those in `blocked` wait, although no other rank is missing."""
        end = self.by_rank[rank].end
        if end is not None and ended_well(end):
            return State.FINISHED
        if self.exits.is_dead(rank):
            return State.DEAD
        if self.status(rank).is_stopped:
            return State.STOPPED
        return State.WAITING if rank in self.waits or rank in blocked else State.RUNNING

    def place(self, rank: int) -> Place:
        """Where a waiting rank issued its call; for other ranks, where their cursor and stack
        are."""
        rank_calls, wait = self.by_rank[rank], self.waits.get(rank)
        issued_at = rank_calls.place_of(wait.key, wait.number) if wait is not None else None
        if issued_at is not None:
            return issued_at
        has_raised = self.exits.has_failed(rank) or self.exits.was_ended_externally(rank)
        error = rank_calls.exception if has_raised else None
        place = error.place if error is not None else rank_calls.place
        return Place(
            rank=rank,
            step=place.step,
            pass_=place.pass_,
            module=place.module,
            call=place.call,
            **self._lines(rank, place, has_raised=error is not None),
            certainty=place.certainty,
            param=place.param,
        )

    def _lines(self, rank: int, place: Place, *, has_raised: bool) -> dict[str, Any]:
        """The lines of a rank: of its stack, of its place, or else the last ones that it
        recorded."""
        rank_calls = self.by_rank[rank]
        folder = rank_calls.box_summary.meta.get("folder")
        lines = stack_lines(self.status(rank).stack, folder=folder)
        # the stack of a failed rank is that of its exit
        if lines["line"] is None or (has_raised and place.line):
            lines = {"line": place.line, "framework_line": place.framework_line}
        return lines if lines["line"] else line_fields(rank_calls.rank_summary.last_line)

    def was_missing(self, rank: int, *, since_ns: int) -> bool:
        """Whether others had waited for a rank since `since_ns`, longer than a stall, when it was
        killed: it hung before, and its exit explains nothing. It may have lived for another
        heartbeat after it was last known alive."""
        exits = self.exits
        was_killed = exits.was_killed(rank) and self.status(rank).out_of_memory is None
        known_s = (exits.alive_ns(rank) - since_ns) / 1e9
        return was_killed and known_s >= max(self.timing.stall_s - BEAT_S, BEAT_S)

    def device_place(self, rank: int) -> DevicePlace | None:
        """Where the device of a rank is, beside its CPU; None if that is not known."""
        state = self.by_rank[rank].rank_summary.device
        return replace(state.device_place, cpu=self.place(rank)) if state is not None else None

    def detail(self, rank: int, *, blocked: Collection[int] = ()) -> Detail | None:
        """How a rank exited, or what blocks it."""
        rank_calls, state = self.by_rank[rank], self.state(rank, blocked=blocked)
        if self.exits.outlived_its_watch(rank) and not self.have_finished:
            return Condition.OUTLIVED_WATCH
        has_ended = rank_calls.end is not None and not self.exits.was_ended_externally(rank)
        if state is State.DEAD or has_ended:
            return self.exits.how(rank)
        if state is State.STOPPED:
            return Condition.STOPPED_BY_SIGNAL
        if state is not State.RUNNING:
            return None
        silent_s = self.timing.silent_s(rank)
        return StoppedHeartbeat(silent_s) if silent_s else holding(rank_calls, self.status(rank))

    def group_in_creation(self, rank: int) -> GroupCreation | None:
        """The group creation that a rank has begun and not completed."""
        group_creations = self.by_rank[rank].rank_summary.group_creations
        if not group_creations or group_creations[-1].is_made:
            return None
        return group_creations[-1] if self.state(rank) is not State.FINISHED else None

    def is_in_last_collective(self, rank: int) -> bool | None:
        """Whether a rank is in its last collective, by its stack; None if unknown."""
        return is_in_collective(self.by_rank[rank].last_collective, self.status(rank))

    # -- all ranks ---------------------------------------------------------------------------------

    @cached_property
    def have_finished(self) -> bool:
        """Whether all ranks with data have finished without an error."""
        return all(self.state(rank) is State.FINISHED for rank in self.by_rank)

    @cached_property
    def are_all_in_one_call(self) -> bool:
        """Whether all ranks are, or were to the end, in the same collective."""
        ranks = self.by_rank.values()
        lasts = {rank_calls.last for rank_calls in ranks}
        if self.job_calls.stale or None in lasts or len(lasts) != 1:
            return False
        return all(rank_calls.in_collective_since_ns is not None for rank_calls in ranks)

    @cached_property
    def has_not_begun(self) -> bool:
        """Whether the job has completed no step and no collective: it is starting."""
        ranks = self.by_rank.values()
        if any(rank_calls.rank_summary.last_step for rank_calls in ranks):
            return False
        keys = {key for rank_calls in ranks for key in rank_calls.counts}
        return not any(self._is_completed_once(key) for key in keys)

    def _is_completed_once(self, key: StreamKey) -> bool:
        """Whether all members of a stream with data have issued its first call."""
        members = [rank for rank in self.job_calls.members(key) if rank in self.by_rank]
        return all(self.by_rank[rank].counts.get(key, 0) for rank in members)

    @property
    def is_unknown_end(self) -> bool:
        """Whether a job ended inside a collective that all ranks had reached, after an unknown
        wait."""
        return self.timing.is_over and not self.timing.is_live and self.are_all_in_one_call
