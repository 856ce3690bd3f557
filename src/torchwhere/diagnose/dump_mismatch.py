"""Tells the mismatches in dumps that may explain a hang from those that are over.

A mismatch is over if all its ranks have completed the call, and issued the same calls after it. A
rank that skipped a call, or issued one too many, stays one call behind or ahead: then the calls
after it differ too, unless they are all alike. Only then is the later hang a fault of its own.
"""

from __future__ import annotations

import numpy as np

from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.calls.stream_calls import CallWindow
from torchwhere.diagnose.doctor.mismatch import Mismatch, mismatches
from torchwhere.diagnose.dump_progress import JobProgress, MessageCount


def current_mismatches(job_calls: JobCalls, progress: JobProgress) -> list[Mismatch]:
    """The first mismatch of each stream, without those that are over."""
    windows = [*job_calls.windows(), *job_calls.longer_windows()]
    return [
        mismatch
        for mismatch in mismatches(job_calls)
        if not all(
            _is_over(window, job_calls, progress)
            for window in windows
            if window.key == mismatch.key
        )
    ]


def _is_over(window: CallWindow, job_calls: JobCalls, progress: JobProgress) -> bool:
    name = job_calls.group(window.key).name
    completed = min(_completed(progress, rank, window.key, name) for rank in window.ranks)
    differs = np.flatnonzero((window.signature_ids != window.signature_ids[0]).any(axis=0))
    first = max([*differs.tolist(), *window.differs.tolist()], default=-1) + 1
    after = slice(first, max(first, min(completed, window.end) - window.first))
    # a call too many, or too few, would show: neighbouring calls are different
    signatures, sites = window.signature_ids[0, after], window.site_ids[0, after]
    have_sites = (sites[1:] > 0) & (sites[:-1] > 0)
    neighbours_differ = (signatures[1:] != signatures[:-1]) | (
        have_sites & (sites[1:] != sites[:-1])
    )
    return bool(neighbours_differ.any())


def _completed(progress: JobProgress, rank: int, key: StreamKey, group: str) -> int:
    """How many calls of a stream a rank has completed."""
    if rank not in progress.ranks:
        return 0
    of_rank = progress.ranks[rank]
    if key.is_p2p:
        stream = group, key.source, key.destination
        return of_rank.messages.get(stream, MessageCount()).completed
    return of_rank.completed.get(group, 0)
