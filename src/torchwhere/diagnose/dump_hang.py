"""Finds the ranks that cause a hang, from the pending calls in the dumps of all ranks.

On a device a rank does not block where it issues a call. It is in the first call that its device
has not completed. Evidence counts in this order:

1. A rank has not issued a call that others wait in, and is in no call itself.
2. With timing, a device has not reached a call that others have started.
3. One device has not completed a call that all others have completed.
4. Ranks issued calls of different groups in different orders.
5. Other sends complete before their receive, and this one does not.

Without any of these, all ranks of a call have issued it and none has completed it. Then it is
unknown which device or link is the cause, and no rank is named.

A rank without a dump is never named. A process that is stopped or dead writes none. But healthy
ranks leave none either: the file was not collected, or the process ended before it wrote one. If
all others wait in a call with it, it may be in that call too, and the network the cause.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from torchwhere.core.place import Certainty
from torchwhere.core.rank_text import Ranks
from torchwhere.diagnose.call_graph import CallGraph, Root
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.finding import CallRef, Cause, Finding
from torchwhere.diagnose.doctor.rules.deadlock import Deadlock, find_deadlock
from torchwhere.diagnose.doctor.rules.missing import MissingRanks
from torchwhere.diagnose.doctor.rules.no_fault import PartlyWatched
from torchwhere.diagnose.doctor.verdict import VerdictKind
from torchwhere.diagnose.doctor.waits import Wait, awaited
from torchwhere.diagnose.dump_causes import (
    BehindRanks,
    DifferentOrder,
    FewInCall,
    IncompleteCall,
    MissingMessage,
    NothingPending,
    OrderCohort,
    ProgressedMeanwhile,
    ReferredCall,
    UnconfirmedCalls,
    UnreachedByAll,
    UnreachedCall,
)
from torchwhere.diagnose.dump_order import order_sides, shift
from torchwhere.diagnose.dump_progress import (
    JobProgress,
    Meeting,
    MessageStream,
    PendingCall,
)


def find_dump_hang(context: Context, progress: JobProgress) -> tuple[Context, Finding]:
    """Find what the dumps show; returns also the context with the waits that they show."""
    search = _HangSearch(context, CallGraph(progress))
    context = replace(context, waits=search.waits)
    return context, search.missing() or search.deadlock() or search.on_devices()


def without_absent(finding: Finding, context: Context) -> Finding:
    """Take ranks without a dump from the culprits: nothing shows that they are not healthy."""
    culprits = tuple(rank for rank in finding.culprits if rank in context.by_rank)
    if culprits == finding.culprits:
        return finding
    certainty = finding.certainty if culprits else Certainty.UNKNOWN
    return replace(finding, culprits=culprits, certainty=certainty)


def no_hang(cause: Cause, unwatched: Collection[int]) -> Finding:
    """The finding on dumps that show no hang: a rank without a dump, or one whose calls may have
    been aborted, may hang."""
    if not unwatched and isinstance(cause, UnconfirmedCalls):
        return Finding(VerdictKind.PARTIAL, cause, certainty=Certainty.UNKNOWN)
    if not unwatched:
        return Finding(VerdictKind.HEALTHY, cause, certainty=Certainty.INFERRED)
    ranks = tuple(sorted(unwatched))
    return Finding(
        VerdictKind.PARTIAL,
        PartlyWatched(cause, ranks),
        certainty=Certainty.UNKNOWN,
        facts={"unwatched": list(ranks)},
    )


@dataclass(frozen=True)
class _HangSearch:
    context: Context
    graph: CallGraph

    @property
    def progress(self) -> JobProgress:
        return self.graph.progress

    @cached_property
    def waits(self) -> dict[int, Wait]:
        """For each rank, the call it is in, and the ranks that have not come there for certain."""
        absent = {
            meeting: self.progress.absent(self.graph.call(meeting))
            for meeting in self.graph.ranks_in
        }
        return {
            rank: Wait(
                rank,
                *self._reference(rank)[:2],
                self.graph.missing[call.meeting],
                absent[call.meeting],
            )
            for rank, call in self.graph.places.items()
        }

    def _reference(self, rank: int, call: PendingCall | None = None) -> CallRef:
        """A reference to a call of a rank; by default, the call that it is in."""
        call, job_calls = call or self.graph.places[rank], self.context.job_calls
        rank_calls = job_calls.by_rank[rank]
        loaded = rank_calls.call_of_record(call.record)
        if loaded is not None:
            return CallRef(*loaded, rank)
        # numbers with gaps: only the newest calls without a gap are loaded
        keys = (key for key in rank_calls.counts if job_calls.group(key).name == call.group)
        return CallRef(next(keys), call.number, rank)

    def _call(self, meeting: Meeting) -> ReferredCall:
        rank = self.graph.ranks_in[meeting][0]
        return ReferredCall(self._reference(rank), self.graph.places[rank].ends)

    def lacks_calls(self) -> bool:
        """Whether ranks wait in calls that others have not issued."""
        calls = map(self.graph.call, self.graph.ranks_in)
        return any(map(self.progress.not_issued, calls))

    # -- ranks that have not come ------------------------------------------------------------------

    def missing(self) -> Finding | None:
        """Ranks that others wait for, and that are in no call themselves."""
        culprits = frozenset(awaited(self.waits))
        waits = [wait for wait in self.waits.values() if not culprits.isdisjoint(wait.missing)]
        if not waits:
            return None
        # the wait closest to the cause: all that it lacks are culprits
        wait = min(
            waits,
            key=lambda wait: (
                len(culprits.symmetric_difference(wait.missing)),
                self.context.timing.began_ns(wait),
            ),
        )
        ranks = tuple(rank for rank in wait.missing if rank in culprits)
        meeting = self.graph.places[wait.rank].meeting
        on_device = all(
            rank in self.graph.ranks and meeting in self.graph.ranks[rank].first_pending
            for rank in ranks
        )
        cause: Cause = UnreachedCall(ranks, self._call(meeting), tuple(sorted(self.waits)))
        if not on_device:
            cause = self._not_issued(ranks, wait, meeting)
        ends = self.graph.places[wait.rank].ends
        is_counted = on_device or ends is None or self.progress.count_messages(ends)
        is_certain = is_counted and not wait.no_data and len(ranks) == len(wait.missing)
        certainty = Certainty.EXACT if is_certain else Certainty.INFERRED
        if isinstance(cause, FewInCall):
            ranks, certainty = (), Certainty.UNKNOWN
        return Finding(
            VerdictKind.MISSING,
            cause,
            culprits=ranks,
            call=CallRef.of(wait),
            certainty=certainty,
            facts={"on_device": True} if on_device else {},
        )

    def _not_issued(self, ranks: Ranks, wait: Wait, meeting: Meeting) -> Cause:
        call, in_it = self._call(meeting), tuple(self.graph.ranks_in[meeting])
        if call.ends is not None:
            return MissingMessage(ranks[0], call)
        if len(ranks) > max(1, len(self.progress.taking_part(self.graph.call(meeting))) // 2):
            return FewInCall(in_it, call, ranks)
        elsewhere = tuple(rank for rank in wait.missing if rank not in ranks)
        return MissingRanks(ranks, wait, elsewhere=elsewhere)

    # -- ranks that wait for each other ------------------------------------------------------------

    def deadlock(self) -> Finding | None:
        """Ranks that wait for each other in calls that others have not issued.

        If nothing shows which rank of the cycle is wrong, none is named.
        """
        finding = (
            find_deadlock(replace(self.context, waits=self.waits)) if self.lacks_calls() else None
        )
        cause = finding.cause if finding is not None else None
        if finding is None or not isinstance(cause, Deadlock):
            return finding
        if {wait.rank for wait in cause.cycle} <= set(finding.culprits):
            return replace(finding, culprits=())
        return finding

    # -- all have issued it ------------------------------------------------------------------------

    def on_devices(self) -> Finding:
        group = self.progress.group_of_failed_device()
        if group is not None:
            return self._behind(*self.progress.furthest_behind(group), is_clear=True)
        roots = sorted(self.graph.roots(), key=self._began_ns)
        current = [root for root in roots if not self._outdated(root)]
        if not current:
            return self._not_current(roots)
        meeting = current[0][0]
        if len(current[0]) > 1:
            return self._different_order(current[0]) or self._incomplete(meeting)
        return self._stuck_end(meeting) or self._left_alone(meeting) or self._incomplete(meeting)

    def _not_current(self, roots: list[Root]) -> Finding:
        """All pending calls are in groups in which a dump is older than the others, or a device has
        failed."""
        progress = self.progress
        if progress.behind and not progress.has_progressed:
            call, ranks = progress.furthest_behind(min(progress.behind))
            return self._behind(call, ranks, is_clear=False)
        if roots and not progress.has_progressed:
            return self._incomplete(roots[0][0])
        if self.graph.ranks and not self.graph.places:
            return self._unreached()
        cause: Cause = NothingPending()
        if progress.unconfirmed:
            cause = UnconfirmedCalls(progress.unconfirmed)
        elif any(rank_progress.pending for rank_progress in progress.ranks.values()):
            outdated = [rank for rank, groups in sorted(progress.outdated.items()) if groups]
            cause = ProgressedMeanwhile(tuple(outdated))
        return no_hang(cause, progress.unwatched)

    def _unreached(self) -> Finding:
        """No device has reached a pending call: a long kernel looks like one that does not end."""
        rank, progress = min(self.graph.ranks.items())
        call = progress.fronts[0]
        reference = self._reference(rank, call)
        ranks = tuple(
            other
            for other, own in sorted(self.graph.ranks.items())
            if call.meeting in own.first_pending
        )
        return Finding(
            VerdictKind.MISSING,
            UnreachedByAll(ranks, ReferredCall(reference, call.ends)),
            call=reference,
            certainty=Certainty.UNKNOWN,
        )

    def _left_alone(self, meeting: Meeting) -> Finding | None:
        """The only rank in a collective that all others have completed."""
        call, ranks = self.graph.call(meeting), tuple(self.graph.ranks_in[meeting])
        others = set(self.progress.taking_part(call)).difference(ranks)
        is_alone = len(ranks) == 1 and len(others) > 1 and call.ends is None
        if not is_alone or set(self.progress.completed_by(call)) != others:
            return None
        return self._behind(call, ranks, is_clear=True)

    def _behind(self, call: PendingCall, ranks: Ranks, *, is_clear: bool) -> Finding:
        reference, absent = self._reference(ranks[0], call), self.progress.absent(call)
        completed_by = self.progress.completed_by(call)
        return Finding(
            VerdictKind.MISSING,
            BehindRanks(ranks, ReferredCall(reference, None), completed_by, absent, is_clear),
            culprits=ranks if is_clear else (),
            call=reference,
            certainty=Certainty.INFERRED if is_clear else Certainty.UNKNOWN,
            facts={"on_device": True} if is_clear else {},
            blocked=frozenset(self.graph.places),
        )

    def _began_ns(self, root: Root) -> int:
        ranks = [rank for meeting in root for rank in self.graph.ranks_in[meeting]]
        return min(self.context.timing.began_ns(self.waits[rank]) for rank in ranks)

    def _outdated(self, root: Root) -> list[int]:
        """The ranks of these calls with a dump that is older than the others."""
        return [
            rank
            for call in map(self.graph.call, root)
            for rank in self.progress.taking_part(call)
            if call.ends is None and call.group in self.progress.outdated.get(rank, ())
        ]

    def _different_order(self, root: Root) -> Finding | None:
        sides, is_clear = order_sides(self.graph, root)
        if len(sides) < 2:
            return None
        cohorts = [OrderCohort(side.ranks, side.in_all, self._call(side.meeting)) for side in sides]
        skipped = shift(self.graph, *sides[:2]) if is_clear else 0
        return Finding(
            VerdictKind.MISMATCH if skipped else VerdictKind.DEADLOCK,
            DifferentOrder(tuple(cohorts), skipped),
            culprits=cohorts[1].in_all if is_clear else (),
            call=cohorts[1].call.reference,
            certainty=Certainty.INFERRED,
            facts={"on_device": True} | ({"differs_in": ["order"]} if skipped else {}),
            blocked=frozenset(self.graph.places),
        )

    def _stuck_end(self, meeting: Meeting) -> Finding | None:
        """The end of a message whose device has not reached it."""
        call = self._call(meeting)
        if call.ends is None:
            return None
        source, destination = call.ends
        buffered = None
        if self._is_sent(meeting):
            rank, other = destination, source
        else:
            rank, other = source, destination
            buffered = self._more_buffered(meeting)
            if buffered is None:
                return None
        return Finding(
            VerdictKind.MISSING,
            UnreachedCall((rank,), call, (other,) if other in self.graph.places else (), buffered),
            culprits=(rank,),
            call=call.reference,
            certainty=Certainty.INFERRED,
            facts={"on_device": True},
            blocked=frozenset(self.graph.places) - {rank},
        )

    def _is_sent(self, meeting: Meeting) -> bool:
        """Whether the send of a message is complete, and its receive is not."""
        source, destination = meeting[1:]
        receive = self.graph.places.get(destination)
        if (
            receive is None
            or receive.meeting != meeting
            or self.progress.unreceived(meeting) is None
        ):
            return False
        return self.progress.messages_of(source, meeting).completed > receive.number

    def _more_buffered(self, meeting: Meeting) -> tuple[MessageStream, int] | None:
        """A stream with more unreceived messages than this one can have.

        A send completes before its receive as long as a buffer has space. If other buffers hold
        more messages of this size, this send would be complete if the device had reached it.
        """
        source = meeting[1]
        if source not in self.graph.places or not self.progress.count_messages((source,)):
            return None
        own = self.progress.messages_of(source, meeting)
        unreceived = self.progress.unreceived(meeting)
        streams = [
            (self.progress.unreceived(stream) or 0, stream)
            for rank, progress in self.progress.ranks.items()
            for stream, count in progress.messages.items()
            if stream[1] == rank and count.largest_bytes >= own.largest_bytes
        ]
        most, stream = max(streams, default=(0, meeting))
        own_most = own.completed if unreceived is None else unreceived
        return (stream, most) if most > own_most else None

    def _went_on(self, meeting: Meeting) -> Ranks:
        """The ranks that have completed a call that others are in."""
        call, ranks = self.graph.call(meeting), self.graph.ranks_in[meeting]
        absent, unknown = self.progress.absent(call), self.progress.unknown(call)
        return tuple(
            sorted(set(self.progress.taking_part(call)).difference(ranks, absent, unknown))
        )

    def _incomplete(self, meeting: Meeting) -> Finding:
        call, ranks = self.graph.call(meeting), tuple(self.graph.ranks_in[meeting])
        absent, unknown = self.progress.absent(call), self.progress.unknown(call)
        went_on = self._went_on(meeting)
        referred = self._call(meeting)
        cause = IncompleteCall(
            ranks,
            referred,
            went_on,
            unknown,
            tuple(rank for rank in unknown if call.group in self.progress.outdated.get(rank, ())),
            absent,
            tuple(sorted(set(self.graph.places).difference(ranks))),
            all(self.graph.ranks[rank].has_timing for rank in ranks),
            {*ranks, *absent} == set(self.progress.taking_part(call))
            and all(self.graph.ranks[rank].has_reached for rank in ranks),
        )
        kind = VerdictKind.TOGETHER
        certainty = Certainty.EXACT if cause.has_timing and not went_on else Certainty.INFERRED
        if absent or unknown:
            kind, certainty = VerdictKind.MISSING, Certainty.UNKNOWN
        return Finding(
            kind,
            cause,
            call=referred.reference,
            certainty=certainty,
            blocked=frozenset(self.graph.places),
        )
