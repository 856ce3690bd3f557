"""Why, and what to look at: the sentences of a verdict."""

from __future__ import annotations

from typing import Any

from torchwhere.diagnose.doctor.case import Case
from torchwhere.diagnose.doctor.mismatch import Mismatch
from torchwhere.diagnose.doctor.pace import Pace
from torchwhere.diagnose.doctor.verdict import State
from torchwhere.diagnose.doctor.waits import Wait, left_out, members, newcomers, out_of_turn
from torchwhere.diagnose.hearing.terms import StreamKey
from torchwhere.diagnose.hearing.testimony import Testimony
from torchwhere.events import Event
from torchwhere.place import Certainty, Place, shown

_MOST_LINKS = 16  # of a circle that are shown
_MOST_COHORTS = 16
_NEARBY = 64  # records before a call in which an exception may be its cause
_FORM_WORDS = {"peer": "root", "reduce_op": "reduction", "shapes": "shape", "out_shapes": "shape of the result"}


def ranks_said(ranks: list[int] | tuple[int, ...]) -> str:
    """`rank 2`, `ranks 0, 1 and 3`, `ranks 0-511`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    parts = [f"{first}-{last}" if last > first + 1 else ", ".join(map(str, range(first, last + 1))) for first, last in spans]
    return "ranks " + ", ".join(parts[:12]) + (f" and {len(parts) - 12} more spans" if len(parts) > 12 else "")


def place_said(place: Place) -> str:
    """Where, without the rank: `forward of layers.0, train.py:7, step 15`."""
    if place.module is None and place.pass_ == "outside":
        what = [] if place.certainty is Certainty.UNKNOWN else ["outside any module"]
    else:
        what = [place.pass_ if place.module is None else f"{place.pass_} of {shown(place.module)}"]
    parts = [*what, *([place.line] if place.line else []), *([f"step {place.step}"] if place.step is not None else [])]
    return ", ".join(parts) or "an unknown place"


def in_place(place: Place) -> str:
    """The same, to follow a verb: `in forward of layers.0, ...`, `outside any module, ...`."""
    said = place_said(place)
    if place.module is None and place.pass_ == "outside" and place.certainty is Certainty.UNKNOWN:
        return f"at {said}"
    return said if said.startswith("outside") else f"in {said}"


def call_said(call: Event) -> str:
    """`all_reduce of float32 [4, 8], backward of layers.0, train.py:9, step 3`."""
    return f"{what_said(call)}, {place_said(call.place)}"


def what_said(call: Event | None) -> str:
    """`all_reduce of float32 [4, 8]`."""
    if call is None:
        return "a collective"
    fields = call.fields
    root = (
        f" with {'peer' if fields.get('op') in ('send', 'recv') else 'root'} {fields['peer']}"
        if fields.get("peer") is not None
        else ""
    )
    return f"{fields.get('op')}{_of_said(call)}{root}"


def _of_said(call: Event | None) -> str:
    shapes = (call.fields.get("shapes") or []) if call is not None else []
    return f" of {call.fields.get('dtype')} {shapes[0] if len(shapes) == 1 else shapes}" if call is not None and shapes else ""


# -- mismatch --------------------------------------------------------------------------------------------------------------


def differs_in(case: Case, found: Mismatch) -> list[str]:
    """In what the first two cohorts differ."""
    one, other = (case.hearing.testimonies[cohort[0]].issued(found.key, found.number) for cohort in found.cohorts[:2])
    if one is None or other is None or found.what == "step":
        return [found.what]
    if found.what == "meaning":
        here, there = one.place, other.place
        places = {"module": here.module != there.module, "pass": here.pass_ != there.pass_, "line": here.line != there.line}
        names = [name for name, differs in places.items() if differs]
        return names + ["for"] * (one.fields.get("for") != other.fields.get("for"))
    is_p2p = {one.fields.get("op"), other.fields.get("op")} == {"send", "recv"}
    names = ["dtype", "shapes"] if is_p2p else ["op", "dtype", "shapes", "out_shapes", "reduce_op", "peer"]
    differing = [name for name in names if one.fields.get(name) != other.fields.get(name)]
    return ["op"] if "op" in differing else [_FORM_WORDS.get(name, name) for name in differing]


def cohorts(case: Case, found: Mismatch) -> list[dict[str, Any]]:
    said = []
    for cohort in found.cohorts[:_MOST_COHORTS]:
        call = case.hearing.testimonies[cohort[0]].issued(found.key, found.number)
        said.append({"ranks": list(cohort), "issued": call_said(call) if call is not None else None})
    rest = found.cohorts[_MOST_COHORTS:]
    if rest:
        ranks = sorted(rank for cohort in rest for rank in cohort)
        said.append({"ranks": ranks, "issued": f"{len(rest)} other things"})
    return said


def on_mismatch(case: Case, found: Mismatch) -> tuple[str, ...]:
    group = case.hearing.group(found.key)
    what = " and ".join(differs_in(case, found))
    said = [f'At #{found.number} of group "{group.title}" ranks issued something different: they differ in {what}.']
    said += [f"  {ranks_said(each['ranks'])}: {each['issued']}" for each in cohorts(case, found)]
    if found.what != "form":
        said.append("Op and shapes are the same, so nothing fails: each rank's data was combined with another thing's.")
    if not found.is_certain and found.departed:
        who = ranks_said(found.departed)
        said.append(f"The cohorts are of one size, but the others do as they did before: {who} departed from its own ways.")
    elif not found.is_certain:
        said.append("The cohorts are of one size: the boxes alone cannot say which of them is wrong.")
    said += _before(case, found.culprits, found.key, found.number)
    return tuple(said)


def _before(case: Case, culprits: tuple[int, ...], key: StreamKey, number: int) -> list[str]:
    """What a culprit did last that all others did too: the branch is after it."""
    said = []
    first = culprits[0]
    testimony = case.hearing.testimonies.get(first)
    if testimony is None:
        return []
    said += _went_on(testimony, testimony.order(key, number))
    call, before = testimony.issued(key, number), testimony.issued(key, number - 1) if number else None
    if call is not None and before is not None and before.place.line:
        said.append(
            f"Likely: {ranks_said(culprits)} took another way after {before.place.line}{_step(before)}. "
            f"Look at: conditions on rank, step or data {_between(before.place.line, call.place.line)}."
        )
    return said


def _went_on(testimony: Testimony, record: int) -> list[str]:
    """An exception of a rank that it survived: recorded shortly before a record."""
    near = [error for error in testimony.statement.exceptions if record - _NEARBY <= error.number < record]
    if not near:
        return []
    error = near[-1]
    text = _first_line(str(error.fields.get("text")))
    return [f"Rank {testimony.rank} had an exception before, and went on: {text} ({place_said(error.place)})."]


def _step(call: Event) -> str:
    return f" (step {call.place.step})" if call.place.step is not None else ""


def _first_line(text: str) -> str:
    return text.partition("\n")[0][:300]


def _between(one: str, other: str | None) -> str:
    return f"before {one}" if other in (one, None) else f"between {one} and {other}"


# -- waits -----------------------------------------------------------------------------------------------------------------


def _waiting(case: Case, wait: Wait) -> list[str]:
    """Who waits in the same call, and where."""
    together = sorted(rank for rank, other in case.waits.items() if (other.key, other.number) == (wait.key, wait.number))
    if not together:  # nobody is behind: all who can be heard wait for one who cannot
        together = [rank for rank in members(case.hearing, wait.key) if rank in case.hearing.testimonies]
    places = {in_place(case.place(rank)) for rank in together}
    said = f"waiting: {ranks_said(together)}"
    return [f"  {said}, {places.pop()}" if len(places) == 1 else f"  {said}, in {len(places)} different places"]


def on_missing(case: Case, blamed: list[int], wait: Wait) -> tuple[str, ...]:
    if _is_inside(case, blamed[0], wait):
        came = f"{ranks_said(blamed).capitalize()} came to {_awaited_said(case, wait)}, and cannot go on there."
        return (came, *_waiting(case, wait), *_held_said(case, blamed), *_branch(case, blamed, wait))
    never = "never" if any(rank in case.hearing.testimonies for rank in blamed) else "may never have"
    said = [f"{ranks_said(blamed).capitalize()} {never} issued {_awaited_said(case, wait)}.", *_waiting(case, wait)]
    for rank in blamed[:4]:
        if rank not in case.hearing.testimonies:
            said.append(f"  rank {rank} has no {case.run.noun}: where it is, nobody knows")
            continue
        if case.place(rank).certainty is Certainty.UNKNOWN:
            now = f"where it is now, its {case.run.noun} does not say"
            said.append(f"  rank {rank} was last seen {in_place(case.place(rank))}; {now}")
            continue
        said.append(f"  rank {rank} is instead {in_place(case.place(rank))}: {case.detail(rank) or case.state(rank)}")
    if len(blamed) > 4:
        said.append(f"  and {len(blamed) - 4} more")
    known = [rank for rank in blamed if rank in case.hearing.testimonies]
    if known and wait.number:
        said += _branch(case, known, wait)
    return tuple(said)


def _is_inside(case: Case, rank: int, wait: Wait) -> bool:
    """Whether a rank that others wait for in a call has come to it."""
    testimony = case.hearing.testimonies.get(rank)
    return testimony is not None and testimony.counts.get(wait.key, 0) > wait.number


def _awaited_said(case: Case, wait: Wait) -> str:
    """What the others wait for: the call they are in, or of a message its other end."""
    call, key = case.hearing.testimonies[wait.rank].issued(wait.key, wait.number), wait.key
    title = case.hearing.group(key).title
    if key.source == key.destination:
        return f'{what_said(call)}, #{wait.number} of group "{title}"'
    op = "recv" if wait.rank == key.source else "send"
    return f'the {op}{_of_said(call)}, #{wait.number} from rank {key.source} to rank {key.destination} on group "{title}"'


def _held_said(case: Case, blamed: list[int]) -> list[str]:
    said = [f"  rank {rank} is {in_place(case.place(rank))}: {case.detail(rank) or case.state(rank)}" for rank in blamed[:4]]
    return said + ([f"  and {len(blamed) - 4} more"] if len(blamed) > 4 else [])


def on_excused(excused: dict[int, int]) -> tuple[str, ...]:
    """Who is waited for, and may wait himself for somebody of whom nothing is known."""
    said = [
        f"Rank {rank} may itself wait for rank {other}, of which there is nothing to read." for rank, other in excused.items()
    ]
    return (*said[:4], "Who is to blame is not known.") if said else ()


def _branch(case: Case, blamed: list[int], wait: Wait) -> list[str]:
    if all(case.state(rank) is State.STOPPED for rank in blamed):
        return ["Look at: who stopped it, a debugger, a shell, a scheduler that suspends jobs."]
    before = case.hearing.testimonies[blamed[0]].issued(wait.key, wait.number - 1)
    call = case.hearing.testimonies[wait.rank].issued(wait.key, wait.number)
    said = []
    testimony = case.hearing.testimonies[blamed[0]]
    said += _went_on(testimony, testimony.statement.records)
    if before is not None and call is not None and call.place.line:
        said.append(
            f"Likely: {ranks_said(blamed)} took another way, or is held, after {before.place.line or 'its last collective'}"
            f"{_step(before)}. Look at: conditions on rank, step or data before {call.place.line}."
        )
    return said


def on_dead(case: Case, blamed: list[int], wait: Wait | None) -> tuple[str, ...]:
    said = []
    for rank in blamed[:4]:
        if rank not in case.hearing.testimonies:
            said.append(
                f"Rank {rank} may have died first: the others say that a peer hung up on them, and it has no readable box."
            )
            continue
        testimony = case.hearing.testimonies[rank]
        how = "finished" if case.state(rank) is State.FINISHED else "ended"
        said.append(f"Rank {rank} {how}: {_first_line(str(case.detail(rank)))}.")
        error = testimony.exception
        where = error.place if error is not None else case.place(rank)
        said.append(f"  its last place: {place_said(where)}")
    if wait is not None:
        call = case.hearing.testimonies[wait.rank].issued(wait.key, wait.number)
        group = case.hearing.group(wait.key)
        what = what_said(call)
        said.append(f'The others wait for it in {what}, #{wait.number} of group "{group.title}".')
        said += _waiting(case, wait)
        if all(rank in case.hearing.testimonies and case.state(rank) is State.FINISHED for rank in blamed):
            said.append("Likely: it had fewer batches, left a loop early, or skipped a step. Look at: what ends its loop.")
    return tuple(said)


def on_dead_together(case: Case, dead: list[int]) -> tuple[str, ...]:
    """Nobody went by himself: who was the first is not to be seen."""
    silent = [rank for rank in case.hearing.testimonies if rank not in dead and case.state(rank) is State.DEAD]
    said = [f"A process ended, and it is not known whose went first. {ranks_said(dead).capitalize()} failed of it:"]
    said.append(f"  {_first_line(str(case.detail(dead[0])))}")
    if silent:
        said.append(f"  one of {ranks_said(silent)} was the first: they all went without a word, and no monitor saw when")
    return tuple(said)


def on_deadlock(case: Case, found: list[Wait], odd: tuple[int, ...]) -> tuple[str, ...]:
    said = [f"{len(found)} ranks wait for each other in a circle:"]
    for wait in found[:_MOST_LINKS]:
        call = case.hearing.testimonies[wait.rank].issued(wait.key, wait.number)
        waits_for = [rank for rank in wait.missing if rank in case.waits]
        title = case.hearing.group(wait.key).title
        what = call_said(call) if call is not None else "a collective"
        said.append(f'  rank {wait.rank} in #{wait.number} of "{title}" ({what}) waits for {ranks_said(waits_for[:4])}')
    if len(found) > _MOST_LINKS:
        said.append(f"  and so on, {len(found) - _MOST_LINKS} more, back to rank {found[0].rank}")
    if 0 < len(odd) < len(found):
        said.append(
            f"Likely: {ranks_said(odd)} came to them in another order than before, or left one out; the others do as they did "
            "before. Look at: the order of the lines above."
        )
    else:
        said.append("Likely: these ranks reach the same collectives in different order. Look at: the order of the lines above.")
    return tuple(said)


def on_wrong_peer(case: Case, strays: list[Wait]) -> tuple[str, ...]:
    said = []
    for wait in strays[:_MOST_LINKS]:
        call = case.hearing.testimonies[wait.rank].issued(wait.key, wait.number)
        what = call_said(call) if call is not None else "a message"
        other = (*wait.missing, *wait.unheard)[0]
        answer = "does not listen to it" if wait.key.source == wait.rank else "has no such message for it"
        said.append(f"Rank {wait.rank} waits for the wrong one: {what}; rank {other} {answer}.")
        said.append("  Another rank has written to it, or listens to it, and gets no answer. Look at: the peer in that line.")
    return (*said, f"And {len(strays) - _MOST_LINKS} more.") if len(strays) > _MOST_LINKS else tuple(said)


def link(case: Case, wait: Wait) -> dict[str, Any]:
    """One link of a circle, for JSON."""
    return {
        "rank": wait.rank,
        "waits_for": list(wait.missing[:16]),
        "collective": case.collective(wait.key, wait.number, wait.rank),
        "place": case.place(wait.rank).to_dict(),
    }


def links(case: Case, found: list[Wait]) -> list[dict[str, Any]]:
    """A circle, for JSON: the first links of it."""
    return [link(case, wait) for wait in found[:_MOST_LINKS]]


def odd_ones(case: Case, found: list[Wait]) -> tuple[int, ...]:
    """Those of a circle that did it in another order a step before. For want of them, those in the one of its calls that the
    fewest are in; everyone in the circle where that is a tie."""
    changed = left_out(case.hearing, found) or out_of_turn(case.hearing, found) or newcomers(found)
    if changed:
        return tuple(changed)
    if any(wait.rank in case.ill_heard for wait in found):  # its habits cannot be read
        return ()
    by_call: dict[tuple[StreamKey, int], list[int]] = {(wait.key, wait.number): [] for wait in found}
    for rank, wait in case.waits.items():
        if (wait.key, wait.number) in by_call:
            by_call[wait.key, wait.number].append(rank)
    sizes = sorted(by_call.values(), key=len)
    if len(sizes) > 1 and len(sizes[0]) < len(sizes[-1]):
        return tuple(sorted(rank for ranks in sizes if len(ranks) == len(sizes[0]) for rank in ranks))
    return tuple(sorted(wait.rank for wait in found))


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
        f"  rank {first}: {_first_line(str(case.detail(first)))}",
        "Likely: the network or a device. Look at: the flight recorder's dump, NCCL's log, the links and the devices.",
    )


# -- nothing wrong ---------------------------------------------------------------------------------------------------------


def on_healthy(case: Case, found: Pace) -> tuple[str, ...]:
    if case.have_finished:
        return (f"All {len(case.hearing.testimonies)} ranks have finished. {found}",)
    if not case.is_over or not case.sightings or any(sighting.alive is None for sighting in case.sightings.values()):
        return (f"Progressing. {found}",)
    said = f"Was progressing when it ended: no process is left, and none has said why. {found}"
    if not case.all_in_one():
        return (said,)
    call = next(iter(case.hearing.testimonies.values())).last_collective
    return (said, f"At the end all ranks were in {what_said(call)}. A job that hung there, all together, would look the same.")


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
    return (ended, f"The others came to {call}. Nobody is known to have got past it, and what was wrong does not show.")
