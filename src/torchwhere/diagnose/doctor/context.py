"""What is known about a job and each of its ranks. All rules share it, and no rule changes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

from torchwhere.blackbox.run import RunSummary
from torchwhere.core.device_place import DevicePlace
from torchwhere.core.events import Event
from torchwhere.core.place import Place, line_fields
from torchwhere.core.rank_text import ranks_phrase
from torchwhere.core.stall import BEAT_S
from torchwhere.diagnose.calls.encode import GroupCreation
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.calls.rank_calls import RankCalls
from torchwhere.diagnose.clocks.host_clocks import HostClocks
from torchwhere.diagnose.doctor.device_wait import device_wait
from torchwhere.diagnose.doctor.exit_records import ExitReason, ended_well
from torchwhere.diagnose.doctor.exits import Exits
from torchwhere.diagnose.doctor.finding import CallRef
from torchwhere.diagnose.doctor.reached import is_only_issued
from torchwhere.diagnose.doctor.stacks import (
    Activity,
    Hold,
    holding,
    is_in_collective,
    stack_lines,
)
from torchwhere.diagnose.doctor.timing import Timing
from torchwhere.diagnose.doctor.verdict import State
from torchwhere.diagnose.doctor.waits import Wait, waiting_for
from torchwhere.gpus.samples import HostGpus
from torchwhere.processes.status import ProcessStatus


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
        """How a verdict names the group of a stream. In dumps, all groups of a kind may have the
        same description."""
        group = self.job_calls.group(key)
        if not self.run.is_of_dumps or self._titles[group.title] < 2:
            return group.title
        return f"{group.title} ({group.name}: {ranks_phrase(group.ranks)})"

    @cached_property
    def _titles(self) -> Counter[str]:
        """How many groups have the same title."""
        keys = {key.group: key for calls in self.by_rank.values() for key in calls.counts}
        return Counter(self.job_calls.group(key).title for key in keys.values())

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

    @cached_property
    def begun_waits(self) -> dict[int, Wait]:
        """The waits without those that have not begun: the CPU has issued the call, the device
        still has earlier work, and the missing ranks may come in the meantime."""
        return {
            rank: wait
            for rank, wait in self.waits.items()
            if not is_only_issued(self.by_rank[rank], wait.key, wait.number)
            or any(map(self._halted, wait.missing))
        }

    def first_wait_for(self, ranks: Iterable[int]) -> Wait | None:
        """The wait for one of these ranks that began first."""
        return min(waiting_for(self.waits, ranks), key=self.timing.began_ns, default=None)

    # -- one rank ----------------------------------------------------------------------------------

    def state(self, rank: int, *, blocked: Collection[int] = ()) -> State:
        """The state of a rank. Those in `blocked` wait, although no other rank is missing."""
        is_waiting = rank in self.begun_waits or rank in blocked
        return self._halted(rank) or (State.WAITING if is_waiting else State.RUNNING)

    def _halted(self, rank: int) -> State | None:
        """The state of a rank that has exited or is stopped; None for others."""
        end = self.by_rank[rank].end
        if end is not None and ended_well(end):
            return State.FINISHED
        if self.exits.is_dead(rank):
            return State.DEAD
        return State.STOPPED if self.status(rank).is_stopped else None

    def place(self, rank: int) -> Place:
        """Where a waiting rank issued its call; for other ranks, where their CPU is."""
        wait = self.begun_waits.get(rank)
        issued_at = self.by_rank[rank].place_of(*wait.call) if wait is not None else None
        return self.cpu_place(rank) if issued_at is None else issued_at

    def cpu_place(self, rank: int) -> Place:
        """Where the cursor and the stack of a rank are."""
        rank_calls = self.by_rank[rank]
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
        if state is None:
            return None
        cpu, waits_in = self.cpu_place(rank), self._device_wait(rank)
        return replace(state.device_place, cpu=cpu, cpu_waits_in=waits_in)

    def _device_wait(self, rank: int) -> str | None:
        """The function in which the CPU of a rank waits for its device, if its stack shows that."""
        rank_calls, stack = self.by_rank[rank], self.status(rank).stack
        state = rank_calls.rank_summary.device
        if state is None or not stack or self._halted(rank) in (State.DEAD, State.FINISHED):
            return None
        pending = state.device_place.pending
        return device_wait(stack, rank_calls.box_summary.meta, pending=pending)

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
        if silent_s:
            return StoppedHeartbeat(silent_s)
        hold, waits_in = holding(rank_calls, self.status(rank)), self._device_wait(rank)
        is_unclear = hold is None or hold.activity in (Activity.RUNNING, Activity.SLEEPING)
        return Hold(Activity.DEVICE, waits_in) if waits_in and is_unclear else hold

    def waits_for_device(self, rank: int) -> bool:
        """Whether the stack of a rank shows that its CPU waits for its device."""
        detail = self.detail(rank)
        return isinstance(detail, Hold) and detail.activity is Activity.DEVICE

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
        """Whether all ranks are, or were to the end, in the same collective. If their devices still
        have earlier work, they are not in it yet."""
        ranks = self.by_rank.values()
        lasts = {rank_calls.last for rank_calls in ranks}
        last = next(iter(lasts), None)
        if self.job_calls.stale or last is None or len(lasts) != 1:
            return False
        return all(
            rank_calls.in_collective_since_ns is not None and not is_only_issued(rank_calls, *last)
            for rank_calls in ranks
        )

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
