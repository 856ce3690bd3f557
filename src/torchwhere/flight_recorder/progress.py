"""Collects the progress of all ranks from their dumps. Takes `Dumps`, gives `JobProgress`."""

from __future__ import annotations

from dataclasses import replace

from torchwhere.diagnose.dump_progress import JobProgress, RankProgress
from torchwhere.flight_recorder.dumps import Dumps
from torchwhere.flight_recorder.to_boxes import DumpBox


def job_progress(run: Dumps) -> JobProgress:
    """The progress of all ranks; only for dumps that show what is pending."""
    members: dict[str, tuple[int, ...]] = {}
    joined: dict[str, int] = {}
    for box in run.dumps.values():
        for name, group in box.groups().items():
            members.setdefault(name, tuple(group["ranks"]))
        for name, account in box.accounts.items():
            joined[name] = max(joined.get(name, 0), account.joined + 1)
    ranks = {
        rank: _rank_progress(rank, box, [name for name in members if rank in members[name]])
        for rank, box in run.dumps.items()
    }
    cut = [box.rank for box in run.unreadable if isinstance(box, DumpBox)]
    return JobProgress(ranks, members, joined, frozenset(cut))


def _rank_progress(rank: int, box: DumpBox, groups: list[str]) -> RankProgress:
    issued = {name: box.issued(name) for name in groups}
    return RankProgress(
        rank=rank,
        pending=tuple(
            # the record has the number of a collective that all ranks share
            replace(call, number=int(box.records["extra"][call.record]))
            if call.ends is None
            else call
            for call in box.pending
        ),
        issued={name: count for name, count in issued.items() if count is not None},
        messages=box.messages,
        has_timing=box.has_timing,
        counts_messages=not box.lists_only_active and not box.lost_messages,
    )
