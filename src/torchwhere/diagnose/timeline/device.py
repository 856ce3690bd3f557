"""What the device of one rank did, as slices: its steps and its collectives.

A collective lasts from when the device reached it until it was done. If its end was not recorded,
it lasts at least until the last device of its group reached it; such an end is marked as estimated.
Between collectives the device computes or has nothing to do: that is not recorded, and the track
is empty there. Collectives inside a CUDA graph are left out: when the device reached them within
the replay is not known.

A collective that was not done when the box was read lasts until the rank was last known alive, and
names the devices that have not reached it. A device that has not reached a collective which others
have reached shows that as a slice too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from functools import partial
from typing import NamedTuple

import numpy as np

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.device import device_state
from torchwhere.core.arrays import Bools, Times
from torchwhere.core.events import Kind
from torchwhere.diagnose.clocks.arrivals import Arrivals, arrivals
from torchwhere.diagnose.clocks.call_arrivals import JobArrivals
from torchwhere.diagnose.clocks.clocks import Clocks
from torchwhere.diagnose.device_time.calls import (
    UNKNOWN_NS,
    DeviceCalls,
    device_arrivals,
    device_calls,
)
from torchwhere.diagnose.device_time.steps import DeviceSteps, device_steps
from torchwhere.diagnose.timeline.slices import ISSUE_NS, Mark, TimeWindow


class DeviceTrack(IntEnum):
    """The tracks of a device."""

    STEPS = 0
    STREAM = 1  # collectives on the stream of the job
    OTHERS = 2  # collectives that are asynchronous, or on a stream of their own


class DeviceSlice(NamedTuple):
    """A collective on a device."""

    begin_ns: int
    end_ns: int
    at: int  # index of its record
    track: DeviceTrack
    lane: int
    marks: int
    wait_ns: int  # for the last device; UNKNOWN_NS: unknown
    transfer_ns: int  # UNKNOWN_NS: unknown
    last_rank: int
    absent: tuple[int, ...] = ()  # the ranks whose devices have not reached it, if it is unfinished


class NotReached(NamedTuple):
    """A collective that other devices have reached, and this one has not."""

    at: int  # index of its record
    number: int
    begin_ns: int  # when the first of the others reached it
    end_ns: int = 0
    lane: int = 0


class DeviceTimeline(NamedTuple):
    """The timeline of the device of one rank. Slices are ordered by begin."""

    slices: tuple[DeviceSlice, ...]
    steps: DeviceSteps | None
    not_reached: NotReached | None = None


def device_timeline(
    box: Box,
    *,
    clocks: Clocks,
    job_arrivals: JobArrivals,
    within: TimeWindow,
    issued_ns: Times,
    end_ns: int,
) -> DeviceTimeline | None:
    """What the device did of that which its CPU issued within a window; None if nothing is known.

    Args:
        box: The box of the rank.
        clocks: The clocks of the job.
        job_arrivals: When the devices of all ranks reached their collectives.
        within: The window.
        issued_ns: The aligned time of each record of the box.
        end_ns: The end of the trace: collectives that are not done last until then, or until the
            rank was last known alive.
    """
    own = device_arrivals(box)
    if own is None:
        return None
    calls = device_calls(box, own, clocks=clocks, job_arrivals=job_arrivals)
    is_within = (issued_ns >= within.begin_ns) & (issued_ns < within.end_ns)
    is_shown = is_within[calls.at] & ~calls.is_replayed
    steps = device_steps(box, calls, clocks=clocks, most=None)
    if steps is not None and within.steps is not None:
        # by number: a step may have no collective, or only collectives inside a CUDA graph
        is_wanted = (steps.steps >= within.steps.start) & (steps.steps < within.steps.stop)
        steps = steps.chosen(is_wanted)
    stop_ns = within.alive_ns or end_ns
    absent = partial(_absent, own, job_arrivals)
    slices = tuple(_slices(box, calls, is_shown, stop_ns, absent))
    first = _first_unreached(box, job_arrivals, is_within)
    return DeviceTimeline(slices, steps, _in_free_lane(first, slices, stop_ns) if first else None)


def _in_free_lane(first: NotReached, slices: Sequence[DeviceSlice], stop_ns: int) -> NotReached:
    """Draws a collective that the device has not reached until the end, beside all others."""
    lanes = [piece for piece in slices if piece.track == DeviceTrack.STREAM]
    ends = [0] * (1 + max((piece.lane for piece in lanes), default=-1))
    for piece in lanes:
        ends[piece.lane] = max(ends[piece.lane], piece.end_ns)
    end_ns = max(stop_ns, first.begin_ns + ISSUE_NS)
    return first._replace(end_ns=end_ns, lane=_free_lane(ends, first.begin_ns, end_ns))


def _first_unreached(box: Box, job_arrivals: JobArrivals, is_within: Bools) -> NotReached | None:
    """The first collective that this device has not reached and another one has."""
    state = device_state(box)
    if state is None or not state.unreached or (box.records["kind"] == int(Kind.END)).any():
        return None
    is_unreached = is_within & np.isin(box.records["number"], state.unreached)
    found = []
    for stream, calls in arrivals(box).streams.items():
        own = calls.chosen(is_unreached[calls.at])
        columns = own.at.tolist(), own.numbers.tolist(), job_arrivals.of(stream, own.numbers)
        found += [
            NotReached(at, number, begin_ns=reached.first_ns)
            for at, number, reached in zip(*columns, strict=True)
            if reached is not None
        ]
    return min(found, default=None)


def _absent(own: Arrivals, job_arrivals: JobArrivals, at: int) -> tuple[int, ...]:
    """The ranks whose devices have not reached the collective of a record."""
    for stream, calls in own.streams.items():
        for row in np.flatnonzero(calls.at == at).tolist():
            return tuple(job_arrivals.absent(stream, int(calls.numbers[row])))
    return ()


def _slices(
    box: Box,
    calls: DeviceCalls,
    is_shown: Bools,
    end_ns: int,
    absent: Callable[[int], tuple[int, ...]],
) -> Iterator[DeviceSlice]:
    is_pending = _are_pending(box, calls)
    is_exact = calls.done_ns >= 0
    ends = np.where(is_pending, np.maximum(calls.reached_ns, end_ns), calls.end_ns)
    ends = np.where(is_exact, ends, np.maximum(ends, calls.reached_ns + ISSUE_NS))
    marks = np.where(is_pending, Mark.UNFINISHED, np.where(is_exact, Mark.NONE, Mark.ESTIMATED))
    tracks = np.where(calls.is_blocking, DeviceTrack.STREAM, DeviceTrack.OTHERS)
    waits_for = {at: absent(at) for at in calls.at[is_pending & calls.waits_for_all].tolist()}
    rows = np.flatnonzero(is_shown)
    rows = rows[np.lexsort((-ends[rows], calls.reached_ns[rows]))]
    columns = (
        calls.reached_ns,
        ends,
        calls.at,
        tracks,
        marks,
        calls.wait_ns,
        calls.transfer_ns,
        calls.last_rank,
    )
    lanes: dict[int, list[int]] = {}
    for begin, end, at, track, mark, wait, transfer, last in zip(
        *(column[rows].tolist() for column in columns), strict=True
    ):
        lane = _free_lane(lanes.setdefault(track, []), begin, end)
        awaited = waits_for.get(at, ())
        yield DeviceSlice(
            begin, end, at, DeviceTrack(track), lane, mark, wait, transfer, last, awaited
        )


def _free_lane(ends: list[int], begin_ns: int, end_ns: int) -> int:
    """The first lane that is free at the start of a slice. `ends` has the end of each lane."""
    for lane, busy_until in enumerate(ends):
        if busy_until <= begin_ns:
            ends[lane] = end_ns
            return lane
    ends.append(end_ns)
    return len(ends) - 1


def _are_pending(box: Box, calls: DeviceCalls) -> Bools:
    """The collectives that the device has reached and that were not done when the box was read.

    The end of a collective may only not have been recorded. So the last collectives are pending,
    those after the last one that is known to have ended. A collective that blocks the stream has
    ended if the device has reached another one after it.
    """
    has_ended: Bools = calls.has_ended | (calls.last_ns != UNKNOWN_NS)
    has_ended[:-1] |= calls.is_blocking[:-1]
    is_pending: Bools = ~has_ended
    if has_ended.any():
        is_pending[: np.flatnonzero(has_ended)[-1]] = False
    if (box.records["kind"] == int(Kind.END)).any():
        is_pending[:] = False
    return is_pending
