"""Collects the progress of all ranks from their dumps. Takes `Dumps`, gives `JobProgress`.

Dumps that disagree about the members of a group are not compared in that group.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from torchwhere.core.grouping import grouped
from torchwhere.diagnose.dump_progress import DumpTimes, JobProgress, PendingCall, RankProgress
from torchwhere.flight_recorder.confirmation import unconfirmed_ranks
from torchwhere.flight_recorder.dump_box import DumpBox
from torchwhere.flight_recorder.dumps import Dumps


def job_progress(run: Dumps) -> JobProgress:
    """The progress of all ranks; only for dumps that show what is pending."""
    members = _members(run)
    groups = {
        rank: [
            name
            for name, ranks in members.items()
            if rank in ranks and box.members(name) in (ranks, None)
        ]
        for rank, box in run.dumps.items()
    }
    pending = {rank: _pending(box, groups[rank]) for rank, box in run.dumps.items()}
    joined: dict[str, int] = {}
    for rank, box in run.dumps.items():
        for name in groups[rank]:
            if name in box.accounts:
                joined[name] = max(joined.get(name, 0), box.accounts[name].joined + 1)
    used = {call.group for calls in pending.values() for call in calls if call.number > 0}
    ranks = {
        rank: RankProgress(
            pending=pending[rank],
            issued=_issued(box, groups[rank], used),
            completed={
                name: box.accounts[name].completed + 1
                for name in groups[rank]
                if name in box.accounts
            },
            messages=box.messages,
            has_timing=box.has_timing and not box.doubted,
            is_of_gloo=box.is_of_gloo,
            counts_messages=_counts_messages(box),
            unsure=frozenset(box.confirmation.unlisted),
            times=DumpTimes(
                box.made_ns, box.confirmation.retired_ns, box.confirmation.has_new_ends
            ),
        )
        for rank, box in run.dumps.items()
    }
    cut = [box.rank for box in run.unreadable if isinstance(box, DumpBox)]
    return JobProgress(
        ranks, members, joined, frozenset(cut), frozenset(run.unwatched), unconfirmed(run)
    )


def _counts_messages(box: DumpBox) -> bool:
    """Whether a dump lists all messages of its rank, and no message may have been aborted."""
    lists_all = not box.lists_only_active and not box.lost_messages and not box.is_blank
    return lists_all and box.confirmation.lists_all and not box.confirmation.messages


def unconfirmed(run: Dumps) -> tuple[int, ...]:
    """Ranks whose last calls ended without proof that they completed."""
    return unconfirmed_ranks(
        {rank: box.confirmation for rank, box in run.dumps.items()},
        {rank: box.status for rank, box in run.dumps.items()},
    )


def _members(run: Dumps) -> dict[str, tuple[int, ...]]:
    """The ranks of each group, as most dumps have them."""
    members = grouped(
        (name, tuple(group["ranks"]))
        for box in run.dumps.values()
        for name, group in box.groups().items()
    )
    return {name: Counter(ranks).most_common(1)[0][0] for name, ranks in members.items()}


def _pending(box: DumpBox, groups: list[str]) -> tuple[PendingCall, ...]:
    return tuple(
        # the record has the number of a collective that all ranks share
        replace(call, number=int(box.records["extra"][call.record])) if call.ends is None else call
        for call in box.pending
        if call.group in groups
    )


def _issued(box: DumpBox, groups: list[str], used: set[str]) -> dict[str, int]:
    """How many collectives of each group a rank has issued, where its dump shows it.

    A dump without any data does not show it for a group in which all ranks have been before.
    """
    is_blank = not len(box.records) and not box.status
    counts = {name: box.issued(name) for name in groups if not is_blank or name not in used}
    return {name: count for name, count in counts.items() if count is not None}
