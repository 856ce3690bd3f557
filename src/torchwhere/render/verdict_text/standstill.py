"""Sentences on a running job that makes no progress: a pause, or a wait that is not yet a hang."""

from __future__ import annotations

from torchwhere.core.rank_text import ranks_phrase
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.pauses import Pause, PauseKind
from torchwhere.diagnose.doctor.rules.no_fault import (
    CreatingGroup,
    InOneCall,
    ShortWait,
    Standstill,
)
from torchwhere.render.verdict_text.no_fault import pace_text, place_lines
from torchwhere.render.verdict_text.phrases import all_ranks_text, in_place, op_text

_MOST_RANKS = 4  # with their own line


def standstill_text(cause: Standstill, context: Context) -> list[str]:
    last = cause.last
    if cause.is_pause:
        lines = [_last_text(last, context)] if last is not None else []
        return [_paused_text(cause), *lines, *_work_lines(cause.pause, context)]
    still = _not_yet_text(cause, context.timing.stall_s)
    if last is None:
        return [still, *place_lines(context)]
    is_wait = isinstance(last, InOneCall | ShortWait)
    doubt = " A normal pause looks the same." if is_wait else ""
    return [still, f"{_last_text(last, context)}{doubt}"]


def overdue_text(pause: Pause | None, context: Context) -> list[str]:
    """Say that a reported wait has lasted longer than a pause of a healthy job may."""
    if pause is None or (pause.kind is None and pause.limit_s <= context.timing.stall_s):
        return []
    work = f" for {pause.kind}" if pause.kind is not None else ""
    earlier = "no rank has waited at this call before"
    if pause.earlier_s:
        earlier = f"the longest earlier wait at this call took {pause.earlier_s:.1f} s"
    return [f"A pause{work} may last {pause.limit_s:.0f} s, and this one lasts longer: {earlier}."]


def _paused_text(cause: Standstill) -> str:
    kind = cause.pause.kind
    title = "Starting" if kind is PauseKind.STARTING else f"Paused: {kind}"
    limit = f"; this is called a hang after {cause.pause.limit_s:g} s"
    if cause.last is None:
        limit = ", and no rank waits for another"
    return f"{title}. No progress for {cause.still_s:.1f} s{limit}. {pace_text(cause.pace)}"


def _not_yet_text(cause: Standstill, stall_s: float) -> str:
    pause = cause.pause
    limit = f"the limit is {stall_s:g} s (--stall)"
    if pause.earlier_s and pause.limit_s > stall_s:
        limit = (
            f"ranks have waited here for {pause.earlier_s:.0f} s before, so the limit is"
            f" {pause.limit_s:.0f} s"
        )
    return (
        f"No progress for {cause.still_s:.1f} s, not yet called a hang: {limit}."
        f" {pace_text(cause.pace)}"
    )


def _last_text(last: InOneCall | CreatingGroup | ShortWait, context: Context) -> str:
    """What the ranks are in."""
    if isinstance(last, InOneCall):
        count = len(context.job_calls.by_rank)
        are_in = all_ranks_text(count, single="is in", several="are in")
        return f"{are_in} {op_text(last.call)}."
    ranks = ranks_phrase(last.ranks).capitalize()
    if isinstance(last, CreatingGroup):
        verb = "creates" if len(last.ranks) == 1 else "create"
        return f"{ranks} {verb} a process group and may wait there for other ranks."
    have = "has" if len(last.ranks) == 1 else "have"
    return (
        f"{ranks} {have} waited for {ranks_phrase(last.awaited)} for {last.waited_s:.1f} s,"
        f" in {op_text(last.call)}."
    )


def _work_lines(pause: Pause, context: Context) -> list[str]:
    """Where the ranks are that others wait for."""
    work = list(zip(pause.ranks, pause.kinds, strict=False))[:_MOST_RANKS]
    lines = [f"  rank {rank} is {kind}, {in_place(context.place(rank))}" for rank, kind in work]
    left_out = len(pause.ranks) - len(lines)
    return [*lines, f"  and {left_out} more"] if left_out else lines
