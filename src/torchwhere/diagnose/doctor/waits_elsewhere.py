"""Measures how long a rank that came late to a collective had waited in other groups before.

Takes a window of collectives of one group, and one of them. Gives the longest possible wait since
the collective before it, in other groups and for messages: for ranks with data, and for ranks
without.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import numpy as np

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.device import device_times
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.calls.rank_calls import RankCalls
from torchwhere.diagnose.calls.stream_calls import CallWindow, StreamCalls

CameNs = Callable[[RankCalls, StreamKey, int], int]  # when a rank came to a call; 0 if unknown


def waited_ns(
    job_calls: JobCalls, window: CallWindow, row: int, column: int, came_ns: CameNs
) -> float:
    """The longest possible wait of a rank for ranks with data."""
    rank_calls = job_calls.by_rank[window.ranks[row]]
    waited = 0
    for key, number in _in_other_streams(job_calls, window, row, column):
        others = [job_calls.by_rank[other] for other in _others(job_calls, key, rank_calls.rank)]
        last_ns = max((came_ns(other, key, number) for other in others), default=0)
        own_ns = came_ns(rank_calls, key, number)
        waited += max(0, last_ns - own_ns) if own_ns else 0
    return waited


def may_have_waited_ns(
    job_calls: JobCalls,
    window: CallWindow,
    row: int,
    column: int,
    came_ns: CameNs,
    *,
    in_time: Collection[int],
) -> float:
    """The longest possible wait of a rank for ranks without data. A call with a rank that came in
    time is no excuse, because that rank waited as long."""
    rank_calls = job_calls.by_rank[window.ranks[row]]
    calls = list(_in_other_streams(job_calls, window, row, column))
    lost = {key: _lost_members(job_calls, key, in_time) for key in {key for key, _ in calls}}
    unseen = [
        (key, number)
        for key, number in calls
        if not all(_has_issued(job_calls, member, key, number) for member in lost[key])
    ]
    until_ns = came_ns(rank_calls, window.key, window.first + column)
    ends_ns = _ends_ns(rank_calls, unseen, until_ns)
    began_ns = [came_ns(rank_calls, *call) or until_ns for call in unseen]
    return sum(max(0, end - began) for began, end in zip(began_ns, ends_ns, strict=True))


def _ends_ns(
    rank_calls: RankCalls, calls: list[tuple[StreamKey, int]], until_ns: int
) -> Iterator[int]:
    """The latest time at which each call of a rank was done, at most a given one: when its device
    was known to be done with it, or its thread recorded something else after a blocking call."""
    box = rank_calls.box if calls else None
    done_ns = device_times(box)[1] if box is not None else ()
    for key, number in calls:
        end_ns, row = 0, _row(box, rank_calls.order(key, number))
        if box is not None and row is not None:
            if rank_calls.is_on_device(key, number):
                end_ns = int(done_ns[row])
            elif rank_calls.is_async(key, number) is False:
                end_ns = _next_ns(box, row)
        yield min(until_ns, box.wall_ns(end_ns)) if box is not None and end_ns else until_ns


def _row(box: Box | None, record: int) -> int | None:
    """The index of a record in a box; None if the box does not have it."""
    numbers = box.records["number"] if box is not None else np.empty(0, np.int64)
    row = int(np.searchsorted(numbers, record))
    return row if row < len(numbers) and int(numbers[row]) == record else None


def _next_ns(box: Box, row: int) -> int:
    """When the thread of a record wrote the next one; 0 if it did not."""
    thread, after = box.records["thread"][row], box.records[row + 1 :]
    own = np.flatnonzero(after["thread"] == thread)
    return int(after["t_ns"][own[0]]) if len(own) else 0


def _lost_members(job_calls: JobCalls, key: StreamKey, in_time: Collection[int]) -> list[int]:
    members = job_calls.members(key)
    lost = [member for member in members if not job_calls.has_data(member)]
    return lost if lost and set(in_time).isdisjoint(members) else []


def _has_issued(job_calls: JobCalls, rank: int, key: StreamKey, number: int) -> bool:
    """Whether a rank without data is known, from a snapshot, to have issued a call."""
    own = job_calls.by_rank.get(rank)
    return own is not None and number < own.counts.get(key, 0)


def _in_other_streams(
    job_calls: JobCalls, window: CallWindow, row: int, column: int
) -> Iterator[tuple[StreamKey, int]]:
    """The calls of a rank in other streams between its previous call in this one and a column."""
    number, own = window.first + column, window.calls[row]
    span = (own.record(number - 1), own.record(number))
    for key, calls in job_calls.by_rank[window.ranks[row]].calls.items():
        for between in _between(calls, span) if key != window.key else ():
            yield key, between


def _others(job_calls: JobCalls, key: StreamKey, rank: int) -> Iterator[int]:
    members = job_calls.members(key)
    return (other for other in members if other != rank and other in job_calls.by_rank)


def _between(calls: StreamCalls, span: tuple[int, int]) -> range:
    """The numbers of a stream that were issued between two records."""
    low, high = np.searchsorted(calls.records(), span, side="right").tolist()
    return range(calls.first + low, calls.first + high)
