"""Sentences on the consequences of a mismatch.

They say whether data was mixed, which rank's step counter is off, which rank uses a group from two
threads, and which ranks are blocked now.
"""

from __future__ import annotations

from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.mismatch import Mismatch

_NEARBY = 32  # calls before and after a mismatch that are searched for other threads


def consequences(context: Context, mismatch: Mismatch, *, culprits: str, blocked: str) -> list[str]:
    """The sentences. `culprits` names the culprits, `blocked` the ranks that are blocked."""
    lines = []
    if mismatch.what == "call_site":
        fails = "so nothing fails" if not context.blocked else "so the call itself does not fail"
        lines.append(
            f"Op and shapes are the same, {fails}: the call succeeds but mixes unrelated tensors."
        )
    elif mismatch.what == "step":
        lines.append(_of_steps(context, mismatch, culprits))
    if len(context.blocked) == len(context.job_calls.by_rank):
        lines.append(
            f"Now all {len(context.blocked)} ranks are blocked, in calls that do not match each"
            " other."
        )
    elif context.blocked:
        lines.append(f"Now {blocked} {'are' if len(context.blocked) > 1 else 'is'} blocked.")
    return lines + _of_threads(context, mismatch)


def _of_steps(context: Context, mismatch: Mismatch, culprits: str) -> str:
    """Which rank's step counter is off, and the likely reason.

    A skipped step makes the step before it look twice as long.
    """
    usual, odd = (
        context.job_calls.by_rank[rank] for rank in (_usual(mismatch), mismatch.culprits[0])
    )
    one, other = (rank_calls.place_of(mismatch.key, mismatch.number) for rank_calls in (usual, odd))
    if (
        one is None
        or other is None
        or one.step is None
        or other.step is None
        or one.step == other.step
    ):
        return "Op, shapes and call sites are the same, but the steps differ."
    first, it = min(one.step, other.step), "it" if len(mismatch.culprits) == 1 else "they"
    counts = [
        int((rank_calls.calls[mismatch.key].steps() == first).sum()) for rank_calls in (usual, odd)
    ]
    if other.step < one.step:
        reason = (
            "made an extra call, or skipped a step"
            if counts[1] < 2 * counts[0] or counts[0] == 1
            else "skipped a step"
        )
        where = f"fell behind in step {first}: {it} {reason}"
    else:
        where = f"ran ahead in step {first}: {it} skipped a call, or counted an extra step"
    return (
        f"Op, shapes and call sites are the same, but the steps differ. {culprits.capitalize()}"
        f" {where} (optimizer.step, torchwhere.step)."
    )


def _usual(mismatch: Mismatch) -> int:
    """A rank that is not a culprit; if all are, one from another cohort."""
    blamed = set(mismatch.culprits)
    free = [rank for cohort in mismatch.cohorts for rank in cohort if rank not in blamed]
    return (
        free[0]
        if free
        else next(cohort[0] for cohort in mismatch.cohorts if mismatch.culprits[0] not in cohort)
    )


def _of_threads(context: Context, mismatch: Mismatch) -> list[str]:
    """Reports a rank that uses the group from several threads, whose order is not deterministic.

    Threads that torch started do not count.
    """
    for rank in (*mismatch.culprits[:1], _usual(mismatch)):
        calls = context.job_calls.by_rank[rank].calls[mismatch.key]
        near = range(
            max(calls.first, mismatch.number - _NEARBY),
            min(calls.last, mismatch.number + _NEARBY) + 1,
        )
        threads = {
            thread
            for number in near
            if (thread := calls.of(number)[1].thread) and not thread.startswith("native-")
        }
        if len(threads) > 1:
            named = " and ".join(sorted(threads)[:2])
            return [
                (
                    f"Rank {rank} uses this group from {len(threads)} threads, {named}: the order"
                    " of their calls is not deterministic."
                )
            ]
    return []
