"""Finds the ranks whose device progress is not known although they use an accelerator."""

from __future__ import annotations

from torchwhere.diagnose.calls.rank_calls import RankCalls
from torchwhere.diagnose.doctor.context import Context

_UNSEEN_NS = 5_000_000_000  # a device is looked at 50 times a second


def unknown_devices(context: Context) -> list[int]:
    """Ranks that use an accelerator on which nothing was marked, or at which torchwhere looked long
    before the rank was last seen alive. Dumps have another source."""
    if context.run.is_of_dumps:
        return []
    return [
        rank
        for rank, rank_calls in context.by_rank.items()
        if _uses_device(context, rank_calls) and _is_unseen(rank_calls)
    ]


def partly_marked_devices(context: Context) -> list[int]:
    """Ranks on whose devices marks were left out: they use more streams than a box has lanes, or a
    device was too far behind."""
    states = {rank: own.rank_summary.device for rank, own in context.by_rank.items()}
    return [rank for rank, state in states.items() if state is not None and state.skipped]


def _uses_device(context: Context, rank_calls: RankCalls) -> bool:
    if rank_calls.rank_summary.uses_device:
        return True
    return any(context.job_calls.group(key).backend == "nccl" for key in rank_calls.calls)


def _is_unseen(rank_calls: RankCalls) -> bool:
    state, box = rank_calls.rank_summary.device, rank_calls.box_summary
    if state is None:
        return True
    looked_ns = state.device_place.looked_ns
    return looked_ns > 0 and max(box.beat_ns, box.last_ns) - looked_ns > _UNSEEN_NS
