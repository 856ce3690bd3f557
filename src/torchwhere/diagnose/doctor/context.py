"""What is known about each rank, shared by all rules, and the verdict made from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchwhere.blackbox.run import RunSummary
from torchwhere.core.place import Certainty, Place
from torchwhere.core.sanitize import plural
from torchwhere.core.stall import ENDED_S
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.clocks.host_clocks import UNALIGNED, HostClocks
from torchwhere.diagnose.doctor.exits import Exits, ended_well
from torchwhere.diagnose.doctor.stacks import holding, is_in_collective, user_line
from torchwhere.diagnose.doctor.verdict import RankReport, State, Verdict, VerdictKind
from torchwhere.diagnose.doctor.waits import (
    Wait,
    is_of_all,
    may_wait_for,
)
from torchwhere.processes.status import ProcessStatus

_UNSEEN_STALLS = 10
_UNUSUAL = 10  # times the usual
_AGAIN = 1.5  # times as long as a pause at the same place has lasted before
_HEARTBEAT_STOPPED_NS = 3_000_000_000
_UNSEEN_S = 2.0  # a stall may be this much longer than monitor or heartbeats show
# a blocked rank has saved its stack, and a snapshot of the others, by then
_TIME_TO_TELL_S = 3.0
_SHOWN = ("op", "number", "dtype", "shapes", "bytes", "reduce_op", "peer", "for")


@dataclass(slots=True)
class Context:
    """A run, the state of its processes, and which rank waits for which."""

    run: RunSummary[Any]
    job_calls: JobCalls
    statuses: Mapping[int, ProcessStatus]
    waits: dict[int, Wait]
    exits: Exits
    now_ns: int | None
    is_suspicion: bool = False
    is_together: bool = False  # all ranks are blocked in one collective
    # after a mismatch: the ranks that are blocked in a collective
    blocked: frozenset[int] = frozenset()
    clocks: HostClocks = UNALIGNED  # of the hosts, aligned
    is_over: bool = field(init=False)  # no process of the job is known to be alive
    recorded_ns: int = field(init=False)  # the newest record of any box

    def __post_init__(self) -> None:
        self.is_over = not any(status.alive for status in self.statuses.values())
        self.recorded_ns = max(
            (self._recorded_ns(rank) for rank in self.job_calls.by_rank), default=0
        )
        if self.now_ns is not None:  # a record proves that its rank was alive
            self.now_ns = max(self.now_ns, self.recorded_ns)

    def _recorded_ns(self, rank: int) -> int:
        """When a rank last recorded something, apart from being ended from outside."""
        rank_calls = self.job_calls.by_rank[rank]
        if not self.exits.was_ended_externally(rank):
            return rank_calls.label.last_ns
        return rank_calls.issued_ns(*rank_calls.last) if rank_calls.last is not None else 0

    # -- ranks -------------------------------------------------------------------------------------

    @property
    def is_live(self) -> bool:
        """Whether the verdict is as of a moment at which the job was alive: now, or the last one
        that a monitor saw or a heartbeat shows."""
        return self.now_ns is not None

    def status(self, rank: int) -> ProcessStatus:
        return self.statuses.get(rank, ProcessStatus())

    @property
    def is_unknown_end(self) -> bool:
        """Whether a job ended inside a collective that all ranks had reached, after an unknown
        wait."""
        return self.is_over and not self.is_live and self.are_all_in_one_call()

    @property
    def have_finished(self) -> bool:
        """Whether all ranks with data have finished without an error."""
        return all(self.state(rank) is State.FINISHED for rank in self.job_calls.by_rank)

    def state(self, rank: int) -> State:
        rank_calls, status = self.job_calls.by_rank[rank], self.status(rank)
        if rank_calls.end is not None and ended_well(rank_calls.end):
            return State.FINISHED
        if self.exits.is_dead(rank):
            return State.DEAD
        if status.is_stopped:
            return State.STOPPED
        return (
            State.WAITING
            if self.is_together or rank in self.waits or rank in self.blocked
            else State.RUNNING
        )

    def place(self, rank: int) -> Place:
        """Where a waiting rank issued its call; for other ranks, where their cursor and stack
        are."""
        rank_calls, wait = self.job_calls.by_rank[rank], self.waits.get(rank)
        issued_at = rank_calls.place_of(wait.key, wait.number) if wait is not None else None
        if issued_at is not None:
            return issued_at
        has_raised = self.exits.has_failed(rank) or self.exits.was_ended_externally(rank)
        error = rank_calls.exception if has_raised else None
        place = error.place if error is not None else rank_calls.place
        folder = f"{rank_calls.label.meta.get('folder')}/"
        # the stack of a failed rank is that of its exit
        raised_at = place.line if error is not None else None
        stack_line = (user_line(self.status(rank).stack) or "").removeprefix(folder)
        line = raised_at or stack_line or place.line or rank_calls.rank_summary.last_line
        return Place(
            rank=rank,
            step=place.step,
            pass_=place.pass_,
            module=place.module,
            call=place.call,
            line=line,
            certainty=place.certainty,
            param=place.param,
        )

    def report(self, rank: int) -> RankReport:
        rank_calls = self.job_calls.by_rank[rank]
        return RankReport(
            state=self.state(rank),
            place=self.place(rank),
            last=(
                _shown(rank_calls.fields(*rank_calls.last)) if rank_calls.last is not None else None
            ),
            detail=self.detail(rank),
            stack=self.status(rank).stack,
        )

    def detail(self, rank: int) -> str | None:
        """How a rank exited, or what blocks it."""
        rank_calls, state = self.job_calls.by_rank[rank], self.state(rank)
        if self.exits.outlived_its_watch(rank) and not self.have_finished:
            return (
                "its watch has ended, but its process still runs: what it does now is not recorded"
            )
        if state is State.DEAD or (
            rank_calls.end is not None and not self.exits.was_ended_externally(rank)
        ):
            return self.exits.how(rank)
        if state is State.STOPPED:
            return "stopped by a signal (SIGSTOP or a debugger): continue it with kill -CONT"
        if state is not State.RUNNING:
            return None
        return self._heartbeat_stopped(rank) or holding(rank_calls, self.status(rank))

    def _heartbeat_stopped(self, rank: int) -> str | None:
        """Reports a rank whose heartbeat stopped long before the others': its Python could not
        run."""
        beat_ns, has_ended = (
            self.job_calls.by_rank[rank].label.beat_ns,
            self.job_calls.by_rank[rank].end is not None,
        )
        if (
            not self.is_over
            or not beat_ns
            or has_ended
            or self.now_ns is None
            or self.now_ns - beat_ns < _HEARTBEAT_STOPPED_NS
        ):
            return None
        before = f"{(self.now_ns - beat_ns) / 1e9:.0f} s before the others'"
        return (
            f"its heartbeat stopped {before}: in native code that holds the GIL, stopped by a"
            " signal, or gone"
        )

    # -- time --------------------------------------------------------------------------------------

    def issued_ns(self, wait: Wait) -> int:
        return self.job_calls.by_rank[wait.rank].issued_ns(wait.key, wait.number)

    def waited_s(self, wait: Wait) -> float | None:
        issued = self.issued_ns(wait)
        return (self.now_ns - issued) / 1e9 if self.now_ns is not None and issued else None

    def is_stalled(self, wait: Wait, stall_s: float) -> bool:
        """Whether a wait has lasted too long.

        If the job is over and nothing shows since when, every wait may have. If that is known, the
        wait is compared with the pace of the job: it cannot be given more time.
        """
        waited = self.waited_s(wait)
        if not self.is_live or waited is None:
            return True
        patience = self.patience_s(wait.rank, stall_s, wait.key)
        # flight recorder dumps come without processes, and are written when something is wrong
        if not self.is_over or not self.statuses:
            return waited >= patience
        # A rank without data may have come, and the others continued: given this time, their
        # stacks would show it.
        least = _TIME_TO_TELL_S if not wait.missing else 0.0
        return waited >= max(patience, least, _AGAIN * self._paused_s(wait))

    def patience_s(self, rank: int, stall_s: float, key: StreamKey | None = None) -> float:
        """How long a wait may last.

        A job that is over cannot be given more time: ten times the usual interval, but at least
        `ENDED_S`, or half of `stall_s` if that is less. A healthy job pauses too, to save or to
        evaluate.
        """
        least = min(ENDED_S, stall_s / 2)
        return (
            max(least, min(stall_s - _UNSEEN_S, self._usual_s(rank, key) * _UNUSUAL))
            if self.is_over
            else stall_s
        )

    def _paused_s(self, wait: Wait) -> float:
        """The longest time between an earlier call at the same call site and the next one:
        saving or evaluating may take as long each time."""
        calls = self.job_calls.by_rank[wait.rank].calls.get(wait.key)
        at = calls.at(wait.number) if calls is not None else None
        if calls is None or not at:
            return 0.0
        alike = np.flatnonzero(calls.codes()[:at] == calls.codes()[at])
        return float(np.diff(calls.times_ns()[: at + 1])[alike].max(initial=0)) / 1e9

    def _usual_s(self, rank: int, key: StreamKey | None = None) -> float:
        """Median seconds between two collectives of a rank, at least 0.1. If the stream has too
        few calls, that of its busiest stream."""
        streams = self.job_calls.by_rank[rank].calls
        calls = streams.get(key) if key is not None else None
        if calls is None or len(calls) < 2:
            calls = max(streams.values(), key=len, default=None)
        if calls is None or len(calls) < 2:
            return 1.0
        return max(0.1, float(np.median(np.diff(calls.times_ns()))) / 1e9)

    def recorded_s(self, wait: Wait) -> float:
        """How long a wait had lasted at the last record of any box: a lower bound."""
        return (self.recorded_ns - self.issued_ns(wait)) / 1e9

    def was_moving(self, stall_s: float) -> bool:
        """Whether a job that is over was still recording when it was last seen."""
        if self.now_ns is None or not self.job_calls.by_rank:
            return False
        patience = min(self.patience_s(rank, stall_s) for rank in self.job_calls.by_rank)
        return (self.now_ns - self.recorded_ns) / 1e9 < patience

    def quiet_s(self, stall_s: float) -> float | None:
        """How long no rank has recorded anything, if that is long and no rank waits; else None."""
        if self.now_ns is None or self.have_finished or self.waits or not self.job_calls.by_rank:
            return None
        lasted = (self.now_ns - self.recorded_ns) / 1e9
        return (
            lasted
            if lasted >= max(self.patience_s(rank, stall_s) for rank in self.job_calls.by_rank)
            else None
        )

    def all_blocked_s(self) -> float | None:
        """How long all ranks have been in a collective that all have issued; None if a rank is
        elsewhere.

        A rank that has moved since its last collective is starting, loading or saving, which may
        take time.
        """
        since = [
            rank_calls.in_collective_since_ns for rank_calls in self.job_calls.by_rank.values()
        ]
        since += [None for _ in self.job_calls.stale]
        moments = [moment for moment in since if moment is not None]
        has_ended = any(
            rank_calls.end and not self.exits.was_ended_externally(rank)
            for rank, rank_calls in self.job_calls.by_rank.items()
        )
        if self.now_ns is None or has_ended or not moments or len(moments) < len(since):
            return None
        return (self.now_ns - max(moments)) / 1e9

    def blocked_s(self, rank: int) -> float | None:
        """How long a rank has been in its last collective; None if it is not in one, or has
        exited."""
        rank_calls = self.job_calls.by_rank[rank]
        since, wait = rank_calls.in_collective_since_ns, self.waits.get(rank)
        has_ended = rank_calls.end is not None and not self.exits.was_ended_externally(rank)
        if has_ended or self.exits.is_dead(rank) or not self.job_calls.has_data(rank):
            return None
        if wait is not None:
            return max(0.0, (self.now_ns or self.recorded_ns) - self.issued_ns(wait)) / 1e9
        is_in_it = is_in_collective(rank_calls.last_collective, self.status(rank))
        since = rank_calls.label.last_ns if is_in_it and since is None else since
        if since is None or is_in_it is False:
            return None
        return max(0.0, (self.now_ns or self.recorded_ns) - since) / 1e9

    def find_blocked(self, stall_s: float) -> float | None:
        """Find the ranks that are blocked after a mismatch, and set `blocked`.

        A rank is blocked if it has waited unusually long, or to the unobserved end of the job.
        Returns how long all have been blocked, if all are and it is known.
        """
        lasted_s = {rank: self.blocked_s(rank) for rank in self.job_calls.by_rank}
        least_s = {
            rank: min(stall_s, self._usual_s(rank) * _UNUSUAL) if self.is_live else 0.0
            for rank in lasted_s
        }
        blocked_s = {
            rank: lasted
            for rank, lasted in lasted_s.items()
            if lasted is not None and lasted >= least_s[rank]
        }
        self.blocked = frozenset(blocked_s)
        return (
            min(blocked_s.values())
            if self.is_live and blocked_s and len(blocked_s) == len(lasted_s)
            else None
        )

    def are_all_in_one_call(self) -> bool:
        """Whether all ranks are, or were to the end, in the same collective."""
        ranks = self.job_calls.by_rank.values()
        lasts = {rank_calls.last for rank_calls in ranks}
        if self.job_calls.stale:
            return False
        return (
            None not in lasts
            and len(lasts) == 1
            and all(rank_calls.in_collective_since_ns is not None for rank_calls in ranks)
        )

    def are_all_blocked(self, stall_s: float) -> bool:
        """Whether all ranks have been in one collective for too long, by their stacks; without
        stacks, for much longer.

        On a device a rank waits wherever it next needs the result, so a stack elsewhere proves
        little there.
        """
        still, ranks = self.all_blocked_s(), list(self.job_calls.by_rank)
        if still is None or still < max(self.patience_s(rank, stall_s) for rank in ranks):
            return False
        in_collective = [self._is_in_last_collective(rank) for rank in ranks]
        if any(is_in_it is False for is_in_it in in_collective):
            return False
        was_seen = self.is_suspicion or any(in_collective)
        return was_seen or still >= _UNSEEN_STALLS * stall_s

    def _is_in_last_collective(self, rank: int) -> bool | None:
        """Whether a rank is in its last collective, by its stack; None if unknown."""
        return is_in_collective(self.job_calls.by_rank[rank].last_collective, self.status(rank))

    # -- collectives -------------------------------------------------------------------------------

    @property
    def no_data(self) -> set[int]:
        """Ranks whose last calls are unknown: no box, or a box that was cut before its counters."""
        return {rank for rank in range(self.run.world_size) if not self.job_calls.has_data(rank)}

    @property
    def incomplete(self) -> list[int]:
        """Ranks without data, or without their newest calls."""
        cut = [
            rank
            for rank, rank_calls in self.job_calls.by_rank.items()
            if rank_calls.has_lost_its_newest
        ]
        return sorted([*self.no_data, *cut])

    def no_data_wait(self) -> Wait | None:
        """The wait for ranks without data, where all other ranks are in one of their
        collectives."""
        key, number, example_rank = self.last_of_all()
        no_data = self.no_data
        if key is None or example_rank is None or not no_data:
            return None
        taking_part = self.job_calls.members(key)
        absent = tuple(
            rank
            for rank in taking_part
            if rank in no_data and not self.job_calls.has_issued(rank, key, number)
        )
        with_data = [
            rank_calls
            for rank in taking_part
            if rank not in no_data and (rank_calls := self.job_calls.by_rank.get(rank)) is not None
        ]
        are_in_it = all(
            rank_calls.in_collective_since_ns is not None for rank_calls in with_data
        ) and not any(
            self._is_in_last_collective(rank_calls.rank) is False for rank_calls in with_data
        )
        return Wait(example_rank, key, number, (), absent) if absent and are_in_it else None

    def excused(self, blamed: list[int]) -> dict[int, int]:
        """Awaited ranks that may wait themselves for a message of a rank without data, and which
        rank."""
        no_data = self.no_data
        if not no_data:
            return {}
        excused = {}
        for rank in blamed:
            other = (
                may_wait_for(self.job_calls, rank, no_data)
                if rank in self.job_calls.by_rank
                else None
            )
            if other is not None and self._is_in_last_collective(rank) is not False:
                excused[rank] = other
        return excused

    def went_on_after(self, key: StreamKey, number: int) -> list[int]:
        """Ranks that continued after a collective that needs all ranks: they returned from it,
        or reached a later step."""
        ranks = []
        for rank, rank_calls in self.job_calls.by_rank.items():
            if rank_calls.last != (key, number):
                continue
            call, now = rank_calls.issued(key, number), rank_calls.place.step
            has_returned = rank_calls.in_collective_since_ns is None and not rank_calls.is_async(
                key, number
            )
            step = call.place.step if call is not None else None
            is_later = now is not None and step is not None and now > step
            if (
                is_of_all(rank_calls, key, number)
                and (has_returned or is_later)
                and not self.exits.has_failed(rank)
            ):
                ranks.append(rank)
        return ranks

    def last_of_all(self) -> tuple[StreamKey | None, int, int | None]:
        """The last collective of a group: its stream, its number, and a rank that has issued it."""
        last: tuple[int, StreamKey, int, int] | None = None
        for rank, rank_calls in self.job_calls.by_rank.items():
            for key, calls in rank_calls.calls.items():
                order = calls.record(calls.last)
                if (last is None or order > last[0]) and len(self.job_calls.members(key)) > 1:
                    last = order, key, calls.last, rank
        return (last[1], last[2], last[3]) if last else (None, 0, None)

    def collective(self, key: StreamKey, number: int, example_rank: int) -> dict[str, Any]:
        call = self.job_calls.by_rank[example_rank].issued(key, number)
        group = self.job_calls.group(key)
        fields = _shown(call.fields) if call is not None else {"number": number}
        return fields | {
            "group": group.title,
            "group_ranks": list(group.ranks) if len(group.ranks) <= 64 else len(group.ranks),
        }

    def last_common(self, key: StreamKey, number: int, example_rank: int) -> dict[str, Any] | None:
        call = self.job_calls.by_rank[example_rank].issued(key, number - 1) if number else None
        if call is None:
            return None
        place = call.place.to_dict()
        if call.place.module is None and call.place.certainty is Certainty.UNKNOWN:
            place["pass"] = None
        return self.collective(key, number - 1, example_rank) | {
            name: place[name] for name in ("step", "pass", "module", "line")
        }

    # -- the verdict -------------------------------------------------------------------------------

    def verdict(
        self,
        kind: VerdictKind,
        *,
        culprits: tuple[int, ...] = (),
        key: StreamKey | None = None,
        number: int = 0,
        example_rank: int | None = None,
        certainty: Certainty = Certainty.EXACT,
        stalled_s: float | None = None,
        explanation: tuple[str, ...] = (),
        facts: dict[str, Any] | None = None,
    ) -> Verdict:
        return Verdict(
            kind=kind,
            culprits=culprits,
            collective=(
                self.collective(key, number, example_rank)
                if key is not None and example_rank is not None
                else None
            ),
            ranks={rank: self.report(rank) for rank in self.job_calls.by_rank},
            last_common=(
                self.last_common(key, number, example_rank)
                if key is not None and example_rank is not None
                else None
            ),
            missing_data=tuple(self.missing_data()),
            certainty=certainty,
            stalled_s=stalled_s,
            explanation=explanation + self.exits.external_end_text(kind),
            facts=facts or {},
        )

    def missing_data(self) -> list[str]:
        lines = self.run.caveats()
        if not self.is_live and any(
            rank_calls.end is None for rank_calls in self.job_calls.by_rank.values()
        ):
            lines.append(
                "no process of this job was seen alive: the states are those at the end of the"
                " boxes"
            )
        wrapped = [
            rank
            for rank, rank_calls in self.job_calls.by_rank.items()
            if rank_calls.label.counts.overwritten
        ]
        if wrapped:
            lines.append(
                f"the rings of {plural(len(wrapped), 'rank')} have wrapped: only calls that all"
                " rings still hold were compared"
            )
        return lines


def _shown(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: fields.get(name) for name in _SHOWN} | {"group": fields.get("group_desc")}
