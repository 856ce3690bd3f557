"""What there is to say where no rank is to blame: all stand together, all is well, or what was
wrong does not show."""

from __future__ import annotations

from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.group_creation import waits_in
from torchwhere.diagnose.doctor.stragglers import Pace
from torchwhere.diagnose.doctor.wait_text import first_line, in_place, ranks_text, what_text
from torchwhere.diagnose.doctor.waits import awaited, waiting_for

_WORTH_TELLING_S = 1.0


def on_together(context: Context) -> tuple[str, ...]:
    places = {in_place(context.place(rank)) for rank in context.job_calls.by_rank}
    where = places.pop() if len(places) == 1 else f"in {len(places)} places"
    return (
        (
            f"All {len(context.job_calls.by_rank)} ranks stand still, {where}. No rank is missing"
            " from any collective."
        ),
        (
            "Likely: the network or a device. Look at: the flight recorder's dump, NCCL's log, the"
            " links and the devices."
        ),
    )


def on_given_up(context: Context) -> tuple[str, ...]:
    """All have ended, of waiting too long, and no rank is missing."""
    first = next(rank for rank in context.job_calls.by_rank if context.exits.gave_up(rank))
    count = len(context.job_calls.by_rank)
    return (
        (
            f"All {count} ranks came to the same collective, and waited there until they gave up."
            " No rank is missing from it."
        ),
        f"  rank {first}: {first_line(str(context.detail(first)))}",
        (
            "Likely: the network or a device. Look at: the flight recorder's dump, NCCL's log, the"
            " links and the devices."
        ),
    )


# -- nothing wrong ---------------------------------------------------------------------------------


def on_healthy(context: Context, found: Pace) -> tuple[str, ...]:
    if context.have_finished:
        count = len(context.job_calls.by_rank)
        ranks = f"The {count} ranks with data" if context.no_data else f"All {count} ranks"
        return (f"{ranks} have finished. {found}",)
    call = (
        next(iter(context.job_calls.by_rank.values())).last_collective
        if context.is_unknown_end
        else None
    )
    if call is not None:
        said = (
            "The job is over, and nobody watched it. At the end all ranks were in"
            f" {what_text(call)}. {found}"
        )
        return (
            said,
            "Whether it was passing through, or hung there all together, the boxes do not say.",
        )
    if (
        not context.is_over
        or not context.statuses
        or any(status.alive is None for status in context.statuses.values())
    ):
        return (f"Progressing. {found}",)
    said = f"Was progressing when it was interrupted, with Ctrl-C. {found}"
    if context.exits.ended_unfinished:
        said = f"Until then it was progressing. {found}"
    elif not context.exits.by_hand:
        said = f"Was progressing when it ended. {found}"
    if not context.all_in_one():
        return said, *_had_begun_to_wait(context)
    call = next(iter(context.job_calls.by_rank.values())).last_collective
    return (
        said,
        (
            f"At the end all ranks were in {what_text(call)}. A job that hung there, all together,"
            " would look the same."
        ),
    )


def on_ended(context: Context, *, besides: list[int] | None = None) -> tuple[str, ...]:
    """How the ranks of a job ended that did not finish, all or all other ones."""
    alike: dict[str, list[int]] = {}
    for rank in sorted(
        {*context.exits.killed(), *context.exits.terminated(), *context.exits.failed()}
        - set(besides or ())
    ):
        alike.setdefault(context.exits.how(rank), []).append(rank)
    lines = [f"  {ranks_text(ranks)}: {first_line(how)}" for how, ranks in list(alike.items())[:4]]
    if besides is not None:
        return ("The others ended too:", *lines) if lines and context.is_over else ()
    are_gone = all(context.status(rank).alive is False for rank in context.job_calls.by_rank)
    head = "No process is left" if are_gone else "No process is known to be left"
    return (f"{head}, and the job had not finished. Which rank went first is not known.", *lines)


def may_have_gone_first(context: Context) -> list[int]:
    """Ranks that others had begun to wait for when all were killed, if they are fewer than half."""
    killed = frozenset(context.exits.killed())
    blamed = [rank for rank in awaited(context.waits) if rank in killed]
    return blamed if 2 * len(blamed) < len(context.job_calls.by_rank) else []


def on_first(context: Context) -> tuple[str, ...]:
    """Which ranks may have gone first where all were killed: those that the others had begun to
    wait for."""
    ranks = may_have_gone_first(context)
    if not ranks:
        return ()
    others = ranks_text(sorted(wait.rank for wait in waiting_for(context.waits, ranks)))
    return (
        (
            f"{ranks_text(ranks).capitalize()} may have gone first: {others} waited for it. All may"
            " have been killed at once."
        ),
    )


def on_quiet(context: Context, quiet_s: float, found: Pace) -> tuple[str, ...]:
    """Nobody waits for anybody, and nobody does anything that shows."""
    over = "The job is over. In its last" if context.is_over else "In the last"
    places: dict[str, list[int]] = {}
    for rank in context.job_calls.by_rank:
        places.setdefault(in_place(context.place(rank)), []).append(rank)
    shown = [f"  {ranks_text(ranks)}: {place}" for place, ranks in list(places.items())[:4]]
    return (
        (
            f"{over} {quiet_s:.0f} s no rank has recorded anything, and none waits for another one"
            f" in a collective. {found}"
        ),
        *shown,
        "Whether they work there, or hang, does not show. Look at: these lines.",
    )


def _had_begun_to_wait(context: Context) -> tuple[str, ...]:
    """That ranks waited for another one when the job ended: too short to be held against it, and
    long enough to be told."""
    if any(group_creations := [waits_in(context, rank) for rank in context.job_calls.by_rank]):
        ranks = [
            rank
            for rank, made in zip(context.job_calls.by_rank, group_creations, strict=True)
            if made is not None
        ]
        return (
            (
                f"At the end {ranks_text(ranks)} had begun to make a process group, and waited"
                " there for others."
            ),
        )
    blamed = awaited(context.waits)
    wait = min(waiting_for(context.waits, blamed), key=context.issued_ns, default=None)
    waited_s = context.waited_s(wait) if wait is not None else None
    if wait is None or waited_s is None or waited_s < _WORTH_TELLING_S:
        return ()
    who = (
        f"{ranks_text([each.rank for each in waiting_for(context.waits, blamed)])} had waited for"
        f" {ranks_text(blamed)}"
    )
    what = what_text(context.job_calls.by_rank[wait.rank].issued(wait.key, wait.number))
    return (f"At the end {who} for {waited_s:.0f} s, in {what}. A pause looks like that too.",)


def on_unheard(
    context: Context,
    example_rank: int | None,
    key: StreamKey | None,
    number: int,
    went_on: list[int],
    found: Pace,
) -> tuple[str, ...]:
    """The job is over, what can be read is well, and a rank left nothing to read."""
    no_data, noun = ranks_text(sorted(context.no_data)), context.run.noun
    ended = f"The job is over, and {no_data} left no {noun} that can be read. {found}"
    if key is None or example_rank is None:
        return (ended, "The others have issued no collective: what the job did is not known.")
    what = what_text(context.job_calls.by_rank[example_rank].issued(key, number))
    call = f'{what}, #{number} of group "{context.job_calls.group(key).title}"'
    if went_on:
        past = (
            f"{ranks_text(went_on).capitalize()} went on after {call}, which takes all of its"
            " ranks: until then all was well."
        )
        return (ended, past, f"What {no_data} did after it is not known.")
    came = [
        rank for rank in sorted(context.no_data) if context.job_calls.has_come(rank, key, number)
    ]
    if came:
        who = (
            f"{ranks_text(came).capitalize()} came to it too, by its counts: what it issued there"
            f" is lost with its {noun}."
        )
        return (
            ended,
            f"The others came to {call}.",
            who,
            "Whether they hung there, and what was wrong, does not show.",
        )
    return (
        ended,
        (
            f"The others came to {call}. Nobody is known to have got past it, and what was wrong"
            " does not show."
        ),
    )
