"""Assembles a verdict: the facts of a finding, a report on each rank, and the sentences.

`_TEXTS` has the function that explains each cause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torchwhere.core.rank_text import ranks_phrase
from torchwhere.core.sanitize import plural
from torchwhere.diagnose.doctor.context import Context, Detail
from torchwhere.diagnose.doctor.device_memory import out_of_device_memory
from torchwhere.diagnose.doctor.examine import Diagnosis
from torchwhere.diagnose.doctor.finding import Cause, Finding, shown_fields
from torchwhere.diagnose.doctor.gpu_evidence import gpu_evidence
from torchwhere.diagnose.doctor.rules.alltoall_splits import UnmatchedSplits
from torchwhere.diagnose.doctor.rules.deadlock import Deadlock
from torchwhere.diagnose.doctor.rules.device_hang import (
    BlockedDevices,
    DeviceDeadlock,
    DevicesBlockedTogether,
)
from torchwhere.diagnose.doctor.rules.exited import (
    ExitedBeforeOthers,
    ExitedRanks,
    ExtraCall,
    TimedOutTogether,
    UnknownFirstExit,
)
from torchwhere.diagnose.doctor.rules.group_creation import DifferentGroups, PendingGroup
from torchwhere.diagnose.doctor.rules.lost_data import LostData
from torchwhere.diagnose.doctor.rules.mismatch import DifferentCalls
from torchwhere.diagnose.doctor.rules.missing import MissingRanks
from torchwhere.diagnose.doctor.rules.no_fault import (
    EndedUnfinished,
    Finished,
    PartlyWatched,
    Progressing,
    ProgressingAtEnd,
    Quiet,
    Standstill,
    UnobservedEnd,
)
from torchwhere.diagnose.doctor.rules.straggler import LateRanks
from torchwhere.diagnose.doctor.rules.together import BlockedTogether
from torchwhere.diagnose.doctor.rules.wrong_peer import WrongPeers
from torchwhere.diagnose.doctor.stacks import WAITS_FOR_WORKERS, Hold
from torchwhere.diagnose.doctor.unknown_devices import partly_marked_devices, unknown_devices
from torchwhere.diagnose.doctor.verdict import NO_FAULT, RankReport, Verdict, VerdictKind
from torchwhere.diagnose.dump_causes import (
    BehindRanks,
    DifferentOrder,
    FewInCall,
    IncompleteCall,
    JustCompleted,
    JustIssued,
    MissingMessage,
    NothingPending,
    ProgressedMeanwhile,
    UnconfirmedCalls,
    UnreachedByAll,
    UnreachedCall,
)
from torchwhere.diagnose.stack_hang import (
    AllBlocked,
    AllWait,
    AwaitedRanks,
    GoneRanks,
    NoHangSeen,
    OpenWait,
    PartlyBlocked,
)
from torchwhere.render.verdict_text import (
    deadlock,
    device,
    dumps,
    exits,
    group_creation,
    mismatch,
    missing,
    no_fault,
    stacks,
    straggler,
)
from torchwhere.render.verdict_text.gpu import gpu_text, unknown_gpu_text
from torchwhere.render.verdict_text.memory import out_of_memory_text
from torchwhere.render.verdict_text.phrases import detail_text


def verdict_of(diagnosis: Diagnosis) -> Verdict:
    """The verdict on what the doctor found."""
    context, finding = diagnosis.context, diagnosis.finding
    call, job_calls = finding.call, context.job_calls
    extra = _extra(context, finding)
    return Verdict(
        kind=finding.kind,
        culprits=finding.culprits,
        collective=call.to_dict(job_calls) if call is not None else None,
        ranks={rank: _report(context, finding, rank) for rank in job_calls.by_rank},
        last_common=call.previous_to_dict(job_calls) if call is not None else None,
        missing_data=(*_missing_data(context), *extra.missing_data),
        certainty=finding.certainty,
        stalled_s=finding.stalled_s,
        explanation=(
            *explain(finding.cause, context),
            *extra.lines,
            *_external_end_text(context, finding.kind),
        ),
        facts=_facts(finding) | extra.facts,
    )


class _Extra(NamedTuple):
    """What a verdict says beside its cause, whatever the cause is."""

    lines: list[str]
    facts: dict[str, Any]
    missing_data: list[str]


def _extra(context: Context, finding: Finding) -> _Extra:
    """The ranks that failed because of the culprits, the memory of their devices, their GPUs."""
    extra = _Extra([], {}, [])
    culprits = finding.culprits
    reactions = context.exits.reactions(besides=culprits) if culprits else {}
    if reactions:
        extra.lines.extend(exits.reactions_text(reactions))
        extra.facts["failed_because_of_it"] = reactions
    is_dead = finding.kind is VerdictKind.DEAD
    memory_errors = out_of_device_memory(context, culprits) if is_dead else []
    if memory_errors:
        extra.lines.extend(out_of_memory_text(memory_errors))
        extra.facts["out_of_memory"] = [error.to_dict() for error in memory_errors]
    if context.gpus or finding.facts.get("on_device"):
        evidence, unknown_gpus = gpu_evidence(context, finding)
        extra.lines.extend(gpu_text(evidence))
        extra.missing_data.extend(unknown_gpu_text(unknown_gpus))
        if evidence:
            extra.facts["gpus"] = [gpu.to_dict() for gpu in evidence]
    return extra


def explain(cause: Cause, context: Context) -> list[str]:
    """The sentences on a cause: the fault, why, and what to look at."""
    return _TEXTS[type(cause)](cause, context)


def _ended_unfinished_text(cause: EndedUnfinished, context: Context) -> list[str]:
    until_then = explain(cause.until_then, context)
    return exits.ended_text(context) + until_then + exits.gone_first_text(cause)


def _partly_watched_text(cause: PartlyWatched, context: Context) -> list[str]:
    of_watched = explain(cause.of_watched, context)
    if context.run.is_of_dumps:
        return dumps.partly_dumped_text(cause, context, of_watched)
    return [*no_fault.partly_watched_text(cause, context), *of_watched]


def _external_end_text(context: Context, kind: VerdictKind) -> list[str]:
    """Say that the job was ended from outside after the fault."""
    if not context.exits.ended_externally or kind in NO_FAULT:
        return []
    if context.exits.was_interrupted:
        return ["Then Ctrl-C interrupted the job."]
    return ["Then SIGTERM ended the job."] if kind is not VerdictKind.DEAD else []


def _facts(finding: Finding) -> dict[str, Any]:
    """The facts for JSON, with those that are texts."""
    if isinstance(finding.cause, DifferentCalls):
        return finding.facts | {"cohorts": mismatch.cohort_rows(finding.cause)}
    if isinstance(finding.cause, LateRanks):
        return finding.facts | straggler.late_ranks_facts(finding.cause)
    return finding.facts


def _report(context: Context, finding: Finding, rank: int) -> RankReport:
    rank_calls = context.by_rank[rank]
    last, detail = rank_calls.last, context.detail(rank, blocked=finding.blocked)
    status, shown = context.status(rank), None
    if last is not None:
        shown = shown_fields(rank_calls.fields(*last))
        shown["group"] = context.job_calls.group(last[0]).title
    # a rank that failed and then crashed while it exited: that stack explains nothing
    has_recorded = rank_calls.end is not None or context.exits.unfinished(rank) is not None
    has_exit_stack = has_recorded and status.ended is not None
    return RankReport(
        state=context.state(rank, blocked=finding.blocked),
        place=context.place(rank),
        last=shown,
        detail=detail_text(detail) if detail is not None else None,
        stack=() if has_exit_stack else status.stack,
        device=context.device_place(rank),
        workers=status.workers if _waits_for_workers(detail) else (),
    )


def _waits_for_workers(detail: Detail | None) -> bool:
    return isinstance(detail, Hold) and detail.activity in WAITS_FOR_WORKERS


def _missing_data(context: Context) -> list[str]:
    """What the verdict lacks."""
    by_rank = context.by_rank
    ranks, lines = by_rank.values(), context.run.caveats()
    if not context.timing.is_live and any(rank_calls.end is None for rank_calls in ranks):
        lines.append(
            "no process of this job was seen alive: the states are those at the end of the boxes"
        )
    replaying = [rank for rank, own in by_rank.items() if own.rank_summary.has_unknown_replays]
    if replaying:
        lines.append(
            "the collectives in CUDA graphs that were captured before the watch, and that"
            f" {ranks_phrase(replaying)} replayed"
        )
    wrapped = sum(rank_calls.box_summary.counts.overwritten > 0 for rank_calls in ranks)
    if wrapped:
        lines.append(
            f"the rings of {plural(wrapped, 'rank')} have wrapped: only calls that all rings still"
            " hold were compared"
        )
    unknown = unknown_devices(context)
    if unknown:
        ranks_text = ranks_phrase(unknown, most=8)
        lines.append(f"device progress of {ranks_text}: only what the CPUs issued was compared")
    partly = partly_marked_devices(context)
    if partly:
        lines.append(
            f"a part of the device progress of {ranks_phrase(partly, most=8)}: more than 31 streams"
            " were in use, or 4,096 marks were pending"
        )
    return lines


_TEXTS: dict[type[Cause], Callable[[Any, Context], list[str]]] = {
    DifferentCalls: mismatch.different_calls_text,
    UnmatchedSplits: mismatch.unmatched_splits_text,
    WrongPeers: deadlock.wrong_peers_text,
    DifferentGroups: group_creation.different_groups_text,
    PendingGroup: group_creation.pending_group_text,
    BlockedDevices: device.blocked_devices_text,
    DevicesBlockedTogether: device.blocked_together_text,
    DeviceDeadlock: device.device_deadlock_text,
    ExtraCall: exits.extra_call_text,
    ExitedRanks: exits.exited_ranks_text,
    UnknownFirstExit: exits.unknown_first_exit_text,
    TimedOutTogether: no_fault.timed_out_together_text,
    MissingRanks: missing.missing_ranks_text,
    Deadlock: deadlock.deadlock_text,
    BlockedTogether: no_fault.blocked_together_text,
    ExitedBeforeOthers: exits.exited_before_others_text,
    LateRanks: straggler.late_ranks_text,
    LostData: no_fault.lost_data_text,
    Finished: no_fault.finished_text,
    Progressing: no_fault.progressing_text,
    ProgressingAtEnd: no_fault.progressing_at_end_text,
    UnobservedEnd: no_fault.unobserved_end_text,
    Quiet: no_fault.quiet_text,
    Standstill: no_fault.standstill_text,
    PartlyWatched: _partly_watched_text,
    EndedUnfinished: _ended_unfinished_text,
    NothingPending: dumps.nothing_pending_text,
    UnconfirmedCalls: dumps.unconfirmed_calls_text,
    ProgressedMeanwhile: dumps.progressed_meanwhile_text,
    JustIssued: dumps.just_issued_text,
    JustCompleted: dumps.just_completed_text,
    MissingMessage: dumps.missing_message_text,
    UnreachedCall: dumps.unreached_call_text,
    FewInCall: dumps.few_in_call_text,
    UnreachedByAll: dumps.unreached_by_all_text,
    BehindRanks: dumps.behind_ranks_text,
    IncompleteCall: dumps.incomplete_call_text,
    DifferentOrder: dumps.different_order_text,
    AwaitedRanks: stacks.awaited_ranks_text,
    OpenWait: stacks.open_wait_text,
    AllWait: stacks.all_wait_text,
    AllBlocked: stacks.all_blocked_text,
    GoneRanks: stacks.gone_ranks_text,
    NoHangSeen: stacks.no_hang_seen_text,
    PartlyBlocked: stacks.partly_blocked_text,
}
