"""The doctor: many boxes in, one verdict out.

Takes a run and what was seen of its processes; looks, in this order, for ranks that issued something different, ranks that died
while others wait, ranks that others wait for, ranks that wait in a circle, ranks that stand still together, and ranks that are
late. What comes first explains what comes after. Pure: it reads no clock, no process and no file by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchwhere.blackbox.run import Roster
from torchwhere.diagnose.doctor import advice, pace
from torchwhere.diagnose.doctor.case import Case
from torchwhere.diagnose.doctor.deaths import Deaths
from torchwhere.diagnose.doctor.mismatch import Mismatch, mismatches
from torchwhere.diagnose.doctor.sighting import Sighting
from torchwhere.diagnose.doctor.verdict import State, Verdict, VerdictKind
from torchwhere.diagnose.doctor.waits import Wait, awaited, circle, owes, waiting_for, waits, wrong_peers
from torchwhere.diagnose.hearing.testimony import Hearing, heard
from torchwhere.place import Certainty

STALL_S = 30.0
_ASKED = 64  # of those who wait for one rank, to find what it owes them


def examine(
    run: Roster[Any],
    *,
    sightings: Mapping[int, Sighting] | None = None,
    now_ns: int | None = None,
    stall_s: float = STALL_S,
    is_suspicion: bool = False,
    hearing: Hearing | None = None,
) -> Verdict:
    """The verdict on a run. `now_ns` is the wall clock while it runs; without it the boxes are read as the last word.

    A suspicion may be wrong: it is what there is to say before the suspects were asked for their stacks. `hearing` is what the
    boxes say, where they have been heard already.
    """
    hearing = hearing if hearing is not None else heard(run)
    seen = dict(sightings or {})
    deaths = Deaths(hearing, seen, now_ns)
    held = {rank for rank in hearing.testimonies if (rank in seen and seen[rank].is_stopped) or deaths.is_dead(rank)}
    case = Case(run, hearing, seen, waits(hearing, held=held), now_ns, is_suspicion)
    return _Examination(case, stall_s).verdict()


@dataclass(slots=True)
class _Examination:
    case: Case
    stall_s: float
    parted: list[Mismatch] = field(default_factory=list)

    def verdict(self) -> Verdict:
        self.parted = mismatches(self.case.hearing)
        checks = (self._mismatch, self._new_peer, self._dead, self._missing, self._deadlock, self._together)
        return next((verdict for check in checks if (verdict := check()) is not None), None) or self._progressing()

    # -- the kinds ---------------------------------------------------------------------------------------------------

    def _mismatch(self) -> Verdict | None:
        if not self.parted:
            return None
        case = self.case
        first = min(self.parted, key=lambda found: case.hearing.testimonies[found.culprits[0]].order(found.key, found.number))
        usual = first.cohorts[0][0]
        certainty = Certainty.EXACT if first.what == "form" and first.is_certain else Certainty.INFERRED
        return case.verdict(
            VerdictKind.MISMATCH,
            culprits=first.culprits,
            key=first.key,
            number=first.number,
            witness=usual,
            certainty=certainty,
            explanation=advice.on_mismatch(case, first),
            facts={"differs_in": advice.differs_in(case, first), "cohorts": advice.cohorts(case, first)},
        )

    def _new_peer(self) -> Verdict | None:
        """A rank that waits for a message with somebody it never dealt with, while one with whom it did waits for it."""
        case = self.case
        strays = wrong_peers(case.hearing, case.waits.values(), is_circle=False)
        stalled = [wait for wait in strays if case.is_stalled(wait, self.stall_s)]
        return self._wrong_peer(stalled) if stalled else None

    def _wrong_peer(self, strays: list[Wait], **facts: Any) -> Verdict:
        case, first = self.case, strays[0]
        return case.verdict(
            VerdictKind.MISMATCH,
            culprits=tuple(stray.rank for stray in strays),
            key=first.key,
            number=first.number,
            witness=first.rank,
            certainty=Certainty.EXACT if facts and not case.ill_heard else Certainty.INFERRED,
            stalled_s=case.waited_s(first),
            explanation=advice.on_wrong_peer(case, strays),
            facts={"differs_in": ["peer"], **facts},
        )

    def _dead(self) -> Verdict | None:
        case, deaths = self.case, self.case.deaths
        dead = [rank for rank in awaited(case.waits) if case.state(rank) in (State.DEAD, State.FINISHED)]
        if dead:
            blamed = deaths.first_of_awaited(dead, case.ill_heard)
        elif not case.waits and (dead := deaths.failed()):
            blamed = deaths.first(case.ill_heard)
            if any(map(deaths.gave_up, dead)) and set(blamed) <= set(case.ill_heard):
                return self._gave_up(blamed)
        else:
            return None
        wait = self._wait_for(blamed)
        return case.verdict(
            VerdictKind.DEAD,
            culprits=tuple(blamed),
            key=wait.key if wait else None,
            number=wait.number if wait else 0,
            witness=wait.rank if wait else None,
            certainty=Certainty.EXACT if blamed and not set(blamed) & set(case.ill_heard) else Certainty.INFERRED,
            explanation=advice.on_dead(case, blamed, wait) or advice.on_dead_together(case, dead),
        )

    def _gave_up(self, blamed: list[int]) -> Verdict:
        """All that were heard waited in one collective until they gave up: for one of which nothing is known, or together."""
        case = self.case
        key, number, witness = case.last_of_all()
        wait = Wait(witness, key, number, (), tuple(blamed)) if key is not None and witness is not None else None
        is_missing = bool(blamed) and wait is not None
        explanation = advice.on_missing(case, blamed, wait) if blamed and wait is not None else advice.on_given_up(case)
        return case.verdict(
            VerdictKind.MISSING if is_missing else VerdictKind.TOGETHER,
            culprits=tuple(blamed) if is_missing else (),
            key=key,
            number=number,
            witness=witness,
            certainty=Certainty.INFERRED,
            explanation=explanation,
        )

    def _missing(self) -> Verdict | None:
        case = self.case
        blamed = awaited(case.waits)
        wait = self._wait_for(blamed)
        certainty = Certainty.EXACT
        if wait is None:
            wait = next((each for each in case.waits.values() if not each.missing), None)
            if wait is None and not case.waits:
                wait = case.unheard_wait()
            blamed, certainty = list(wait.unheard) if wait else [], Certainty.INFERRED
            owing = self._owing()
            if owing:
                blamed, wait = owing, self._wait_for(owing)
        if wait is None or not blamed or not case.is_stalled(wait, self.stall_s):
            return None
        if not case.is_live:
            certainty = Certainty.INFERRED
        excused = case.excused(blamed)
        return case.verdict(
            VerdictKind.MISSING,
            culprits=tuple(rank for rank in blamed if rank not in excused),
            key=wait.key,
            number=wait.number,
            witness=wait.rank,
            certainty=Certainty.INFERRED if excused else certainty,
            stalled_s=case.waited_s(wait),
            explanation=advice.on_missing(case, blamed, wait) + advice.on_excused(excused),
        )

    def _owing(self) -> list[int]:
        """Ranks that stand in a collective with one that has no box, but came there without what others wait for from them."""
        case = self.case
        excused = [wait for wait in case.waits.values() if not wait.missing]
        return sorted(
            wait.rank
            for wait in excused
            if any(owes(case.hearing, wait, other) for other in waiting_for(case.waits, [wait.rank])[:_ASKED])
        )

    def _deadlock(self) -> Verdict | None:
        case = self.case
        found = circle(case.waits)
        if not found or not case.is_stalled(found[0], self.stall_s):
            return None
        first = found[0]
        strays = wrong_peers(case.hearing, found, is_circle=True)
        if strays:
            return self._wrong_peer(strays, circle=advice.links(case, found))
        odd = advice.odd_ones(case, found)
        return case.verdict(
            VerdictKind.DEADLOCK,
            culprits=odd,
            key=first.key,
            number=first.number,
            witness=first.rank,
            certainty=Certainty.INFERRED if case.ill_heard else Certainty.EXACT,
            stalled_s=case.waited_s(first),
            explanation=advice.on_deadlock(case, found, odd),
            facts={"circle": advice.links(case, found)},
        )

    def _together(self) -> Verdict | None:
        case = self.case
        if not case.is_still(self.stall_s):
            return None
        case.is_together = True
        key, number, witness = case.last_of_all()
        return case.verdict(
            VerdictKind.TOGETHER,
            key=key,
            number=number,
            witness=witness,
            stalled_s=case.still_s(),
            certainty=Certainty.EXACT if not case.unheard else Certainty.INFERRED,
            explanation=advice.on_together(case),
        )

    def _progressing(self) -> Verdict:
        case = self.case
        late = pace.straggler(case.hearing)
        if late is not None:
            return case.verdict(
                VerdictKind.STRAGGLER,
                culprits=(late.rank,),
                certainty=Certainty.INFERRED,
                explanation=pace.sentences(late),
                facts=late.to_dict(),
            )
        found = pace.pace(case.hearing)
        if case.is_over and case.unheard and not case.have_finished:
            return self._unheard_to_the_end(found)
        certainty = Certainty.INFERRED if case.is_over and case.all_in_one() else Certainty.EXACT
        explanation = advice.on_healthy(case, found)
        return case.verdict(VerdictKind.HEALTHY, certainty=certainty, explanation=explanation, facts=found.to_dict())

    def _unheard_to_the_end(self, found: pace.Pace) -> Verdict:
        """The job is over, nothing is wrong in the boxes, and one is missing: nobody is to blame, and all may not be well."""
        case = self.case
        key, number, witness = case.last_of_all()
        went_on = case.went_on_after(key, number) if key is not None else []
        return case.verdict(
            VerdictKind.HEALTHY if went_on else VerdictKind.MISSING,
            key=key,
            number=number,
            witness=witness,
            certainty=Certainty.INFERRED if went_on else Certainty.UNKNOWN,
            explanation=advice.on_unheard(case, witness, key, number, went_on, found),
            facts=found.to_dict(),
        )

    def _wait_for(self, blamed: list[int]) -> Wait | None:
        """Somebody who waits for one of these, the longest first."""
        case = self.case
        return min(waiting_for(case.waits, blamed), key=case.issued_ns, default=None)
