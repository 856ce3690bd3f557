"""Rule: ranks wait in a call that others never issued, or cannot complete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torchwhere.diagnose.doctor.call_patterns import Patterns
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.deadlocks import has_skipped
from torchwhere.diagnose.doctor.finding import CallRef, Cause, Finding, exact_if
from torchwhere.diagnose.doctor.pauses import Pause, pause_of
from torchwhere.diagnose.doctor.stragglers import straggler
from torchwhere.diagnose.doctor.verdict import VerdictKind
from torchwhere.diagnose.doctor.waits import (
    Wait,
    awaited,
    cycle_apart_from,
    may_wait_for,
    waiting_for,
)

_USUALLY = 2  # times the median delay
_ASKED = 64  # waiting ranks that are checked for a call that the awaited rank skipped


class Excuse(NamedTuple):
    """A rank that others wait for, and that may itself wait for a rank without data."""

    rank: int
    no_data: int


@dataclass(frozen=True, slots=True)
class MissingRanks(Cause):
    """Ranks that have not issued the call that others wait in, or cannot complete it."""

    ranks: tuple[int, ...]
    wait: Wait
    excuses: tuple[Excuse, ...] = ()
    elsewhere: tuple[int, ...] = ()  # ranks that have not come either, and wait in another call
    pause: Pause | None = None  # in a running job: what the ranks do, and how long that may last


class _Suspects(NamedTuple):
    ranks: list[int]
    wait: Wait | None
    is_certain: bool


def find_missing(context: Context) -> Finding | None:
    suspects = _suspects(context)
    wait = suspects.wait
    ranks = [
        rank
        for rank in suspects.ranks
        if rank not in context.by_rank or context.group_in_creation(rank) is None
    ]
    if wait is None or not ranks or not context.timing.is_stalled(wait):
        return None
    if is_usual_delay(context, wait) or _is_deadlock_of_others(context, ranks):
        return None
    pause = None if context.timing.is_over else pause_of(context, ranks, wait)
    if pause is not None and (context.timing.waited_s(wait) or 0.0) < pause.limit_s:
        return None
    excuses = _excuses(context, ranks)
    is_certain = suspects.is_certain and not excuses and _is_observed(context, ranks, wait)
    excused = {excuse.rank for excuse in excuses}
    return Finding(
        VerdictKind.MISSING,
        MissingRanks(tuple(ranks), wait, excuses, pause=pause),
        culprits=tuple(rank for rank in ranks if rank not in excused),
        call=CallRef.of(wait),
        certainty=exact_if(is_certain),
        stalled_s=context.timing.waited_s(wait),
    )


def is_usual_delay(context: Context, wait: Wait) -> bool:
    """Whether a rank is always late, and the others waited no longer than usual at the last record.

    Only checked if it is unknown when the job ended, and so how long they waited.
    """
    if context.timing.is_live:
        return False
    late = straggler(context.job_calls, key=wait.key, align_clocks=context.align_clocks)
    return late is not None and context.timing.recorded_s(wait) <= _USUALLY * late.late_s


def _is_deadlock_of_others(context: Context, ranks: list[int]) -> bool:
    """Whether other ranks block each other in a cycle, to which these ranks do not belong.

    These may still come; the cycle cannot end. A rank that is stopped or has exited does not come.
    """
    if not context.exits.held.isdisjoint(ranks):
        return False
    waits = cycle_apart_from(ranks, context.job_calls, context.waits)
    return bool(waits) and context.timing.is_stalled(waits[0])


def _suspects(context: Context) -> _Suspects:
    """The ranks that others wait for; else those that skipped a call; else those without data."""
    ranks = awaited(context.waits)
    wait = context.first_wait_for(ranks)
    if wait is not None:
        return _Suspects(ranks, wait, is_certain=True)
    if skipping := _skipping_ranks(context):
        return _Suspects(skipping, context.first_wait_for(skipping), is_certain=False)
    if context.waits:
        wait = next((wait for wait in context.waits.values() if not wait.missing), None)
    else:
        wait = _wait_for_no_data(context)
    return _Suspects(list(wait.no_data) if wait is not None else [], wait, is_certain=False)


def _is_observed(context: Context, ranks: list[int], wait: Wait) -> bool:
    """Whether the data shows for certain that these ranks are missing, and for long enough."""
    timing, by_rank = context.timing, context.by_rank
    if any(rank in by_rank and context.exits.outlived_its_watch(rank) for rank in ranks):
        return False
    is_short = timing.is_over and (timing.waited_s(wait) or 0.0) < timing.stall_s
    return timing.is_live and not wait.no_data and not is_short


def _wait_for_no_data(context: Context) -> Wait | None:
    """The wait for ranks without data, where all other ranks are in one of their collectives."""
    call, job_calls = context.last_call, context.job_calls
    if call is None or not context.no_data:
        return None
    members = job_calls.members(call.key)
    absent = tuple(
        rank
        for rank in members
        if rank in context.no_data and not job_calls.has_issued(rank, call.key, call.number)
    )
    with_data = [rank for rank in members if rank not in context.no_data]
    are_in_it = all(
        job_calls.by_rank[rank].in_collective_since_ns is not None
        and context.is_in_last_collective(rank) is not False
        for rank in with_data
        if rank in job_calls.by_rank
    )
    return Wait(call.rank, call.key, call.number, (), absent) if absent and are_in_it else None


# -- excuses ---------------------------------------------------------------------------------------


def _excuses(context: Context, ranks: list[int]) -> tuple[Excuse, ...]:
    """Awaited ranks that may wait themselves for a message of a rank without data."""
    if not context.no_data:
        return ()
    patterns = Patterns(context.job_calls, ranks=len(ranks))
    excuses = []
    for rank in ranks:
        if rank not in context.by_rank:
            continue
        other = may_wait_for(context.job_calls, rank, context.no_data)
        may_be_blocked = other is not None and context.is_in_last_collective(rank) is not False
        if other is not None and may_be_blocked and not _has_skipped(context, patterns, rank):
            excuses.append(Excuse(rank, other))
    return tuple(excuses)


def _skipping_ranks(context: Context) -> list[int]:
    """Ranks that wait for a rank without data, but skipped what others wait for before they came
    there."""
    excused = [wait.rank for wait in context.waits.values() if not wait.missing]
    patterns = Patterns(context.job_calls, ranks=len(excused))
    return sorted(rank for rank in excused if _has_skipped(context, patterns, rank))


def _has_skipped(context: Context, patterns: Patterns, rank: int) -> bool:
    """Whether a rank skipped, against its usual pattern, a call that another rank waits for."""
    others = waiting_for(context.waits, [rank])[:_ASKED]
    return any(has_skipped(patterns, rank, other) for other in others)
