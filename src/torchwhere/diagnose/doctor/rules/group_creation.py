"""Rule: ranks wait for others while they create a process group.

`init_process_group` and `new_group` issue no collective, so no other rule sees it. All ranks create
the same groups in the same order, members or not: the others wait for a rank that has created
fewer, and a rank that has created other groups is a mismatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torchwhere.core.grouping import grouped
from torchwhere.core.place import Certainty, Place
from torchwhere.diagnose.calls.encode import GroupCreation
from torchwhere.diagnose.calls.rank_calls import RankCalls
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.finding import Cause, Finding, exact_if
from torchwhere.diagnose.doctor.pauses import pause_of
from torchwhere.diagnose.doctor.verdict import State, VerdictKind


class GroupCall(NamedTuple):
    """A group creation: the function, and the ranks of the group."""

    op: str
    ranks: tuple[int, ...] | None


class GroupCohort(NamedTuple):
    """Ranks that created the same group, and where the first of them did."""

    call: GroupCall
    ranks: tuple[int, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class DifferentGroups(Cause):
    """Ranks create different groups at the same time."""

    number: int
    cohorts: tuple[GroupCohort, ...]  # the largest first


@dataclass(frozen=True, slots=True)
class PendingGroup(Cause):
    """A group creation in progress: the ranks inside, and the ranks that have not come."""

    creation: GroupCreation
    there: tuple[int, ...]
    absent: tuple[int, ...]  # ranks with data only

    @property
    def is_alone(self) -> bool:
        """Whether one rank waits and no other is known: it waits for ranks without data."""
        return len(self.there) == 1 and not self.absent


class _Blame(NamedTuple):
    kind: VerdictKind
    culprits: tuple[int, ...] = ()


def find_blocked_group_creation(context: Context) -> Finding | None:
    pending = _pending_group(context)
    if pending is None:
        return None
    begun = [context.group_in_creation(rank) for rank in pending.there]
    waited_s = context.timing.since_s(max(made.since_ns for made in begun if made is not None))
    if waited_s is not None and waited_s < context.timing.patience_s(pending.there[0]):
        return None
    difference = _different_groups(context)
    if difference is not None:
        blame: _Blame | None = _Blame(VerdictKind.MISMATCH, _culprits(context, difference))
    else:
        blame = _blame(context, pending)
    if blame is None or _is_pause(context, blame, waited_s):
        return None
    return Finding(
        blame.kind,
        difference or pending,
        culprits=blame.culprits,
        certainty=_certainty(context, pending, blame),
        stalled_s=waited_s,
        facts={"gathering": _facts(pending)},
    )


def _is_pause(context: Context, blame: _Blame, waited_s: float | None) -> bool:
    """Whether the missing ranks of a running job still work, for example import modules."""
    if context.timing.is_over or blame.kind is not VerdictKind.MISSING or not blame.culprits:
        return False
    pause = pause_of(context, blame.culprits)
    return pause.kind is not None and (waited_s or 0.0) < pause.limit_s


def _certainty(context: Context, pending: PendingGroup, blame: _Blame) -> Certainty:
    """How sure the verdict is. A rank without data may not have started: hosts start at
    different times."""
    if context.no_data or pending.is_alone:
        return Certainty.INFERRED if pending.absent else Certainty.UNKNOWN
    is_known = (
        blame.kind in (VerdictKind.MISSING, VerdictKind.DEAD)
        and set(blame.culprits) <= set(pending.absent)
        and context.timing.is_live
    )
    return exact_if(is_known)


def _pending_group(context: Context) -> PendingGroup | None:
    """The earliest group creation that ranks are in."""
    creations = {rank: context.group_in_creation(rank) for rank in context.by_rank}
    inside = {rank: made for rank, made in creations.items() if made is not None}
    if not inside:
        return None
    first = min(made.number for made in inside.values())
    there = tuple(rank for rank, made in inside.items() if made.number == first)
    ranks = context.by_rank.items()
    absent = tuple(rank for rank, rank_calls in ranks if _is_behind(rank_calls, first))
    return PendingGroup(inside[there[0]], there, absent)


def _is_behind(rank_calls: RankCalls, number: int) -> bool:
    """Whether a rank has not reached this creation.

    That is unknown for a rank that was not watched when it created its groups.
    """
    group_creations = rank_calls.rank_summary.group_creations
    return group_creations[-1].number < number if group_creations else not rank_calls.counts


def _blame(context: Context, pending: PendingGroup) -> _Blame | None:
    """The culprits of a group creation that some ranks have not reached."""
    absent, there = pending.absent, pending.there
    if not absent and (context.no_data or len(context.by_rank) == 1):
        return _Blame(VerdictKind.MISSING)
    if not absent:
        are_all = len(there) == len(context.by_rank)
        return _Blame(VerdictKind.TOGETHER) if are_all else None
    since_ns = pending.creation.since_ns
    gone = tuple(
        rank
        for rank in absent
        if context.state(rank) in (State.DEAD, State.FINISHED)
        and not context.was_missing(rank, since_ns=since_ns)
    )
    if gone:
        return _Blame(VerdictKind.DEAD, gone)
    if all(rank in context.waits for rank in absent):  # each side waits for the other
        return _Blame(VerdictKind.MISMATCH, absent if len(absent) < len(there) else there)
    return _Blame(VerdictKind.MISSING, absent)


def _facts(pending: PendingGroup) -> dict[str, Any]:
    creation = pending.creation
    return {
        "op": creation.op,
        "number": creation.number,
        "ranks": list(creation.ranks) if creation.ranks is not None else None,
        "there": list(pending.there),
        "absent": list(pending.absent),
    }


# -- other groups ----------------------------------------------------------------------------------


def _different_groups(context: Context) -> DifferentGroups | None:
    """The first number at which ranks created different groups, the largest cohort first."""
    creations = {
        rank: {made.number: made for made in rank_calls.rank_summary.group_creations}
        for rank, rank_calls in context.by_rank.items()
    }
    for number in sorted({number for made in creations.values() for number in made}):
        cohorts = grouped(
            (_group_call(made[number]), rank) for rank, made in creations.items() if number in made
        )
        if len(cohorts) > 1:
            largest_first = sorted(cohorts.items(), key=lambda cohort: -len(cohort[1]))
            return DifferentGroups(
                number, tuple(_cohort(context, call, ranks) for call, ranks in largest_first)
            )
    return None


def _cohort(context: Context, call: GroupCall, ranks: list[int]) -> GroupCohort:
    group_creations = context.by_rank[ranks[0]].rank_summary.group_creations
    place = next(made.place for made in group_creations if _group_call(made) == call)
    return GroupCohort(call, tuple(ranks), place)


def _culprits(context: Context, difference: DifferentGroups) -> tuple[int, ...]:
    """Blame ranks that create a group the others create later (they skipped one); otherwise the
    smaller cohort."""
    early = [
        cohort
        for cohort in difference.cohorts
        if _is_made_later(context, difference.number, cohort)
    ]
    if len(early) == 1:
        return early[0].ranks
    most, *others = difference.cohorts
    fewer = sorted(rank for cohort in others for rank in cohort.ranks)
    return tuple(fewer) if len(fewer) < len(most.ranks) else ()


def _is_made_later(context: Context, number: int, cohort: GroupCohort) -> bool:
    others = context.by_rank.keys() - set(cohort.ranks)
    return any(
        _group_call(made) == cohort.call and made.number > number
        for rank in others
        for made in context.by_rank[rank].rank_summary.group_creations
    )


def _group_call(made: GroupCreation) -> GroupCall:
    return GroupCall(made.op, made.ranks)
