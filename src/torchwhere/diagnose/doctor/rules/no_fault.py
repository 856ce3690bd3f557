"""Rule: the boxes show no fault. It always applies, so it is the last one.

A job that was killed, or ended by SIGTERM, is still not healthy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torchwhere.core.events import Event
from torchwhere.core.place import Certainty
from torchwhere.core.stall import no_progress_s
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.finding import CallRef, Cause, Finding, exact_if
from torchwhere.diagnose.doctor.pace import Pace, pace_of
from torchwhere.diagnose.doctor.pauses import Pause, pause_of
from torchwhere.diagnose.doctor.verdict import VerdictKind
from torchwhere.diagnose.doctor.waits import Wait, awaited, waiting_for

_WORTH_TELLING_S = 1.0


@dataclass(frozen=True, slots=True)
class Finished(Cause):
    """All ranks with data have finished."""

    pace: Pace


@dataclass(frozen=True, slots=True)
class Progressing(Cause):
    """The job runs, or nothing shows that it has ended."""

    pace: Pace


@dataclass(frozen=True, slots=True)
class UnobservedEnd(Cause):
    """The job ended in a collective that all ranks had reached, and no process was seen then."""

    pace: Pace
    call: Event


class InOneCall(NamedTuple):
    """At the end, all ranks were in one collective; None if their rings have lost it."""

    call: Event | None


class CreatingGroup(NamedTuple):
    """At the end, ranks were creating a process group."""

    ranks: tuple[int, ...]


class ShortWait(NamedTuple):
    """At the end, ranks had waited: too short for a hang, long enough to report."""

    ranks: tuple[int, ...]
    awaited: tuple[int, ...]
    waited_s: float
    call: Event | None


@dataclass(frozen=True, slots=True)
class Standstill(Cause):
    """The job runs and makes no progress, but not for long enough to call it a hang."""

    pace: Pace
    still_s: float
    pause: Pause  # what the awaited ranks do, or all ranks; and how long that may last
    last: InOneCall | CreatingGroup | ShortWait | None

    @property
    def is_pause(self) -> bool:
        """Whether the ranks do work that takes long in a healthy job too."""
        return self.pause.kind is not None and self.still_s < self.pause.limit_s


@dataclass(frozen=True, slots=True)
class ProgressingAtEnd(Cause):
    """The job was progressing when it ended."""

    pace: Pace
    last: InOneCall | CreatingGroup | ShortWait | None


@dataclass(frozen=True, slots=True)
class Quiet(Cause):
    """No rank waits for another, and no rank has recorded anything for long."""

    pace: Pace
    quiet_s: float


@dataclass(frozen=True, slots=True)
class EndedUnfinished(Cause):
    """No process is left, and the job had not finished."""

    until_then: Cause
    may_have_gone_first: tuple[int, ...]  # ranks that others had begun to wait for
    waiting: tuple[int, ...]  # those others


@dataclass(frozen=True, slots=True)
class PartlyWatched(Cause):
    """The ranks with data show no fault; the others have no data."""

    of_watched: Cause  # what the ranks with data show
    unwatched: tuple[int, ...]


def find_no_fault(context: Context) -> Finding:
    pace, quiet_s = pace_of(context.job_calls), _quiet_s(context)
    standstill = _standstill(context, pace)
    is_pause = standstill is not None and standstill.is_pause
    if quiet_s is not None and not is_pause:
        cause: Cause = Quiet(pace, quiet_s)
    else:
        cause = standstill or _progress(context, pace)
    return no_fault(context, cause, _certainty(context, cause), pace)


def no_fault(
    context: Context,
    cause: Cause,
    certainty: Certainty,
    pace: Pace,
    *,
    call: CallRef | None = None,
) -> Finding:
    """The finding on a job without a fault, unless it was killed or ended by SIGTERM.

    A job is not called healthy if a rank has no data.
    """
    facts = pace.to_dict()
    if not context.exits.ended_unfinished:
        kind, still_s, shown = VerdictKind.HEALTHY, None, cause
        if isinstance(cause, Standstill):
            still_s = cause.still_s
            facts |= {"paused": cause.pause.to_dict()} if cause.is_pause else {}
        if context.no_data:
            unwatched = tuple(sorted(context.no_data))
            kind, shown = VerdictKind.PARTIAL, PartlyWatched(cause, unwatched)
            facts["unwatched"] = list(unwatched)
        return Finding(kind, shown, call=call, certainty=certainty, stalled_s=still_s, facts=facts)
    killed = frozenset(context.exits.killed())
    first = [rank for rank in awaited(context.begun_waits) if rank in killed]
    if 2 * len(first) >= len(context.by_rank):
        first = []
    waiting = sorted(wait.rank for wait in waiting_for(context.begun_waits, first))
    return Finding(
        VerdictKind.DEAD,
        EndedUnfinished(cause, tuple(first), tuple(waiting)),
        call=call,
        certainty=Certainty.UNKNOWN,
        facts=facts | {"may_have_gone_first": first},
    )


def _certainty(context: Context, cause: Cause) -> Certainty:
    """Lower if the job does not move, or if its end was not observed."""
    is_over, is_still = context.timing.is_over, isinstance(cause, Quiet | Standstill)
    if context.is_unknown_end or (is_over and is_still):
        return Certainty.UNKNOWN
    is_unsure = is_still or (is_over and (context.no_data or _ended_in_call(context)))
    return exact_if(not is_unsure)


def _ended_in_call(context: Context) -> bool:
    """Whether ranks were in a collective, or created a group, when the job ended."""
    if context.have_finished:
        return False
    return (
        context.are_all_in_one_call
        or bool(context.begun_waits)
        or any(map(context.group_in_creation, context.by_rank))
    )


def _quiet_s(context: Context) -> float | None:
    """How long no rank has recorded anything and no device has reached a mark, if that is long and
    no rank waits; else None."""
    timing, ranks = context.timing, context.by_rank
    moved_ns = [timing.recorded_ns, *(own.device_moved_ns for own in ranks.values())]
    lasted = timing.since_s(max(moved_ns))
    if lasted is None or context.have_finished or context.begun_waits or not ranks:
        return None
    return lasted if lasted >= max(map(timing.patience_s, ranks)) else None


def _standstill(context: Context, pace: Pace) -> Standstill | None:
    """What a running job is in that makes no progress; None if it progresses or has ended.

    The heartbeat in the box of a rank shows how long the rank was still when its box was read: the
    clock of this host would also count the time that it takes to read all boxes. A job of one rank
    has no heartbeat, and its box is read at once.
    """
    timing, by_rank = context.timing, context.by_rank
    wait = _first_wait(context)
    ranks = [wait.rank] if wait is not None else list(by_rank)
    if timing.is_over or context.have_finished or not ranks:
        return None
    moved_ns = {rank: _moved_ns(context, rank) for rank in ranks}
    still_s = timing.since_s(max(moved_ns.values()))
    beats = {rank: by_rank[rank].box_summary.beat_ns or timing.end_ns for rank in ranks}
    shown_s = min(beats[rank] - moved_ns[rank] for rank in ranks) / 1e9
    limit_s = no_progress_s(
        1 / pace.steps_per_s if pace.steps_per_s else None,
        is_waiting=(
            wait is not None
            or context.are_all_in_one_call
            or any(map(context.group_in_creation, by_rank))
        ),
        is_starting=wait is None
        and any(rank_calls.is_compiling for rank_calls in by_rank.values()),
    )
    if still_s is None or shown_s < limit_s:
        return None
    return Standstill(pace, still_s, _pause(context, wait), _last(context))


def _pause(context: Context, wait: Wait | None) -> Pause:
    """What the ranks do that others wait for; if no rank waits, what all ranks do."""
    if wait is not None:
        return pause_of(context, awaited(context.begun_waits), wait)
    by_rank = context.by_rank
    return pause_of(context, [rank for rank in by_rank if not context.group_in_creation(rank)])


def _first_wait(context: Context) -> Wait | None:
    """The wait for an awaited rank that began first."""
    waits = context.begun_waits
    return min(waiting_for(waits, awaited(waits)), key=context.timing.began_ns, default=None)


def _moved_ns(context: Context, rank: int) -> int:
    """When a rank last recorded something, or entered or left a module, or its device reached a
    mark."""
    rank_calls = context.by_rank[rank]
    moved_ns = max(rank_calls.box_summary.last_ns, rank_calls.rank_summary.moved_ns)
    return max(moved_ns, rank_calls.device_moved_ns)


def _progress(context: Context, pace: Pace) -> Cause:
    if context.have_finished:
        return Finished(pace)
    first = next(iter(context.by_rank.values()), None)
    call = first.last_collective if first is not None and context.are_all_in_one_call else None
    if context.is_unknown_end and call is not None:
        return UnobservedEnd(pace, call)
    statuses = context.exits.statuses.values()
    is_known = statuses and all(status.alive is not None for status in statuses)
    if not context.timing.is_over or not is_known:
        return Progressing(pace)
    return ProgressingAtEnd(pace, _last(context))


def _last(context: Context) -> InOneCall | CreatingGroup | ShortWait | None:
    """What the ranks are in, or were in when the job ended."""
    if not context.are_all_in_one_call:
        return _had_begun_to_wait(context)
    return InOneCall(next(iter(context.by_rank.values())).last_collective)


def _had_begun_to_wait(context: Context) -> CreatingGroup | ShortWait | None:
    """The ranks that waited when the job ended."""
    by_rank = context.by_rank
    creating = tuple(rank for rank in by_rank if context.group_in_creation(rank) is not None)
    if creating:
        return CreatingGroup(creating)
    ranks, wait = awaited(context.begun_waits), _first_wait(context)
    waited_s = context.timing.waited_s(wait) if wait is not None else None
    if wait is None or waited_s is None or waited_s < _WORTH_TELLING_S:
        return None
    waiting = tuple(other.rank for other in waiting_for(context.begun_waits, ranks))
    call = by_rank[wait.rank].issued(wait.key, wait.number)
    return ShortWait(waiting, tuple(ranks), waited_s, call)
