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
from torchwhere.core.place import Certainty
from torchwhere.diagnose.calls.rank_calls import Hearing, heard
from torchwhere.diagnose.calls.rebase import counted_alike
from torchwhere.diagnose.doctor import deadlock_text, no_culprit, stragglers, wait_text
from torchwhere.diagnose.doctor.alltoall_splits import unfitting
from torchwhere.diagnose.doctor.call_patterns import Habits
from torchwhere.diagnose.doctor.context import Case
from torchwhere.diagnose.doctor.deadlocks import blame, has_left_out, turns_away
from torchwhere.diagnose.doctor.exits import Deaths
from torchwhere.diagnose.doctor.group_creation import on_gathering, waits_in
from torchwhere.diagnose.doctor.interruption import interrupted
from torchwhere.diagnose.doctor.mismatch import Mismatch, mismatches
from torchwhere.diagnose.doctor.verdict import State, Verdict, VerdictKind
from torchwhere.diagnose.doctor.waits import Wait, awaited, circle, new_peers, waiting_for, waits
from torchwhere.processes.status import Sighting

STALL_S = 30.0
_USUALLY = 2  # times as late as it is in the middle
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
    hearing = counted_alike(hearing if hearing is not None else heard(run))
    seen = dict(sightings or {})
    deaths = Deaths(hearing, seen, now_ns, interrupted(hearing, waited_s=stall_s / 2))
    stopped = {rank for rank, sighting in seen.items() if sighting.is_stopped and rank in hearing.testimonies}
    held = stopped | {rank for rank in hearing.testimonies if deaths.is_dead(rank) and not deaths.died_of_the_end(rank)}
    failed_in_it = {rank for rank in deaths.failed() if deaths.was_hung_up_on(rank) or deaths.gave_up(rank)} if held else ()
    found = waits(hearing, held=held, failed_in_it=failed_in_it)
    case = Case(run, hearing, seen, found, deaths, now_ns, is_suspicion)
    return _Examination(case, stall_s).verdict()


@dataclass(slots=True)
class _Examination:
    case: Case
    stall_s: float
    parted: list[Mismatch] = field(default_factory=list)

    def verdict(self) -> Verdict:
        self.parted = mismatches(self.case.hearing)
        checks = (
            self._mismatch,
            self._splits,
            self._new_peer,
            self._gathering,
            self._dead,
            self._missing,
            self._deadlock,
            self._together,
        )
        return next((verdict for check in checks if (verdict := check()) is not None), None) or self._progressing()

    # -- the kinds ---------------------------------------------------------------------------------------------------

    def _mismatch(self) -> Verdict | None:
        if not self.parted:
            return None
        case = self.case
        first = min(self.parted, key=lambda found: case.hearing.testimonies[found.culprits[0]].order(found.key, found.number))
        usual = first.cohorts[0][0]
        certainty = Certainty.EXACT if first.what == "form" and first.is_certain else Certainty.INFERRED
        stalled_s = case.stand(self.stall_s)
        return case.verdict(
            VerdictKind.MISMATCH,
            culprits=first.culprits,
            key=first.key,
            number=first.number,
            witness=usual,
            certainty=certainty,
            stalled_s=stalled_s,
            explanation=wait_text.on_mismatch(case, first),
            facts={"differs_in": wait_text.differs_in(case, first), "cohorts": wait_text.cohorts(case, first)},
        )

    def _splits(self) -> Verdict | None:
        """Ranks that split an all_to_all so that what one sends is not what the other takes."""
        found = unfitting(self.case.hearing)
        if found is None:
            return None
        return self.case.verdict(
            VerdictKind.MISMATCH,
            culprits=found.culprits,
            key=found.key,
            number=found.number,
            witness=found.ranks[0],
            certainty=Certainty.INFERRED,
            explanation=found.sentences(self.case.hearing),
            facts=found.facts(),
        )

    def _new_peer(self) -> Verdict | None:
        """A rank that waits for a message with somebody it never dealt with, while one with whom it did waits for it."""
        case = self.case
        strays = [wait for wait in new_peers(case.hearing, case.waits.values()) if case.is_stalled(wait, self.stall_s)]
        habits = Habits(case.hearing, ranks=len(strays))
        turned = [wait for wait in strays if turns_away(case.hearing, habits, wait)]
        return self._wrong_peer(turned, Certainty.INFERRED) if turned else None

    def _wrong_peer(self, strays: list[Wait], certainty: Certainty, **facts: Any) -> Verdict:
        case, first = self.case, strays[0]
        return case.verdict(
            VerdictKind.MISMATCH,
            culprits=tuple(stray.rank for stray in strays),
            key=first.key,
            number=first.number,
            witness=first.rank,
            certainty=certainty,
            stalled_s=case.waited_s(first),
            explanation=deadlock_text.on_wrong_peer(case, strays),
            facts={"differs_in": ["peer"], **facts},
        )

    def _gathering(self) -> Verdict | None:
        return on_gathering(self.case, self.stall_s)

    def _dead(self) -> Verdict | None:
        case, deaths = self.case, self.case.deaths
        ended = [rank for rank in awaited(case.waits) if case.state(rank) in (State.DEAD, State.FINISHED)]
        gone = [rank for rank in ended if not deaths.died_of_the_end(rank) and not deaths.has_left(rank)]
        dead = [rank for rank in gone if not deaths.is_doubtful(rank)]
        certainty = Certainty.EXACT
        if dead:
            blamed = deaths.first_of_awaited(dead, case.ill_heard)
        elif likely := self._likely_dead():
            blamed, certainty = likely, Certainty.INFERRED
        elif not case.waits and not deaths.were_killed_together and (dead := deaths.failed()):
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
            certainty=certainty if self._is_sure_of(blamed) else Certainty.INFERRED,
            explanation=wait_text.on_dead(case, blamed, wait) or wait_text.on_dead_together(case, dead),
        )

    def _is_sure_of(self, dead: list[int]) -> bool:
        return bool(dead) and not set(dead) & set(self.case.ill_heard) and not any(map(self.case.deaths.crashed_in_it, dead))

    def _likely_dead(self) -> list[int]:
        """Where all are gone, and nobody has looked since a rank said that a peer hung up on it: the one that the others wait
        for, if they had hardly begun to, and if all others were alive after that. Had they waited long before, what they waited
        for was missing before it was gone. A rank that waited itself may have died just as well."""
        case, deaths = self.case, self.case.deaths
        blamed = awaited(case.waits) if deaths.were_killed_together and deaths.failed_unseen else []
        wait = self._wait_for(blamed)
        if wait is None or len(blamed) > 1 or deaths.has_failed(blamed[0]) or self._is_habit(wait):
            return []
        if not deaths.is_only_candidate(blamed[0]):
            return []
        return blamed if case.recorded_s(wait) < case.patience_s(wait.rank, self.stall_s, wait.key) else []

    def _gave_up(self, blamed: list[int]) -> Verdict:
        """All that were heard waited in one collective until they gave up: for one of which nothing is known, or together."""
        case = self.case
        key, number, witness = case.last_of_all()
        wait = Wait(witness, key, number, (), tuple(blamed)) if key is not None and witness is not None else None
        is_missing = bool(blamed) and wait is not None
        explanation = wait_text.on_missing(case, blamed, wait) if blamed and wait is not None else no_culprit.on_given_up(case)
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
        blamed = [rank for rank in blamed if rank not in case.hearing.testimonies or waits_in(case, rank) is None]
        if wait is None or not blamed or not case.is_stalled(wait, self.stall_s) or self._is_habit(wait):
            return None
        if any(rank in case.hearing.testimonies and case.deaths.has_left(rank) for rank in blamed):
            certainty = Certainty.INFERRED
        if not case.is_live or wait.unheard or (case.is_over and (case.waited_s(wait) or 0.0) < self.stall_s):
            certainty = Certainty.INFERRED
        habits = Habits(case.hearing, ranks=len(blamed))
        excused = {rank: other for rank, other in case.excused(blamed).items() if not self._owes(habits, rank)}
        return case.verdict(
            VerdictKind.MISSING,
            culprits=tuple(rank for rank in blamed if rank not in excused),
            key=wait.key,
            number=wait.number,
            witness=wait.rank,
            certainty=Certainty.INFERRED if excused else certainty,
            stalled_s=case.waited_s(wait),
            explanation=wait_text.on_missing(case, blamed, wait) + wait_text.on_excused(excused),
        )

    def _is_habit(self, wait: Wait) -> bool:
        """Whether a rank of a group is always late, and the others wait no longer than they always do, as far as the boxes go.

        That counts only where it is not known when the job ended, and so how long they waited.
        """
        case = self.case
        late = stragglers.straggler(case.hearing, key=wait.key) if not case.is_live else None
        return late is not None and case.recorded_s(wait) <= _USUALLY * late.late_s

    def _owing(self) -> list[int]:
        """Ranks that stand in a collective with one that has no box, but came there without what others wait for from them."""
        case = self.case
        excused = [wait.rank for wait in case.waits.values() if not wait.missing]
        habits = Habits(case.hearing, ranks=len(excused))
        return sorted(rank for rank in excused if self._owes(habits, rank))

    def _owes(self, habits: Habits, rank: int) -> bool:
        """Whether a rank has left out, against its habit, what another one waits for."""
        others = waiting_for(self.case.waits, [rank])[:_ASKED]
        return any(has_left_out(self.case.hearing, habits, rank, other) for other in others)

    def _deadlock(self) -> Verdict | None:
        case = self.case
        found = circle(case.waits)
        if not found or not case.is_stalled(found[0], self.stall_s):
            return None
        first = found[0]
        blamed = blame(case.hearing, found, case.waits, unread=case.ill_heard)
        certainty = Certainty.INFERRED if case.ill_heard else blamed.certainty
        if blamed.has_wrong_peer:
            strays = [case.waits[rank] for rank in blamed.culprits]
            return self._wrong_peer(strays, certainty, circle=deadlock_text.links(case, found))
        return case.verdict(
            VerdictKind.DEADLOCK,
            culprits=blamed.culprits,
            key=first.key,
            number=first.number,
            witness=first.rank,
            certainty=certainty,
            stalled_s=case.waited_s(first),
            explanation=deadlock_text.on_deadlock(case, found, blamed),
            facts={"circle": deadlock_text.links(case, found)},
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
            explanation=no_culprit.on_together(case),
        )

    def _progressing(self) -> Verdict:
        case = self.case
        if first := case.deaths.went_first():
            return self._went_first(first)
        late = stragglers.straggler(case.hearing)
        if late is not None:
            return case.verdict(
                VerdictKind.STRAGGLER,
                culprits=late.ranks,
                certainty=Certainty.INFERRED,
                explanation=stragglers.sentences(late),
                facts=late.to_dict(),
            )
        found, failed = stragglers.pace(case.hearing), case.deaths.failed()
        if case.is_over and failed and not case.deaths.were_killed_together:
            said = wait_text.on_dead_together(case, failed)
            return case.verdict(VerdictKind.DEAD, certainty=Certainty.UNKNOWN, explanation=said)
        if case.is_over and case.unheard and not case.have_finished and not case.was_moving(self.stall_s):
            return self._unheard_to_the_end(found)
        quiet_s = case.quiet_s(self.stall_s)
        explanation = no_culprit.on_healthy(case, found) if quiet_s is None else no_culprit.on_quiet(case, quiet_s, found)
        return self._nothing_wrong(self._certainty(quiet_s), explanation, found)

    def _went_first(self, ranks: list[int]) -> Verdict:
        """Ranks are gone without an exit record, before the others, and nothing else is wrong."""
        case, deaths = self.case, self.case.deaths
        codes = {rank: code for rank in ranks if (code := case.sighting(rank).exit_code) is not None}
        is_seen = all(map(deaths.was_seen_to_go, ranks))
        return case.verdict(
            VerdictKind.DEAD,
            culprits=tuple(ranks),
            certainty=Certainty.EXACT if is_seen and not case.ill_heard else Certainty.INFERRED,
            explanation=(*wait_text.on_dead(case, ranks, None), *no_culprit.on_ended(case, besides=ranks)),
            facts={"exit_codes": codes} if codes else {},
        )

    def _certainty(self, quiet_s: float | None) -> Certainty:
        """How sure it is that a job in which nothing is wrong was well: not to its end, where that was not seen."""
        case = self.case
        makes_groups = any(waits_in(case, rank) for rank in case.hearing.testimonies)
        is_open = not case.have_finished and (case.all_in_one() or bool(case.waits) or makes_groups)  # as the job ended
        if case.is_unknown_end or (case.is_over and quiet_s is not None):
            return Certainty.UNKNOWN
        is_unsure = quiet_s is not None or (case.is_over and (case.unheard or is_open))
        return Certainty.INFERRED if is_unsure else Certainty.EXACT

    def _nothing_wrong(
        self, certainty: Certainty, explanation: tuple[str, ...], found: stragglers.Pace, **where: Any
    ) -> Verdict:
        """Nothing is wrong in the boxes. A job that was killed, or ended with SIGTERM, was not healthy all the same."""
        case = self.case
        if not case.deaths.ended_unfinished:
            return case.verdict(
                VerdictKind.HEALTHY, certainty=certainty, explanation=explanation, facts=found.to_dict(), **where
            )
        return case.verdict(
            VerdictKind.DEAD,
            certainty=Certainty.UNKNOWN,
            explanation=(*no_culprit.on_ended(case), *explanation, *no_culprit.on_first(case)),
            facts=found.to_dict() | {"may_have_gone_first": no_culprit.may_have_gone_first(case)},
            **where,
        )

    def _unheard_to_the_end(self, found: stragglers.Pace) -> Verdict:
        """The job is over, nothing is wrong in the boxes, and one is missing: nobody is to blame, and all may not be well."""
        case = self.case
        key, number, witness = case.last_of_all()
        went_on = case.went_on_after(key, number) if key is not None else []
        where: dict[str, Any] = {"key": key, "number": number, "witness": witness}
        explanation = no_culprit.on_unheard(case, witness, key, number, went_on, found)
        if went_on:
            return self._nothing_wrong(Certainty.INFERRED, explanation, found, **where)
        return case.verdict(
            VerdictKind.MISSING, certainty=Certainty.UNKNOWN, explanation=explanation, facts=found.to_dict(), **where
        )

    def _wait_for(self, blamed: list[int]) -> Wait | None:
        """Somebody who waits for one of these, the longest first."""
        case = self.case
        return min(waiting_for(case.waits, blamed), key=case.issued_ns, default=None)
