"""Rule: the boxes show no fault. It always applies, so it is the last one.

A job that was killed, or ended by SIGTERM, is still not healthy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torchwhere.core.events import Event
from torchwhere.core.place import Certainty
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.finding import CallRef, Cause, Finding
from torchwhere.diagnose.doctor.pace import Pace, pace_of
from torchwhere.diagnose.doctor.verdict import VerdictKind
from torchwhere.diagnose.doctor.waits import awaited, waiting_for

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


def find_no_fault(context: Context) -> Finding:
    pace, quiet_s = pace_of(context.job_calls), _quiet_s(context)
    cause = Quiet(pace, quiet_s) if quiet_s is not None else _progress(context, pace)
    return no_fault(context, cause, _certainty(context, quiet_s), pace)


def no_fault(
    context: Context,
    cause: Cause,
    certainty: Certainty,
    pace: Pace,
    *,
    call: CallRef | None = None,
) -> Finding:
    """The finding on a job without a fault, unless it was killed or ended by SIGTERM."""
    facts = pace.to_dict()
    if not context.exits.ended_unfinished:
        return Finding(VerdictKind.HEALTHY, cause, call=call, certainty=certainty, facts=facts)
    killed = frozenset(context.exits.killed())
    first = [rank for rank in awaited(context.waits) if rank in killed]
    if 2 * len(first) >= len(context.job_calls.by_rank):
        first = []
    waiting = sorted(wait.rank for wait in waiting_for(context.waits, first))
    return Finding(
        VerdictKind.DEAD,
        EndedUnfinished(cause, tuple(first), tuple(waiting)),
        call=call,
        certainty=Certainty.UNKNOWN,
        facts=facts | {"may_have_gone_first": first},
    )


def _certainty(context: Context, quiet_s: float | None) -> Certainty:
    """Lower if the end of the job was not observed."""
    is_over = context.timing.is_over
    if context.is_unknown_end or (is_over and quiet_s is not None):
        return Certainty.UNKNOWN
    is_unsure = quiet_s is not None or (is_over and (context.no_data or _ended_in_call(context)))
    return Certainty.INFERRED if is_unsure else Certainty.EXACT


def _ended_in_call(context: Context) -> bool:
    """Whether ranks were in a collective, or created a group, when the job ended."""
    if context.have_finished:
        return False
    return (
        context.are_all_in_one_call
        or bool(context.waits)
        or any(map(context.group_in_creation, context.job_calls.by_rank))
    )


def _quiet_s(context: Context) -> float | None:
    """How long no rank has recorded anything, if that is long and no rank waits; else None."""
    timing, ranks = context.timing, context.job_calls.by_rank
    lasted = timing.since_s(timing.recorded_ns)
    if lasted is None or context.have_finished or context.waits or not ranks:
        return None
    return lasted if lasted >= max(map(timing.patience_s, ranks)) else None


def _progress(context: Context, pace: Pace) -> Cause:
    if context.have_finished:
        return Finished(pace)
    first = next(iter(context.job_calls.by_rank.values()), None)
    call = first.last_collective if first is not None and context.are_all_in_one_call else None
    if context.is_unknown_end and call is not None:
        return UnobservedEnd(pace, call)
    statuses = context.exits.statuses.values()
    is_known = statuses and all(status.alive is not None for status in statuses)
    if not context.timing.is_over or not is_known:
        return Progressing(pace)
    last = InOneCall(call) if context.are_all_in_one_call else _had_begun_to_wait(context)
    return ProgressingAtEnd(pace, last)


def _had_begun_to_wait(context: Context) -> CreatingGroup | ShortWait | None:
    """The ranks that waited when the job ended."""
    by_rank = context.job_calls.by_rank
    creating = tuple(rank for rank in by_rank if context.group_in_creation(rank) is not None)
    if creating:
        return CreatingGroup(creating)
    ranks = awaited(context.waits)
    wait = context.first_wait_for(ranks)
    waited_s = context.timing.waited_s(wait) if wait is not None else None
    if wait is None or waited_s is None or waited_s < _WORTH_TELLING_S:
        return None
    waiting = tuple(other.rank for other in waiting_for(context.waits, ranks))
    call = by_rank[wait.rank].issued(wait.key, wait.number)
    return ShortWait(waiting, tuple(ranks), waited_s, call)
