"""The collectives of one rank on its device: when the device reached each of them, when the last
device of the group did, and when it was done.

`device_arrivals` takes a box and gives the times when its device reached its collectives.
`JobArrivals` finds the last device of each collective from the arrivals of all ranks. With that,
`device_calls` gives the `DeviceCalls` of a rank, as columns in aligned time.

A box has the end of each collective that runs on the stream of the job. For one that is
asynchronous or runs on a separate stream, as in FSDP, it has when the stream of the job came to the
wait for it, and when it passed that wait. If the stream had to wait, it passed when the collective
was done. Otherwise only a lower bound of the end is known: most collectives end on no rank before
the last device has reached them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.device import (
    device_lane_numbers,
    device_lanes,
    device_times,
    device_waits,
    ends_are_bounds,
)
from torchwhere.blackbox.file_format import FLAG_ASYNC, FLAG_REPLAYED
from torchwhere.core.arrays import Bools, Times, Words
from torchwhere.core.events import Kind
from torchwhere.diagnose.clocks.arrivals import (
    NEVER,
    Arrivals,
    CallTimes,
    arrivals,
    as_wall_ns,
    waits_for_all,
)
from torchwhere.diagnose.clocks.call_arrivals import JobArrivals
from torchwhere.diagnose.clocks.clocks import Clocks
from torchwhere.diagnose.clocks.host_clocks import HostClocks

UNKNOWN_NS = -1
NO_RANK = -1
_DEFAULT_STREAM = 0
_NO_CALLS = tuple(np.empty(0, np.int64) for _ in range(5))
_SHORTEST_WAIT_NS = 20_000  # two marks with nothing between them take a few us


@dataclass(frozen=True, slots=True)
class DeviceCalls:
    """The collectives that the device of one rank has reached, in the order of their records.

    Each column has one item for each collective. Times are aligned, in ns.
    """

    rank: int
    at: Times  # index of the record
    reached_ns: Times
    done_ns: Times  # UNKNOWN_NS: not known exactly, or not done
    has_ended: Bools  # whether it was done before a time that is known
    waited_ns: Times  # when the stream of the job came to the wait for it; UNKNOWN_NS: unknown
    last_ns: Times  # when the last device of the group reached it; UNKNOWN_NS: not all have
    last_rank: Times  # the rank of that device; NO_RANK: unknown
    waits_for_all: Bools  # whether it ends on no rank before all devices have reached it
    is_on_stream: Bools  # whether it was issued on the stream of the job
    # whether it also runs there and blocks that stream: kernels after it start when it is done
    is_blocking: Bools
    # whether a replay of a CUDA graph issued it: then its times are those of the whole replay
    is_replayed: Bools

    def __len__(self) -> int:
        return len(self.at)

    @property
    def wait_ns(self) -> Times:
        """How long each collective waited for the last device; UNKNOWN_NS: unknown."""
        until = np.where(self.done_ns >= 0, np.minimum(self.last_ns, self.done_ns), self.last_ns)
        is_known = (self.last_ns >= 0) & ((self.done_ns >= 0) | self.waits_for_all)
        return np.where(is_known, np.maximum(until - self.reached_ns, 0), UNKNOWN_NS)

    @property
    def transfer_ns(self) -> Times:
        """How long each collective took after the last device reached it; UNKNOWN_NS: unknown."""
        is_known = (self.last_ns >= 0) & (self.done_ns >= 0)
        begin = np.maximum(self.last_ns, self.reached_ns)
        return np.where(is_known, np.maximum(self.done_ns - begin, 0), UNKNOWN_NS)

    @property
    def end_ns(self) -> Times:
        """The end of each collective, or the earliest end that it can have."""
        earliest = self.reached_ns + np.maximum(self.wait_ns, 0)
        return np.where(self.done_ns >= 0, np.maximum(self.done_ns, self.reached_ns), earliest)


def device_arrivals(box: Box) -> Arrivals | None:
    """When the device of a rank reached its collectives; None if nothing is known about it.

    These are `Arrivals` with the times of the device in place of those of the CPU: `issued_ns` is
    when the device reached a collective, `next_ns` when the collective was done.
    """
    reached, done = device_times(box)
    if not reached.any():
        return None
    by_cpu = arrivals(box)
    streams = {}
    for stream, calls in by_cpu.streams.items():
        is_reached = reached[calls.at] > 0
        if is_reached.any():
            streams[stream] = _on_device(box, calls.chosen(is_reached), reached, done)
    return replace(by_cpu, streams=streams)


def _on_device(box: Box, calls: CallTimes, reached: Words, done: Words) -> CallTimes:
    own_done = done[calls.at]
    return replace(
        calls,
        issued_ns=as_wall_ns(box, reached[calls.at]),
        next_ns=np.where(own_done > 0, as_wall_ns(box, own_done), NEVER),
    )


def device_calls(
    box: Box, own_arrivals: Arrivals, *, clocks: Clocks | HostClocks, job_arrivals: JobArrivals
) -> DeviceCalls:
    """The collectives of a rank, from its box, its arrivals and those of all ranks."""
    parts: list[tuple[Times, ...]] = [_NO_CALLS]
    for stream, calls in own_arrivals.streams.items():
        reached = clocks.aligned_ns(box.rank, calls.issued_ns)
        is_done = calls.next_ns != NEVER
        done = clocks.aligned_ns(box.rank, np.where(is_done, calls.next_ns, calls.issued_ns))
        last = job_arrivals.last(stream, calls.numbers)
        parts.append((calls.at, reached, np.where(is_done, done, UNKNOWN_NS), *last))
    at, reached, done, last_ns, last_rank = map(np.concatenate, zip(*parts, strict=True))
    order = np.argsort(at)
    at, done = at[order], done[order]
    lanes, flags = device_lane_numbers(box)[at], box.records["flags"][at]
    is_on_stream, is_async = on_job_stream(box, lanes), flags & FLAG_ASYNC != 0
    is_replayed = flags & FLAG_REPLAYED != 0
    waited, wait_lanes = (words[at] for words in device_waits(box))
    waited_ns = clocks.aligned_ns(box.rank, as_wall_ns(box, waited))
    waited_ns = np.where(waited > 0, waited_ns, UNKNOWN_NS)
    # in older files, a collective on another stream has its end beside the wait for it
    has_own_end = (waited == 0) | (~is_async & (wait_lanes != lanes))
    has_own_end &= ~ends_are_bounds(box)[at]
    is_known = has_own_end | _shows_end(waited_ns, done)
    return DeviceCalls(
        rank=box.rank,
        at=at,
        reached_ns=reached[order],
        done_ns=np.where(is_known, done, UNKNOWN_NS),
        has_ended=done >= 0,
        waited_ns=np.where(on_job_stream(box, wait_lanes), waited_ns, UNKNOWN_NS),
        last_ns=last_ns[order],
        last_rank=last_rank[order],
        waits_for_all=_wait_for_all(box, at),
        is_on_stream=is_on_stream,
        is_blocking=is_on_stream & ~is_async & ~is_replayed,
        is_replayed=is_replayed,
    )


def _shows_end(waited_ns: Times, passed_ns: Times) -> Bools:
    """Whether the time when a stream passed the wait for each collective is the end of the
    collective: the stream had to wait, and the collective is the last one of that wait."""
    is_last = np.zeros(len(passed_ns), np.bool_)
    is_last[len(passed_ns) - 1 - np.unique(passed_ns[::-1], return_index=True)[1]] = True
    return is_last & (passed_ns - waited_ns > _SHORTEST_WAIT_NS)


def _wait_for_all(box: Box, at: Times) -> Bools:
    subjects = box.records["subject"][at]
    waiting = [own for own in np.unique(subjects).tolist() if waits_for_all(box.value(own))]
    return np.isin(subjects, waiting)


def on_job_stream(box: Box, lanes: Times) -> Bools:
    """Whether marks on some lanes are on the stream of the job.

    That is the stream on which steps begin, else the default stream, or the only stream that has
    marks. FSDP issues its collectives on its own streams, and the job continues meanwhile.
    """
    if len(device_lanes(box)) == 1:
        return np.ones(len(lanes), np.bool_)
    return np.isin(lanes, _job_lanes(box))


def _job_lanes(box: Box) -> list[int]:
    """The lanes of the streams of the job; none if the rank uses several devices."""
    lanes = device_lanes(box)
    if len({lane.device for lane in lanes}) != 1:
        return []
    begins = device_lane_numbers(box)[box.records["kind"] == int(Kind.STEP_BEGIN)]
    own: list[int] = np.unique(begins[begins >= 0]).tolist()
    return own or [at for at, lane in enumerate(lanes) if lane.stream == _DEFAULT_STREAM]
