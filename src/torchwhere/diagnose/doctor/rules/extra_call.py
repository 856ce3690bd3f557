"""Rule: a few ranks wait in a collective that most ranks never issued, because those have finished.

A rank that issued one collective too many often gets to `destroy_process_group`, and hangs there:
the group waits for this collective. The ranks that finished did as most ranks did.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.finding import CallRef, Cause, Finding
from torchwhere.diagnose.doctor.verdict import State, VerdictKind
from torchwhere.diagnose.doctor.waits import Wait, awaited, waiting_for


@dataclass(frozen=True, slots=True)
class ExtraCall(Cause):
    """Ranks that issued a call which the others, which have finished, never issued."""

    ranks: tuple[int, ...]
    finished: tuple[int, ...]
    wait: Wait


def find_extra_call(context: Context) -> Finding | None:
    finished = awaited(context.waits)
    wait = context.first_wait_for(finished)
    if wait is None or wait.no_data or not all(_has_finished(context, rank) for rank in finished):
        return None
    ranks = tuple(sorted(other.rank for other in waiting_for(context.waits, finished)))
    if len(ranks) >= len(finished):
        return None
    return Finding(
        VerdictKind.MISMATCH,
        ExtraCall(ranks, tuple(finished), wait),
        culprits=ranks,
        call=CallRef.of(wait),
        stalled_s=context.timing.waited_s(wait),
    )


def _has_finished(context: Context, rank: int) -> bool:
    if rank not in context.job_calls.by_rank or context.exits.outlived_its_watch(rank):
        return False
    return context.state(rank) is State.FINISHED
