"""The time of a device in each step of one rank: computing, in collectives, and waiting.

`device_steps` takes a box and its `DeviceCalls`, and gives `DeviceSteps`: one item a column for
each step. Four parts add up to the time of a step:

- *exposed*: a collective blocked the stream of the job, or the stream waited for one that is
  asynchronous or on a separate stream, so no kernel of the job ran on it.
- *hidden*: only such other collectives were in flight, and the stream of the job continued: it came
  to its next mark later, for example to the wait for them.
- *unclear*: such a collective was in flight, and it is not known whether the stream continued or
  waited for the collective. A replay of a CUDA graph that contains a collective counts as a whole.
- *compute*: no collective was in flight. The device computed, copied, or had nothing to do.

If the end of a collective is not known, its time counts until the last device of its group reached
it, which is the earliest end that it can have. With such collectives *compute* is an upper bound.
`open_calls` counts those of which it is not even known that they have ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.device import device_times
from torchwhere.blackbox.file_format import NO_STEP
from torchwhere.core.arrays import Bools, Times
from torchwhere.core.events import Kind
from torchwhere.core.results import plain_fields
from torchwhere.diagnose.clocks.arrivals import as_wall_ns
from torchwhere.diagnose.clocks.clocks import Clocks
from torchwhere.diagnose.clocks.host_clocks import HostClocks
from torchwhere.diagnose.device_time.calls import NO_RANK, DeviceCalls

MOST_STEPS = 100
Intervals = tuple[Times, Times]  # their begins and ends
PARTS = ("compute", "hidden", "unclear", "exposed")


@dataclass(frozen=True, slots=True)
class DeviceSteps:
    """The last steps of one rank on its device. Each column has one item for each step.

    Attributes:
        steps: The numbers of the steps.
        begin_ns: When the device began each step, on the aligned clock.
        device_ns: The time from the start of a step to the start of the next one.
        compute_ns: The part of it without a collective in flight.
        exposed_ns: The part in which a collective blocked the stream of the job, or the stream
            waited for one.
        hidden_ns: The part in which only other collectives were in flight and the stream continued.
        unclear_ns: The same, but the stream may have waited for them.
        waited_ns: The time in which a collective waited for the device of another rank.
        waited_for: The rank of the device that it waited for longest; NO_RANK without a wait.
        open_calls: How many collectives have no recorded end.
    """

    steps: Times
    begin_ns: Times
    device_ns: Times
    compute_ns: Times
    exposed_ns: Times
    hidden_ns: Times
    unclear_ns: Times
    waited_ns: Times
    waited_for: Times
    open_calls: Times

    def __len__(self) -> int:
        return len(self.steps)

    def chosen(self, is_chosen: Bools) -> DeviceSteps:
        """Some of the steps."""
        return DeviceSteps(*(getattr(self, name)[is_chosen] for name in self.__slots__))

    def to_dict(self) -> dict[str, Any]:
        parts = (f"{part}_ns" for part in PARTS)
        names = ("steps", "device_ns", *parts, "waited_ns", "open_calls")
        waited_for = [rank if rank != NO_RANK else None for rank in self.waited_for.tolist()]
        return plain_fields(self, *names) | {"waited_for": waited_for}


def device_steps(
    box: Box, calls: DeviceCalls, *, clocks: Clocks | HostClocks, most: int | None = MOST_STEPS
) -> DeviceSteps | None:
    """The last complete steps on the device of a rank, `most` of them; None if there is none.

    A step begins on the device where its mark is. Without such marks, it begins at its first
    collective.
    """
    numbers, begins = _begins(box, calls, clocks)
    is_complete = np.diff(numbers) == 1
    if most is not None:
        is_complete[:-most] = False
    if not is_complete.any():
        return None
    edges = begins[:-1][is_complete], begins[1:][is_complete]
    busy = calls.reached_ns, calls.end_ns
    blocked = _blocked(calls)
    unhidden = _together(blocked, _unhidden(box, calls, clocks))
    waits = calls.wait_ns.clip(min=0)
    device_ns, busy_ns = edges[1] - edges[0], _Cover(*busy).within(*edges)
    exposed_ns, unhidden_ns = (_common(own, busy, edges) for own in (blocked, unhidden))
    step_of = np.searchsorted(edges[0], calls.reached_ns, side="right") - 1
    is_inside = (step_of >= 0) & (calls.reached_ns < edges[1][step_of])
    return DeviceSteps(
        steps=numbers[:-1][is_complete],
        begin_ns=edges[0],
        device_ns=device_ns,
        compute_ns=device_ns - busy_ns,
        exposed_ns=exposed_ns,
        hidden_ns=busy_ns - unhidden_ns,
        unclear_ns=unhidden_ns - exposed_ns,
        waited_ns=_Cover(calls.reached_ns, calls.reached_ns + waits).within(*edges),
        waited_for=_waited_for(calls, waits, np.where(is_inside, step_of, -1), len(device_ns)),
        open_calls=np.bincount(
            step_of[is_inside & ~calls.has_ended],
            minlength=len(device_ns),
        ).astype(np.int64),
    )


def _step_marks(box: Box, clocks: Clocks | HostClocks) -> tuple[Times, Times]:
    """The records of the steps that have a mark on the device, and when the device reached it."""
    reached = device_times(box)[0]
    at = np.flatnonzero((box.records["kind"] == int(Kind.STEP_BEGIN)) & (reached > 0))
    return at, clocks.aligned_ns(box.rank, as_wall_ns(box, reached[at]))


def _begins(box: Box, calls: DeviceCalls, clocks: Clocks | HostClocks) -> tuple[Times, Times]:
    """The numbers of the steps that the device has begun, and when it began them."""
    marks, times = _step_marks(box, clocks)
    if not len(marks):
        marks, times = calls.at, calls.reached_ns
    steps = box.records["step"][marks].astype(np.int64)
    has_step = steps != NO_STEP
    steps, times = steps[has_step], times[has_step]
    order = np.lexsort((times, steps))
    numbers, first = np.unique(steps[order], return_index=True)
    begins = times[order][first]
    # A device may reach a collective of a step before one of an earlier step, on another stream.
    return numbers, np.maximum.accumulate(begins) if len(begins) else begins


def _blocked(calls: DeviceCalls) -> Intervals:
    """When the stream of the job ran no kernel: a collective blocked it, or it waited for one.

    A wait may begin before the device has reached the collective: its stream may still be in an
    earlier one.
    """
    has_wait = ~calls.is_blocking & (calls.waited_ns >= 0) & (calls.done_ns >= 0)
    begins = np.where(has_wait, np.minimum(calls.waited_ns, calls.end_ns), calls.reached_ns)
    is_known = calls.is_blocking | has_wait
    return begins[is_known], calls.end_ns[is_known]


def _unhidden(box: Box, calls: DeviceCalls, clocks: Clocks | HostClocks) -> Intervals:
    """The start and end of the time in which the stream may have waited for each collective.

    If a wait for it is known, that is the time. Otherwise: the stream reaches its next mark only
    after it has waited. So it waited for a collective at most from the last mark before the end of
    the collective until that end. If the end is not known, the stream may have waited all the time:
    the clock of another device is not exact enough.
    """
    reached, done = calls.reached_ns[calls.is_on_stream], calls.done_ns[calls.is_blocking]
    waited = calls.waited_ns[calls.waited_ns >= 0]
    moments = np.sort(np.concatenate([reached, done, waited, _step_marks(box, clocks)[1]]))
    before = np.searchsorted(moments, calls.end_ns) - 1
    is_resolved = ~calls.is_blocking & (calls.done_ns >= 0) & (before >= 0)
    begins = calls.reached_ns.copy()
    begins[is_resolved] = np.maximum(moments[before[is_resolved]], begins[is_resolved])
    has_wait = ~calls.is_blocking & (calls.waited_ns >= 0)
    waits = np.clip(calls.waited_ns, calls.reached_ns, calls.end_ns)
    begins[has_wait] = waits[has_wait]
    return begins, calls.end_ns


def _waited_for(calls: DeviceCalls, waits: Times, step_of: Times, steps: int) -> Times:
    """For each step the rank whose device the collectives waited for longest."""
    waited_for = np.full(steps, NO_RANK, np.int64)
    is_waiting = (waits > 0) & (step_of >= 0)
    pairs = np.stack([step_of[is_waiting], calls.last_rank[is_waiting]], axis=1)
    keys, index = np.unique(pairs, axis=0, return_inverse=True)
    sums = np.bincount(index.reshape(-1), weights=waits[is_waiting], minlength=len(keys))
    order = np.argsort(sums, kind="stable")
    waited_for[keys[order, 0]] = keys[order, 1]  # the largest is written last
    return waited_for


def _common(these: Intervals, others: Intervals, edges: Intervals) -> Times:
    """The time in each window that some intervals and others cover both."""
    own_ns, other_ns, either_ns = (
        _Cover(*intervals).within(*edges) for intervals in (these, others, _together(these, others))
    )
    return own_ns + other_ns - either_ns


def _together(these: Intervals, others: Intervals) -> Intervals:
    begins, ends = zip(these, others, strict=True)
    return np.concatenate(begins), np.concatenate(ends)


class _Cover:
    """The time that some intervals cover together."""

    def __init__(self, begins: Times, ends: Times) -> None:
        order = np.argsort(begins, kind="stable")
        begins, ends = begins[order], ends[order]
        reach = np.maximum.accumulate(ends) if len(ends) else ends
        is_first = np.ones(len(begins), np.bool_)
        is_first[1:] = begins[1:] > reach[:-1]
        self._begins = begins[is_first]
        self._ends = reach[np.append(is_first[1:], len(reach) > 0)[: len(reach)]]
        self._before = np.append(0, np.cumsum(self._ends - self._begins))

    def within(self, begins: Times, ends: Times) -> Times:
        """The covered time in each window."""
        return self._until(ends) - self._until(begins)

    def _until(self, moments: Times) -> Times:
        if not len(self._begins):
            return np.zeros(len(moments), np.int64)
        at = np.searchsorted(self._begins, moments, side="right") - 1
        partly = np.minimum(moments, self._ends[at]) - self._begins[at]
        covered: Times = np.where(at < 0, 0, self._before[at] + partly)
        return covered
