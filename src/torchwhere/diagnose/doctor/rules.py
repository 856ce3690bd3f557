"""The rules of the doctor: takes all boxes, gives one verdict.

Takes a run and the observed states of its processes. Checks, in this order: ranks that issued
different calls, ranks that exited while others wait, ranks that others wait for, deadlocks, ranks
that are blocked together, stragglers. An earlier finding explains the later ones. Pure: reads no
clock, process or file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchwhere.blackbox.run import RunSummary
from torchwhere.core.place import Certainty
from torchwhere.core.stall import ENDED_S, STALL_S
from torchwhere.diagnose.calls.job_calls import JobCalls, calls_of_run
from torchwhere.diagnose.calls.rebase import rebase_numbers
from torchwhere.diagnose.clocks.host_clocks import UNALIGNED, HostClocks
from torchwhere.diagnose.doctor import deadlock_text, no_culprit, stragglers, wait_text
from torchwhere.diagnose.doctor.alltoall_splits import unfitting
from torchwhere.diagnose.doctor.call_patterns import Patterns
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.deadlocks import blame, has_skipped, switched_peer
from torchwhere.diagnose.doctor.exits import Exits
from torchwhere.diagnose.doctor.group_creation import on_group_creation, waits_in
from torchwhere.diagnose.doctor.interruption import interrupted
from torchwhere.diagnose.doctor.mismatch import Mismatch, mismatches
from torchwhere.diagnose.doctor.verdict import State, Verdict, VerdictKind
from torchwhere.diagnose.doctor.waits import Wait, awaited, cycle, new_peers, waiting_for, waits
from torchwhere.processes.status import ProcessStatus

_USUALLY = 2  # times the median delay
_ASKED = 64  # waiting ranks that are checked for a call that the awaited rank skipped


def diagnose(
    run: RunSummary[Any],
    *,
    statuses: Mapping[int, ProcessStatus] | None = None,
    now_ns: int | None = None,
    stall_s: float = STALL_S,
    is_suspicion: bool = False,
    job_calls: JobCalls | None = None,
    clocks: HostClocks = UNALIGNED,
) -> Verdict:
    """The verdict on a run.

    `now_ns` is the wall clock while the job runs; without it the newest records are taken as the
    end. A suspicion is a preliminary verdict, before the suspects were asked for their stacks.
    `job_calls` are the calls of the boxes, if they have been loaded already.
    """
    job_calls = rebase_numbers(job_calls if job_calls is not None else calls_of_run(run))
    seen = dict(statuses or {})
    exits = Exits(
        job_calls, seen, now_ns, interrupted(job_calls, waited_s=min(ENDED_S, stall_s / 2))
    )
    stopped = {
        rank for rank, status in seen.items() if status.is_stopped and rank in job_calls.by_rank
    }
    held = stopped | {
        rank
        for rank in job_calls.by_rank
        if exits.is_dead(rank) and not exits.exited_with_the_job(rank)
    }
    failed_in_it = (
        {rank for rank in exits.failed() if exits.lost_its_peer(rank) or exits.timed_out(rank)}
        if held
        else ()
    )
    by_rank = waits(job_calls, held=held, failed_in_it=failed_in_it)
    context = Context(run, job_calls, seen, by_rank, exits, now_ns, is_suspicion, clocks=clocks)
    return Rules(context, stall_s).verdict()


@dataclass(slots=True)
class Rules:
    context: Context
    stall_s: float
    differences: list[Mismatch] = field(default_factory=list)

    def verdict(self) -> Verdict:
        self.differences = mismatches(self.context.job_calls)
        checks = (
            self._mismatch,
            self._splits,
            self._new_peer,
            self._group_creation,
            self._exited,
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
        if not self.differences:
            return None
        context = self.context
        first = min(
            self.differences,
            key=lambda difference: context.job_calls.by_rank[difference.culprits[0]].order(
                difference.key, difference.number
            ),
        )
        usual = first.cohorts[0][0]
        certainty = (
            Certainty.EXACT
            if first.what == "signature" and first.is_certain
            else Certainty.INFERRED
        )
        stalled_s = context.find_blocked(self.stall_s)
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
        """All_to_all splits that do not match between two ranks."""
        mismatched = unfitting(self.context.job_calls)
        if mismatched is None:
            return None
        return self.context.verdict(
            VerdictKind.MISMATCH,
            culprits=mismatched.culprits,
            key=mismatched.key,
            number=mismatched.number,
            example_rank=mismatched.ranks[0],
            certainty=Certainty.INFERRED,
            explanation=mismatched.sentences(self.context.job_calls),
            facts=mismatched.facts(),
        )

    def _new_peer(self) -> Verdict | None:
        """A rank that waits on a new peer while a peer it used before waits for it."""
        context = self.context
        strays = [
            wait
            for wait in new_peers(context.job_calls, context.waits.values())
            if context.is_stalled(wait, self.stall_s)
        ]
        patterns = Patterns(context.job_calls, ranks=len(strays))
        turned = [wait for wait in strays if switched_peer(context.job_calls, patterns, wait)]
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

    def _exited(self) -> Verdict | None:
        context, exits = self.context, self.context.exits
        ended = [
            rank
            for rank in awaited(context.waits)
            if context.state(rank) in (State.DEAD, State.FINISHED)
        ]
        gone = [
            rank
            for rank in ended
            if not exits.exited_with_the_job(rank) and not exits.outlived_its_watch(rank)
        ]
        exited = [rank for rank in gone if not exits.is_doubtful(rank)]
        certainty = Certainty.EXACT
        if exited:
            blamed = exits.first_of_awaited(exited, context.incomplete)
        elif likely := self._likely_exited():
            blamed, certainty = likely, Certainty.INFERRED
        elif not context.waits and not exits.were_killed_together and (exited := exits.failed()):
            blamed = exits.first(context.incomplete)
            if any(map(exits.timed_out, exited)) and set(blamed) <= set(context.incomplete):
                return self._timed_out(blamed)
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
            explanation=wait_text.on_exit(context, blamed, wait)
            or wait_text.on_consequential_exits(context, exited),
        )

    def _is_sure_of(self, exited: list[int]) -> bool:
        return (
            bool(exited)
            and not set(exited) & set(self.context.incomplete)
            and not any(map(self.context.exits.crashed_in_collective, exited))
        )

    def _likely_exited(self) -> list[int]:
        """The likely first exit, where all processes are gone and none was observed since a rank
        lost its peer.

        It is the rank that the others wait for, if they had only just begun to wait and all other
        ranks were alive after the failure. If they had waited long, the rank was missing before it
        exited. A rank that waited itself may have exited just as well.
        """
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

    def _timed_out(self, blamed: list[int]) -> Verdict:
        """All ranks with data timed out in one collective: a rank without data is missing, or
        none is."""
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
            else no_culprit.on_timeout(context)
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
            skipping = self._skipping_ranks()
            if skipping:
                blamed, wait = skipping, self._wait_for(skipping)
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
            rank in context.job_calls.by_rank and context.exits.outlived_its_watch(rank)
            for rank in blamed
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
            if not self._has_skipped(patterns, rank)
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
        """Whether a rank is always late, and the others waited no longer than usual at the last
        record.

        Only checked if it is unknown when the job ended, and so how long they waited.
        """
        context = self.context
        late = (
            stragglers.straggler(context.job_calls, key=wait.key, clocks=context.clocks)
            if not context.is_live
            else None
        )
        return late is not None and context.recorded_s(wait) <= _USUALLY * late.late_s

    def _skipping_ranks(self) -> list[int]:
        """Ranks that wait for a rank without data, but skipped what others wait for before they
        came there."""
        context = self.context
        excused = [wait.rank for wait in context.waits.values() if not wait.missing]
        patterns = Patterns(context.job_calls, ranks=len(excused))
        return sorted(rank for rank in excused if self._has_skipped(patterns, rank))

    def _has_skipped(self, patterns: Patterns, rank: int) -> bool:
        """Whether a rank skipped, against its usual pattern, a call that another rank waits for."""
        others = waiting_for(self.context.waits, [rank])[:_ASKED]
        return any(has_skipped(self.context.job_calls, patterns, rank, other) for other in others)

    def _deadlock(self) -> Verdict | None:
        context = self.context
        blocked_cycle = cycle(context.waits)
        if not blocked_cycle or not context.is_stalled(blocked_cycle[0], self.stall_s):
            return None
        first = blocked_cycle[0]
        blamed = blame(context.job_calls, blocked_cycle, context.waits, unread=context.incomplete)
        certainty = Certainty.INFERRED if context.incomplete else blamed.certainty
        if blamed.has_wrong_peer:
            strays = [context.waits[rank] for rank in blamed.culprits]
            return self._wrong_peer(
                strays, certainty, circle=deadlock_text.links(context, blocked_cycle)
            )
        return context.verdict(
            VerdictKind.DEADLOCK,
            culprits=blamed.culprits,
            key=first.key,
            number=first.number,
            example_rank=first.rank,
            certainty=certainty,
            stalled_s=context.waited_s(first),
            explanation=deadlock_text.on_deadlock(context, blocked_cycle, blamed),
            facts={"circle": deadlock_text.links(context, blocked_cycle)},
        )

    def _together(self) -> Verdict | None:
        context = self.context
        if not context.are_all_blocked(self.stall_s):
            return None
        context.is_together = True
        key, number, example_rank = context.last_of_all()
        return context.verdict(
            VerdictKind.TOGETHER,
            key=key,
            number=number,
            example_rank=example_rank,
            stalled_s=context.all_blocked_s(),
            certainty=Certainty.EXACT if not context.no_data else Certainty.INFERRED,
            explanation=no_culprit.on_together(context),
        )

    def _progressing(self) -> Verdict:
        context = self.context
        if first := context.exits.exited_first():
            return self._exited_first(first)
        late = stragglers.straggler(context.job_calls, clocks=context.clocks)
        if late is not None:
            return context.verdict(
                VerdictKind.STRAGGLER,
                culprits=late.ranks,
                certainty=Certainty.INFERRED,
                explanation=stragglers.sentences(late),
                facts=late.to_dict(),
            )
        pace, failed = stragglers.pace(context.job_calls), context.exits.failed()
        if context.is_over and failed and not context.exits.were_killed_together:
            explanation = wait_text.on_consequential_exits(context, failed)
            return context.verdict(
                VerdictKind.DEAD, certainty=Certainty.UNKNOWN, explanation=explanation
            )
        if (
            context.is_over
            and context.no_data
            and not context.have_finished
            and not context.was_moving(self.stall_s)
        ):
            return self._no_data_to_the_end(pace)
        quiet_s = context.quiet_s(self.stall_s)
        explanation = (
            no_culprit.on_healthy(context, pace)
            if quiet_s is None
            else no_culprit.on_quiet(context, quiet_s, pace)
        )
        return self._nothing_wrong(self._certainty(quiet_s), explanation, pace)

    def _exited_first(self, ranks: list[int]) -> Verdict:
        """Ranks exited before the others without an exit record, and nothing else is wrong."""
        context, exits = self.context, self.context.exits
        codes = {
            rank: code for rank in ranks if (code := context.status(rank).exit_code) is not None
        }
        is_seen = all(map(exits.was_seen_to_exit, ranks))
        return context.verdict(
            VerdictKind.DEAD,
            culprits=tuple(ranks),
            certainty=Certainty.EXACT if is_seen and not context.incomplete else Certainty.INFERRED,
            explanation=(
                *wait_text.on_exit(context, ranks, None),
                *no_culprit.on_ended(context, besides=ranks),
            ),
            facts={"exit_codes": codes} if codes else {},
        )

    def _certainty(self, quiet_s: float | None) -> Certainty:
        """The certainty of a verdict that finds no fault: lower if the end of the job was not
        observed."""
        context = self.context
        makes_groups = any(waits_in(context, rank) for rank in context.job_calls.by_rank)
        is_open = not context.have_finished and (
            context.are_all_in_one_call() or bool(context.waits) or makes_groups
        )  # as the job ended
        if context.is_unknown_end or (context.is_over and quiet_s is not None):
            return Certainty.UNKNOWN
        is_unsure = quiet_s is not None or (context.is_over and (context.no_data or is_open))
        return Certainty.INFERRED if is_unsure else Certainty.EXACT

    def _nothing_wrong(
        self,
        certainty: Certainty,
        explanation: tuple[str, ...],
        pace: stragglers.Pace,
        **where: Any,
    ) -> Verdict:
        """The boxes show no fault. A job that was killed, or ended by SIGTERM, is still not
        healthy."""
        context = self.context
        if not context.exits.ended_unfinished:
            return context.verdict(
                VerdictKind.HEALTHY,
                certainty=certainty,
                explanation=explanation,
                facts=pace.to_dict(),
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
            facts=pace.to_dict() | {"may_have_gone_first": no_culprit.may_have_gone_first(context)},
            **where,
        )

    def _no_data_to_the_end(self, pace: stragglers.Pace) -> Verdict:
        """The job is over, the boxes show no fault, and one is missing: no rank is blamed, but
        the job may not have been healthy."""
        context = self.context
        key, number, example_rank = context.last_of_all()
        went_on = context.went_on_after(key, number) if key is not None else []
        where: dict[str, Any] = {"key": key, "number": number, "example_rank": example_rank}
        explanation = no_culprit.on_no_data(context, example_rank, key, number, went_on, pace)
        if went_on:
            return self._nothing_wrong(Certainty.INFERRED, explanation, pace, **where)
        return context.verdict(
            VerdictKind.MISSING,
            certainty=Certainty.UNKNOWN,
            explanation=explanation,
            facts=pace.to_dict(),
            **where,
        )

    def _wait_for(self, blamed: list[int]) -> Wait | None:
        """The wait for one of these ranks that began first."""
        context = self.context
        return min(waiting_for(context.waits, blamed), key=context.issued_ns, default=None)
