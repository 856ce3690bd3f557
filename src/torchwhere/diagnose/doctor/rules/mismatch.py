"""Rule: at one number, ranks issued different calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torchwhere.core.events import Event
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.doctor.blocked import blocked_ranks
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.exit_records import survived_exception
from torchwhere.diagnose.doctor.finding import CallRef, Cause, Finding, exact_if
from torchwhere.diagnose.doctor.mismatch import Mismatch, mismatches
from torchwhere.diagnose.doctor.twin_groups import outvoted
from torchwhere.diagnose.doctor.verdict import VerdictKind

_NEARBY = 32  # calls before and after a mismatch that are searched for other threads
_FIELDS = ("op", "dtype", "shapes", "out_shapes", "reduce_op", "peer")
_FIELDS_OF_MESSAGES = ("dtype", "shapes")
_FIELD_NAMES = {
    "peer": "root",
    "reduce_op": "reduction",
    "shapes": "shape",
    "out_shapes": "shape of the result",
}


class Cohort(NamedTuple):
    """Ranks that issued the same call; None if their rings have lost it."""

    ranks: tuple[int, ...]
    call: Event | None


class StepShift(NamedTuple):
    """The culprits are a step behind the others, or ahead of them."""

    step: int  # the first step in which they differ
    is_behind: bool
    may_be_extra_call: bool  # else they skipped a step: the step before looks twice as long


class ThreadUse(NamedTuple):
    """A rank that uses the group from several threads, whose order is not deterministic."""

    rank: int
    threads: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DifferentCalls(Cause):
    """Ranks issued different calls at one number."""

    mismatch: Mismatch
    differs_in: tuple[str, ...]
    cohorts: tuple[Cohort, ...]  # the largest first
    step_shift: StepShift | None
    thread_use: ThreadUse | None
    survived: Event | None  # an exception of the first culprit, shortly before
    # of the first culprit, the call before it and the call; the replay of a graph that has the call
    last_common: Event | None
    call: Event | None
    blocked: tuple[int, ...]  # ranks that are blocked now
    names_culprits: bool = True


def find_mismatch(context: Context) -> Finding | None:
    """The first call of the culprits that differs."""
    differences = mismatches(context.job_calls)
    return first_mismatch(context, differences) if differences else None


def first_mismatch(context: Context, differences: Sequence[Mismatch]) -> Finding:
    """The finding on the first of some differences."""
    job_calls = context.job_calls
    first = min(
        differences,
        key=lambda difference: job_calls.by_rank[difference.culprits[0]].order(
            difference.key, difference.number
        ),
    )
    if first.is_tie and context.run.is_of_dumps:
        wrong = outvoted(job_calls, first)
        first = replace(first, deviated=wrong, is_outvoted=bool(wrong))
    is_exact = first.aspect == "signature" and first.is_certain
    blocked_s = blocked_ranks(context)
    are_all_blocked = len(blocked_s) == len(job_calls.by_rank) and context.timing.is_live
    cause = _cause(job_calls, first, tuple(sorted(blocked_s)))
    # dumps of two ranks are often those of a larger job: one of the two is not to blame
    if first.is_tie and context.run.is_of_dumps:
        cause = replace(cause, names_culprits=False)
    return Finding(
        VerdictKind.MISMATCH,
        cause,
        culprits=first.culprits if cause.names_culprits else (),
        call=CallRef(first.key, first.number, first.cohorts[0][0]),
        certainty=exact_if(is_exact),
        stalled_s=min(blocked_s.values(), default=None) if are_all_blocked else None,
        facts={"differs_in": list(cause.differs_in)},
        blocked=frozenset(blocked_s),
    )


def _cause(job_calls: JobCalls, mismatch: Mismatch, blocked: tuple[int, ...]) -> DifferentCalls:
    cohorts = tuple(
        Cohort(ranks, job_calls.by_rank[ranks[0]].issued(mismatch.key, mismatch.number))
        for ranks in mismatch.cohorts
    )
    culprit, number = job_calls.by_rank[mismatch.culprits[0]], mismatch.number
    is_step = mismatch.aspect == "step"
    return DifferentCalls(
        mismatch,
        tuple(_differs_in(mismatch, cohorts[0].call, cohorts[1].call)),
        cohorts,
        step_shift=_step_shift(job_calls, mismatch) if is_step else None,
        thread_use=_thread_use(job_calls, mismatch),
        survived=survived_exception(culprit, culprit.order(mismatch.key, number)),
        last_common=culprit.issuer(mismatch.key, number - 1) if number else None,
        call=culprit.issuer(mismatch.key, number),
        blocked=blocked,
    )


def _differs_in(mismatch: Mismatch, first: Event | None, second: Event | None) -> list[str]:
    """The fields in which the first two cohorts differ."""
    if first is None or second is None or mismatch.aspect == "step":
        return [mismatch.aspect]
    if mismatch.aspect == "call_site":
        here, there = first.place, second.place
        differs = {
            "module": here.module != there.module,
            "pass": here.pass_ != there.pass_,
            "line": here.full_line != there.full_line,
            "for": first.fields.get("for") != second.fields.get("for"),
        }
        return [name for name, is_different in differs.items() if is_different]
    is_message = {first.fields.get("op"), second.fields.get("op")} == {"send", "recv"}
    names = _FIELDS_OF_MESSAGES if is_message else _FIELDS
    differing = [name for name in names if first.fields.get(name) != second.fields.get(name)]
    return ["op"] if "op" in differing else [_FIELD_NAMES.get(name, name) for name in differing]


def _step_shift(job_calls: JobCalls, mismatch: Mismatch) -> StepShift | None:
    """Which step the culprits miss or have too many; None if the steps are unknown."""
    ranks = [job_calls.by_rank[rank] for rank in (_usual(mismatch), mismatch.culprits[0])]
    places = [rank_calls.place_of(mismatch.key, mismatch.number) for rank_calls in ranks]
    steps = [place.step for place in places if place is not None and place.step is not None]
    if len(steps) < 2 or steps[0] == steps[1]:
        return None
    first = min(steps)
    usual, odd = (
        int((rank_calls.calls[mismatch.key].steps() == first).sum()) for rank_calls in ranks
    )
    return StepShift(first, steps[1] < steps[0], odd < 2 * usual or usual == 1)


def _usual(mismatch: Mismatch) -> int:
    """A rank that is not a culprit; if all are, one from another cohort."""
    blamed = set(mismatch.culprits)
    for cohort in mismatch.cohorts:
        for rank in cohort:
            if rank not in blamed:
                return rank
    return next(cohort[0] for cohort in mismatch.cohorts if mismatch.culprits[0] not in cohort)


def _thread_use(job_calls: JobCalls, mismatch: Mismatch) -> ThreadUse | None:
    """A rank that uses the group from several threads. Threads that torch started do not count."""
    for rank in (mismatch.culprits[0], _usual(mismatch)):
        calls = job_calls.by_rank[rank].calls[mismatch.key]
        first = max(calls.first, mismatch.number - _NEARBY)
        last = min(calls.last, mismatch.number + _NEARBY)
        names = {calls.of(number)[1].thread for number in range(first, last + 1)}
        threads = sorted(name for name in names if name and not name.startswith("native-"))
        if len(threads) > 1:
            return ThreadUse(rank, tuple(threads))
    return None
