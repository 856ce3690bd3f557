"""Ranks that wait for others where a process group is made: in `init_process_group`, in
`new_group`.

No collective has been issued there, so nothing else in this folder sees it. All ranks make the same
groups in the same order, members or not: who has made fewer is the one they wait for, and who has
made others has parted from them.
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

_AT_THE_START = "init_process_group"
_RULE = (
    "All ranks must create all groups in the same order, including groups they are not members of;"
    " or pass use_local_synchronization=True."
)
_NETWORK = (
    "the rendezvous address and port, the world size, firewalls and network interfaces between the"
    " hosts"
)

What = tuple[str, tuple[int, ...] | None]  # of a making: what was called, for which ranks


@dataclass(frozen=True, slots=True)
class PendingGroup:
    """One making of a group: who is there, and who is not."""

    made: GroupCreation
    there: tuple[int, ...]
    absent: tuple[int, ...]  # that were heard


def on_group_creation(context: Context, stall_s: float) -> Verdict | None:
    """The verdict on a job that stands still there; None if it does not."""
    found = _group_creation(context)
    if found is None:
        return None
    since_ns = max(
        made.since_ns for rank in found.there if (made := waits_in(context, rank)) is not None
    )
    waited_s = (context.now_ns - since_ns) / 1e9 if context.now_ns is not None else None
    if waited_s is not None and waited_s < context.patience_s(found.there[0], stall_s):
        return None
    parted = _parted(context)
    kind, culprits, said = (
        _on_parted(context, *parted) if parted is not None else _on_absent(context, found)
    )
    if kind is None:
        return None
    is_known = (
        kind in (VerdictKind.MISSING, VerdictKind.DEAD)
        and set(culprits) <= set(found.absent)
        and context.is_live
    )
    return context.verdict(
        kind,
        culprits=culprits,
        certainty=_certainty(context, found, is_known),
        stalled_s=waited_s,
        explanation=tuple(said),
        facts={"gathering": _facts(found)},
    )


def _certainty(context: Context, found: PendingGroup, is_known: bool) -> Certainty:
    """Who has not been heard may not have started: hosts do not all begin at once, and nobody is
    told of it."""
    if context.no_data:
        return Certainty.INFERRED if found.absent else Certainty.UNKNOWN
    return Certainty.EXACT if is_known else Certainty.INFERRED


def _group_creation(context: Context) -> PendingGroup | None:
    """The earliest making of a group that ranks are in."""
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
        rank for rank, said in context.job_calls.by_rank.items() if _is_behind(said, first.number)
    )
    return PendingGroup(inside[there[0]], there, absent)


def waits_in(context: Context, rank: int) -> GroupCreation | None:
    """The making that a rank has begun and not ended."""
    group_creations = context.job_calls.by_rank[rank].rank_summary.group_creations
    return (
        group_creations[-1]
        if group_creations
        and not group_creations[-1].is_made
        and context.state(rank) is not State.FINISHED
        else None
    )


def _is_behind(said: RankCalls, number: int) -> bool:
    """Whether a rank has not come there. Of one that was not watched when it made its groups, that
    is not known."""
    group_creations = said.rank_summary.group_creations
    return group_creations[-1].number < number if group_creations else not said.counts


# -- other groups ----------------------------------------------------------------------------------


def _parted(context: Context) -> tuple[int, dict[What, list[int]]] | None:
    """Who made what, where ranks first made different groups; the largest cohort first."""
    heard = {
        rank: {made.number: made for made in said.rank_summary.group_creations}
        for rank, said in context.job_calls.by_rank.items()
    }
    for number in sorted({number for made in heard.values() for number in made}):
        cohorts: dict[What, list[int]] = {}
        for rank, made in heard.items():
            if number in made:
                cohorts.setdefault((made[number].op, made[number].ranks), []).append(rank)
        if len(cohorts) > 1:
            return number, dict(sorted(cohorts.items(), key=lambda cohort: -len(cohort[1])))
    return None


def _on_parted(
    context: Context, number: int, cohorts: dict[What, list[int]]
) -> tuple[VerdictKind, tuple[int, ...], list[str]]:
    """Who made here what others make later has left something out, and is to blame; else the
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
    said = ["The ranks create different groups at the same time, so they wait for each other."]
    for what, ranks in cohorts.items():
        group_creations = context.job_calls.by_rank[ranks[0]].rank_summary.group_creations
        place = next(made.place for made in group_creations if (made.op, made.ranks) == what)
        said.append(f"  {ranks_phrase(ranks)}: {_what(*what)}, {in_place(place)}")
    return VerdictKind.MISMATCH, culprits, [*said, _RULE]


def _is_made_later(context: Context, number: int, what: What, cohort: set[int]) -> bool:
    others = (said for rank, said in context.job_calls.by_rank.items() if rank not in cohort)
    return any(
        (made.op, made.ranks) == what and made.number > number
        for said in others
        for made in said.rank_summary.group_creations
    )


# -- nobody, or not all ----------------------------------------------------------------------------


def _on_absent(
    context: Context, found: PendingGroup
) -> tuple[VerdictKind | None, tuple[int, ...], list[str]]:
    what, waiting, absent = (
        _what(found.made.op, found.made.ranks),
        ranks_phrase(found.there),
        found.absent,
    )
    verb = "waits" if len(found.there) == 1 else "wait"
    where = f"  waiting: {waiting}, {in_place(found.made.place)}"
    if not absent and context.no_data:
        no_data = tuple(sorted(context.no_data))
        said = (
            f"{waiting.capitalize()} {verb} in {what}, and there is no data for"
            f" {ranks_phrase(no_data)}."
        )
        they, its = ("It", "its") if len(no_data) == 1 else ("They", "their")
        why = (
            f"{they} may not have started yet, or may have exited before the watch began. Look at:"
            f" {its} own log."
        )
        return VerdictKind.MISSING, (), [said, where, why]
    if not absent:
        said = f"All {len(found.there)} ranks wait in {what}, and no rank is missing."
        are_all = len(found.there) == len(context.job_calls.by_rank)
        return (
            VerdictKind.TOGETHER if are_all else None,
            (),
            [said, where, f"Likely cause: the network. Look at: {_NETWORK}."],
        )
    gone = tuple(rank for rank in absent if context.state(rank) in (State.DEAD, State.FINISHED))
    lines = [
        f"{ranks_phrase(absent).capitalize()} never called {what}, where {waiting} {verb}.",
        where,
    ]
    lines += [f"  {_elsewhere(context, rank)}" for rank in absent[:4]]
    lines += [_RULE] if found.made.op != _AT_THE_START else []
    if not gone and all(rank in context.waits for rank in absent):  # each side waits for the other
        return (
            VerdictKind.MISMATCH,
            absent if len(absent) < len(found.there) else found.there,
            lines,
        )
    return VerdictKind.DEAD if gone else VerdictKind.MISSING, gone or absent, lines


# -- words -----------------------------------------------------------------------------------------


def _what(op: str, ranks: tuple[int, ...] | None) -> str:
    return f"{op} of {ranks_phrase(ranks)}" if ranks else op


def _elsewhere(context: Context, rank: int) -> str:
    detail = context.detail(rank)
    verb = {State.DEAD: "has exited", State.FINISHED: "has finished"}.get(
        context.state(rank), "is instead"
    )
    said = f"rank {rank} {verb} {in_place(context.place(rank))}"
    return f"{said}: {detail}" if detail else said


def _facts(found: PendingGroup) -> dict[str, Any]:
    made = found.made
    ranks = list(made.ranks) if made.ranks is not None else None
    return {
        "op": made.op,
        "number": made.number,
        "ranks": ranks,
        "there": list(found.there),
        "absent": list(found.absent),
    }
