"""Finds ranks whose device does not progress, and which of them only wait for another rank.

On a GPU the CPU issues work and continues. A device is stalled if it has not reached what its CPU
issued long ago: a collective, a step or a module. It only waits if a collective that it reached is
held up by another rank, whose device has not reached it or whose process cannot run. A stalled
device that waits for no rank is blocked by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from torchwhere.blackbox.device import device_lanes
from torchwhere.core.device_place import CallState, DevicePlace
from torchwhere.core.place import Place
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.calls.rank_calls import RankCalls
from torchwhere.diagnose.doctor.finding import CallRef
from torchwhere.diagnose.doctor.reached import first_unreached, has_reached, last_reached
from torchwhere.diagnose.doctor.timing import Timing

_UNUSUAL = 1.5  # times the delay that 9 of 10 collectives had


class StalledDevice(NamedTuple):
    """A rank whose device has not reached what its CPU has issued."""

    rank: int
    lasted_s: float
    place: Place | None  # the last mark that the device has reached
    reached: tuple[CallRef, ...]  # the last collectives that it has reached
    next: CallRef | None  # the first collective that it has not reached, if any was issued
    waits_in: CallRef | None  # the first collective that another rank holds up
    waits_for: tuple[int, ...]  # the ranks that hold it up
    may_wait_for: tuple[int, ...] = ()  # ranks without data that may hold it up


@dataclass(frozen=True)
class DeviceStalls:
    """The stalled devices of a job."""

    job_calls: JobCalls
    timing: Timing

    @cached_property
    def by_rank(self) -> dict[int, StalledDevice]:
        stalled = map(self._stalled, self.job_calls.by_rank.values())
        devices = {device.rank: device for device in stalled if device is not None}
        blocked = {rank for rank, device in devices.items() if not device.waits_for}
        behind = {rank: self._behind_another(devices[rank], blocked) for rank in blocked}
        # If each of them has reached something that another has not, this explains nothing.
        is_explained = any(not device.waits_for for device in behind.values())
        return devices | behind if is_explained else devices

    def blocked(self) -> list[StalledDevice]:
        """The devices that wait for no other rank."""
        return [device for device in self.by_rank.values() if not device.waits_for]

    def waiting(self) -> list[StalledDevice]:
        return [device for device in self.by_rank.values() if device.waits_for]

    def _stalled(self, rank_calls: RankCalls) -> StalledDevice | None:
        state = rank_calls.rank_summary.device
        if state is None or not state.device_place.pending:
            return None
        first = _call(rank_calls, state.unreached[0]) if state.unreached else None
        if first is None and state.unreached:
            return None  # its record is lost, and so is the time of its issue
        looked_ns = state.device_place.looked_ns or rank_calls.box_summary.beat_ns
        # Before it was issued, the device could not reach it. The time of a place is not recorded,
        # but the CPU issued it before its last record.
        key, issued_ns = None, rank_calls.box_summary.last_ns
        if first is not None:
            key, issued_ns = first.key, rank_calls.issued_ns(first.key, first.number)
        lasted_s = (looked_ns - max(state.device_place.t_ns, issued_ns)) / 1e9
        if lasted_s < self._patience_s(rank_calls, key):
            return None
        calls = (_call(rank_calls, record) for record in state.reached)
        reached = tuple(call for call in calls if call is not None)
        holding_up = {call: tuple(self._holding_up(call)) for call in reached}
        held_up = [self._first_open(call, ranks) for call, ranks in holding_up.items() if ranks]
        unseen = [rank for call in reached for rank in self._unseen(rank_calls, call)]
        return StalledDevice(
            rank_calls.rank,
            lasted_s,
            state.place,
            reached,
            first,
            min(held_up, key=lambda call: rank_calls.order(*call[:2]), default=None),
            tuple(sorted(set().union(*holding_up.values()))),
            tuple(sorted(set(unseen))),
        )

    def _behind_another(self, device: StalledDevice, blocked: Collection[int]) -> StalledDevice:
        """A device that may wait in an earlier asynchronous collective of another group: it has
        reached one that another blocked device has not."""
        rank_calls = self.job_calls.by_rank[device.rank]
        for call in last_reached(rank_calls):
            ranks = tuple(rank for rank in self._holding_up(call) if rank in blocked)
            if ranks:
                return device._replace(waits_in=self._first_open(call, ranks), waits_for=ranks)
        return device

    def reached_calls(self) -> JobCalls:
        """The calls of the job as its devices came to them: until the one that each waits in."""
        job_calls = self.job_calls.copy()
        for rank, device in self.by_rank.items():
            if device.waits_in is not None:
                rank_calls = job_calls.by_rank[rank]
                record = rank_calls.order(*device.waits_in[:2])
                job_calls.by_rank[rank] = rank_calls.until(record)
        return job_calls

    def _patience_s(self, rank_calls: RankCalls, key: StreamKey | None) -> float:
        """How long a device may take to reach a collective. A job that is over cannot be given more
        time: its device may take longer than usual, because kernels may be long."""
        patience_s = self.timing.patience_s(rank_calls.rank, key)
        if not self.timing.is_over:
            return patience_s
        return max(patience_s, _UNUSUAL * _usual_delay_s(rank_calls))

    def _holding_up(self, call: CallRef) -> Iterator[int]:
        """The other members that have not reached a collective, on the CPU or on the device, or
        whose process cannot run."""
        for rank in self.job_calls.members(call.key):
            if rank == call.rank or rank not in self.job_calls.by_rank:
                continue
            rank_calls = self.job_calls.by_rank[rank]
            can_run = rank not in self.timing.unable_to_run
            if not can_run or not has_reached(rank_calls, call.key, call.number):
                yield rank

    def _unseen(self, rank_calls: RankCalls, call: CallRef) -> list[int]:
        """The members without data that may hold up a collective which the device of a rank has
        reached last. None if the device has passed it, or another device has reached a later one.
        """
        members = self.job_calls.members(call.key)
        unseen = [rank for rank in members if not self.job_calls.has_data(rank)]
        if not unseen or _has_passed(rank_calls, call):
            return []
        others = (self.job_calls.by_rank[rank] for rank in members if rank not in unseen)
        later = (
            other.number > call.number
            for own in others
            for other in last_reached(own)
            if other.key == call.key
        )
        return [] if any(later) else unseen

    def _first_open(self, call: CallRef, ranks: Sequence[int]) -> CallRef:
        """The first collective in the stream of a call that these ranks hold up.

        An asynchronous collective does not block the stream that issues it, so the device may have
        reached several. They complete in order.
        """
        by_rank = self.job_calls.by_rank
        number = min(first_unreached(by_rank[rank], call.key) for rank in ranks)
        is_known = by_rank[call.rank].calls[call.key].at(number) is not None
        return call._replace(number=number) if is_known and number < call.number else call


def hangs_between(rank_calls: RankCalls) -> DevicePlace | None:
    """The last mark that a blocked device has reached, and the first that it has not: what does not
    end was issued between the two. None if marks are pending on several streams, because one may
    wait for another, or if another stream has reached its last mark later."""
    state, box = rank_calls.rank_summary.device, rank_calls.box
    lanes = device_lanes(box) if box is not None else []
    pending = [lane.t_ns for lane in lanes if lane.pending]
    if state is None or len(pending) != 1 or pending[0] < max(lane.t_ns for lane in lanes):
        return None
    return state.device_place


def _has_passed(rank_calls: RankCalls, call: CallRef) -> bool:
    """Whether the device of a rank has completed the collective that it has reached last: a mark
    after it is known to be reached."""
    state = rank_calls.rank_summary.device
    if state is None or rank_calls.is_async(call.key, call.number) is not False:
        return False
    last = state.device_place.collective
    return last is None or last.state is CallState.DONE


def _usual_delay_s(rank_calls: RankCalls) -> float:
    """How long after their issue the device reached 9 of 10 collectives."""
    delays = [
        calls.device_delays_ns(calls.first, calls.first + len(calls))
        for calls in rank_calls.calls.values()
        if calls.has_device_delays
    ]
    reached = [part[part >= 0] for part in delays]
    whole = np.concatenate(reached) if reached else np.empty(0)
    return float(np.quantile(whole, 0.9)) / 1e9 if len(whole) else 0.0


def _call(rank_calls: RankCalls, record: int) -> CallRef | None:
    """The collective with a record number."""
    call = rank_calls.call_of_record(record)
    return None if call is None else CallRef(*call, rank_calls.rank)
