"""Orders the streams of a job by importance: a report shows the first ones.

Takes the calls of a job by stream and the verdict, gives the keys of the streams.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from torchwhere.diagnose.calls.job_calls import JobCalls
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.calls.stream_calls import StreamCalls
from torchwhere.diagnose.doctor.verdict import Verdict

MOST_RANKS = 64  # of a group, with their times


def by_importance(
    job_calls: JobCalls,
    by_stream: Mapping[StreamKey, Mapping[int, StreamCalls]],
    verdict: Verdict,
    mismatched: Container[StreamKey],
) -> list[StreamKey]:
    """All streams: that of the verdict, those with a mismatch, those of culprits, then by bytes,
    taking turns between kinds of groups: a few of a thousand groups of one dimension suffice."""
    culprits = set(verdict.culprits[:MOST_RANKS])
    of_verdict = _of_verdict(job_calls, by_stream, verdict)
    weights = {key: _bytes(calls) for key, calls in by_stream.items()}
    turns: dict[tuple[str, bool], int] = {}
    ranking: list[tuple[Any, ...]] = []
    # Names and ranks order streams of equal weight, not ids: ids depend on which worker read what.
    identity = {
        key: (title(job_calls, key), job_calls.group(key).ranks, job_calls.group(key).name)
        for key in by_stream
    }
    for key in sorted(by_stream, key=lambda key: (-weights[key], identity[key])):
        kind = job_calls.group(key).title, key.is_p2p
        turns[kind] = turns.get(kind, -1) + 1
        is_alone = len(by_stream[key]) < 2  # nothing to compare
        has_culprit = not culprits.isdisjoint(by_stream[key]) and not is_alone
        order = (
            key != of_verdict,
            key not in mismatched,
            not has_culprit,
            is_alone,
            turns[kind],
            -weights[key],
            identity[key],
        )
        ranking.append((order, key))
    return [key for _, key in sorted(ranking)]


def _of_verdict(
    job_calls: JobCalls, by_stream: Mapping[StreamKey, Mapping[int, StreamCalls]], verdict: Verdict
) -> StreamKey | None:
    """The stream of the verdict's collective: by name and ranks of the group and, for a message, by
    peer and number."""
    call, culprits = verdict.collective or {"op": None}, set(verdict.culprits)
    is_p2p = call["op"] in ("send", "recv")
    for key, calls in by_stream.items():
        group = job_calls.group(key)
        if group.title != call.get("group") or is_p2p != key.is_p2p:
            continue
        if call.get("group_ranks") not in (list(group.ranks), len(group.ranks)):
            continue
        is_large = len(group.ranks) > MOST_RANKS  # then the verdict has only the number of ranks
        if is_large and culprits and culprits.isdisjoint(group.ranks):
            continue
        has_peer = call.get("peer") == (key.source if call["op"] == "recv" else key.destination)
        if not is_p2p or (has_peer and _has_last(calls, call.get("number"))):
            return key
    return None


def title(job_calls: JobCalls, key: StreamKey) -> str:
    """The displayed name: `tp`, `pp 3 to 11`."""
    title = job_calls.group(key).title
    ends = [str(rank) if rank >= 0 else "any" for rank in (key.source, key.destination)]
    return f"{title} {' to '.join(ends)}" if key.is_p2p else title


def _has_last(calls: Mapping[int, StreamCalls], number: object) -> bool:
    return any(of_rank.last == number for of_rank in calls.values())


def _bytes(of_ranks: Mapping[int, StreamCalls]) -> int:
    """Roughly the bytes that a group moves: the size of the last call times the number of calls."""
    calls = next(iter(of_ranks.values()))
    return calls.of(calls.last)[0].bytes * len(calls)
