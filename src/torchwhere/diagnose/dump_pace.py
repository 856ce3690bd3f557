"""Tells a rank that hangs in the dumps from one that is only slow, by the last calls it completed.

With CPUs that run ahead, a call is pending for seconds although the job progresses: its age shows
no hang. But the watchdog of each rank retires completed calls ten times a second, and dumps with
all entries have the time of that. If a rank on which others wait completed a call a moment before
its dump was made, the dumps show no hang. The wait is long if the last call completed long before,
or if the pending call has timed out. If the dumps show neither, the finding is inferred.

Limits: dumps of active calls have no such times. A dump may be older than its time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torchwhere.core.place import Certainty
from torchwhere.core.rank_text import Ranks
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.finding import Finding
from torchwhere.diagnose.doctor.rules.deadlock import Deadlock
from torchwhere.diagnose.doctor.rules.missing import MissingRanks
from torchwhere.diagnose.doctor.verdict import VerdictKind
from torchwhere.diagnose.dump_age import CLOCK_SLACK_S, MOMENT_S
from torchwhere.diagnose.dump_causes import (
    DifferentOrder,
    IncompleteCall,
    JustCompleted,
    MissingMessage,
    UnreachedCall,
)
from torchwhere.diagnose.dump_progress import DumpTimes, JobProgress, RankProgress


def checked_by_pace(context: Context, finding: Finding, progress: JobProgress) -> Finding:
    """Check a finding by the last calls that its ranks completed.

    No rank is named if one of them completed a call a moment before its dump was made, and no call
    has timed out. Else a wait on devices is only `exact` if the dumps show that it is long.
    """
    ranks, cause = _ranks(finding), finding.cause
    if not ranks or finding.certainty is Certainty.UNKNOWN:
        return finding
    pace = _Pace(progress, _group(context, finding))
    shown = pace.current(ranks) or pace.current(context.waits)
    ages_s = {rank: age_s for rank in shown if (age_s := pace.age_s(rank)) is not None}
    recent = tuple(sorted(rank for rank in ages_s if ages_s[rank] < MOMENT_S))
    if recent and not any(map(pace.has_timed_out, {*ranks, *context.waits})):
        just_completed = JustCompleted(recent, max(0.0, *(ages_s[rank] for rank in recent)))
        return Finding(
            VerdictKind.MISSING, just_completed, call=finding.call, certainty=Certainty.UNKNOWN
        )
    if not isinstance(cause, (UnreachedCall, IncompleteCall)) or all(map(pace.is_long, ranks)):
        return finding
    is_exact = finding.certainty is Certainty.EXACT
    certainty = Certainty.INFERRED if is_exact else finding.certainty
    return replace(finding, cause=replace(cause, may_progress=True), certainty=certainty)


def _ranks(finding: Finding) -> Ranks:
    """The ranks that cause the wait, as far as a finding shows them."""
    match finding.cause:
        case UnreachedCall(ranks=ranks) | IncompleteCall(ranks=ranks):
            return ranks
        case DifferentOrder(cohorts=cohorts):
            return tuple(rank for cohort in cohorts for rank in cohort.ranks)
        case Deadlock(cycle=cycle):
            return tuple(wait.rank for wait in cycle)
        case MissingRanks() | MissingMessage():
            return finding.culprits
    return ()


def _group(context: Context, finding: Finding) -> str | None:
    """The only group whose calls count; None if all count. A device executes the calls of all
    groups; a thread that issues calls of one group may progress while that of another is stuck."""
    if finding.call is None or not isinstance(finding.cause, (MissingRanks, MissingMessage)):
        return None
    return context.job_calls.group(finding.call.key).name


@dataclass(frozen=True)
class _Pace:
    progress: JobProgress
    group: str | None

    @cached_property
    def _with_pending(self) -> Mapping[int, RankProgress]:
        return self.progress.with_pending()

    def _times(self, rank: int) -> DumpTimes:
        known = self.progress.ranks.get(rank)
        return known.times if known is not None else DumpTimes()

    def current(self, ranks: Iterable[int]) -> list[int]:
        """Those with a dump that is not older than the newest one. The dump of a process that
        failed shows its last moment, not that of the others, which may wait for long."""
        newest_ns = max(self._times(rank).made_ns or 0 for rank in self.progress.ranks)
        return [
            rank
            for rank in ranks
            if newest_ns - (self._times(rank).made_ns or 0) < MOMENT_S * 1_000_000_000
        ]

    def age_s(self, rank: int) -> float | None:
        """Seconds from the last confirmed completion to the dump; None if that is not known."""
        times = self._times(rank)
        completed_ns = [
            time_ns
            for group, time_ns in times.completed_ns.items()
            if self.group in (None, group) and time_ns
        ]
        if times.made_ns is None or not completed_ns:
            return None
        age_s = (times.made_ns - max(completed_ns)) / 1e9
        return age_s if age_s > -CLOCK_SLACK_S else None

    def has_timed_out(self, rank: int) -> bool:
        known = self._with_pending.get(rank)
        calls = known.pending if known is not None else ()
        made_ns = self._times(rank).made_ns or 0
        return any(0 < call.deadline_ns <= made_ns for call in calls)

    def is_long(self, rank: int) -> bool:
        """Whether a dump shows that its rank has completed nothing for a while."""
        age_s = self.age_s(rank)
        is_old = age_s is not None and age_s >= MOMENT_S
        return not self._times(rank).has_new_ends and (is_old or self.has_timed_out(rank))
