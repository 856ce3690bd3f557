"""Decides a tie between the ranks of a small group by the other groups of the same kind.

A job with several dimensions has many groups with the same description and size, and the same
calls. If two ranks of one group differ, and nothing in the group shows which one is wrong, the rank
is wrong whose call the other groups did not issue at this number.

Takes a mismatch, gives the wrong ranks. Limit: another group counts only if it issued the same
calls before, and these are not all alike: else its numbers may be shifted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torchwhere.core.rank_text import Ranks
from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.stream_calls import StreamCalls
from torchwhere.diagnose.doctor.mismatch import Mismatch


def outvoted(job_calls: JobCalls, mismatch: Mismatch) -> Ranks:
    """The ranks of a tie that the ranks of other groups contradict; none if these do not decide."""
    if mismatch.key.is_p2p:
        return ()
    own = [job_calls.by_rank[cohort[0]].calls[mismatch.key] for cohort in mismatch.cohorts]
    votes: Counter[int] = Counter()
    for calls in _twins(job_calls, mismatch):
        votes.update(
            index
            for index, of_cohort in enumerate(own)
            if _are_alike(calls, of_cohort, mismatch.number)
        )
    right, count = max(votes.items(), key=lambda item: item[1], default=(-1, 0))
    if 2 * count <= votes.total():
        return ()
    wrong = (cohort for index, cohort in enumerate(mismatch.cohorts) if index != right)
    return tuple(sorted(rank for cohort in wrong for rank in cohort))


def _twins(job_calls: JobCalls, mismatch: Mismatch) -> Iterator[StreamCalls]:
    """The calls of each rank in each other group of the same kind."""
    own = job_calls.group(mismatch.key)
    for rank_calls in job_calls.by_rank.values():
        for key, calls in rank_calls.calls.items():
            group = job_calls.group(key)
            is_other = not key.is_p2p and key != mismatch.key
            if is_other and (group.desc, len(group.ranks)) == (own.desc, len(own.ranks)):
                yield calls


def _are_alike(calls: StreamCalls, others: StreamCalls, number: int) -> bool:
    """Whether two streams have the same calls up to a number, which are not all alike."""
    first = max(calls.first, others.first)
    if first >= number or calls.at(number) is None or others.at(number) is None:
        return False
    ids, other_ids = (part.packed_ids(first, number + 1).tolist() for part in (calls, others))
    return bool(ids == other_ids and len(set(ids[:-1])) > 1)
