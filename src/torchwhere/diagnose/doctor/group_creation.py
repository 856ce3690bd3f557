"""Finds ranks that wait for others while they create a process group (`init_process_group`,
`new_group`).

No collective has been issued there, so no other rule sees it. All ranks create the same groups in
the same order, members or not: the others wait for a rank that has created fewer, and a rank that
has created other groups is a mismatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchwhere.core.place import Certainty
from torchwhere.core.rank_text import ranks_phrase
from torchwhere.diagnose.calls.encode import GroupCreation
from torchwhere.diagnose.calls.rank_calls import RankCalls
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.verdict import State, Verdict, VerdictKind
from torchwhere.diagnose.doctor.wait_text import in_place

_INIT = "init_process_group"
_RULE = (
    "All ranks must create all groups in the same order, including groups they are not members of;"
    " or pass use_local_synchronization=True."
)
_NETWORK = (
    "the rendezvous address and port, the world size, firewalls and network interfaces between the"
    " hosts"
)

GroupCall = tuple[
    str, tuple[int, ...] | None
]  # a group creation: the function, and the ranks of the group


@dataclass(frozen=True, slots=True)
class PendingGroup:
    """A group creation in progress: the ranks inside, and the ranks that have not come."""

    made: GroupCreation
    there: tuple[int, ...]
    absent: tuple[int, ...]  # ranks with data only


def on_group_creation(context: Context, stall_s: float) -> Verdict | None:
    """The verdict on a job that is blocked in a group creation; None if it is not."""
    pending = _group_creation(context)
    if pending is None:
        return None
    since_ns = max(
        made.since_ns for rank in pending.there if (made := waits_in(context, rank)) is not None
    )
    waited_s = (context.now_ns - since_ns) / 1e9 if context.now_ns is not None else None
    if waited_s is not None and waited_s < context.patience_s(pending.there[0], stall_s):
        return None
    difference = _first_difference(context)
    kind, culprits, lines = (
        _on_different(context, *difference)
        if difference is not None
        else _on_absent(context, pending)
    )
    if kind is None:
        return None
    is_known = (
        kind in (VerdictKind.MISSING, VerdictKind.DEAD)
        and set(culprits) <= set(pending.absent)
        and context.is_live
    )
    return context.verdict(
        kind,
        culprits=culprits,
        certainty=_certainty(context, pending, is_known),
        stalled_s=waited_s,
        explanation=tuple(lines),
        facts={"gathering": _facts(pending)},
    )


def _certainty(context: Context, pending: PendingGroup, is_known: bool) -> Certainty:
    """How sure the verdict is. A rank without data may not have started: hosts start at
    different times."""
    if context.no_data:
        return Certainty.INFERRED if pending.absent else Certainty.UNKNOWN
    return Certainty.EXACT if is_known else Certainty.INFERRED


def _group_creation(context: Context) -> PendingGroup | None:
    """The earliest group creation that ranks are in."""
    inside = {
        rank: made
        for rank in context.job_calls.by_rank
        if (made := waits_in(context, rank)) is not None
    }
    if not inside:
        return None
    first = min(inside.values(), key=lambda made: made.number)
    there = tuple(rank for rank, made in inside.items() if made.number == first.number)
    absent = tuple(
        rank
        for rank, rank_calls in context.job_calls.by_rank.items()
        if _is_behind(rank_calls, first.number)
    )
    return PendingGroup(inside[there[0]], there, absent)


def waits_in(context: Context, rank: int) -> GroupCreation | None:
    """The group creation that a rank has begun and not completed."""
    group_creations = context.job_calls.by_rank[rank].rank_summary.group_creations
    return (
        group_creations[-1]
        if group_creations
        and not group_creations[-1].is_made
        and context.state(rank) is not State.FINISHED
        else None
    )


def _is_behind(rank_calls: RankCalls, number: int) -> bool:
    """Whether a rank has not reached this creation.

    That is unknown for a rank that was not watched when it created its groups.
    """
    group_creations = rank_calls.rank_summary.group_creations
    return group_creations[-1].number < number if group_creations else not rank_calls.counts


# -- other groups ----------------------------------------------------------------------------------


def _first_difference(context: Context) -> tuple[int, dict[GroupCall, list[int]]] | None:
    """The first number at which ranks created different groups, and the cohorts, largest first."""
    creations = {
        rank: {made.number: made for made in rank_calls.rank_summary.group_creations}
        for rank, rank_calls in context.job_calls.by_rank.items()
    }
    for number in sorted({number for made in creations.values() for number in made}):
        cohorts: dict[GroupCall, list[int]] = {}
        for rank, made in creations.items():
            if number in made:
                cohorts.setdefault((made[number].op, made[number].ranks), []).append(rank)
        if len(cohorts) > 1:
            return number, dict(sorted(cohorts.items(), key=lambda cohort: -len(cohort[1])))
    return None


def _on_different(
    context: Context, number: int, cohorts: dict[GroupCall, list[int]]
) -> tuple[VerdictKind, tuple[int, ...], list[str]]:
    """Blame ranks that create a group the others create later (they skipped one); otherwise the
    smaller cohort."""
    most, *others = cohorts.values()
    early = [
        ranks
        for what, ranks in cohorts.items()
        if _is_made_later(context, number, what, set(ranks))
    ]
    fewer = sorted(rank for ranks in others for rank in ranks)
    culprits = (
        tuple(early[0]) if len(early) == 1 else tuple(fewer) if len(fewer) < len(most) else ()
    )
    lines = ["The ranks create different groups at the same time, so they wait for each other."]
    for what, ranks in cohorts.items():
        group_creations = context.job_calls.by_rank[ranks[0]].rank_summary.group_creations
        place = next(made.place for made in group_creations if (made.op, made.ranks) == what)
        lines.append(f"  {ranks_phrase(ranks)}: {_call_text(*what)}, {in_place(place)}")
    return VerdictKind.MISMATCH, culprits, [*lines, _RULE]


def _is_made_later(context: Context, number: int, what: GroupCall, cohort: set[int]) -> bool:
    others = (
        rank_calls for rank, rank_calls in context.job_calls.by_rank.items() if rank not in cohort
    )
    return any(
        (made.op, made.ranks) == what and made.number > number
        for rank_calls in others
        for made in rank_calls.rank_summary.group_creations
    )


# -- absent ranks ----------------------------------------------------------------------------------


def _on_absent(
    context: Context, pending: PendingGroup
) -> tuple[VerdictKind | None, tuple[int, ...], list[str]]:
    what, waiting, absent = (
        _call_text(pending.made.op, pending.made.ranks),
        ranks_phrase(pending.there),
        pending.absent,
    )
    verb = "waits" if len(pending.there) == 1 else "wait"
    where = f"  waiting: {waiting}, {in_place(pending.made.place)}"
    if not absent and context.no_data:
        no_data = tuple(sorted(context.no_data))
        head = (
            f"{waiting.capitalize()} {verb} in {what}, and there is no data for"
            f" {ranks_phrase(no_data)}."
        )
        they, its = ("It", "its") if len(no_data) == 1 else ("They", "their")
        why = (
            f"{they} may not have started yet, or may have exited before the watch began. Look at:"
            f" {its} own log."
        )
        return VerdictKind.MISSING, (), [head, where, why]
    if not absent:
        head = f"All {len(pending.there)} ranks wait in {what}, and no rank is missing."
        are_all = len(pending.there) == len(context.job_calls.by_rank)
        return (
            VerdictKind.TOGETHER if are_all else None,
            (),
            [head, where, f"Likely cause: the network. Look at: {_NETWORK}."],
        )
    gone = tuple(rank for rank in absent if context.state(rank) in (State.DEAD, State.FINISHED))
    lines = [
        f"{ranks_phrase(absent).capitalize()} never called {what}, where {waiting} {verb}.",
        where,
    ]
    lines += [f"  {_elsewhere(context, rank)}" for rank in absent[:4]]
    lines += [_RULE] if pending.made.op != _INIT else []
    if not gone and all(rank in context.waits for rank in absent):  # each side waits for the other
        return (
            VerdictKind.MISMATCH,
            absent if len(absent) < len(pending.there) else pending.there,
            lines,
        )
    return VerdictKind.DEAD if gone else VerdictKind.MISSING, gone or absent, lines


# -- text ------------------------------------------------------------------------------------------


def _call_text(op: str, ranks: tuple[int, ...] | None) -> str:
    return f"{op} of {ranks_phrase(ranks)}" if ranks else op


def _elsewhere(context: Context, rank: int) -> str:
    detail = context.detail(rank)
    verb = {State.DEAD: "has exited", State.FINISHED: "has finished"}.get(
        context.state(rank), "is instead"
    )
    text = f"rank {rank} {verb} {in_place(context.place(rank))}"
    return f"{text}: {detail}" if detail else text


def _facts(pending: PendingGroup) -> dict[str, Any]:
    made = pending.made
    ranks = list(made.ranks) if made.ranks is not None else None
    return {
        "op": made.op,
        "number": made.number,
        "ranks": ranks,
        "there": list(pending.there),
        "absent": list(pending.absent),
    }
