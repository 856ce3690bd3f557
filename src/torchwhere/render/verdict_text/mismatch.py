"""Sentences on ranks that issued different calls, or whose all_to_all splits do not match."""

from __future__ import annotations

from typing import Any

from torchwhere.core.events import Event, Kind
from torchwhere.core.rank_text import ranks_phrase
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.rules.alltoall_splits import MOST_PAIRS, OP, UnmatchedSplits
from torchwhere.diagnose.doctor.rules.mismatch import Cohort, DifferentCalls
from torchwhere.render.verdict_text.phrases import (
    agree,
    call_text,
    records_text,
    step_text,
    subject_text,
    survived_text,
)

_MOST_COHORTS = 16


def different_calls_text(cause: DifferentCalls, context: Context) -> list[str]:
    mismatch = cause.mismatch
    difference = f"issued different calls: they differ in {' and '.join(cause.differs_in)}"
    if mismatch.aspect == "step":
        difference = "are in different steps"
    title = context.title(mismatch.key)
    return [
        f'At #{mismatch.number} of group "{title}", the ranks {difference}.',
        *(f"  {ranks_phrase(row['ranks'])}: {row['issued']}" for row in cohort_rows(cause)),
        *_consequences(cause),
        *_blocked_text(cause, context),
        *_threads_text(cause),
        *_tie_text(cause, context),
        *survived_text(cause.survived),
        *_branch_text(cause),
    ]


def cohort_rows(cause: DifferentCalls) -> list[dict[str, Any]]:
    """The ranks of each cohort, and what they issued: for the text and for JSON."""
    rows: list[dict[str, Any]] = [
        {"ranks": list(cohort.ranks), "issued": _issued_text(cause, cohort)}
        for cohort in cause.cohorts[:_MOST_COHORTS]
    ]
    others = cause.cohorts[_MOST_COHORTS:]
    if others:
        ranks = sorted(rank for cohort in others for rank in cohort.ranks)
        rows.append({"ranks": ranks, "issued": f"{len(others)} other calls"})
    return rows


def _issued_text(cause: DifferentCalls, cohort: Cohort) -> str | None:
    if cohort.call is None:
        return None
    text = call_text(cohort.call)
    if cause.differs_in != ("reduction",):
        return text
    return f"{text}, reduction {cohort.call.fields.get('reduce_op')}"


def _consequences(cause: DifferentCalls) -> list[str]:
    """Whether data was mixed, and which step counter is off."""
    if cause.mismatch.aspect == "call_site":
        fails = "so the call itself does not fail" if cause.blocked else "so nothing fails"
        return [
            f"Op and shapes are the same, {fails}: the call succeeds but mixes unrelated tensors."
        ]
    if cause.mismatch.aspect != "step":
        return []
    text, shift = "Op, shapes and call sites are the same, but the steps differ.", cause.step_shift
    if shift is None:
        return [text]
    culprits = cause.mismatch.culprits
    they = agree(culprits, "it", "they")
    call = "replay" if _is_replay(cause.call) else "call"
    reason = "skipped a step"
    if not shift.is_behind:
        reason = f"skipped a {call}, or counted an extra step"
    elif shift.may_be_extra_call:
        reason = f"made an extra {call}, or skipped a step"
    verb = "fell behind" if shift.is_behind else "ran ahead"
    return [
        (
            f"{text} {subject_text(culprits)} {verb} in step {shift.step}: {they}"
            f" {reason} (optimizer.step, torchwhere.step)."
        )
    ]


def _blocked_text(cause: DifferentCalls, context: Context) -> list[str]:
    if len(cause.blocked) == len(context.by_rank):
        count = len(cause.blocked)
        return [f"Now all {count} ranks are blocked, in calls that do not match each other."]
    if not cause.blocked:
        return []
    return [f"Now {ranks_phrase(cause.blocked)} {agree(cause.blocked, 'is', 'are')} blocked."]


def _threads_text(cause: DifferentCalls) -> list[str]:
    use = cause.thread_use
    if use is None:
        return []
    return [
        (
            f"Rank {use.rank} uses this group from {len(use.threads)} threads,"
            f" {' and '.join(use.threads[:2])}: the order of their calls is not deterministic."
        )
    ]


def _tie_text(cause: DifferentCalls, context: Context) -> list[str]:
    """How the culprits were chosen, if the largest cohort is not unique."""
    mismatch = cause.mismatch
    if mismatch.is_certain:
        return []
    deviated = mismatch.deviated
    if not deviated:
        records = records_text(context)
        return [f"The cohorts have the same size: the {records} do not show which one is wrong."]
    they, own = agree(deviated, "it", "they"), agree(deviated, "its own", "their own")
    reason = f"deviated from {own} earlier calls."
    if mismatch.is_outvoted:
        reason = f"{agree(deviated, 'differs', 'differ')} from the other groups of this kind."
    elif mismatch.has_new_op:
        reason = f"issued an op that {they} had not issued in this group before."
    elif mismatch.is_own_call:
        reason = (
            "issued its call in your own code. The other call comes from torch or from a framework,"
            " whose code is the same on all ranks."
        )
    return [f"The cohorts have the same size, but only {ranks_phrase(deviated)} {reason}"]


def _branch_text(cause: DifferentCalls) -> list[str]:
    """The last call that the culprit shares with the others: the branch comes after it."""
    before, call = cause.last_common, cause.call
    if before is None or call is None or not before.place.line or not cause.names_culprits:
        return []
    line = before.place.full_line
    is_one_line = call.place.full_line in (line, "")
    where = f"before {line}" if is_one_line else f"between {line} and {call.place.full_line}"
    after = f"the replay at {line}" if _is_replay(before) else line
    return [
        (
            f"Likely cause: {ranks_phrase(cause.mismatch.culprits)} took a different code path"
            f" after {after}{step_text(before)}. Look at: conditions on rank, step or data {where}."
        )
    ]


def _is_replay(event: Event | None) -> bool:
    return event is not None and event.kind == Kind.REPLAY.label


def unmatched_splits_text(cause: UnmatchedSplits, context: Context) -> list[str]:
    title = context.title(cause.key)
    lines = [
        f'In #{cause.number} of group "{title}", {OP}, the send and receive splits do not match.'
    ]
    lines += [
        f"  rank {source} sends {sent} elements to rank {destination}, which expects {taken}"
        for source, destination, sent, taken in cause.pairs[:MOST_PAIRS]
    ]
    if len(cause.pairs) > MOST_PAIRS:
        lines.append(f"  and {len(cause.pairs) - MOST_PAIRS} more pairs")
    if not cause.pairs:
        lines.append(
            f"  all ranks together send {cause.sent} elements and expect {cause.taken}; the boxes"
            " do not show which split is wrong"
        )
    place = context.by_rank[cause.ranks[0]].place_of(cause.key, cause.number)
    where = f" at {place.full_line}" if place is not None and place.line else ""
    lines.append(
        f"Look at: how the split sizes{where} are computed, and whether they change after the ranks"
        " have exchanged them."
    )
    return lines
