"""Finds ranks that are blocked inside a collective, and how long, by their records and stacks."""

from __future__ import annotations

from torchwhere.diagnose.calls.rank_calls import RankCalls
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.device_stalls import DeviceStalls
from torchwhere.diagnose.doctor.stacks import is_in_collective

_UNSEEN_STALLS = 10  # times `stall_s`, if no stack shows that the ranks are in the collective


def blocked_s(context: Context, rank: int) -> float | None:
    """How long a rank has been in its last collective; None if it is not in one, or has exited."""
    rank_calls, wait = context.by_rank[rank], context.waits.get(rank)
    has_ended = rank_calls.end is not None and not context.exits.was_ended_externally(rank)
    if has_ended or context.exits.is_dead(rank) or not context.job_calls.has_data(rank):
        return None
    if wait is not None:
        since_ns: int | None = context.timing.began_ns(wait)
    else:
        since_ns = _in_collective_since_ns(rank_calls)
        is_in_it = is_in_collective(rank_calls.last_collective, context.status(rank))
        if is_in_it and since_ns is None:
            since_ns = max(rank_calls.box_summary.last_ns, rank_calls.device_moved_ns)
        elif is_in_it is False:
            return None
    return max(0.0, context.timing.end_ns - since_ns) / 1e9 if since_ns is not None else None


def blocked_ranks(context: Context) -> dict[int, float]:
    """The ranks that are blocked after a mismatch, and how long.

    A rank is blocked if it has waited unusually long, or to the unobserved end of the job. It is
    also blocked if its device is stalled, although its CPU continues.
    """
    lasted_s = {rank: blocked_s(context, rank) for rank in context.by_rank}
    stalled = DeviceStalls(context.job_calls, context.timing).by_rank.values()
    return {device.rank: device.lasted_s for device in stalled} | {
        rank: lasted
        for rank, lasted in lasted_s.items()
        if lasted is not None and lasted >= context.timing.unusual_s(rank)
    }


def _in_collective_since_ns(rank_calls: RankCalls) -> int | None:
    """When a rank came to its last collective, or its device moved after that; None if the rank is
    elsewhere."""
    since_ns = rank_calls.in_collective_since_ns
    return None if since_ns is None else max(since_ns, rank_calls.device_moved_ns)


def all_blocked_s(context: Context) -> float | None:
    """How long all ranks have been in a collective that all have issued; None if a rank is
    elsewhere.

    A rank that has moved since its last collective is starting, loading or saving, which may take
    time. While a device progresses, its CPU only waits for it.
    """
    ranks = context.by_rank
    since = [_in_collective_since_ns(rank_calls) for rank_calls in ranks.values()]
    moments = [moment for moment in since if moment is not None]
    if not moments or len(moments) < len(since) or context.job_calls.stale:
        return None
    if any(
        rank_calls.end and not context.exits.was_ended_externally(rank)
        for rank, rank_calls in ranks.items()
    ):
        return None
    return context.timing.since_s(max(moments))


def are_all_blocked(context: Context) -> bool:
    """Whether all ranks have been in one collective for too long, by their stacks; without stacks,
    for much longer.

    On a device a rank waits wherever it next needs the result, so a stack elsewhere proves little
    there. And a CPU that is far ahead of its device is blocked as long as a kernel lasts.
    """
    lasted_s, ranks = all_blocked_s(context), list(context.by_rank)
    if lasted_s is None or lasted_s < max(map(context.timing.patience_s, ranks)):
        return False
    if lasted_s < context.timing.stall_s and any(map(context.device_place, ranks)):
        return False
    in_collective = [context.is_in_last_collective(rank) for rank in ranks]
    if any(is_in_it is False for is_in_it in in_collective):
        return False
    was_seen = context.is_suspicion or any(in_collective)
    return was_seen or lasted_s >= _UNSEEN_STALLS * context.timing.stall_s
