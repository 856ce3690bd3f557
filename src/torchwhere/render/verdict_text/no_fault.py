"""Sentences of a verdict without a culprit: all ranks blocked together, a healthy job, a pause, an
unknown cause."""

from __future__ import annotations

from torchwhere.core.grouping import grouped
from torchwhere.core.rank_text import ranks_phrase, watched_phrase
from torchwhere.core.sanitize import plural
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.pace import Pace
from torchwhere.diagnose.doctor.pauses import Pause, PauseKind
from torchwhere.diagnose.doctor.rules.exited import TimedOutTogether
from torchwhere.diagnose.doctor.rules.lost_data import LostData
from torchwhere.diagnose.doctor.rules.no_fault import (
    CreatingGroup,
    Finished,
    InOneCall,
    PartlyWatched,
    Progressing,
    ProgressingAtEnd,
    Quiet,
    ShortWait,
    Standstill,
    UnobservedEnd,
)
from torchwhere.diagnose.doctor.rules.together import BlockedTogether
from torchwhere.diagnose.doctor.verdict import State
from torchwhere.render.verdict_text.phrases import (
    agree,
    all_ranks_text,
    common_place_text,
    first_line,
    in_place,
    numbered_call_text,
    op_text,
    rank_detail_text,
    subject_text,
)

_SUSPECT_NETWORK = (
    "Likely cause: the network or a device. Look at: the flight recorder dump, the NCCL log, the"
    " network links and the devices."
)
_MOST_PLACES = 4
_MOST_RANKS = 4  # with their own line


def pace_text(pace: Pace) -> str:
    """The pace as a sentence: `Last step 9, 2.5 steps/s.`"""
    if pace.steps_per_s is None and pace.collectives_per_s is not None and not pace.last_step:
        counted = "One step" if pace.last_step == 0 else "No step"
        return f"{counted} has been counted; {pace.collectives_per_s:.3g} collectives/s."
    if pace.last_step is None:
        return "No step has been counted yet."
    rate = f", {pace.steps_per_s:.3g} steps/s" if pace.steps_per_s else ""
    return f"Last step {pace.last_step}{rate}."


# -- all together ----------------------------------------------------------------------------------


def blocked_together_text(cause: BlockedTogether, context: Context) -> list[str]:
    ranks = context.by_rank
    where = common_place_text(context, ranks, noun="places")
    stalled = all_ranks_text(len(ranks), single="is stalled", several="are stalled")
    return [
        f"{stalled}, {where}. No rank is missing from any collective.",
        _SUSPECT_NETWORK,
    ]


def timed_out_together_text(cause: TimedOutTogether, context: Context) -> list[str]:
    text = rank_detail_text(context, cause.example_rank)
    count = len(context.by_rank)
    reached = all_ranks_text(count, single="reached", several="reached")
    return [
        (
            f"{reached} the same collective and waited there until the timeout. No rank is missing"
            " from it."
        ),
        f"  rank {cause.example_rank}: {first_line(text)}",
        _SUSPECT_NETWORK,
    ]


# -- nothing wrong ---------------------------------------------------------------------------------


def finished_text(cause: Finished, context: Context) -> list[str]:
    count = len(context.by_rank)
    finished = all_ranks_text(count, single="has finished", several="have finished")
    if context.no_data:
        have = agree(context.by_rank, "has", "have")
        finished = f"The {plural(count, 'rank')} with data {have} finished"
    return [f"{finished}. {pace_text(cause.pace)}"]


def partly_watched_text(cause: PartlyWatched, context: Context) -> list[str]:
    world_size = context.run.world_size
    watched = watched_phrase(world_size - len(cause.unwatched), world_size)
    return [
        f"{watched}, and no fault is known. There is no data for {ranks_phrase(cause.unwatched)}."
    ]


def progressing_text(cause: Progressing, context: Context) -> list[str]:
    return [f"Progressing. {pace_text(cause.pace)}"]


def unobserved_end_text(cause: UnobservedEnd, context: Context) -> list[str]:
    return [
        (
            "The job is over, and no process was seen at its end. At the end all ranks were in"
            f" {op_text(cause.call)}. {pace_text(cause.pace)}"
        ),
        "The boxes do not show whether the job hung there or was still progressing.",
    ]


def progressing_at_end_text(cause: ProgressingAtEnd, context: Context) -> list[str]:
    until = "The job was progressing when it ended."
    if context.exits.ended_unfinished:
        until = "Until then the job was progressing."
    elif context.exits.ended_externally:
        until = "The job was progressing when Ctrl-C interrupted it."
    lines = [f"{until} {pace_text(cause.pace)}"]
    return [*lines, _last_text(cause.last)] if cause.last is not None else lines


def _last_text(last: InOneCall | CreatingGroup | ShortWait) -> str:
    """What the ranks were in when the job ended."""
    if isinstance(last, InOneCall):
        return (
            f"At the end all ranks were in {op_text(last.call)}. A job in which all ranks hang"
            " there would look the same."
        )
    if isinstance(last, CreatingGroup):
        was = agree(last.ranks, "was", "were")
        return (
            f"At the end {ranks_phrase(last.ranks)} {was} creating a process group and waiting"
            " there for other ranks."
        )
    return (
        f"At the end {ranks_phrase(last.ranks)} had waited for {ranks_phrase(last.awaited)} for"
        f" {last.waited_s:.0f} s, in {op_text(last.call)}. A normal pause looks the same."
    )


def quiet_text(cause: Quiet, context: Context) -> list[str]:
    seconds = f"{cause.quiet_s:.0f} s"
    quiet = f"No rank has recorded anything for {seconds}, and no rank waits for another"
    if context.timing.is_over:
        quiet = (
            f"The job is over. No rank recorded anything in its last {seconds}, and no rank waited"
            " for another"
        )
    return [
        f"{quiet} in a collective. {pace_text(cause.pace)}",
        *_place_lines(context),
        "The boxes do not show whether they work there or hang. Look at: these lines.",
    ]


def _place_lines(context: Context) -> list[str]:
    """The places of the ranks, one line for each of the first few."""
    places = grouped((_now_text(context, rank), rank) for rank in context.by_rank)
    first = list(places.items())[:_MOST_PLACES]
    return [f"  {ranks_phrase(ranks)}: {place}" for place, ranks in first]


def _now_text(context: Context, rank: int) -> str:
    """Where a rank is, and whether it waits there for its device."""
    if context.state(rank) is State.FINISHED:
        return "finished"
    waits = context.waits_for_device(rank)
    place = in_place(context.place(rank))
    return f"{place}: {rank_detail_text(context, rank)}" if waits else place


def lost_data_text(cause: LostData, context: Context) -> list[str]:
    no_data, noun, call = ranks_phrase(context.no_data), context.run.noun, cause.call
    ended = f"The job is over, and {no_data} left no readable {noun}. {pace_text(cause.pace)}"
    if call is None:
        return [ended, "The others issued no collective: it is unknown what the job did."]
    reached = numbered_call_text(context, call)
    if cause.went_on:
        return [
            ended,
            (
                f"{subject_text(cause.went_on)} continued after {reached}, which needs"
                " all ranks of the group: until then nothing was wrong."
            ),
            f"It is unknown what {no_data} did after it.",
        ]
    if cause.reached:
        its = agree(cause.reached, "its", "their")
        return [
            ended,
            f"The others reached {reached}.",
            (
                f"{subject_text(cause.reached)} reached it too, by {its} counters; the"
                f" call itself is lost with {its} {noun}."
            ),
            "It is unknown whether they hung there, and what was wrong.",
        ]
    return [
        ended,
        (
            f"The others reached {reached}. No rank is known to have passed it, and it is unknown"
            " what was wrong."
        ),
    ]


# -- no progress -----------------------------------------------------------------------------------


def standstill_text(cause: Standstill, context: Context) -> list[str]:
    last = cause.last
    if cause.is_pause:
        lines = [_last_now_text(last, context)] if last is not None else []
        return [_paused_text(cause), *lines, *_work_lines(cause.pause, context)]
    still = _not_yet_text(cause, context.timing.stall_s)
    if last is None:
        return [still, *_place_lines(context)]
    is_wait = isinstance(last, InOneCall | ShortWait)
    doubt = " A normal pause looks the same." if is_wait else ""
    return [still, f"{_last_now_text(last, context)}{doubt}"]


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


def _last_now_text(last: InOneCall | CreatingGroup | ShortWait, context: Context) -> str:
    """What the ranks are in."""
    if isinstance(last, InOneCall):
        count = len(context.by_rank)
        are_in = all_ranks_text(count, single="is in", several="are in")
        return f"{are_in} {op_text(last.call)}."
    ranks = subject_text(last.ranks)
    if isinstance(last, CreatingGroup):
        verb = agree(last.ranks, "creates", "create")
        return f"{ranks} {verb} a process group and may wait there for other ranks."
    have = agree(last.ranks, "has", "have")
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
