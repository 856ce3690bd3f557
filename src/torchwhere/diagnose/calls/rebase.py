"""Numbers that mean the same on all ranks, also where some began to count elsewhere.

A watch that begins late goes on from what a group says it has done so far. gloo counts messages
there as well, and ranks do not all send as many: then the same collective has other numbers on
other ranks. Which of the two it is, ranks that began at different moments or a count that was wrong
from the start, shows in the collectives themselves: as counted, or each rank's from its own
beginning, they are the same or not.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import numpy as np

from torchwhere.diagnose.calls.job_calls import StreamCalls
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.calls.rank_calls import JobCalls, RankCalls

# in a box's header: what groups had done when the watch began, where that is not nothing
COUNTED = "counted"


def rebase_numbers(job_calls: JobCalls) -> JobCalls:
    """The same testimonies; each group whose ranks agree only if each begins at its own count is
    counted from there."""
    late = {
        rank: counted for rank, said in job_calls.by_rank.items() if (counted := _counted(said))
    }
    if not late:
        return job_calls
    found = job_calls.copy()
    for key in {key for rank in late for key in job_calls.by_rank[rank].calls if key.source == -1}:
        name = job_calls.group(key).name
        calls = {
            rank: said.calls[key] for rank, said in job_calls.by_rank.items() if key in said.calls
        }
        begins = {rank: late.get(rank, {}).get(name, 0) for rank in calls}
        if len(set(begins.values())) > 1 and _likeness(calls, begins) > _likeness(
            calls, dict.fromkeys(calls, 0)
        ):
            for rank, begin in begins.items():
                found.by_rank[rank] = _from(found.by_rank[rank], key, begin)
    return found


def _counted(said: RankCalls) -> dict[str, int]:
    counted = said.label.meta.get(COUNTED)
    known = counted.items() if isinstance(counted, dict) else ()
    return {
        name: number
        for name, number in known
        if isinstance(name, str) and type(number) is int and number > 0
    }


def _likeness(calls: Mapping[int, StreamCalls], begins: Mapping[int, int]) -> tuple[int, int]:
    """How many collectives are as on the rank that has most of them, less those that are not; where
    that does not tell, how little the last ones are apart."""
    first = max(calls, key=lambda rank: len(calls[rank]))
    usual, score = calls[first], 0
    for rank, own in calls.items():
        begin = max(own.first - begins[rank], usual.first - begins[first])
        end = min(own.last - begins[rank], usual.last - begins[first]) + 1
        if begin < end and rank != first:
            here = own.packed_ids(begin + begins[rank], end + begins[rank])
            there = usual.packed_ids(begin + begins[first], end + begins[first])
            score += 2 * int(np.count_nonzero(here == there)) - len(here)
    lasts = [own.last - begins[rank] for rank, own in calls.items()]
    return score, min(lasts) - max(lasts)


def _from(said: RankCalls, key: StreamKey, begin: int) -> RankCalls:
    found = copy.copy(said)
    found.calls, found.counts = dict(said.calls), dict(said.counts)
    found.calls[key] = copy.copy(said.calls[key])
    found.calls[key].first -= begin
    found.counts[key] -= begin
    if said.last is not None and said.last[0] == key:
        found.last = key, said.last[1] - begin
    return found
