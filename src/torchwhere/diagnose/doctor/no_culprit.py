"""What there is to say where no rank is to blame: all stand together, all is well, or what was wrong does not show."""

from __future__ import annotations

from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.doctor.context import Case
from torchwhere.diagnose.doctor.group_creation import waits_in
from torchwhere.diagnose.doctor.stragglers import Pace
from torchwhere.diagnose.doctor.wait_text import first_line, in_place, ranks_said, what_said
from torchwhere.diagnose.doctor.waits import awaited, waiting_for

_WORTH_TELLING_S = 1.0


def on_together(case: Case) -> tuple[str, ...]:
    places = {in_place(case.place(rank)) for rank in case.hearing.testimonies}
    where = places.pop() if len(places) == 1 else f"in {len(places)} places"
    return (
        f"All {len(case.hearing.testimonies)} ranks stand still, {where}. No rank is missing from any collective.",
        "Likely: the network or a device. Look at: the flight recorder's dump, NCCL's log, the links and the devices.",
    )


def on_given_up(case: Case) -> tuple[str, ...]:
    """All have ended, of waiting too long, and no rank is missing."""
    first = next(rank for rank in case.hearing.testimonies if case.deaths.gave_up(rank))
    count = len(case.hearing.testimonies)
    return (
        f"All {count} ranks came to the same collective, and waited there until they gave up. No rank is missing from it.",
        f"  rank {first}: {first_line(str(case.detail(first)))}",
        "Likely: the network or a device. Look at: the flight recorder's dump, NCCL's log, the links and the devices.",
    )


# -- nothing wrong ---------------------------------------------------------------------------------------------------------


def on_healthy(case: Case, found: Pace) -> tuple[str, ...]:
    if case.have_finished:
        count = len(case.hearing.testimonies)
        return (f"{f'The {count} ranks that were heard' if case.unheard else f'All {count} ranks'} have finished. {found}",)
    call = next(iter(case.hearing.testimonies.values())).last_collective if case.is_unknown_end else None
    if call is not None:
        said = f"The job is over, and nobody watched it. At the end all ranks were in {what_said(call)}. {found}"
        return (said, "Whether it was passing through, or hung there all together, the boxes do not say.")
    if not case.is_over or not case.sightings or any(sighting.alive is None for sighting in case.sightings.values()):
        return (f"Progressing. {found}",)
    said = f"Was progressing when it was interrupted, with Ctrl-C. {found}"
    if case.deaths.ended_unfinished:
        said = f"Until then it was progressing. {found}"
    elif not case.deaths.by_hand:
        said = f"Was progressing when it ended. {found}"
    if not case.all_in_one():
        return said, *_had_begun_to_wait(case)
    call = next(iter(case.hearing.testimonies.values())).last_collective
    return (said, f"At the end all ranks were in {what_said(call)}. A job that hung there, all together, would look the same.")


def on_ended(case: Case, *, besides: list[int] | None = None) -> tuple[str, ...]:
    """How the ranks of a job ended that did not finish, all or all other ones."""
    alike: dict[str, list[int]] = {}
    for rank in sorted({*case.deaths.killed(), *case.deaths.terminated(), *case.deaths.failed()} - set(besides or ())):
        alike.setdefault(case.deaths.how(rank), []).append(rank)
    lines = [f"  {ranks_said(ranks)}: {first_line(how)}" for how, ranks in list(alike.items())[:4]]
    if besides is not None:
        return ("The others ended too:", *lines) if lines and case.is_over else ()
    are_gone = all(case.sighting(rank).alive is False for rank in case.hearing.testimonies)
    head = "No process is left" if are_gone else "No process is known to be left"
    return (f"{head}, and the job had not finished. Which rank went first is not known.", *lines)


def may_have_gone_first(case: Case) -> list[int]:
    """Ranks that others had begun to wait for when all were killed, if they are fewer than half."""
    killed = frozenset(case.deaths.killed())
    blamed = [rank for rank in awaited(case.waits) if rank in killed]
    return blamed if 2 * len(blamed) < len(case.hearing.testimonies) else []


def on_first(case: Case) -> tuple[str, ...]:
    """Which ranks may have gone first where all were killed: those that the others had begun to wait for."""
    ranks = may_have_gone_first(case)
    if not ranks:
        return ()
    others = ranks_said(sorted(wait.rank for wait in waiting_for(case.waits, ranks)))
    return (f"{ranks_said(ranks).capitalize()} may have gone first: {others} waited for it. All may have been killed at once.",)


def on_quiet(case: Case, quiet_s: float, found: Pace) -> tuple[str, ...]:
    """Nobody waits for anybody, and nobody does anything that shows."""
    over = "The job is over. In its last" if case.is_over else "In the last"
    places: dict[str, list[int]] = {}
    for rank in case.hearing.testimonies:
        places.setdefault(in_place(case.place(rank)), []).append(rank)
    shown = [f"  {ranks_said(ranks)}: {place}" for place, ranks in list(places.items())[:4]]
    return (
        f"{over} {quiet_s:.0f} s no rank has recorded anything, and none waits for another one in a collective. {found}",
        *shown,
        "Whether they work there, or hang, does not show. Look at: these lines.",
    )


def _had_begun_to_wait(case: Case) -> tuple[str, ...]:
    """That ranks waited for another one when the job ended: too short to be held against it, and long enough to be told."""
    if any(makings := [waits_in(case, rank) for rank in case.hearing.testimonies]):
        ranks = [rank for rank, made in zip(case.hearing.testimonies, makings, strict=True) if made is not None]
        return (f"At the end {ranks_said(ranks)} had begun to make a process group, and waited there for others.",)
    blamed = awaited(case.waits)
    wait = min(waiting_for(case.waits, blamed), key=case.issued_ns, default=None)
    waited_s = case.waited_s(wait) if wait is not None else None
    if wait is None or waited_s is None or waited_s < _WORTH_TELLING_S:
        return ()
    who = f"{ranks_said([each.rank for each in waiting_for(case.waits, blamed)])} had waited for {ranks_said(blamed)}"
    what = what_said(case.hearing.testimonies[wait.rank].issued(wait.key, wait.number))
    return (f"At the end {who} for {waited_s:.0f} s, in {what}. A pause looks like that too.",)


def on_unheard(
    case: Case, witness: int | None, key: StreamKey | None, number: int, went_on: list[int], found: Pace
) -> tuple[str, ...]:
    """The job is over, what can be read is well, and a rank left nothing to read."""
    unheard, noun = ranks_said(sorted(case.unheard)), case.run.noun
    ended = f"The job is over, and {unheard} left no {noun} that can be read. {found}"
    if key is None or witness is None:
        return (ended, "The others have issued no collective: what the job did is not known.")
    what = what_said(case.hearing.testimonies[witness].issued(key, number))
    call = f'{what}, #{number} of group "{case.hearing.group(key).title}"'
    if went_on:
        past = (
            f"{ranks_said(went_on).capitalize()} went on after {call}, which takes all of its ranks: until then all was well."
        )
        return (ended, past, f"What {unheard} did after it is not known.")
    came = [rank for rank in sorted(case.unheard) if case.hearing.has_come(rank, key, number)]
    if came:
        who = f"{ranks_said(came).capitalize()} came to it too, by its counts: what it issued there is lost with its {noun}."
        return (ended, f"The others came to {call}.", who, "Whether they hung there, and what was wrong, does not show.")
    return (ended, f"The others came to {call}. Nobody is known to have got past it, and what was wrong does not show.")
