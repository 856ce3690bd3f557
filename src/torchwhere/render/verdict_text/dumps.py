"""Sentences on what is pending in the dumps of a job."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchwhere.core.rank_text import Ranks, ranks_phrase
from torchwhere.core.sanitize import plural
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.rules.no_fault import PartlyWatched
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
    ReferredCall,
    UnconfirmedCalls,
    UnreachedByAll,
    UnreachedCall,
)
from torchwhere.diagnose.dump_facts import DumpsAgree
from torchwhere.render.verdict_text.phrases import (
    after_comma,
    agree,
    all_ranks_text,
    in_place,
    numbered_call_text,
    subject_text,
    tensors_text,
)

_WHY_EMPTY = (
    "Is the recorder on (TORCH_FR_BUFFER_SIZE, for NCCL before torch 2.9"
    " TORCH_NCCL_TRACE_BUFFER_SIZE)? gloo records no sends and receives."
)
_SET_TIMING = (
    "The dumps do not show which devices have reached it. Start the next job with `torchwhere run`:"
    " its boxes show that. Or set TORCH_NCCL_ENABLE_TIMING=1, which costs time: the dumps show it."
)

_NOTHING_WRONG = "If the job still progressed when the dumps were written, nothing is wrong."
_NO_HANG_SHOWN = (
    "The dumps do not show a hang: the job may be progressing.",
    (
        "Write all dumps again after some seconds, and compare: in a hang, the same call is still"
        " pending."
    ),
)


def nothing_pending_text(cause: NothingPending, context: Context) -> list[str]:
    return [str(DumpsAgree(len(context.run.boxes)))]


def unconfirmed_calls_text(cause: UnconfirmedCalls, context: Context) -> list[str]:
    its = agree(cause.ranks, "its last calls", "their last calls")
    return [
        (
            f"No call is pending in the dumps. But the watchdog of {ranks_phrase(cause.ranks)} has"
            f" not confirmed that {its} completed: they may have been aborted before the dump."
        ),
        "A hang is not excluded, and the culprit is unknown.",
        (
            "Look at: the first NCCL error or timeout in the logs. If the job runs, write all dumps"
            " again after some seconds."
        ),
    ]


def partly_dumped_text(cause: PartlyWatched, context: Context, of_dumps: list[str]) -> list[str]:
    """What the dumps show, and the ranks without data."""
    missing = [rank for rank in cause.unwatched if rank not in context.run.boxes]
    blank = [rank for rank in cause.unwatched if rank in context.run.boxes]
    if len(blank) == len(context.run.boxes):
        return [f"The dumps have no entries. {_WHY_EMPTY}", *_no_dump_text(missing)]
    if blank:
        dumps = agree(blank, "dump", "dumps")
        of_dumps.append(f"The {dumps} of {ranks_phrase(blank)} {agree(blank, 'is', 'are')} empty.")
    return [*of_dumps, *_no_dump_text(missing)]


def _no_dump_text(ranks: Sequence[int]) -> list[str]:
    may = agree(ranks, "it may hang", "one of them may hang")
    return [f"There is no dump of {ranks_phrase(ranks)}: {may}."] if ranks else []


def progressed_meanwhile_text(cause: ProgressedMeanwhile, context: Context) -> list[str]:
    outdated = ranks_phrase(cause.outdated)
    dumps, show = agree(cause.outdated, "dump", "dumps"), agree(cause.outdated, "shows", "show")
    return [
        (
            "The job progressed while the dumps were written: other ranks have completed calls that"
            f" the {dumps} of {outdated} {show} as not issued or not complete."
        ),
        "No rank is known to hang. If the job hangs, write all dumps at the same time.",
    ]


def just_issued_text(cause: JustIssued, context: Context) -> list[str]:
    call, dumps = numbered_call_text(context, cause.call), agree(cause.ranks, "dump", "dumps")
    its, was = agree(cause.ranks, "its", "their"), agree(cause.ranks, "was", "were")
    return [
        (
            f"{subject_text(cause.ranks)} issued {call}, at most {cause.age_s:.1f} s before"
            f" {its} {dumps} {was} written."
        ),
        *_NO_HANG_SHOWN,
    ]


def just_completed_text(cause: JustCompleted, context: Context) -> list[str]:
    devices, calls = agree(cause.ranks, "device", "devices"), agree(cause.ranks, "a call", "calls")
    its, ranks = agree(cause.ranks, "its dump was", "their dumps were"), ranks_phrase(cause.ranks)
    age_s = max(1, math.ceil(cause.age_s * 10)) / 10
    return [
        f"The {devices} of {ranks} completed {calls} at most {age_s:.1f} s before {its} written.",
        *_NO_HANG_SHOWN,
    ]


def missing_message_text(cause: MissingMessage, context: Context) -> list[str]:
    source, destination = cause.call.ends or (-1, -1)
    op = "send" if cause.rank == source else "recv"
    waiting = destination if cause.rank == source else source
    return [
        f"Rank {cause.rank} never issued the {op} of {_call_text(context, cause.call)}.",
        *_waiting_text(context, [waiting]),
    ]


def few_in_call_text(cause: FewInCall, context: Context) -> list[str]:
    ranks, others = ranks_phrase(cause.ranks), ranks_phrase(cause.others)
    have, call = agree(cause.ranks, "has", "have"), _call_text(context, cause.call)
    return [
        f"Only {ranks} {have} issued {call}. The other ranks are in no call: {others}.",
        (
            f"The culprit is unknown. {subject_text(cause.ranks)} issued a call that the others"
            f" leave out, or {others} are blocked outside of collectives."
        ),
        f"Look at: the code path of {ranks}, and the stacks of {others}.",
    ]


def unreached_call_text(cause: UnreachedCall, context: Context) -> list[str]:
    ranks = ranks_phrase(cause.ranks)
    noun, has = agree(cause.ranks, "device", "devices"), agree(cause.ranks, "has", "have")
    its = agree(cause.ranks, "its CPU has", "their CPUs have")
    lines = [
        (
            f"The {noun} of {ranks} {has} not reached {_call_text(context, cause.call)}, which"
            f" {its} issued."
        ),
        *_waiting_text(context, cause.waiting),
    ]
    if cause.buffered is not None:
        (_, source, destination), count = cause.buffered
        lines.append(
            f"  {plural(count, 'send')} from rank {source} to rank {destination} completed before"
            " the receive: this send should have completed too"
        )
    return [
        *lines,
        (
            "Likely cause: a kernel or a copy that was queued there before this call does not end."
            " Look at: nvidia-smi and the kernel log (Xid) on the host of"
            f" {ranks_phrase(cause.ranks[:1])}."
        ),
        *([_only_slow_text(cause.ranks)] if cause.may_progress else []),
    ]


def _only_slow_text(ranks: Ranks) -> str:
    device, is_ = agree(ranks, "device", "devices"), agree(ranks, "is", "are")
    return (
        "If the job still progressed when the dumps were written, the"
        f" {device} of {ranks_phrase(ranks)} {is_} only slow."
    )


def unreached_by_all_text(cause: UnreachedByAll, context: Context) -> list[str]:
    ranks, call = subject_text(cause.ranks), _call_text(context, cause.call)
    have, device = agree(cause.ranks, "has", "have"), agree(cause.ranks, "its device", "no device")
    has_not = agree(cause.ranks, "has not", "has")
    return [
        (
            f"{ranks} {have} issued {call}, and {device} {has_not} reached it. No rank is known to"
            " wait in a call."
        ),
        (
            f"A long kernel looks the same as one that does not end. Look at"
            f" {ranks_phrase(cause.ranks)} first, or write the dumps again and compare."
        ),
    ]


def behind_ranks_text(cause: BehindRanks, context: Context) -> list[str]:
    ranks, call = ranks_phrase(cause.ranks), _call_text(context, cause.call)
    others, have = subject_text(cause.completed_by), agree(cause.completed_by, "has", "have")
    dumps, are = agree(cause.ranks, "dump", "dumps"), agree(cause.ranks, "is", "are")
    look_at = (
        "Look at: nvidia-smi and the kernel log (Xid) on the host of"
        f" {ranks_phrase(cause.ranks[:1])}."
    )
    if cause.is_clear:
        return [
            f"The device of {ranks} has not completed {call}. {others} {have} completed it.",
            f"Likely cause: the device of {ranks} failed, or does not progress. {look_at}",
            (
                f"If the job still progressed when the dumps were written, the dump of {ranks} may"
                " only be older than the others."
            ),
        ]
    show = agree(cause.ranks, "shows", "show")
    lines = [f"The {dumps} of {ranks} {show} {call} as not complete. {others} {have} completed it."]
    if cause.absent:
        lines.append(f"  {ranks_phrase(cause.absent)} left no dump")
    device = agree(cause.ranks, "its device", "one of their devices")
    return [
        *lines,
        (
            f"The culprit is unknown. Look at {ranks} first: {device} may have failed, or the"
            f" {dumps} {are} only older than the others. {look_at}"
        ),
        "If the job hangs, write all dumps again at the same time.",
    ]


def incomplete_call_text(cause: IncompleteCall, context: Context) -> list[str]:
    lines = [_incomplete_text(cause, context)]
    if cause.waiting:
        wait = agree(cause.waiting, "waits", "wait")
        lines.append(f"  {ranks_phrase(cause.waiting)} only {wait} for ranks in this call")
    if cause.absent or cause.unknown:
        return [*lines, *_unknown_text(cause)]
    if cause.went_on:
        return [
            *lines,
            (
                "Likely cause: ranks passed different roots or reduce ops, which dumps do not"
                " contain; or the network, or a device."
            ),
        ]
    if cause.has_timing:
        lines.append("All devices have started it: look at the network between them.")
        return [*lines, _NOTHING_WRONG] if cause.may_progress else lines
    return [
        *lines,
        (
            "Likely cause: on the device of one of these ranks, a kernel or a copy before this call"
            " does not end; or the network between them. Look at: nvidia-smi and the kernel log"
            " (Xid) on their hosts."
        ),
        _SET_TIMING,
        _NOTHING_WRONG,
    ]


def _incomplete_text(cause: IncompleteCall, context: Context) -> str:
    call, ranks = _call_text(context, cause.call), subject_text(cause.ranks)
    if cause.unknown or cause.absent:
        return f"{ranks} issued {call}, which is not complete."
    if cause.went_on:
        number, title = cause.call.reference.number, _title(context, cause.call)
        return (
            f'{ranks} {agree(cause.ranks, "is", "are")} still in #{number} of group "{title}",'
            f" which all ranks have issued; {ranks_phrase(cause.went_on)} continued. No rank is"
            " missing from it."
        )
    if cause.call.ends is not None:
        return f"{ranks} have issued {call}, and it is not complete."
    issued = f"{ranks} {agree(cause.ranks, 'has', 'have')} issued"
    if len(cause.ranks) == context.run.world_size:
        issued = all_ranks_text(len(cause.ranks), single="has issued", several="have issued")
    return f"{issued} {call}, and none has completed it. No rank is missing from any collective."


def _unknown_text(cause: IncompleteCall) -> list[str]:
    lines = []
    if cause.absent:
        they = agree(cause.absent, "it", "they")
        absent = ranks_phrase(cause.absent)
        lines.append(f"  {absent} left no dump: whether {they} reached this call is unknown")
    unknown = [rank for rank in cause.unknown if rank not in cause.older]
    if unknown:
        show = agree(unknown, "shows", "show")
        dumps = agree(unknown, "dump", "dumps")
        lines.append(
            f"  the {dumps} of {ranks_phrase(unknown)} {show} nothing about this call: it may"
            " be complete there, or not issued"
        )
    if cause.older:
        dumps, are = agree(cause.older, "dump", "dumps"), agree(cause.older, "is", "are")
        lines.append(
            f"  the {dumps} of {ranks_phrase(cause.older)} {are} older than the others, which have"
            " completed later calls"
        )
    suspects = ranks_phrase(sorted({*cause.ranks, *cause.unknown, *cause.absent}))
    if len(cause.absent) == 1:
        lines.append(
            f"Look at {ranks_phrase(cause.absent)} first: a process that is stopped or dead writes"
            " no dump."
        )
    elif cause.older and not cause.absent:
        lines.append(
            f"Look at {ranks_phrase(cause.older)} first: a process that is stopped or dead writes"
            " no new dump."
        )
    if cause.have_reached and cause.absent and not cause.unknown:
        has, they = agree(cause.absent, "has", "have"), agree(cause.absent, "it", "they")
        return [
            *lines,
            (
                f"The culprit is unknown. All ranks with a dump have reached this call:"
                f" {ranks_phrase(cause.absent)} {has} not, or {they} {has} and the network between"
                " the ranks is the cause."
            ),
        ]
    return [
        *lines,
        (
            f"The culprit is unknown. One of {suspects} has not issued this call, or issued its"
            " calls in a different order; or its device does not reach the call; or the network is"
            " the cause."
        ),
    ]


def different_order_text(cause: DifferentOrder, context: Context) -> list[str]:
    lines = [
        "Ranks wait for each other: they issued the calls of their groups in different orders."
    ]
    lines += [
        f"  in {_call_text(context, cohort.call)}: {ranks_phrase(cohort.ranks)}"
        for cohort in cause.cohorts
    ]
    usual, other = cause.cohorts[:2]
    if not cause.shift:
        return [
            *lines,
            (
                "Likely cause: a different code path on some ranks. Look at: the order of these"
                f" groups {_at(context, other.in_all or other.ranks)}."
            ),
        ]
    skipping, group = ranks_phrase(other.in_all), _title(context, usual.call)
    if cause.shift < 0:
        skipping, group = ranks_phrase(usual.in_all), _title(context, other.call)
    return [
        *lines,
        (
            f"After that, the calls of {ranks_phrase(other.in_all)} stay in a different order:"
            f' {skipping} skipped {plural(abs(cause.shift), "call")} of group "{group}".'
        ),
        f"Look at: conditions on rank, step or data {_at(context, other.in_all or other.ranks)}.",
    ]


def _at(context: Context, ranks: Sequence[int]) -> str:
    line = context.place(ranks[0]).full_line
    return f"before {line}" if line else f"on rank {ranks[0]}"


def _title(context: Context, call: ReferredCall) -> str:
    return context.title(call.reference.key)


def _waiting_text(context: Context, ranks: Sequence[int]) -> list[str]:
    """The ranks that wait, as far as they have a dump."""
    with_dump = [rank for rank in ranks if rank in context.by_rank]
    places = {in_place(context.place(rank)) for rank in with_dump}
    if not with_dump:
        return []
    where = places.pop() if len(places) == 1 else "in different places"
    return [f"  waiting: {ranks_phrase(with_dump)}{after_comma(where)}"]


def _call_text(context: Context, call: ReferredCall) -> str:
    """`all_reduce of float32 [4], #5 of group "default"`; for a message its ends."""
    if call.ends is None:
        return numbered_call_text(context, call.reference)
    source, destination = call.ends
    return (
        f"the message{tensors_text(context.issued(call.reference))} from rank {source} to rank"
        f' {destination} on group "{_title(context, call)}"'
    )
