"""Why, and what to look at: the sentences of a verdict."""

from __future__ import annotations

from typing import Any

from torchwhere.core.events import Event
from torchwhere.core.place import Certainty, Place, shown
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.calls.rank_calls import RankCalls
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.mismatch import Mismatch
from torchwhere.diagnose.doctor.mismatch_text import consequences
from torchwhere.diagnose.doctor.verdict import State
from torchwhere.diagnose.doctor.waits import Wait, members

_MOST_COHORTS = 16
_NEARBY = 64  # records before a call in which an exception may be its cause
_FORM_WORDS = {
    "peer": "root",
    "reduce_op": "reduction",
    "shapes": "shape",
    "out_shapes": "shape of the result",
}


def ranks_text(ranks: list[int] | tuple[int, ...]) -> str:
    """`rank 2`, `ranks 0, 1 and 3`, `ranks 0-511`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    parts = [
        f"{first}-{last}" if last > first + 1 else ", ".join(map(str, range(first, last + 1)))
        for first, last in spans
    ]
    return (
        "ranks "
        + ", ".join(parts[:12])
        + (f" and {len(parts) - 12} more spans" if len(parts) > 12 else "")
    )


def place_text(place: Place) -> str:
    """Where, without the rank: `forward of layers.0, train.py:7, step 15`."""
    if place.module is None and place.pass_ == "outside":
        what = [] if place.certainty is Certainty.UNKNOWN else ["outside any module"]
    else:
        what = [place.pass_ if place.module is None else f"{place.pass_} of {shown(place.module)}"]
    parts = [
        *what,
        *([place.line] if place.line else []),
        *([f"step {place.step}"] if place.step is not None else []),
    ]
    return ", ".join(parts) or "an unknown place"


def in_place(place: Place) -> str:
    """The same, to follow a verb: `in forward of layers.0, ...`, `outside any module, ...`."""
    said = place_text(place)
    if place.module is None and place.pass_ == "outside" and place.certainty is Certainty.UNKNOWN:
        return f"at {said}"
    return said if said.startswith("outside") else f"in {said}"


def call_text(call: Event) -> str:
    """`all_reduce of float32 [4, 8], backward of layers.0, train.py:9, step 3`."""
    return f"{what_text(call)}, {place_text(call.place)}"


def what_text(call: Event | None) -> str:
    """`all_reduce of float32 [4, 8]`."""
    if call is None:
        return "a collective"
    fields = call.fields
    root = (
        f" with {'peer' if fields.get('op') in ('send', 'recv') else 'root'} {fields['peer']}"
        if fields.get("peer") is not None
        else ""
    )
    return f"{fields.get('op')}{_of_text(call)}{root}"


def _of_text(call: Event | None) -> str:
    shapes = (call.fields.get("shapes") or []) if call is not None else []
    return (
        f" of {call.fields.get('dtype')} {shapes[0] if len(shapes) == 1 else shapes}"
        if call is not None and shapes
        else ""
    )


# -- mismatch --------------------------------------------------------------------------------------


def differs_in(context: Context, found: Mismatch) -> list[str]:
    """In what the first two cohorts differ."""
    one, other = (
        context.job_calls.by_rank[cohort[0]].issued(found.key, found.number)
        for cohort in found.cohorts[:2]
    )
    if one is None or other is None or found.what == "step":
        return [found.what]
    if found.what == "call_site":
        here, there = one.place, other.place
        places = {
            "module": here.module != there.module,
            "pass": here.pass_ != there.pass_,
            "line": here.line != there.line,
        }
        names = [name for name, differs in places.items() if differs]
        return names + ["for"] * (one.fields.get("for") != other.fields.get("for"))
    is_p2p = {one.fields.get("op"), other.fields.get("op")} == {"send", "recv"}
    names = (
        ["dtype", "shapes"]
        if is_p2p
        else ["op", "dtype", "shapes", "out_shapes", "reduce_op", "peer"]
    )
    differing = [name for name in names if one.fields.get(name) != other.fields.get(name)]
    return ["op"] if "op" in differing else [_FORM_WORDS.get(name, name) for name in differing]


def cohorts(context: Context, found: Mismatch) -> list[dict[str, Any]]:
    said, differs = [], differs_in(context, found)
    for cohort in found.cohorts[:_MOST_COHORTS]:
        call = context.job_calls.by_rank[cohort[0]].issued(found.key, found.number)
        issued = call_text(call) if call is not None else None
        reduction = (
            f", reduction {call.fields.get('reduce_op')}"
            if call is not None and differs == ["reduction"]
            else ""
        )
        said.append(
            {
                "ranks": list(cohort),
                "issued": f"{issued}{reduction}" if issued is not None else None,
            }
        )
    rest = found.cohorts[_MOST_COHORTS:]
    if rest:
        ranks = sorted(rank for cohort in rest for rank in cohort)
        said.append({"ranks": ranks, "issued": f"{len(rest)} other things"})
    return said


def on_mismatch(context: Context, found: Mismatch) -> tuple[str, ...]:
    group = context.job_calls.group(found.key)
    what = " and ".join(differs_in(context, found))
    differ = (
        f"issued something different: they differ in {what}"
        if found.what != "step"
        else "are in different steps"
    )
    said = [f'At #{found.number} of group "{group.title}" ranks {differ}.']
    said += [f"  {ranks_text(each['ranks'])}: {each['issued']}" for each in cohorts(context, found)]
    said += consequences(
        context,
        found,
        who=ranks_text(found.culprits),
        standing=ranks_text(sorted(context.standing) or [0]),
    )
    if not found.is_certain and found.deviated:
        who, ways = (
            ranks_text(found.deviated),
            "its own ways" if len(found.deviated) == 1 else "their own ways",
        )
        said.append(
            f"The cohorts are of one size, but the others do as they did before: {who} departed"
            f" from {ways}."
        )
    elif not found.is_certain:
        said.append(
            "The cohorts are of one size: the boxes alone cannot say which of them is wrong."
        )
    said += _before(context, found.culprits, found.key, found.number)
    return tuple(said)


def _before(context: Context, culprits: tuple[int, ...], key: StreamKey, number: int) -> list[str]:
    """What a culprit did last that all others did too: the branch is after it."""
    said = []
    first = culprits[0]
    rank_calls = context.job_calls.by_rank.get(first)
    if rank_calls is None:
        return []
    said += _went_on(rank_calls, rank_calls.order(key, number))
    call, before = (
        rank_calls.issued(key, number),
        rank_calls.issued(key, number - 1) if number else None,
    )
    if call is not None and before is not None and before.place.line:
        said.append(
            f"Likely: {ranks_text(culprits)} took another way after"
            f" {before.place.line}{_step(before)}. Look at: conditions on rank, step or data"
            f" {_between(before.place.line, call.place.line)}."
        )
    return said


def _went_on(rank_calls: RankCalls, record: int) -> list[str]:
    """An exception of a rank that it survived: recorded shortly before a record."""
    near = [
        error
        for error in rank_calls.rank_summary.exceptions
        if record - _NEARBY <= error.number < record
    ]
    if not near:
        return []
    error = near[-1]
    text = first_line(str(error.fields.get("text")))
    return [
        (
            f"Rank {rank_calls.rank} had an exception before, and went on: {text}"
            f" ({place_text(error.place)})."
        )
    ]


def _step(call: Event) -> str:
    return f" (step {call.place.step})" if call.place.step is not None else ""


def first_line(text: str) -> str:
    return text.partition("\n")[0][:300]


def _between(one: str, other: str | None) -> str:
    return f"before {one}" if other in (one, None) else f"between {one} and {other}"


# -- waits -----------------------------------------------------------------------------------------


def _waiting(context: Context, wait: Wait) -> list[str]:
    """Who waits in the same call, and where."""
    together = sorted(
        rank
        for rank, other in context.waits.items()
        if (other.key, other.number) == (wait.key, wait.number)
    )
    if not together:  # nobody is behind: all who can be heard wait for one who cannot
        together = [
            rank
            for rank in members(context.job_calls, wait.key)
            if rank in context.job_calls.by_rank
        ]
    places = {in_place(context.place(rank)) for rank in together}
    said = f"waiting: {ranks_text(together)}"
    return [
        (
            f"  {said}, {places.pop()}"
            if len(places) == 1
            else f"  {said}, in {len(places)} different places"
        )
    ]


def on_missing(context: Context, blamed: list[int], wait: Wait) -> tuple[str, ...]:
    if _is_inside(context, blamed[0], wait):
        came = (
            f"{ranks_text(blamed).capitalize()} came to {_awaited_text(context, wait)}, and cannot"
            " go on there."
        )
        return (
            came,
            *_waiting(context, wait),
            *_held_text(context, blamed),
            *_branch(context, blamed, wait),
        )
    never = (
        "never" if any(context.job_calls.has_data(rank) for rank in blamed) else "may never have"
    )
    if all(rank in context.job_calls.by_rank and context.exits.has_left(rank) for rank in blamed):
        never = (
            "has not, while it was watched,"
            if len(blamed) == 1
            else "have not, while they were watched,"
        )
    said = [
        f"{ranks_text(blamed).capitalize()} {never} issued {_awaited_text(context, wait)}.",
        *_waiting(context, wait),
    ]
    for rank in blamed[:4]:
        if not context.job_calls.has_data(rank):
            said.append(_no_data_text(context, rank))
            continue
        if context.place(rank).certainty is Certainty.UNKNOWN:
            now = f"where it is now, its {context.run.noun} does not say"
            said.append(f"  rank {rank} was last seen {in_place(context.place(rank))}; {now}")
            continue
        said.append(
            f"  rank {rank} is instead {in_place(context.place(rank))}:"
            f" {context.detail(rank) or context.state(rank)}"
        )
    if len(blamed) > 4:
        said.append(f"  and {len(blamed) - 4} more")
    known = [rank for rank in blamed if context.job_calls.has_data(rank)]
    if known and wait.number:
        said += _branch(context, known, wait)
    return (*said, *_doubts(context, blamed, wait))


def _no_data_text(context: Context, rank: int) -> str:
    if rank in context.job_calls.past:
        return (
            f"  rank {rank} was last seen {in_place(context.place(rank))}; what it did after that"
            " is not known"
        )
    return f"  rank {rank} has no {context.run.noun}: where it is, nobody knows"


def _doubts(context: Context, blamed: list[int], wait: Wait) -> list[str]:
    """What else it may be, as far as the data does not say."""
    if not any(context.job_calls.has_data(rank) for rank in blamed):
        who = "They are the only ones" if len(blamed) > 1 else f"Rank {blamed[0]} is the only one"
        return [
            (
                f"{who} of which nothing is known. If it had come too, nobody is missing, and it is the"
                " network or a device."
            )
        ]
    others = [rank for rank in wait.no_data if rank not in blamed]
    said = [f"  whether {ranks_text(others)} came to it is not known"] if others else []
    if not context.is_live:
        said.append(
            "How long they had waited when all ended, nobody saw: a job that was well may be"
            " between two collectives."
        )
    return said


def _is_inside(context: Context, rank: int, wait: Wait) -> bool:
    """Whether a rank that others wait for in a call has come to it."""
    rank_calls = context.job_calls.by_rank.get(rank)
    return rank_calls is not None and rank_calls.counts.get(wait.key, 0) > wait.number


def _awaited_text(context: Context, wait: Wait) -> str:
    """What the others wait for: the call they are in, or of a message its other end."""
    call, key = context.job_calls.by_rank[wait.rank].issued(wait.key, wait.number), wait.key
    title = context.job_calls.group(key).title
    if key.source == key.destination:
        return f'{what_text(call)}, #{wait.number} of group "{title}"'
    op = "recv" if wait.rank == key.source else "send"
    return (
        f"the {op}{_of_text(call)}, #{wait.number} from rank {key.source} to rank {key.destination}"
        f' on group "{title}"'
    )


def _held_text(context: Context, blamed: list[int]) -> list[str]:
    said = [
        f"  rank {rank} is {in_place(context.place(rank))}:"
        f" {context.detail(rank) or context.state(rank)}"
        for rank in blamed[:4]
    ]
    return said + ([f"  and {len(blamed) - 4} more"] if len(blamed) > 4 else [])


def on_excused(excused: dict[int, int]) -> tuple[str, ...]:
    """Who is waited for, and may wait himself for somebody of whom nothing is known."""
    said = [
        f"Rank {rank} may itself wait for rank {other}, of which there is nothing to read."
        for rank, other in excused.items()
    ]
    return (*said[:4], "Who is to blame is not known.") if said else ()


def _branch(context: Context, blamed: list[int], wait: Wait) -> list[str]:
    if all(context.state(rank) is State.STOPPED for rank in blamed):
        return ["Look at: who stopped it, a debugger, a shell, a scheduler that suspends jobs."]
    before = context.job_calls.by_rank[blamed[0]].issued(wait.key, wait.number - 1)
    call = context.job_calls.by_rank[wait.rank].issued(wait.key, wait.number)
    said = []
    rank_calls = context.job_calls.by_rank[blamed[0]]
    said += (
        _went_on(rank_calls, rank_calls.rank_summary.records)
        if not context.exits.was_ended_by_hand(blamed[0])
        else []
    )
    if before is not None and call is not None and call.place.line:
        who = (
            f"{ranks_text(blamed)} took another way, or {'is' if len(blamed) == 1 else 'are'} held"
        )
        after = f"{before.place.line or 'its last collective'}{_step(before)}"
        said.append(
            f"Likely: {who}, after {after}. Look at: conditions on rank, step or data before"
            f" {call.place.line}."
        )
    return said


def on_dead(context: Context, blamed: list[int], wait: Wait | None) -> tuple[str, ...]:
    said = _ends(context, blamed)
    if wait is not None:
        call = context.job_calls.by_rank[wait.rank].issued(wait.key, wait.number)
        group = context.job_calls.group(wait.key)
        what = what_text(call)
        said.append(f'The others wait for it in {what}, #{wait.number} of group "{group.title}".')
        said += _waiting(context, wait)
        if all(
            rank in context.job_calls.by_rank and context.state(rank) is State.FINISHED
            for rank in blamed
        ):
            said.append(
                "Likely: it had fewer batches, left a loop early, or skipped a step. Look at: what"
                " ends its loop."
            )
    if context.exits.were_killed_together and not any(
        context.job_calls.by_rank[rank].end for rank in blamed
    ):
        noticed = ranks_text(sorted(context.exits.failed()))
        said.append(
            f"That a process was gone, {noticed} noticed; then all were. They may have been killed"
            " at once."
        )
    return tuple(said)


def _ends(context: Context, dead: list[int]) -> list[str]:
    """How each of them ended, and where; those that ended alike in one sentence."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank in dead:
        alike.setdefault(_end(context, rank), []).append(rank)
    said = []
    for (how, *more), ranks in list(alike.items())[:4]:
        said += [f"{ranks_text(ranks).capitalize()} {how}", *more]
    return said


def _end(context: Context, rank: int) -> tuple[str, ...]:
    if rank not in context.job_calls.by_rank:
        return (
            (
                "may have died first: the others say that a peer hung up on them, and it has no"
                " readable box."
            ),
        )
    rank_calls = context.job_calls.by_rank[rank]
    how = "finished" if context.state(rank) is State.FINISHED else "ended"
    error = rank_calls.exception
    where = error.place if error is not None else context.place(rank)
    text = _gist(context.detail(rank) or context.exits.how(rank)).removesuffix(".")
    before = (
        _went_on(rank_calls, error.number)
        if error is not None and context.exits.has_failed(rank)
        else []
    )
    return (f"{how}: {text}.", f"  its last place: {place_text(where)}", *before)


def _gist(text: str) -> str:
    """What an exception says: its first line; of one that holds the traceback of another one, how
    that ends too."""
    first, _, rest = text.partition("\n")
    last = (
        rest.strip().rpartition("\n")[2].strip()
        if "Traceback (most recent call last)" in rest
        else ""
    )
    return f"{first[:200]}: {last[:200]}" if last else first_line(text)


def on_dead_together(context: Context, dead: list[int]) -> tuple[str, ...]:
    """Nobody went by himself: who was the first is not to be seen."""
    if context.exits.never_met(dead):
        return (
            (
                f"{ranks_text(dead).capitalize()} could not connect to another one. Whether it had"
                " ended before does not show:"
            ),
            f"  {first_line(str(context.detail(dead[0])))}",
            (
                "Look at: the log of the other ranks, the address and port of the rendezvous, the"
                " network interfaces."
            ),
        )
    silent = [
        rank
        for rank in context.job_calls.by_rank
        if rank not in dead and context.state(rank) is State.DEAD
    ]
    said = [
        (
            f"A process ended, and it is not known whose went first. {ranks_text(dead).capitalize()}"
            " failed of it:"
        )
    ]
    said.append(f"  {first_line(str(context.detail(dead[0])))}")
    if silent:
        said.append(
            f"  one of {ranks_text(silent)} was the first: they all went without a word, and no"
            " monitor saw when"
        )
    return tuple(said)
