"""Finds the calls that cause a hang: those that wait for no other call.

A device executes the calls of its rank in the order of issue, as far as they depend on each other.
So a rank that is in one call has not come to the calls that it issued later, and ranks in those
calls wait for it. Calls that wait for each other in a cycle were issued in different orders.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torchwhere.core.grouping import grouped
from torchwhere.diagnose.dump_progress import JobProgress, Meeting, PendingCall, RankProgress

Root = tuple[Meeting, ...]  # several calls: a cycle


@dataclass(frozen=True)
class CallGraph:
    """The calls that ranks are in, and which call waits for which."""

    progress: JobProgress

    @cached_property
    def ranks(self) -> dict[int, RankProgress]:
        """The ranks with pending calls."""
        return self.progress.with_pending()

    @cached_property
    def places(self) -> dict[int, PendingCall]:
        """The call that each rank is in. A device that has reached none of its pending calls is in
        none."""
        late: dict[tuple[Meeting, int], bool] = {}
        places = {}
        for rank, progress in self.ranks.items():
            calls = progress.fronts
            if progress.has_timing:
                calls = [call for call in calls if call.has_started]
            for call in calls:
                key = call.meeting, call.number
                if key not in late:
                    late[key] = bool(self.progress.not_issued(call))
            awaiting = (call for call in calls if late[call.meeting, call.number])
            if calls:
                places[rank] = next(awaiting, calls[0])
        return places

    @cached_property
    def ranks_in(self) -> dict[Meeting, list[int]]:
        return grouped((call.meeting, rank) for rank, call in sorted(self.places.items()))

    def call(self, meeting: Meeting) -> PendingCall:
        return self.places[self.ranks_in[meeting][0]]

    @cached_property
    def missing(self) -> dict[Meeting, tuple[int, ...]]:
        """For each call, the ranks that have not issued it, or whose device has not reached it by
        its timing."""
        missing = {}
        for meeting in self.ranks_in:
            call = self.call(meeting)
            unreached = filter(lambda rank: self._is_unreached(rank, meeting), self.ranks)
            missing[meeting] = tuple(sorted({*self.progress.not_issued(call), *unreached}))
        return missing

    def _is_unreached(self, rank: int, meeting: Meeting) -> bool:
        call = self.ranks[rank].first_pending.get(meeting)
        if call is None or self.progress.outdated[rank]:
            return False
        return self.ranks[rank].has_timing and not call.has_started

    @cached_property
    def later(self) -> dict[Meeting, tuple[int, ...]]:
        """For each call, the ranks that have issued it after another one that they are in."""
        later = grouped(
            (call.meeting, rank)
            for rank, place in self.places.items()
            if not self.ranks[rank].has_timing
            for call in self.ranks[rank].first_pending.values()
            if call.record > place.record
        )
        return {meeting: tuple(later.get(meeting, ())) for meeting in self.ranks_in}

    @cached_property
    def edges(self) -> dict[Meeting, set[Meeting]]:
        """For each call, the calls that its late ranks are in."""
        return {
            meeting: {
                self.places[rank].meeting
                for rank in (*self.missing[meeting], *self.later[meeting])
                if rank in self.places
            }
            for meeting in self.ranks_in
        }

    def roots(self) -> list[Root]:
        """The calls that wait for no other call, and the cycles that wait for no call outside."""
        roots: list[Root] = []
        explained: set[Meeting] = set()
        for start in sorted(self.edges):
            meeting, reached = start, self._reached(start)
            while reached.isdisjoint(explained):
                # a call from which no path leads back is closer to the root
                closer = next(
                    (other for other in reached if meeting not in self._reached(other)), None
                )
                if closer is None:
                    roots.append(tuple(sorted(reached)))
                    explained |= reached
                else:
                    meeting, reached = closer, self._reached(closer)
        return roots

    def _reached(self, start: Meeting) -> set[Meeting]:
        """A call, and all calls that it waits for, directly or not."""
        reached, to_do = {start}, [start]
        while to_do:
            for other in self.edges[to_do.pop()] - reached:
                reached.add(other)
                to_do.append(other)
        return reached
