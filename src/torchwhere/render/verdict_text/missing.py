"""Sentences on ranks that others wait for."""

from __future__ import annotations

from collections.abc import Sequence

from torchwhere.core.place import Certainty
from torchwhere.core.rank_text import ranks_phrase
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.exit_records import survived_exception
from torchwhere.diagnose.doctor.pauses import Pause
from torchwhere.diagnose.doctor.rules.missing import MissingRanks
from torchwhere.diagnose.doctor.verdict import State
from torchwhere.diagnose.doctor.waits import Wait
from torchwhere.render.verdict_text.phrases import (
    after_comma,
    agree,
    common_place_text,
    in_place,
    more_text,
    numbered_call_text,
    rank_detail_text,
    step_text,
    subject_text,
    survived_text,
    tensors_text,
)

_MOST_RANKS = 4  # with their own line


def missing_ranks_text(cause: MissingRanks, context: Context) -> list[str]:
    first = context.by_rank.get(cause.ranks[0])
    # stopped, or exited, inside the call
    is_inside = first is not None and first.counts.get(cause.wait.key, 0) > cause.wait.number
    lines = _inside_text(cause, context) if is_inside else _never_issued_text(cause, context)
    lines += _overdue_text(cause.pause, context)
    return lines + _excuses_text(cause) + _elsewhere_ranks_text(cause)


def waiting_text(context: Context, wait: Wait) -> str:
    """The ranks that wait in the same call, and where."""
    call = wait.key, wait.number
    together = sorted(
        rank for rank, other in context.waits.items() if (other.key, other.number) == call
    )
    if not together:  # all issued it: they wait for a rank without data, or on the device
        members = context.job_calls.members(wait.key)
        with_data = [rank for rank in members if rank in context.by_rank]
        together = [rank for rank in with_data if rank not in wait.missing]
    where = common_place_text(context, together, noun="different places", call=call)
    return f"  waiting: {ranks_phrase(together)}{after_comma(where)}"


def _inside_text(cause: MissingRanks, context: Context) -> list[str]:
    ranks = cause.ranks
    lines = [
        (
            f"{subject_text(ranks)} reached {_awaited_text(context, cause.wait)}, but cannot"
            " complete it."
        ),
        waiting_text(context, cause.wait),
    ]
    with_box = [rank for rank in ranks if rank in context.by_rank]
    for rank in ranks[:_MOST_RANKS]:
        where = _elsewhere_text(context, rank)
        if rank in with_box:
            detail = rank_detail_text(context, rank)
            where = f"rank {rank} is {in_place(context.place(rank))}: {detail}"
        lines.append(f"  {where}")
    return lines + more_text(ranks, _MOST_RANKS) + _unable_text(context, with_box)


def _never_issued_text(cause: MissingRanks, context: Context) -> list[str]:
    ranks, wait = cause.ranks, cause.wait
    lines = [_claim_text(cause, context), waiting_text(context, wait)]
    lines += [f"  {_elsewhere_text(context, rank)}" for rank in ranks[:_MOST_RANKS]]
    lines += more_text(ranks, _MOST_RANKS)
    with_data = [rank for rank in ranks if context.job_calls.has_data(rank)]
    if with_data and wait.number:
        lines += _branch_text(context, with_data, wait)
    return lines + _doubts_text(cause, context)


def _claim_text(cause: MissingRanks, context: Context) -> str:
    job_calls, exits = context.job_calls, context.exits
    ranks, call = subject_text(cause.ranks), _awaited_text(context, cause.wait)
    if all(rank in job_calls.by_rank and exits.outlived_its_watch(rank) for rank in cause.ranks):
        watched = agree(cause.ranks, "it was watched", "they were watched")
        return f"{ranks} did not issue {call} while {watched}."
    has_data = any(map(job_calls.has_data, cause.ranks))
    return f"{ranks} {'never' if has_data else 'may never have'} issued {call}."


def _awaited_text(context: Context, wait: Wait) -> str:
    """The awaited call: the collective, or the other end of a message."""
    key = wait.key
    if not key.is_p2p:
        return numbered_call_text(context, wait)
    op = "recv" if wait.rank == key.source else "send"
    return (
        f"the {op}{tensors_text(context.issued(wait))}, #{wait.number} from rank {key.source} to"
        f' rank {key.destination} on group "{context.title(key)}"'
    )


def _elsewhere_text(context: Context, rank: int) -> str:
    """Where a missing rank is instead."""
    job_calls, noun = context.job_calls, context.run.noun
    if rank not in job_calls.by_rank:
        return f"rank {rank} left no {noun}; its location is unknown"
    place = context.place(rank)
    if not job_calls.has_data(rank):
        return f"rank {rank} was last seen {in_place(place)}; its later calls are unknown"
    if place.certainty is Certainty.UNKNOWN and not after_comma(in_place(place)):
        return f"the {noun} of rank {rank} does not show where it is"
    if place.certainty is Certainty.UNKNOWN:
        return (
            f"rank {rank} was last seen {in_place(place)}; its {noun} does not show where it is now"
        )
    verb = "was" if context.state(rank) is State.DEAD else "is"
    return f"rank {rank} {verb} instead {in_place(place)}: {rank_detail_text(context, rank)}"


def _unable_text(context: Context, ranks: Sequence[int]) -> list[str]:
    """What to look at if ranks have reached a call and cannot complete it."""
    if all(context.state(rank) is State.STOPPED for rank in ranks):
        return ["Look at: what stopped it (a debugger, a shell, a scheduler that suspends jobs)."]
    log, kernel_log = f"the log of {ranks_phrase(ranks)}", "the kernel log of its host"
    why = "what kept its process from running, or ended it"
    if len(ranks) > 1:
        kernel_log = "the kernel logs of their hosts"
        why = "what kept their processes from running, or ended them"
    return [f"Look at: {log}, and {kernel_log}: {why}."]


def _device_text(context: Context, ranks: Sequence[int]) -> list[str]:
    """What to look at if ranks wait for their own devices, which have reached all marks."""
    line = context.cpu_place(ranks[0]).full_line
    before = f"before {line}" if line else "before that"
    devices = f"{agree(ranks, 'device', 'devices')} of {ranks_phrase(ranks)}"
    hosts = agree(ranks, "its host", "their hosts")
    return [
        (
            f"Likely cause: a kernel or a copy on the {devices} does not end. Look at: nvidia-smi"
            f" and the kernel log (Xid) on {hosts}, and the kernels that the CPU issued {before}."
        )
    ]


def _branch_text(context: Context, ranks: Sequence[int], wait: Wait) -> list[str]:
    """Where the ranks may have taken a different code path, or what blocks them."""
    if all(context.state(rank) is State.STOPPED for rank in ranks):
        return _unable_text(context, ranks)
    if all(map(context.waits_for_device, ranks)):
        return _device_text(context, ranks)
    rank_calls = context.by_rank[ranks[0]]
    lines = []
    if not context.exits.was_ended_externally(ranks[0]):
        lines = survived_text(survived_exception(rank_calls, rank_calls.rank_summary.records))
    before = rank_calls.issued(wait.key, wait.number - 1)
    call = context.issued(wait)
    if before is not None and call is not None and call.place.line:
        is_are = agree(ranks, "is", "are")
        after = f"{before.place.full_line or 'its last collective'}{step_text(before)}"
        lines.append(
            f"Likely cause: {ranks_phrase(ranks)} took a different code path, or {is_are} blocked,"
            f" after {after}. Look at: conditions on rank, step or data before"
            f" {call.place.full_line}."
        )
    return lines


def _overdue_text(pause: Pause | None, context: Context) -> list[str]:
    """Say that a reported wait has lasted longer than a pause of a healthy job may."""
    if pause is None or (pause.kind is None and pause.limit_s <= context.timing.stall_s):
        return []
    work = f" for {pause.kind}" if pause.kind is not None else ""
    earlier = "no rank has waited at this call before"
    if pause.earlier_s:
        earlier = f"the longest earlier wait at this call took {pause.earlier_s:.1f} s"
    return [f"A pause{work} may last {pause.limit_s:.0f} s, and this one lasts longer: {earlier}."]


def _doubts_text(cause: MissingRanks, context: Context) -> list[str]:
    """Other explanations that the data does not exclude."""
    ranks = cause.ranks
    if not any(map(context.job_calls.has_data, ranks)):
        they = agree(ranks, "it", "they")
        return [
            (
                f"There is no data for {ranks_phrase(ranks)}. If {they} reached this collective"
                " too, no rank is missing: suspect the network or a device."
            )
        ]
    others = [rank for rank in cause.wait.no_data if rank not in ranks]
    lines = [f"  it is unknown whether {ranks_phrase(others)} reached it"] if others else []
    if not context.timing.is_live:
        lines.append(
            "It is unknown how long they had waited when the job ended: a healthy job may also have"
            " been between two collectives."
        )
    return lines


def _elsewhere_ranks_text(cause: MissingRanks) -> list[str]:
    if not cause.elsewhere:
        return []
    wait = agree(cause.elsewhere, "it still waits", "they still wait")
    return [f"{subject_text(cause.elsewhere)} did not reach it either: {wait} in another call."]


def _excuses_text(cause: MissingRanks) -> list[str]:
    """Ranks that others wait for, and that may wait for a rank without data."""
    lines = [
        f"Rank {rank} may itself be waiting for rank {other}, which left no data."
        for rank, other in cause.excuses[:_MOST_RANKS]
    ]
    return [*lines, "The culprit is unknown."] if lines else []
