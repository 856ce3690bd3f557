"""Why, and what to look at: the sentences of a verdict."""

from __future__ import annotations

from typing import Any

from torchwhere.core.events import Event
from torchwhere.core.place import Certainty, Place, shown
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.calls.rank_calls import Testimony
from torchwhere.diagnose.doctor.context import Case
from torchwhere.diagnose.doctor.mismatch import Mismatch
from torchwhere.diagnose.doctor.mismatch_text import consequences
from torchwhere.diagnose.doctor.verdict import State
from torchwhere.diagnose.doctor.waits import Wait, members

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
    said, differs = [], differs_in(case, found)
    for cohort in found.cohorts[:_MOST_COHORTS]:
        call = case.hearing.testimonies[cohort[0]].issued(found.key, found.number)
        issued = call_said(call) if call is not None else None
        reduction = f", reduction {call.fields.get('reduce_op')}" if call is not None and differs == ["reduction"] else ""
        said.append({"ranks": list(cohort), "issued": f"{issued}{reduction}" if issued is not None else None})
    rest = found.cohorts[_MOST_COHORTS:]
    if rest:
        ranks = sorted(rank for cohort in rest for rank in cohort)
        said.append({"ranks": ranks, "issued": f"{len(rest)} other things"})
    return said


def on_mismatch(case: Case, found: Mismatch) -> tuple[str, ...]:
    group = case.hearing.group(found.key)
    what = " and ".join(differs_in(case, found))
    differ = f"issued something different: they differ in {what}" if found.what != "step" else "are in different steps"
    said = [f'At #{found.number} of group "{group.title}" ranks {differ}.']
    said += [f"  {ranks_said(each['ranks'])}: {each['issued']}" for each in cohorts(case, found)]
    said += consequences(case, found, who=ranks_said(found.culprits), standing=ranks_said(sorted(case.standing) or [0]))
    if not found.is_certain and found.departed:
        who, ways = ranks_said(found.departed), "its own ways" if len(found.departed) == 1 else "their own ways"
        said.append(f"The cohorts are of one size, but the others do as they did before: {who} departed from {ways}.")
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
    text = first_line(str(error.fields.get("text")))
    return [f"Rank {testimony.rank} had an exception before, and went on: {text} ({place_said(error.place)})."]


def _step(call: Event) -> str:
    return f" (step {call.place.step})" if call.place.step is not None else ""


def first_line(text: str) -> str:
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
    never = "never" if any(case.hearing.hears(rank) for rank in blamed) else "may never have"
    if all(rank in case.hearing.testimonies and case.deaths.has_left(rank) for rank in blamed):
        never = "has not, while it was watched," if len(blamed) == 1 else "have not, while they were watched,"
    said = [f"{ranks_said(blamed).capitalize()} {never} issued {_awaited_said(case, wait)}.", *_waiting(case, wait)]
    for rank in blamed[:4]:
        if not case.hearing.hears(rank):
            said.append(_unheard_said(case, rank))
            continue
        if case.place(rank).certainty is Certainty.UNKNOWN:
            now = f"where it is now, its {case.run.noun} does not say"
            said.append(f"  rank {rank} was last seen {in_place(case.place(rank))}; {now}")
            continue
        said.append(f"  rank {rank} is instead {in_place(case.place(rank))}: {case.detail(rank) or case.state(rank)}")
    if len(blamed) > 4:
        said.append(f"  and {len(blamed) - 4} more")
    known = [rank for rank in blamed if case.hearing.hears(rank)]
    if known and wait.number:
        said += _branch(case, known, wait)
    return (*said, *_doubts(case, blamed, wait))


def _unheard_said(case: Case, rank: int) -> str:
    if rank in case.hearing.past:
        return f"  rank {rank} was last seen {in_place(case.place(rank))}; what it did after that is not known"
    return f"  rank {rank} has no {case.run.noun}: where it is, nobody knows"


def _doubts(case: Case, blamed: list[int], wait: Wait) -> list[str]:
    """What else it may be, as far as the data does not say."""
    if not any(case.hearing.hears(rank) for rank in blamed):
        who = "They are the only ones" if len(blamed) > 1 else f"Rank {blamed[0]} is the only one"
        return [f"{who} of which nothing is known. If it had come too, nobody is missing, and it is the network or a device."]
    others = [rank for rank in wait.unheard if rank not in blamed]
    said = [f"  whether {ranks_said(others)} came to it is not known"] if others else []
    if not case.is_live:
        said.append("How long they had waited when all ended, nobody saw: a job that was well may be between two collectives.")
    return said


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
    said += _went_on(testimony, testimony.statement.records) if not case.deaths.was_ended_by_hand(blamed[0]) else []
    if before is not None and call is not None and call.place.line:
        who = f"{ranks_said(blamed)} took another way, or {'is' if len(blamed) == 1 else 'are'} held"
        after = f"{before.place.line or 'its last collective'}{_step(before)}"
        said.append(f"Likely: {who}, after {after}. Look at: conditions on rank, step or data before {call.place.line}.")
    return said


def on_dead(case: Case, blamed: list[int], wait: Wait | None) -> tuple[str, ...]:
    said = _ends(case, blamed)
    if wait is not None:
        call = case.hearing.testimonies[wait.rank].issued(wait.key, wait.number)
        group = case.hearing.group(wait.key)
        what = what_said(call)
        said.append(f'The others wait for it in {what}, #{wait.number} of group "{group.title}".')
        said += _waiting(case, wait)
        if all(rank in case.hearing.testimonies and case.state(rank) is State.FINISHED for rank in blamed):
            said.append("Likely: it had fewer batches, left a loop early, or skipped a step. Look at: what ends its loop.")
    if case.deaths.were_killed_together and not any(case.hearing.testimonies[rank].end for rank in blamed):
        noticed = ranks_said(sorted(case.deaths.failed()))
        said.append(f"That a process was gone, {noticed} noticed; then all were. They may have been killed at once.")
    return tuple(said)


def _ends(case: Case, dead: list[int]) -> list[str]:
    """How each of them ended, and where; those that ended alike in one sentence."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank in dead:
        alike.setdefault(_end(case, rank), []).append(rank)
    said = []
    for (how, *more), ranks in list(alike.items())[:4]:
        said += [f"{ranks_said(ranks).capitalize()} {how}", *more]
    return said


def _end(case: Case, rank: int) -> tuple[str, ...]:
    if rank not in case.hearing.testimonies:
        return ("may have died first: the others say that a peer hung up on them, and it has no readable box.",)
    testimony = case.hearing.testimonies[rank]
    how = "finished" if case.state(rank) is State.FINISHED else "ended"
    error = testimony.exception
    where = error.place if error is not None else case.place(rank)
    text = _gist(case.detail(rank) or case.deaths.how(rank)).removesuffix(".")
    before = _went_on(testimony, error.number) if error is not None and case.deaths.has_failed(rank) else []
    return (f"{how}: {text}.", f"  its last place: {place_said(where)}", *before)


def _gist(text: str) -> str:
    """What an exception says: its first line; of one that holds the traceback of another one, how that ends too."""
    first, _, rest = text.partition("\n")
    last = rest.strip().rpartition("\n")[2].strip() if "Traceback (most recent call last)" in rest else ""
    return f"{first[:200]}: {last[:200]}" if last else first_line(text)


def on_dead_together(case: Case, dead: list[int]) -> tuple[str, ...]:
    """Nobody went by himself: who was the first is not to be seen."""
    if case.deaths.never_met(dead):
        return (
            f"{ranks_said(dead).capitalize()} could not connect to another one. Whether it had ended before does not show:",
            f"  {first_line(str(case.detail(dead[0])))}",
            "Look at: the log of the other ranks, the address and port of the rendezvous, the network interfaces.",
        )
    silent = [rank for rank in case.hearing.testimonies if rank not in dead and case.state(rank) is State.DEAD]
    said = [f"A process ended, and it is not known whose went first. {ranks_said(dead).capitalize()} failed of it:"]
    said.append(f"  {first_line(str(case.detail(dead[0])))}")
    if silent:
        said.append(f"  one of {ranks_said(silent)} was the first: they all went without a word, and no monitor saw when")
    return tuple(said)
