"""Rule: the job is over, the readable boxes show no fault, and a rank left no data.

No rank is blamed, but the job may not have been healthy.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchwhere.core.place import Certainty
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.finding import CallRef, Cause, Finding
from torchwhere.diagnose.doctor.pace import Pace, pace_of
from torchwhere.diagnose.doctor.rules.no_fault import no_fault
from torchwhere.diagnose.doctor.verdict import VerdictKind
from torchwhere.diagnose.doctor.waits import is_of_all


@dataclass(frozen=True, slots=True)
class LostData(Cause):
    """The last collective of a job whose ranks have not all left data."""

    call: CallRef | None
    went_on: tuple[int, ...]  # ranks that continued after it
    reached: tuple[int, ...]  # ranks without data that issued it, by their counters
    pace: Pace


def find_lost_data(context: Context) -> Finding | None:
    timing, call = context.timing, context.last_call
    if not timing.is_over or not context.no_data or context.have_finished or timing.was_moving():
        return None
    went_on = _went_on_after(context, call) if call is not None else []
    reached = [
        rank
        for rank in sorted(context.no_data)
        if call is not None and context.job_calls.has_issued(rank, call.key, call.number)
    ]
    pace = pace_of(context.job_calls)
    cause = LostData(call, tuple(went_on), tuple(reached), pace)
    if went_on:
        return no_fault(context, cause, Certainty.INFERRED, pace, call=call)
    return Finding(
        VerdictKind.MISSING, cause, call=call, certainty=Certainty.UNKNOWN, facts=pace.to_dict()
    )


def _went_on_after(context: Context, call: CallRef) -> list[int]:
    """Ranks that continued after a collective that needs all ranks: they returned from it, or
    reached a later step."""
    key, number = call.key, call.number
    ranks = []
    for rank, rank_calls in context.by_rank.items():
        if rank_calls.last != (key, number) or not is_of_all(rank_calls, key, number):
            continue
        is_in_it = rank_calls.in_collective_since_ns is not None
        has_returned = not is_in_it and not rank_calls.is_async(key, number)
        issued_at, step = rank_calls.place_of(key, number), rank_calls.place.step
        began = issued_at.step if issued_at is not None else None
        is_later = step is not None and began is not None and step > began
        if (has_returned or is_later) and not context.exits.has_failed(rank):
            ranks.append(rank)
    return ranks
