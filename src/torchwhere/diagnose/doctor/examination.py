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
from torchwhere.diagnose.doctor import case as cases
from torchwhere.diagnose.doctor.case import Case
from torchwhere.diagnose.doctor.mismatch import Mismatch, mismatches
from torchwhere.diagnose.doctor.sighting import Sighting
from torchwhere.diagnose.doctor.verdict import State, Verdict, VerdictKind
from torchwhere.diagnose.doctor.waits import Wait, awaited, circle, waiting_for, waits, wrong_peers
from torchwhere.diagnose.hearing.testimony import Hearing, heard
from torchwhere.place import Certainty

STALL_S = 30.0


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
    found = waits(hearing)
    case = Case(run, hearing, dict(sightings or {}), found, now_ns, is_suspicion)
    return _Examination(case, stall_s).verdict()


@dataclass(slots=True)
class _Examination:
    case: Case
    stall_s: float
    parted: list[Mismatch] = field(default_factory=list)

    def verdict(self) -> Verdict:
        self.parted = mismatches(self.case.hearing)
        checks = (self._mismatch, self._dead, self._missing, self._deadlock, self._together)
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

    def _dead(self) -> Verdict | None:
        case = self.case
        blamed = [rank for rank in awaited(case.waits) if case.state(rank) in (State.DEAD, State.FINISHED)]
        if not blamed and not case.waits:  # nobody waits for them: those who say themselves that they failed
            blamed = case.failed_by_themselves()
        if not blamed:
            return None
        wait = self._wait_for(blamed)
        return case.verdict(
            VerdictKind.DEAD,
            culprits=tuple(blamed),
            key=wait.key if wait else None,
            number=wait.number if wait else 0,
            witness=wait.rank if wait else None,
            certainty=Certainty.INFERRED if set(blamed) & case.unheard else Certainty.EXACT,
            explanation=advice.on_dead(case, blamed, wait),
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
        if wait is None or not blamed or not case.is_stalled(wait, self.stall_s):
            return None
        if not case.is_live:
            certainty = Certainty.INFERRED
        return case.verdict(
            VerdictKind.MISSING,
            culprits=tuple(blamed),
            key=wait.key,
            number=wait.number,
            witness=wait.rank,
            certainty=certainty,
            stalled_s=case.waited_s(wait),
            explanation=advice.on_missing(case, blamed, wait),
        )

    def _deadlock(self) -> Verdict | None:
        case = self.case
        found = circle(case.waits)
        if not found or not case.is_stalled(found[0], self.stall_s):
            return None
        first = found[0]
        strays = wrong_peers(case.hearing, found)
        if strays:
            return case.verdict(
                VerdictKind.MISMATCH,
                culprits=tuple(stray.rank for stray in strays),
                key=strays[0].key,
                number=strays[0].number,
                witness=strays[0].rank,
                stalled_s=case.waited_s(strays[0]),
                explanation=advice.on_wrong_peer(case, strays),
                facts={"differs_in": ["peer"], "circle": advice.links(case, found)},
            )
        return case.verdict(
            VerdictKind.DEADLOCK,
            culprits=advice.odd_ones(case, found),
            key=first.key,
            number=first.number,
            witness=first.rank,
            stalled_s=case.waited_s(first),
            explanation=advice.on_deadlock(case, found),
            facts={"circle": advice.links(case, found)},
        )

    def _together(self) -> Verdict | None:
        case = self.case
        if not case.is_still(self.stall_s):
            return None
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
        found = pace.straggler(case.hearing)
        if found is not None:
            return case.verdict(
                VerdictKind.STRAGGLER,
                culprits=(found.rank,),
                certainty=Certainty.INFERRED,
                explanation=pace.sentences(found),
                facts=found.to_dict(),
            )
        healthy = pace.pace(case.hearing)
        return case.verdict(VerdictKind.HEALTHY, explanation=cases.healthy(case, healthy), facts=healthy.to_dict())

    def _wait_for(self, blamed: list[int]) -> Wait | None:
        """Somebody who waits for one of these, the longest first."""
        case = self.case
        return min(waiting_for(case.waits, blamed), key=case.issued_ns, default=None)
