"""Finds ranks whose device does not progress, and which of them only wait for another device.

On a GPU the CPU issues work and goes on. A device is stalled if it has not reached what its CPU
issued long ago: a collective, a step or a module. It only waits if the last collective that it
reached is one that another rank has not reached. A stalled device that waits for no rank is blocked
by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from torchwhere.core.place import Place
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.calls.rank_calls import RankCalls
from torchwhere.diagnose.doctor.context import Timing
from torchwhere.diagnose.doctor.finding import CallRef

_UNUSUAL = 1.5  # times the delay that 9 of 10 collectives had


class StalledDevice(NamedTuple):
    """A rank whose device has not reached what its CPU has issued."""

    rank: int
    lasted_s: float
    place: Place | None  # the last mark that the device has reached
    reached: tuple[CallRef, ...]  # the last collectives that it has reached
    next: CallRef | None  # the first collective that it has not reached, if any was issued
    waits_for: tuple[int, ...]  # ranks that have not reached one of `reached`


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
        if state is None or not state.pending:
            return None
        first = _call(rank_calls, state.unreached[0]) if state.unreached else None
        if first is None and state.unreached:
            return None  # its record is lost, and so is the time of its issue
        looked_ns = state.looked_ns or rank_calls.box_summary.beat_ns
        # Before it was issued, the device could not reach it. The time of a place is not recorded,
        # but the CPU issued it before its last record.
        issued_ns = (
            rank_calls.box_summary.last_ns
            if first is None
            else rank_calls.issued_ns(first.key, first.number)
        )
        since_ns = max(state.reached_ns, issued_ns)
        lasted_s = (looked_ns - since_ns) / 1e9
        if lasted_s < self._patience_s(rank_calls, None if first is None else first.key):
            return None
        calls = (_call(rank_calls, record) for record in state.reached)
        reached = tuple(call for call in calls if call is not None)
        waits_for = {rank for call in reached for rank in self._behind(call)}
        return StalledDevice(
            rank_calls.rank, lasted_s, state.place, reached, first, tuple(sorted(waits_for))
        )

    def _patience_s(self, rank_calls: RankCalls, key: StreamKey | None) -> float:
        """How long a device may take to reach a collective. A job that is over cannot be given more
        time: its device may take longer than usual, because kernels may be long."""
        patience_s = self.timing.patience_s(rank_calls.rank, key)
        if not self.timing.is_over:
            return patience_s
        return max(patience_s, _UNUSUAL * _usual_delay_s(rank_calls))

    def _behind(self, call: CallRef) -> Iterator[int]:
        """The other members that have not reached a collective, on the CPU or on the device."""
        for rank in self.job_calls.members(call.key):
            if rank == call.rank or rank not in self.job_calls.by_rank:
                continue
            if not has_reached(self.job_calls.by_rank[rank], call.key, call.number):
                yield rank


def has_reached(rank_calls: RankCalls, key: StreamKey, number: int) -> bool:
    """Whether a rank has issued a collective, and its device has reached it, as far as known."""
    if rank_calls.counts.get(key, 0) <= number:
        return False
    state, calls = rank_calls.rank_summary.device, rank_calls.calls.get(key)
    if state is None or not state.unreached or calls is None or calls.at(number) is None:
        return True
    record = calls.record(number)
    return record not in state.unreached and record <= max(state.unreached)


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
