"""Rule: a device has not reached a collective that its CPU issued long ago.

On a GPU the CPU issues work and continues. A device is stalled if it has not reached what its CPU
issued long ago: a collective, a step or a module. It only waits if the last collective that it
reached is held up by another rank, whose device has not reached it or whose process cannot run. The
CPUs may all have issued the same calls. The culprit is the rank whose device does not progress and
waits for no other rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from torchwhere.core.grouping import grouped
from torchwhere.core.place import Certainty, Place
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.calls.rank_calls import RankCalls
from torchwhere.diagnose.doctor.context import Context, Timing
from torchwhere.diagnose.doctor.deadlocks import Blame, blame
from torchwhere.diagnose.doctor.finding import CallRef, Cause, Finding, exact_if
from torchwhere.diagnose.doctor.rules.missing import MissingRanks
from torchwhere.diagnose.doctor.verdict import VerdictKind
from torchwhere.diagnose.doctor.waits import Wait, cycle

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


@dataclass(frozen=True, slots=True)
class BlockedDevices(Cause):
    """Devices that do not progress, and the devices that wait for them."""

    blocked: tuple[StalledDevice, ...]
    waiting: tuple[StalledDevice, ...]


@dataclass(frozen=True, slots=True)
class DevicesBlockedTogether(Cause):
    """All devices are blocked after the same collective, which all have reached."""

    devices: tuple[StalledDevice, ...]


@dataclass(frozen=True, slots=True)
class DeviceDeadlock(Cause):
    """Devices that wait for each other, in groups by the collective that they wait in."""

    cohorts: tuple[tuple[StalledDevice, ...], ...]  # the largest first
    blame: Blame


def find_device_hang(context: Context) -> Finding | None:
    stalls = DeviceStalls(context.job_calls, context.timing)
    if not stalls.by_rank:
        return None
    blocked, waiting = stalls.blocked(), stalls.waiting()
    if not blocked:
        return _unable_to_run(context, waiting) or _deadlock(context, stalls)
    if not waiting and len(blocked) == len(context.by_rank) > 1:
        return _together(context, blocked)
    first = max(blocked, key=lambda device: device.lasted_s)
    return Finding(
        VerdictKind.MISSING,
        BlockedDevices(tuple(blocked), tuple(waiting)),
        culprits=tuple(device.rank for device in blocked),
        call=first.next,
        certainty=exact_if(not context.no_data),
        stalled_s=first.lasted_s,
        facts=_facts(blocked, waiting),
        blocked=frozenset(device.rank for device in waiting),
    )


def _together(context: Context, devices: list[StalledDevice]) -> Finding | None:
    """Devices that are all stalled at the same point.

    None if the job was ended before that had lasted as long as a hang: it may have been a long
    kernel of all ranks.
    """
    if any(device.lasted_s < context.timing.stall_s for device in devices):
        return None
    return Finding(
        VerdictKind.TOGETHER,
        DevicesBlockedTogether(tuple(devices)),
        call=devices[0].reached[0] if devices[0].reached else devices[0].next,
        certainty=exact_if(not context.no_data),
        stalled_s=min(device.lasted_s for device in devices),
        facts=_facts(devices, []),
        blocked=frozenset(device.rank for device in devices),
    )


def _unable_to_run(context: Context, waiting: list[StalledDevice]) -> Finding | None:
    """Devices that wait for ranks whose processes are stopped, or had no heartbeat."""
    ranks = {rank for device in waiting for rank in device.waits_for}
    ranks -= {device.rank for device in waiting}
    if not ranks or not ranks <= context.timing.unable_to_run:
        return None
    first = max(
        (device for device in waiting if not ranks.isdisjoint(device.waits_for)),
        key=lambda device: device.lasted_s,
    )
    culprits = tuple(sorted(ranks))
    return Finding(
        VerdictKind.MISSING,
        MissingRanks(culprits, _wait(first)),
        culprits=culprits,
        call=_waits_in(first),
        certainty=exact_if(not context.no_data),
        stalled_s=first.lasted_s,
        facts={"waiting_devices": [device.rank for device in waiting]},
        blocked=frozenset(device.rank for device in waiting),
    )


def _deadlock(context: Context, stalls: DeviceStalls) -> Finding | None:
    """Devices that wait for each other: groups were used in different orders.

    None if one of them waits for a rank whose device is not stalled: that rank is late on the CPU.
    """
    waiting = stalls.waiting()
    ranks = {device.rank for device in waiting}
    if not all(ranks.issuperset(device.waits_for) for device in waiting):
        return None
    cohorts = grouped((_waits_in(device)[:2], device) for device in waiting)
    ordered = sorted(cohorts.values(), key=len, reverse=True)
    if len(ordered) < 2:
        return None
    blamed = _blame(context, stalls)
    culprits = blamed.culprits or tuple(sorted(ranks))
    return Finding(
        VerdictKind.DEADLOCK,
        DeviceDeadlock(tuple(map(tuple, ordered)), blamed),
        culprits=culprits,
        call=_waits_in(stalls.by_rank[culprits[0]]),
        certainty=Certainty.INFERRED if context.no_data else blamed.certainty,
        stalled_s=min(device.lasted_s for device in waiting),
        facts=_facts([], waiting),
        blocked=frozenset(ranks),
    )


def _blame(context: Context, stalls: DeviceStalls) -> Blame:
    """The ranks that deviated from their call pattern before the devices came to wait."""
    waits = {device.rank: _wait(device) for device in stalls.waiting()}
    circle = cycle(waits)
    if not circle:
        return Blame()
    return blame(stalls.reached_calls(), circle, waits, unread=context.incomplete)


def _wait(device: StalledDevice) -> Wait:
    call = _waits_in(device)
    return Wait(device.rank, call.key, call.number, device.waits_for, ())


def _waits_in(device: StalledDevice) -> CallRef:
    """The call that a waiting device waits in."""
    assert device.waits_in is not None
    return device.waits_in


def _facts(blocked: list[StalledDevice], waiting: list[StalledDevice]) -> dict[str, object]:
    return {
        "on_device": True,
        "blocked_devices": [device.rank for device in blocked],
        "waiting_devices": [device.rank for device in waiting],
    }


# -- stalled devices -------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceStalls:
    """The stalled devices of a job."""

    job_calls: JobCalls
    timing: Timing

    @cached_property
    def by_rank(self) -> dict[int, StalledDevice]:
        stalled = map(self._stalled, self.job_calls.by_rank.values())
        return {device.rank: device for device in stalled if device is not None}

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
        held_up = (self._first_open(call, ranks) for call, ranks in holding_up.items() if ranks)
        return StalledDevice(
            rank_calls.rank,
            lasted_s,
            state.place,
            reached,
            first,
            next(held_up, None),
            tuple(sorted(set().union(*holding_up.values()))),
        )

    def reached_calls(self) -> JobCalls:
        """The calls of the job as its devices came to them: without those that a stalled device has
        not reached."""
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

    def _first_open(self, call: CallRef, ranks: Sequence[int]) -> CallRef:
        """The first collective in the stream of a call that these ranks hold up.

        An asynchronous collective does not block the stream that issues it, so the device may have
        reached several. They complete in order.
        """
        by_rank = self.job_calls.by_rank
        number = min(_first_unreached(by_rank[rank], call.key) for rank in ranks)
        is_known = by_rank[call.rank].calls[call.key].at(number) is not None
        return call._replace(number=number) if is_known and number < call.number else call


def has_reached(rank_calls: RankCalls, key: StreamKey, number: int) -> bool:
    """Whether a rank has issued a collective, and its device has reached it, as far as known."""
    if rank_calls.counts.get(key, 0) <= number:
        return False
    state, calls = rank_calls.rank_summary.device, rank_calls.calls.get(key)
    if state is None or not state.unreached or calls is None or calls.at(number) is None:
        return True
    record = calls.record(number)
    return record not in state.unreached and record <= max(state.unreached)


def _first_unreached(rank_calls: RankCalls, key: StreamKey) -> int:
    """The number of the first call of a stream that a rank has not reached, as far as known."""
    state = rank_calls.rank_summary.device
    calls = map(rank_calls.call_of_record, () if state is None else state.unreached)
    numbers = [call[1] for call in calls if call is not None and call[0] == key]
    return min(numbers, default=rank_calls.counts.get(key, 0))


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
