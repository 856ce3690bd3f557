"""Ranks that wait for others where a process group is made: in `init_process_group`, in `new_group`.

No collective has been issued there, so nothing else in this folder sees it. All ranks make the same groups in the same order,
members or not: who has made fewer is the one they wait for, and who has made others has parted from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchwhere.core.place import Certainty
from torchwhere.diagnose.calls.encode import Making
from torchwhere.diagnose.calls.rank_calls import Testimony
from torchwhere.diagnose.doctor.context import Case
from torchwhere.diagnose.doctor.verdict import State, Verdict, VerdictKind
from torchwhere.diagnose.doctor.wait_text import in_place, ranks_said

_AT_THE_START = "init_process_group"
_RULE = "All ranks must make all groups in one order, also those they are not in; or pass use_local_synchronization=True."
_NETWORK = "the address and port of the rendezvous, the world size, firewalls and network interfaces between the hosts"

What = tuple[str, tuple[int, ...] | None]  # of a making: what was called, for which ranks


@dataclass(frozen=True, slots=True)
class Gathering:
    """One making of a group: who is there, and who is not."""

    made: Making
    there: tuple[int, ...]
    absent: tuple[int, ...]  # that were heard


def on_gathering(case: Case, stall_s: float) -> Verdict | None:
    """The verdict on a job that stands still there; None if it does not."""
    found = _gathering(case)
    if found is None:
        return None
    since_ns = max(made.since_ns for rank in found.there if (made := waits_in(case, rank)) is not None)
    waited_s = (case.now_ns - since_ns) / 1e9 if case.now_ns is not None else None
    if waited_s is not None and waited_s < case.patience_s(found.there[0], stall_s):
        return None
    parted = _parted(case)
    kind, culprits, said = _on_parted(case, *parted) if parted is not None else _on_absent(case, found)
    if kind is None:
        return None
    is_known = kind in (VerdictKind.MISSING, VerdictKind.DEAD) and set(culprits) <= set(found.absent) and case.is_live
    return case.verdict(
        kind,
        culprits=culprits,
        certainty=_certainty(case, found, is_known),
        stalled_s=waited_s,
        explanation=tuple(said),
        facts={"gathering": _facts(found)},
    )


def _certainty(case: Case, found: Gathering, is_known: bool) -> Certainty:
    """Who has not been heard may not have started: hosts do not all begin at once, and nobody is told of it."""
    if case.unheard:
        return Certainty.INFERRED if found.absent else Certainty.UNKNOWN
    return Certainty.EXACT if is_known else Certainty.INFERRED


def _gathering(case: Case) -> Gathering | None:
    """The earliest making of a group that ranks are in."""
    inside = {rank: made for rank in case.hearing.testimonies if (made := waits_in(case, rank)) is not None}
    if not inside:
        return None
    first = min(inside.values(), key=lambda made: made.number)
    there = tuple(rank for rank, made in inside.items() if made.number == first.number)
    absent = tuple(rank for rank, said in case.hearing.testimonies.items() if _is_behind(said, first.number))
    return Gathering(inside[there[0]], there, absent)


def waits_in(case: Case, rank: int) -> Making | None:
    """The making that a rank has begun and not ended."""
    makings = case.hearing.testimonies[rank].statement.makings
    return makings[-1] if makings and not makings[-1].is_made and case.state(rank) is not State.FINISHED else None


def _is_behind(said: Testimony, number: int) -> bool:
    """Whether a rank has not come there. Of one that was not watched when it made its groups, that is not known."""
    makings = said.statement.makings
    return makings[-1].number < number if makings else not said.counts


# -- other groups ----------------------------------------------------------------------------------------------------------


def _parted(case: Case) -> tuple[int, dict[What, list[int]]] | None:
    """Who made what, where ranks first made different groups; the largest cohort first."""
    heard = {rank: {made.number: made for made in said.statement.makings} for rank, said in case.hearing.testimonies.items()}
    for number in sorted({number for made in heard.values() for number in made}):
        cohorts: dict[What, list[int]] = {}
        for rank, made in heard.items():
            if number in made:
                cohorts.setdefault((made[number].op, made[number].ranks), []).append(rank)
        if len(cohorts) > 1:
            return number, dict(sorted(cohorts.items(), key=lambda cohort: -len(cohort[1])))
    return None


def _on_parted(case: Case, number: int, cohorts: dict[What, list[int]]) -> tuple[VerdictKind, tuple[int, ...], list[str]]:
    """Who made here what others make later has left something out, and is to blame; else the smaller cohort."""
    most, *others = cohorts.values()
    early = [ranks for what, ranks in cohorts.items() if _is_made_later(case, number, what, set(ranks))]
    fewer = sorted(rank for ranks in others for rank in ranks)
    culprits = tuple(early[0]) if len(early) == 1 else tuple(fewer) if len(fewer) < len(most) else ()
    said = ["Ranks make different groups at the same time, so that they wait for each other."]
    for what, ranks in cohorts.items():
        makings = case.hearing.testimonies[ranks[0]].statement.makings
        place = next(made.place for made in makings if (made.op, made.ranks) == what)
        said.append(f"  {ranks_said(ranks)}: {_what(*what)}, {in_place(place)}")
    return VerdictKind.MISMATCH, culprits, [*said, _RULE]


def _is_made_later(case: Case, number: int, what: What, cohort: set[int]) -> bool:
    others = (said for rank, said in case.hearing.testimonies.items() if rank not in cohort)
    return any((made.op, made.ranks) == what and made.number > number for said in others for made in said.statement.makings)


# -- nobody, or not all ----------------------------------------------------------------------------------------------------


def _on_absent(case: Case, found: Gathering) -> tuple[VerdictKind | None, tuple[int, ...], list[str]]:
    what, waiting, absent = _what(found.made.op, found.made.ranks), ranks_said(found.there), found.absent
    verb = "waits" if len(found.there) == 1 else "wait"
    where = f"  waiting: {waiting}, {in_place(found.made.place)}"
    if not absent and case.unheard:
        unheard = tuple(sorted(case.unheard))
        said = f"{waiting.capitalize()} {verb} in {what}, and of {ranks_said(unheard)} nothing is known."
        why = "It may have to start yet, or have ended before it could be watched. Look at: its own log."
        return VerdictKind.MISSING, (), [said, where, why]
    if not absent:
        said = f"All {len(found.there)} ranks wait in {what}, and none is missing."
        are_all = len(found.there) == len(case.hearing.testimonies)
        return VerdictKind.TOGETHER if are_all else None, (), [said, where, f"Likely: the network. Look at: {_NETWORK}."]
    gone = tuple(rank for rank in absent if case.state(rank) in (State.DEAD, State.FINISHED))
    lines = [f"{ranks_said(absent).capitalize()} never called {what}, in which {waiting} {verb}.", where]
    lines += [f"  {_elsewhere(case, rank)}" for rank in absent[:4]]
    lines += [_RULE] if found.made.op != _AT_THE_START else []
    if not gone and all(rank in case.waits for rank in absent):  # each side waits for the other
        return VerdictKind.MISMATCH, absent if len(absent) < len(found.there) else found.there, lines
    return VerdictKind.DEAD if gone else VerdictKind.MISSING, gone or absent, lines


# -- words -----------------------------------------------------------------------------------------------------------------


def _what(op: str, ranks: tuple[int, ...] | None) -> str:
    return f"{op} of {ranks_said(ranks)}" if ranks else op


def _elsewhere(case: Case, rank: int) -> str:
    detail = case.detail(rank)
    verb = {State.DEAD: "has died", State.FINISHED: "has finished"}.get(case.state(rank), "is instead")
    said = f"rank {rank} {verb} {in_place(case.place(rank))}"
    return f"{said}: {detail}" if detail else said


def _facts(found: Gathering) -> dict[str, Any]:
    made = found.made
    ranks = list(made.ranks) if made.ranks is not None else None
    return {"op": made.op, "number": made.number, "ranks": ranks, "there": list(found.there), "absent": list(found.absent)}
