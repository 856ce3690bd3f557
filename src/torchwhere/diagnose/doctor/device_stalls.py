"""Finds ranks whose device does not progress, and which of them only wait for another rank.

On a GPU the CPU issues work and continues. A device is stalled if it has not reached what its CPU
issued long ago: a collective, a step or a module. It only waits if a collective that it reached is
held up by another rank, whose device has not reached it or whose process cannot run. A stalled
device that waits for no rank is blocked by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchwhere.blackbox.device import device_lanes
from torchwhere.core.device_place import DevicePlace
from torchwhere.core.place import Place
from torchwhere.core.stall import ENDED_AGAIN, wait_limit_s
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.rank_calls import RankCalls
from torchwhere.diagnose.doctor.finding import CallRef
from torchwhere.diagnose.doctor.reached import (
    first_unreached,
    has_passed,
    has_reached,
    last_reached,
)
from torchwhere.diagnose.doctor.timing import Timing

_ASKED = 16  # of the longest earlier times, for how long another rank was late
_NEARLY = 0.5  # of the time after which a device is stalled


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
    may_wait_in: CallRef | None = None  # the first collective that they may hold up


@dataclass(frozen=True)
class DeviceStalls:
    """The stalled devices of a job."""

    job_calls: JobCalls
    timing: Timing

    @cached_property
    def by_rank(self) -> dict[int, StalledDevice]:
        """The devices that have not progressed for too long."""
        devices = {rank: device for rank, device in self._behind.items() if self._is_long(device)}
        blocked = {rank for rank, device in devices.items() if not device.waits_for}
        behind = {rank: self._behind_another(devices[rank], blocked) for rank in blocked}
        # If each of them has reached something that another has not, this explains nothing.
        is_explained = any(not device.waits_for for device in behind.values())
        return devices | behind if is_explained else devices

    @cached_property
    def _behind(self) -> dict[int, StalledDevice]:
        """All devices that have not reached what their CPUs have issued; empty if each of them has
        progressed lately."""
        pending = (_pending(rank_calls) for rank_calls in self.job_calls.by_rank.values())
        known = {device.rank: device for device in pending if device is not None}
        if not any(map(self._is_long, known.values())):
            return {}
        return {rank: self._with_waits(device) for rank, device in known.items()}

    def blocked(self) -> list[StalledDevice]:
        """The devices that wait for no other rank."""
        return [device for device in self.by_rank.values() if not device.waits_for]

    def waiting(self) -> list[StalledDevice]:
        return [device for device in self.by_rank.values() if device.waits_for]

    def may_be_usual(self, blocked: AbstractSet[int]) -> bool:
        """Whether these devices may be in a long kernel of a job that progresses: others have
        hardly begun to wait for them, or have been in a kernel for nearly as long."""
        others = [
            self.by_rank.get(rank, device)
            for rank, device in self._behind.items()
            if rank not in blocked
        ]
        long = [device for device in others if self._is_long(device, share=_NEARLY)]
        if any(not blocked.isdisjoint(device.waits_for) for device in others):
            return not any(device.waits_for for device in long)
        return any(not device.waits_for and not device.may_wait_for for device in long)

    def _with_waits(self, device: StalledDevice) -> StalledDevice:
        """A device, with the collectives and the ranks that it waits for."""
        rank_calls = self.job_calls.by_rank[device.rank]
        holding_up = {call: tuple(self._holding_up(call)) for call in device.reached}
        held_up = [self._first_open(call, ranks) for call, ranks in holding_up.items() if ranks]
        unseen = {call: self._unseen(rank_calls, call) for call in device.reached}
        may_be_held_up = [call for call, ranks in unseen.items() if ranks]
        return device._replace(
            waits_in=_first(rank_calls, held_up),
            waits_for=tuple(sorted(set().union(*holding_up.values()))),
            may_wait_for=tuple(sorted(set().union(*unseen.values()))),
            may_wait_in=_first(rank_calls, may_be_held_up),
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

    def _is_long(self, device: StalledDevice, *, share: float = 1.0) -> bool:
        """Whether a device has not progressed for longer than it may, or than a share of that.

        Kernels may be long: a device may take longer to reach a call than `stall_s`, if it has
        taken as long at the same call site before.
        """
        timing, following = self.timing, device.next
        least_s = timing.patience_s(device.rank, following.key if following is not None else None)
        if device.lasted_s < share * least_s or following is None:
            return device.lasted_s >= share * least_s
        earlier_s = self._longest_before_s(following)
        if timing.is_over:
            return device.lasted_s >= share * max(least_s, ENDED_AGAIN * earlier_s)
        return device.lasted_s >= share * wait_limit_s(least_s, earlier_s=earlier_s, is_pause=False)

    def _longest_before_s(self, call: CallRef) -> float:
        """The longest time that the device took to reach an earlier call with the same call site:
        since its issue, or since the end of the call before it, whichever came later."""
        rank_calls = self.job_calls.by_rank[call.rank]
        own = rank_calls.calls[call.key]
        at = own.at(call.number)
        if not at or not own.has_device_delays:
            return 0.0
        alike = np.flatnonzero(own.codes()[:at] == own.codes()[at])
        records, reached_ns = _reached_times(rank_calls)
        latest_ns = np.maximum.accumulate(np.concatenate([[0], reached_ns]))
        rows = np.searchsorted(records, own.records()[alike])
        began_ns = np.maximum(own.times_ns()[alike], latest_ns[rows])
        took_ns = np.where(reached_ns[rows] > 0, reached_ns[rows] - began_ns, 0)
        longest_ns = 0
        for item in np.argsort(-took_ns, kind="stable")[:_ASKED].tolist():
            row = int(rows[item])
            ended_ns = self._ended_ns(rank_calls, int(records[row - 1])) if row else 0
            longest_ns = max(longest_ns, min(int(took_ns[item]), int(reached_ns[row]) - ended_ns))
        return longest_ns / 1e9

    def _ended_ns(self, rank_calls: RankCalls, record: int) -> int:
        """When the last member came to a call; 0 if that is not known. Until then the device only
        waited."""
        call = rank_calls.call_of_record(record)
        if call is None:
            return 0
        by_rank = self.job_calls.by_rank
        members = (rank for rank in self.job_calls.members(call[0]) if rank in by_rank)
        return max((by_rank[rank].reached_ns(*call) for rank in members), default=0)

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
        if not unseen or has_passed(rank_calls, call.key, call.number):
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


def _first(rank_calls: RankCalls, calls: Sequence[CallRef]) -> CallRef | None:
    return min(calls, key=lambda call: rank_calls.order(*call[:2]), default=None)


def _pending(rank_calls: RankCalls) -> StalledDevice | None:
    """A device that has not reached what its CPU has issued; None if it has reached everything, or
    if the record of the first collective that it has not reached is lost."""
    state = rank_calls.rank_summary.device
    if state is None or not state.device_place.pending:
        return None
    first = _call(rank_calls, state.unreached[0]) if state.unreached else None
    if first is None and state.unreached:
        return None  # the time of its issue is lost too
    looked_ns = state.device_place.looked_ns or rank_calls.box_summary.beat_ns
    # Before it was issued, the device could not reach it. The time of a place is not recorded, but
    # the CPU issued it before its last record.
    issued_ns = rank_calls.box_summary.last_ns
    if first is not None:
        issued_ns = rank_calls.issued_ns(first.key, first.number)
    calls = (_call(rank_calls, record) for record in state.reached)
    return StalledDevice(
        rank_calls.rank,
        lasted_s=(looked_ns - max(state.device_place.t_ns, issued_ns)) / 1e9,
        place=state.place,
        reached=tuple(call for call in calls if call is not None),
        next=first,
        waits_in=None,
        waits_for=(),
    )


def _reached_times(rank_calls: RankCalls) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """The records of all calls on the device, in order, and when it reached them; 0: unknown."""
    streams = [calls for calls in rank_calls.calls.values() if calls.has_device_delays]
    records = np.concatenate([calls.records() for calls in streams])
    issued_ns = np.concatenate([calls.times_ns() for calls in streams])
    delays_ns = np.concatenate(
        [calls.device_delays_ns(calls.first, calls.first + len(calls)) for calls in streams]
    )
    reached_ns = np.where(delays_ns >= 0, issued_ns + delays_ns, 0).astype(np.int64)
    order = np.argsort(records)
    return records[order], reached_ns[order]


def _call(rank_calls: RankCalls, record: int) -> CallRef | None:
    """The collective with a record number."""
    call = rank_calls.call_of_record(record)
    return None if call is None else CallRef(*call, rank_calls.rank)
