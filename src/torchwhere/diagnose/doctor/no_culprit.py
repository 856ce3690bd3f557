"""Sentences of a verdict without a culprit: all ranks blocked together, a healthy job, an
unknown cause."""

from __future__ import annotations

from torchwhere.core.rank_text import ranks_phrase
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.group_creation import waits_in
from torchwhere.diagnose.doctor.stragglers import Pace
from torchwhere.diagnose.doctor.wait_text import first_line, in_place, what_text
from torchwhere.diagnose.doctor.waits import awaited, waiting_for

_WORTH_TELLING_S = 1.0
_SUSPECT_NETWORK = (
    "Likely cause: the network or a device. Look at: the flight recorder dump, the NCCL log, the"
    " network links and the devices."
)


def on_together(context: Context) -> tuple[str, ...]:
    places = {in_place(context.place(rank)) for rank in context.job_calls.by_rank}
    where = places.pop() if len(places) == 1 else f"in {len(places)} places"
    return (
        (
            f"All {len(context.job_calls.by_rank)} ranks are stalled, {where}. No rank is missing"
            " from any collective."
        ),
        _SUSPECT_NETWORK,
    )


def on_timeout(context: Context) -> tuple[str, ...]:
    """All ranks timed out in one collective, and no rank is missing from it."""
    first = next(rank for rank in context.job_calls.by_rank if context.exits.timed_out(rank))
    count = len(context.job_calls.by_rank)
    return (
        (
            f"All {count} ranks reached the same collective and waited there until they timed out."
            " No rank is missing from it."
        ),
        f"  rank {first}: {first_line(str(context.detail(first)))}",
        _SUSPECT_NETWORK,
    )


# -- nothing wrong ---------------------------------------------------------------------------------


def on_healthy(context: Context, pace: Pace) -> tuple[str, ...]:
    if context.have_finished:
        count = len(context.job_calls.by_rank)
        ranks = f"The {count} ranks with data" if context.no_data else f"All {count} ranks"
        return (f"{ranks} have finished. {pace}",)
    call = (
        next(iter(context.job_calls.by_rank.values())).last_collective
        if context.is_unknown_end
        else None
    )
    if call is not None:
        return (
            (
                "The job is over, and no process was seen at its end. At the end all ranks were in"
                f" {what_text(call)}. {pace}"
            ),
            "The boxes do not show whether the job hung there or was only passing through.",
        )
    if (
        not context.is_over
        or not context.statuses
        or any(status.alive is None for status in context.statuses.values())
    ):
        return (f"Progressing. {pace}",)
    until = f"The job was progressing when Ctrl-C interrupted it. {pace}"
    if context.exits.ended_unfinished:
        until = f"Until then the job was progressing. {pace}"
    elif not context.exits.ended_externally:
        until = f"The job was progressing when it ended. {pace}"
    if not context.are_all_in_one_call():
        return until, *_had_begun_to_wait(context)
    call = next(iter(context.job_calls.by_rank.values())).last_collective
    return (
        until,
        (
            f"At the end all ranks were in {what_text(call)}. A job in which all ranks hang there"
            " would look the same."
        ),
    )


def on_ended(context: Context, *, besides: list[int] | None = None) -> tuple[str, ...]:
    """How the ranks of an unfinished job ended; with `besides`, only the other ranks."""
    alike: dict[str, list[int]] = {}
    for rank in sorted(
        {*context.exits.killed(), *context.exits.terminated(), *context.exits.failed()}
        - set(besides or ())
    ):
        alike.setdefault(context.exits.how(rank), []).append(rank)
    lines = [
        f"  {ranks_phrase(ranks)}: {first_line(how)}" for how, ranks in list(alike.items())[:4]
    ]
    if besides is not None:
        return ("The others exited too:", *lines) if lines and context.is_over else ()
    are_gone = all(context.status(rank).alive is False for rank in context.job_calls.by_rank)
    head = "No process is left" if are_gone else "No process is known to be left"
    return (f"{head}, and the job had not finished. It is unknown which rank exited first.", *lines)


def may_have_gone_first(context: Context) -> list[int]:
    """Ranks that others had begun to wait for when all were killed, if fewer than half."""
    killed = frozenset(context.exits.killed())
    blamed = [rank for rank in awaited(context.waits) if rank in killed]
    return blamed if 2 * len(blamed) < len(context.job_calls.by_rank) else []


def on_first(context: Context) -> tuple[str, ...]:
    """Names the ranks that may have exited first: the others had begun to wait for them."""
    ranks = may_have_gone_first(context)
    if not ranks:
        return ()
    them = "it" if len(ranks) == 1 else "them"
    others = ranks_phrase(sorted(wait.rank for wait in waiting_for(context.waits, ranks)))
    return (
        (
            f"{ranks_phrase(ranks).capitalize()} may have exited first: {others} waited for {them}."
            " All ranks may also have been killed at the same time."
        ),
    )


def on_quiet(context: Context, quiet_s: float, pace: Pace) -> tuple[str, ...]:
    """No rank waits for another, and no rank records anything."""
    quiet = f"No rank has recorded anything for {quiet_s:.0f} s, and no rank waits for another"
    if context.is_over:
        quiet = (
            f"The job is over. No rank recorded anything in its last {quiet_s:.0f} s, and no rank"
            " waited for another"
        )
    places: dict[str, list[int]] = {}
    for rank in context.job_calls.by_rank:
        places.setdefault(in_place(context.place(rank)), []).append(rank)
    shown = [f"  {ranks_phrase(ranks)}: {place}" for place, ranks in list(places.items())[:4]]
    return (
        f"{quiet} in a collective. {pace}",
        *shown,
        "The boxes do not show whether they work there or hang. Look at: these lines.",
    )


def _had_begun_to_wait(context: Context) -> tuple[str, ...]:
    """Ranks that waited when the job ended: too short for a hang, long enough to report."""
    if any(group_creations := [waits_in(context, rank) for rank in context.job_calls.by_rank]):
        ranks = [
            rank
            for rank, made in zip(context.job_calls.by_rank, group_creations, strict=True)
            if made is not None
        ]
        was = "was" if len(ranks) == 1 else "were"
        return (
            (
                f"At the end {ranks_phrase(ranks)} {was} creating a process group and waiting there"
                " for other ranks."
            ),
        )
    blamed = awaited(context.waits)
    wait = min(waiting_for(context.waits, blamed), key=context.issued_ns, default=None)
    waited_s = context.waited_s(wait) if wait is not None else None
    if wait is None or waited_s is None or waited_s < _WORTH_TELLING_S:
        return ()
    waits = (
        f"{ranks_phrase([each.rank for each in waiting_for(context.waits, blamed)])} had waited for"
        f" {ranks_phrase(blamed)}"
    )
    what = what_text(context.job_calls.by_rank[wait.rank].issued(wait.key, wait.number))
    return (f"At the end {waits} for {waited_s:.0f} s, in {what}. A normal pause looks the same.",)


def on_no_data(
    context: Context,
    example_rank: int | None,
    key: StreamKey | None,
    number: int,
    went_on: list[int],
    pace: Pace,
) -> tuple[str, ...]:
    """The job is over, the readable boxes show no fault, and a rank left no data."""
    no_data, noun = ranks_phrase(sorted(context.no_data)), context.run.noun
    ended = f"The job is over, and {no_data} left no readable {noun}. {pace}"
    if key is None or example_rank is None:
        return (ended, "The others issued no collective: it is unknown what the job did.")
    what = what_text(context.job_calls.by_rank[example_rank].issued(key, number))
    call = f'{what}, #{number} of group "{context.job_calls.group(key).title}"'
    if went_on:
        past = (
            f"{ranks_phrase(went_on).capitalize()} continued after {call}, which needs all ranks of"
            " the group: until then nothing was wrong."
        )
        return (ended, past, f"It is unknown what {no_data} did after it.")
    came = [
        rank for rank in sorted(context.no_data) if context.job_calls.has_issued(rank, key, number)
    ]
    if came:
        its = "its" if len(came) == 1 else "their"
        return (
            ended,
            f"The others reached {call}.",
            (
                f"{ranks_phrase(came).capitalize()} reached it too, by {its} counters; the call"
                f" itself is lost with {its} {noun}."
            ),
            "It is unknown whether they hung there, and what was wrong.",
        )
    return (
        ended,
        (
            f"The others reached {call}. No rank is known to have passed it, and it is unknown what"
            " was wrong."
        ),
    )
