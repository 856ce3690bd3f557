"""Finds which calls the device of a rank has reached, of those that its CPU has issued."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator
from dataclasses import replace

import numpy as np

from torchwhere.blackbox.device import device_lane_numbers, device_lanes, device_times
from torchwhere.blackbox.replays import NO_ROW, replay_rows
from torchwhere.core.device_place import CallState
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.calls.rank_calls import RankCalls
from torchwhere.diagnose.doctor.finding import CallRef

_ASKED = 16  # ranks, for which calls their devices have completed


def has_reached(rank_calls: RankCalls, key: StreamKey, number: int) -> bool:
    """Whether a rank has issued a collective, and its device has reached it, as far as known."""
    if rank_calls.counts.get(key, 0) <= number:
        return False
    state, calls = rank_calls.rank_summary.device, rank_calls.calls.get(key)
    if state is None or not state.unreached or calls is None or calls.at(number) is None:
        return True
    record = calls.record(number)
    return record not in state.unreached and record <= max(state.unreached)


def is_only_issued(rank_calls: RankCalls, key: StreamKey, number: int) -> bool:
    """Whether the device of a rank has not reached a collective that its CPU has issued: the rank
    does not wait in it yet. False for a collective on the CPU."""
    state, calls = rank_calls.rank_summary.device, rank_calls.calls.get(key)
    if state is None or calls is None or has_reached(rank_calls, key, number):
        return False
    at = calls.at(number)
    return at is not None and bool(np.isin(calls.records()[: at + 1], state.unreached).any())


def has_passed(rank_calls: RankCalls, key: StreamKey, number: int) -> bool:
    """Whether the device of a rank is known to have completed a call: its end is known, or the
    stream of the call has reached a later mark.

    A later mark of another stream shows nothing: it need not wait for the call.
    """
    if rank_calls.is_async(key, number) is not False:
        return False
    box = rank_calls.box
    if box is None:  # only a snapshot: it has the last mark of all streams
        state = rank_calls.rank_summary.device
        last = None if state is None else state.device_place.collective
        if last is None or last.group != rank_calls.shared_ids.group(key).title:
            return False
        return (last.number, last.state) == (number, CallState.DONE)
    row = int(np.searchsorted(box.records["number"], rank_calls.order(key, number)))
    if row >= len(box.records):
        return False
    replay = int(replay_rows(box)[row])
    row = row if replay == NO_ROW else replay  # of a CUDA graph, only the replay has marks
    reached_ns, done_ns = (int(times[row]) for times in device_times(box))
    if done_ns or not reached_ns:
        return done_ns > 0
    lanes, lane = device_lanes(box), int(device_lane_numbers(box)[row])
    lane = 0 if len(lanes) == 1 else lane
    return 0 <= lane < len(lanes) and lanes[lane].t_ns > reached_ns


def last_reached(rank_calls: RankCalls) -> Iterator[CallRef]:
    """The last call of each stream that the device of a rank has reached, as far as known."""
    state = rank_calls.rank_summary.device
    unreached = () if state is None else state.unreached
    for key, calls in rank_calls.calls.items():
        if not calls.has_device_delays:
            continue  # not on a device
        records = calls.records()
        count = (
            int(np.searchsorted(records, max(unreached), side="right"))
            if unreached
            else len(records)
        )
        while count and records[count - 1] in unreached:
            count -= 1
        if count:
            yield CallRef(key, calls.first + count - 1, rank_calls.rank)


def first_unreached(rank_calls: RankCalls, key: StreamKey) -> int:
    """The number of the first call of a stream that a rank has not reached, as far as known."""
    state = rank_calls.rank_summary.device
    calls = map(rank_calls.call_of_record, () if state is None else state.unreached)
    numbers = [call[1] for call in calls if call is not None and call[0] == key]
    return min(numbers, default=rank_calls.counts.get(key, 0))


def without_unreached(
    job_calls: JobCalls, ranks: Collection[int], *, finished: Container[int]
) -> JobCalls:
    """The same calls, but of these ranks, which have exited, only those that their devices had
    reached: what their CPUs had issued after that never runs, and the others wait for it.

    Args:
        job_calls: The calls of the job.
        ranks: The ranks that have exited.
        finished: Ranks that have finished: their devices have completed what they issued.
    """
    reached = job_calls.copy()
    for rank in ranks:
        own = job_calls.by_rank[rank]
        counts = dict(own.counts)
        for key, count in own.counts.items():
            unreached = first_unreached(own, key)
            if unreached < count:
                others = [other for other in job_calls.members(key) if other not in ranks]
                completed = _completed(job_calls, others, key, finished)
                counts[key] = min(count, max(unreached, completed))
        reached.by_rank[rank] = replace(own, counts=counts)
    return reached


def _completed(
    job_calls: JobCalls, ranks: Iterable[int], key: StreamKey, finished: Container[int]
) -> int:
    """How many calls of a stream have completed on some of these ranks, as far as known. The last
    look at the device of an exited rank may be older than that."""
    by_rank = job_calls.by_rank
    known = [by_rank[rank] for rank in ranks if rank in by_rank]
    issued = (own.counts.get(key, 0) for own in known if own.rank in finished)
    running = [own for own in known if own.rank not in finished][:_ASKED]
    return max([*issued, *(_completed_on_device(own, key) for own in running)], default=0)


def _completed_on_device(rank_calls: RankCalls, key: StreamKey) -> int:
    box, calls = rank_calls.box, rank_calls.calls.get(key)
    if box is None or calls is None:
        return 0
    is_done = np.isin(calls.records(), box.records["number"][device_times(box)[1] > 0])
    return calls.first + int(np.flatnonzero(is_done)[-1]) + 1 if is_done.any() else 0
