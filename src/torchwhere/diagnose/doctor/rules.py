"""The doctor: many boxes in, one verdict out.

Takes a run and what was seen of its processes; looks, in this order, for ranks that issued
something different, ranks that died while others wait, ranks that others wait for, ranks that wait
in a circle, ranks that stand still together, and ranks that are late. What comes first explains
what comes after. Pure: it reads no clock, no process and no file by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchwhere.blackbox.run import RunSummary
from torchwhere.core.place import Certainty
from torchwhere.diagnose.calls.rank_calls import JobCalls, heard
from torchwhere.diagnose.calls.rebase import rebase_numbers
from torchwhere.diagnose.doctor import deadlock_text, no_culprit, stragglers, wait_text
from torchwhere.diagnose.doctor.alltoall_splits import unfitting
from torchwhere.diagnose.doctor.call_patterns import Patterns
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.deadlocks import blame, has_left_out, turns_away
from torchwhere.diagnose.doctor.exits import Exits
from torchwhere.diagnose.doctor.group_creation import on_group_creation, waits_in
from torchwhere.diagnose.doctor.interruption import interrupted
from torchwhere.diagnose.doctor.mismatch import Mismatch, mismatches
from torchwhere.diagnose.doctor.verdict import State, Verdict, VerdictKind
from torchwhere.diagnose.doctor.waits import Wait, awaited, cycle, new_peers, waiting_for, waits
from torchwhere.processes.status import ProcessStatus

STALL_S = 30.0
_USUALLY = 2  # times as late as it is in the middle
_ASKED = 64  # of those who wait for one rank, to find what it owes them


def diagnose(
    run: RunSummary[Any],
    *,
    statuses: Mapping[int, ProcessStatus] | None = None,
    now_ns: int | None = None,
    stall_s: float = STALL_S,
    is_suspicion: bool = False,
    job_calls: JobCalls | None = None,
) -> Verdict:
    """The verdict on a run. `now_ns` is the wall clock while it runs; without it the boxes are read
    as the last word.

    A suspicion may be wrong: it is what there is to say before the suspects were asked for their
    stacks. `hearing` is what the boxes say, where they have been heard already.
    """
    job_calls = rebase_numbers(job_calls if job_calls is not None else heard(run))
    seen = dict(statuses or {})
    exits = Exits(job_calls, seen, now_ns, interrupted(job_calls, waited_s=stall_s / 2))
    stopped = {
        rank for rank, status in seen.items() if status.is_stopped and rank in job_calls.by_rank
    }
    held = stopped | {
        rank
        for rank in job_calls.by_rank
        if exits.is_dead(rank) and not exits.died_of_the_end(rank)
    }
    failed_in_it = (
        {rank for rank in exits.failed() if exits.was_hung_up_on(rank) or exits.gave_up(rank)}
        if held
        else ()
    )
    found = waits(job_calls, held=held, failed_in_it=failed_in_it)
    context = Context(run, job_calls, seen, found, exits, now_ns, is_suspicion)
    return Rules(context, stall_s).verdict()


@dataclass(slots=True)
class Rules:
    context: Context
    stall_s: float
    parted: list[Mismatch] = field(default_factory=list)

    def verdict(self) -> Verdict:
        self.parted = mismatches(self.context.job_calls)
        checks = (
            self._mismatch,
            self._splits,
            self._new_peer,
            self._group_creation,
            self._dead,
            self._missing,
            self._deadlock,
            self._together,
        )
        return (
            next((verdict for check in checks if (verdict := check()) is not None), None)
            or self._progressing()
        )

    # -- the kinds ---------------------------------------------------------------------------------

    def _mismatch(self) -> Verdict | None:
        if not self.parted:
            return None
        context = self.context
        first = min(
            self.parted,
            key=lambda found: context.job_calls.by_rank[found.culprits[0]].order(
                found.key, found.number
            ),
        )
        usual = first.cohorts[0][0]
        certainty = (
            Certainty.EXACT
            if first.what == "signature" and first.is_certain
            else Certainty.INFERRED
        )
        stalled_s = context.stand(self.stall_s)
        return context.verdict(
            VerdictKind.MISMATCH,
            culprits=first.culprits,
            key=first.key,
            number=first.number,
            example_rank=usual,
            certainty=certainty,
            stalled_s=stalled_s,
            explanation=wait_text.on_mismatch(context, first),
            facts={
                "differs_in": wait_text.differs_in(context, first),
                "cohorts": wait_text.cohorts(context, first),
            },
        )

    def _splits(self) -> Verdict | None:
        """Ranks that split an all_to_all so that what one sends is not what the other takes."""
        found = unfitting(self.context.job_calls)
        if found is None:
            return None
        return self.context.verdict(
            VerdictKind.MISMATCH,
            culprits=found.culprits,
            key=found.key,
            number=found.number,
            example_rank=found.ranks[0],
            certainty=Certainty.INFERRED,
            explanation=found.sentences(self.context.job_calls),
            facts=found.facts(),
        )

    def _new_peer(self) -> Verdict | None:
        """A rank that waits for a message with somebody it never dealt with, while one with whom it
        did waits for it."""
        context = self.context
        strays = [
            wait
            for wait in new_peers(context.job_calls, context.waits.values())
            if context.is_stalled(wait, self.stall_s)
        ]
        patterns = Patterns(context.job_calls, ranks=len(strays))
        turned = [wait for wait in strays if turns_away(context.job_calls, patterns, wait)]
        return self._wrong_peer(turned, Certainty.INFERRED) if turned else None

    def _wrong_peer(self, strays: list[Wait], certainty: Certainty, **facts: Any) -> Verdict:
        context, first = self.context, strays[0]
        return context.verdict(
            VerdictKind.MISMATCH,
            culprits=tuple(stray.rank for stray in strays),
            key=first.key,
            number=first.number,
            example_rank=first.rank,
            certainty=certainty,
            stalled_s=context.waited_s(first),
            explanation=deadlock_text.on_wrong_peer(context, strays),
            facts={"differs_in": ["peer"], **facts},
        )

    def _group_creation(self) -> Verdict | None:
        return on_group_creation(self.context, self.stall_s)

    def _dead(self) -> Verdict | None:
        context, exits = self.context, self.context.exits
        ended = [
            rank
            for rank in awaited(context.waits)
            if context.state(rank) in (State.DEAD, State.FINISHED)
        ]
        gone = [
            rank for rank in ended if not exits.died_of_the_end(rank) and not exits.has_left(rank)
        ]
        dead = [rank for rank in gone if not exits.is_doubtful(rank)]
        certainty = Certainty.EXACT
        if dead:
            blamed = exits.first_of_awaited(dead, context.incomplete)
        elif likely := self._likely_dead():
            blamed, certainty = likely, Certainty.INFERRED
        elif not context.waits and not exits.were_killed_together and (dead := exits.failed()):
            blamed = exits.first(context.incomplete)
            if any(map(exits.gave_up, dead)) and set(blamed) <= set(context.incomplete):
                return self._gave_up(blamed)
        else:
            return None
        wait = self._wait_for(blamed)
        return context.verdict(
            VerdictKind.DEAD,
            culprits=tuple(blamed),
            key=wait.key if wait else None,
            number=wait.number if wait else 0,
            example_rank=wait.rank if wait else None,
            certainty=certainty if self._is_sure_of(blamed) else Certainty.INFERRED,
            explanation=wait_text.on_dead(context, blamed, wait)
            or wait_text.on_dead_together(context, dead),
        )

    def _is_sure_of(self, dead: list[int]) -> bool:
        return (
            bool(dead)
            and not set(dead) & set(self.context.incomplete)
            and not any(map(self.context.exits.crashed_in_it, dead))
        )

    def _likely_dead(self) -> list[int]:
        """Where all are gone, and nobody has looked since a rank said that a peer hung up on it:
        the one that the others wait for, if they had hardly begun to, and if all others were alive
        after that. Had they waited long before, what they waited for was missing before it was
        gone. A rank that waited itself may have died just as well."""
        context, exits = self.context, self.context.exits
        blamed = (
            awaited(context.waits) if exits.were_killed_together and exits.failed_unseen else []
        )
        wait = self._wait_for(blamed)
        if wait is None or len(blamed) > 1 or exits.has_failed(blamed[0]) or self._is_pattern(wait):
            return []
        if not exits.is_only_candidate(blamed[0]):
            return []
        return (
            blamed
            if context.recorded_s(wait) < context.patience_s(wait.rank, self.stall_s, wait.key)
            else []
        )

    def _gave_up(self, blamed: list[int]) -> Verdict:
        """All that were heard waited in one collective until they gave up: for one of which nothing
        is known, or together."""
        context = self.context
        key, number, example_rank = context.last_of_all()
        wait = (
            Wait(example_rank, key, number, (), tuple(blamed))
            if key is not None and example_rank is not None
            else None
        )
        is_missing = bool(blamed) and wait is not None
        explanation = (
            wait_text.on_missing(context, blamed, wait)
            if blamed and wait is not None
            else no_culprit.on_given_up(context)
        )
        return context.verdict(
            VerdictKind.MISSING if is_missing else VerdictKind.TOGETHER,
            culprits=tuple(blamed) if is_missing else (),
            key=key,
            number=number,
            example_rank=example_rank,
            certainty=Certainty.INFERRED,
            explanation=explanation,
        )

    def _missing(self) -> Verdict | None:
        context = self.context
        blamed = awaited(context.waits)
        wait = self._wait_for(blamed)
        certainty = Certainty.EXACT
        if wait is None:
            wait = next((each for each in context.waits.values() if not each.missing), None)
            if wait is None and not context.waits:
                wait = context.no_data_wait()
            blamed, certainty = list(wait.no_data) if wait else [], Certainty.INFERRED
            owing = self._owing()
            if owing:
                blamed, wait = owing, self._wait_for(owing)
        blamed = [
            rank
            for rank in blamed
            if rank not in context.job_calls.by_rank or waits_in(context, rank) is None
        ]
        if (
            wait is None
            or not blamed
            or not context.is_stalled(wait, self.stall_s)
            or self._is_pattern(wait)
        ):
            return None
        if any(
            rank in context.job_calls.by_rank and context.exits.has_left(rank) for rank in blamed
        ):
            certainty = Certainty.INFERRED
        if (
            not context.is_live
            or wait.no_data
            or (context.is_over and (context.waited_s(wait) or 0.0) < self.stall_s)
        ):
            certainty = Certainty.INFERRED
        patterns = Patterns(context.job_calls, ranks=len(blamed))
        excused = {
            rank: other
            for rank, other in context.excused(blamed).items()
            if not self._owes(patterns, rank)
        }
        return context.verdict(
            VerdictKind.MISSING,
            culprits=tuple(rank for rank in blamed if rank not in excused),
            key=wait.key,
            number=wait.number,
            example_rank=wait.rank,
            certainty=Certainty.INFERRED if excused else certainty,
            stalled_s=context.waited_s(wait),
            explanation=wait_text.on_missing(context, blamed, wait) + wait_text.on_excused(excused),
        )

    def _is_pattern(self, wait: Wait) -> bool:
        """Whether a rank of a group is always late, and the others wait no longer than they always
        do, as far as the boxes go.

        That counts only where it is not known when the job ended, and so how long they waited.
        """
        context = self.context
        late = (
            stragglers.straggler(context.job_calls, key=wait.key) if not context.is_live else None
        )
        return late is not None and context.recorded_s(wait) <= _USUALLY * late.late_s

    def _owing(self) -> list[int]:
        """Ranks that stand in a collective with one that has no box, but came there without what
        others wait for from them."""
        context = self.context
        excused = [wait.rank for wait in context.waits.values() if not wait.missing]
        patterns = Patterns(context.job_calls, ranks=len(excused))
        return sorted(rank for rank in excused if self._owes(patterns, rank))

    def _owes(self, patterns: Patterns, rank: int) -> bool:
        """Whether a rank has left out, against its habit, what another one waits for."""
        others = waiting_for(self.context.waits, [rank])[:_ASKED]
        return any(has_left_out(self.context.job_calls, patterns, rank, other) for other in others)

    def _deadlock(self) -> Verdict | None:
        context = self.context
        found = cycle(context.waits)
        if not found or not context.is_stalled(found[0], self.stall_s):
            return None
        first = found[0]
        blamed = blame(context.job_calls, found, context.waits, unread=context.incomplete)
        certainty = Certainty.INFERRED if context.incomplete else blamed.certainty
        if blamed.has_wrong_peer:
            strays = [context.waits[rank] for rank in blamed.culprits]
            return self._wrong_peer(strays, certainty, circle=deadlock_text.links(context, found))
        return context.verdict(
            VerdictKind.DEADLOCK,
            culprits=blamed.culprits,
            key=first.key,
            number=first.number,
            example_rank=first.rank,
            certainty=certainty,
            stalled_s=context.waited_s(first),
            explanation=deadlock_text.on_deadlock(context, found, blamed),
            facts={"circle": deadlock_text.links(context, found)},
        )

    def _together(self) -> Verdict | None:
        context = self.context
        if not context.is_still(self.stall_s):
            return None
        context.is_together = True
        key, number, example_rank = context.last_of_all()
        return context.verdict(
            VerdictKind.TOGETHER,
            key=key,
            number=number,
            example_rank=example_rank,
            stalled_s=context.still_s(),
            certainty=Certainty.EXACT if not context.no_data else Certainty.INFERRED,
            explanation=no_culprit.on_together(context),
        )

    def _progressing(self) -> Verdict:
        context = self.context
        if first := context.exits.went_first():
            return self._went_first(first)
        late = stragglers.straggler(context.job_calls)
        if late is not None:
            return context.verdict(
                VerdictKind.STRAGGLER,
                culprits=late.ranks,
                certainty=Certainty.INFERRED,
                explanation=stragglers.sentences(late),
                facts=late.to_dict(),
            )
        found, failed = stragglers.pace(context.job_calls), context.exits.failed()
        if context.is_over and failed and not context.exits.were_killed_together:
            said = wait_text.on_dead_together(context, failed)
            return context.verdict(VerdictKind.DEAD, certainty=Certainty.UNKNOWN, explanation=said)
        if (
            context.is_over
            and context.no_data
            and not context.have_finished
            and not context.was_moving(self.stall_s)
        ):
            return self._no_data_to_the_end(found)
        quiet_s = context.quiet_s(self.stall_s)
        explanation = (
            no_culprit.on_healthy(context, found)
            if quiet_s is None
            else no_culprit.on_quiet(context, quiet_s, found)
        )
        return self._nothing_wrong(self._certainty(quiet_s), explanation, found)

    def _went_first(self, ranks: list[int]) -> Verdict:
        """Ranks are gone without an exit record, before the others, and nothing else is wrong."""
        context, exits = self.context, self.context.exits
        codes = {
            rank: code for rank in ranks if (code := context.status(rank).exit_code) is not None
        }
        is_seen = all(map(exits.was_seen_to_go, ranks))
        return context.verdict(
            VerdictKind.DEAD,
            culprits=tuple(ranks),
            certainty=Certainty.EXACT if is_seen and not context.incomplete else Certainty.INFERRED,
            explanation=(
                *wait_text.on_dead(context, ranks, None),
                *no_culprit.on_ended(context, besides=ranks),
            ),
            facts={"exit_codes": codes} if codes else {},
        )

    def _certainty(self, quiet_s: float | None) -> Certainty:
        """How sure it is that a job in which nothing is wrong was well: not to its end, where that
        was not seen."""
        context = self.context
        makes_groups = any(waits_in(context, rank) for rank in context.job_calls.by_rank)
        is_open = not context.have_finished and (
            context.all_in_one() or bool(context.waits) or makes_groups
        )  # as the job ended
        if context.is_unknown_end or (context.is_over and quiet_s is not None):
            return Certainty.UNKNOWN
        is_unsure = quiet_s is not None or (context.is_over and (context.no_data or is_open))
        return Certainty.INFERRED if is_unsure else Certainty.EXACT

    def _nothing_wrong(
        self,
        certainty: Certainty,
        explanation: tuple[str, ...],
        found: stragglers.Pace,
        **where: Any,
    ) -> Verdict:
        """Nothing is wrong in the boxes. A job that was killed, or ended with SIGTERM, was not
        healthy all the same."""
        context = self.context
        if not context.exits.ended_unfinished:
            return context.verdict(
                VerdictKind.HEALTHY,
                certainty=certainty,
                explanation=explanation,
                facts=found.to_dict(),
                **where,
            )
        return context.verdict(
            VerdictKind.DEAD,
            certainty=Certainty.UNKNOWN,
            explanation=(
                *no_culprit.on_ended(context),
                *explanation,
                *no_culprit.on_first(context),
            ),
            facts=found.to_dict()
            | {"may_have_gone_first": no_culprit.may_have_gone_first(context)},
            **where,
        )

    def _no_data_to_the_end(self, found: stragglers.Pace) -> Verdict:
        """The job is over, nothing is wrong in the boxes, and one is missing: nobody is to blame,
        and all may not be well."""
        context = self.context
        key, number, example_rank = context.last_of_all()
        went_on = context.went_on_after(key, number) if key is not None else []
        where: dict[str, Any] = {"key": key, "number": number, "example_rank": example_rank}
        explanation = no_culprit.on_unheard(context, example_rank, key, number, went_on, found)
        if went_on:
            return self._nothing_wrong(Certainty.INFERRED, explanation, found, **where)
        return context.verdict(
            VerdictKind.MISSING,
            certainty=Certainty.UNKNOWN,
            explanation=explanation,
            facts=found.to_dict(),
            **where,
        )

    def _wait_for(self, blamed: list[int]) -> Wait | None:
        """Somebody who waits for one of these, the longest first."""
        context = self.context
        return min(waiting_for(context.waits, blamed), key=context.issued_ns, default=None)
