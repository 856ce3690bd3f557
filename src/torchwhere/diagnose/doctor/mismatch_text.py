"""What it means that ranks parted at a call of the same form: whether data was mixed, whose steps
are off, who uses a group from two threads, and who stands still now. Sentences, for a verdict.
"""

from __future__ import annotations

from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.mismatch import Mismatch

_NEARBY = 32  # numbers around one, in which threads are looked for


def consequences(context: Context, found: Mismatch, *, who: str, standing: str) -> list[str]:
    """`who` are the culprits and `standing` those who stand still, in words."""
    said = []
    if found.what == "call_site":
        fails = "so nothing fails" if not context.standing else "so the call itself does not fail"
        said.append(
            f"Op and shapes are the same, {fails}: the call succeeds but mixes unrelated tensors."
        )
    elif found.what == "step":
        said.append(_of_steps(context, found, who))
    if len(context.standing) == len(context.job_calls.by_rank):
        said.append(
            f"Now all {len(context.standing)} ranks are blocked, in calls that do not match each"
            " other."
        )
    elif context.standing:
        said.append(f"Now {standing} {'are' if len(context.standing) > 1 else 'is'} blocked.")
    return said + _of_threads(context, found)


def _of_steps(context: Context, found: Mismatch, who: str) -> str:
    """Whose counter is off, and by what it may be: a step left out makes the one before it as long
    as two."""
    usual, odd = (context.job_calls.by_rank[rank] for rank in (_usual(found), found.culprits[0]))
    one, other = (said.place_of(found.key, found.number) for said in (usual, odd))
    if (
        one is None
        or other is None
        or one.step is None
        or other.step is None
        or one.step == other.step
    ):
        return "Op, shapes and call sites are the same, but the steps differ."
    first, it = min(one.step, other.step), "it" if len(found.culprits) == 1 else "they"
    counts = [int((said.calls[found.key].steps() == first).sum()) for said in (usual, odd)]
    if other.step < one.step:
        more = (
            "made an extra call, or skipped a step"
            if counts[1] < 2 * counts[0] or counts[0] == 1
            else "skipped a step"
        )
        where = f"fell behind in step {first}: {it} {more}"
    else:
        where = f"ran ahead in step {first}: {it} skipped a call, or counted an extra step"
    return (
        f"Op, shapes and call sites are the same, but the steps differ. {who.capitalize()} {where}"
        " (optimizer.step, torchwhere.step)."
    )


def _usual(found: Mismatch) -> int:
    """A rank that is not to blame; where all are, one of the others."""
    blamed = set(found.culprits)
    free = [rank for cohort in found.cohorts for rank in cohort if rank not in blamed]
    return (
        free[0]
        if free
        else next(cohort[0] for cohort in found.cohorts if found.culprits[0] not in cohort)
    )


def _of_threads(context: Context, found: Mismatch) -> list[str]:
    """A group that two threads of a rank use: which of them comes first is chance. Threads of
    torch's own are no threads of the program's."""
    for rank in (*found.culprits[:1], _usual(found)):
        calls = context.job_calls.by_rank[rank].calls[found.key]
        near = range(
            max(calls.first, found.number - _NEARBY), min(calls.last, found.number + _NEARBY) + 1
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
