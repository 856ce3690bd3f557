"""Sentences of a verdict on mismatches, waits and exits: the cause and what to look at."""

from __future__ import annotations

from typing import Any

from torchwhere.core.events import Event
from torchwhere.core.place import Certainty, Place, shown
from torchwhere.core.rank_text import ranks_phrase
from torchwhere.diagnose.calls.keys import StreamKey
from torchwhere.diagnose.calls.rank_calls import RankCalls
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.exits import NO_EXIT_RECORD
from torchwhere.diagnose.doctor.mismatch import Mismatch
from torchwhere.diagnose.doctor.mismatch_text import consequences
from torchwhere.diagnose.doctor.verdict import State
from torchwhere.diagnose.doctor.waits import Wait

_MOST_COHORTS = 16
_NEARBY = 64  # records before a call in which an exception may be its cause
_FORM_WORDS = {
    "peer": "root",
    "reduce_op": "reduction",
    "shapes": "shape",
    "out_shapes": "shape of the result",
}


def place_text(place: Place) -> str:
    """A place without its rank: `forward of layers.0, train.py:7, step 15`."""
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
    """A place after a verb: `in forward of layers.0, ...`, `outside any module, ...`."""
    text = place_text(place)
    if place.module is None and place.pass_ == "outside" and place.certainty is Certainty.UNKNOWN:
        return f"at {text}"
    return text if text.startswith("outside") else f"in {text}"


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


def differs_in(context: Context, mismatch: Mismatch) -> list[str]:
    """The fields in which the first two cohorts differ."""
    one, other = (
        context.job_calls.by_rank[cohort[0]].issued(mismatch.key, mismatch.number)
        for cohort in mismatch.cohorts[:2]
    )
    if one is None or other is None or mismatch.what == "step":
        return [mismatch.what]
    if mismatch.what == "call_site":
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


def cohorts(context: Context, mismatch: Mismatch) -> list[dict[str, Any]]:
    entries, differs = [], differs_in(context, mismatch)
    for cohort in mismatch.cohorts[:_MOST_COHORTS]:
        call = context.job_calls.by_rank[cohort[0]].issued(mismatch.key, mismatch.number)
        issued = call_text(call) if call is not None else None
        reduction = (
            f", reduction {call.fields.get('reduce_op')}"
            if call is not None and differs == ["reduction"]
            else ""
        )
        entries.append(
            {
                "ranks": list(cohort),
                "issued": f"{issued}{reduction}" if issued is not None else None,
            }
        )
    rest = mismatch.cohorts[_MOST_COHORTS:]
    if rest:
        ranks = sorted(rank for cohort in rest for rank in cohort)
        entries.append({"ranks": ranks, "issued": f"{len(rest)} other calls"})
    return entries


def on_mismatch(context: Context, mismatch: Mismatch) -> tuple[str, ...]:
    group = context.job_calls.group(mismatch.key)
    what = " and ".join(differs_in(context, mismatch))
    differ = (
        f"issued different calls: they differ in {what}"
        if mismatch.what != "step"
        else "are in different steps"
    )
    lines = [f'At #{mismatch.number} of group "{group.title}", the ranks {differ}.']
    lines += [
        f"  {ranks_phrase(cohort['ranks'])}: {cohort['issued']}"
        for cohort in cohorts(context, mismatch)
    ]
    lines += consequences(
        context,
        mismatch,
        culprits=ranks_phrase(mismatch.culprits),
        blocked=ranks_phrase(sorted(context.blocked) or [0]),
    )
    if not mismatch.is_certain and mismatch.deviated:
        own = "its own" if len(mismatch.deviated) == 1 else "their own"
        lines.append(
            f"The cohorts have the same size, but only {ranks_phrase(mismatch.deviated)} deviated"
            f" from {own} earlier calls."
        )
    elif not mismatch.is_certain:
        lines.append("The cohorts have the same size: the boxes do not show which one is wrong.")
    lines += _before(context, mismatch.culprits, mismatch.key, mismatch.number)
    return tuple(lines)


def _before(context: Context, culprits: tuple[int, ...], key: StreamKey, number: int) -> list[str]:
    """The last call that the culprit shares with the others: the branch comes after it."""
    lines = []
    first = culprits[0]
    rank_calls = context.job_calls.by_rank.get(first)
    if rank_calls is None:
        return []
    lines += _survived_exception(rank_calls, rank_calls.order(key, number))
    call, before = (
        rank_calls.issued(key, number),
        rank_calls.issued(key, number - 1) if number else None,
    )
    if call is not None and before is not None and before.place.line:
        lines.append(
            f"Likely cause: {ranks_phrase(culprits)} took a different code path after"
            f" {before.place.line}{_step(before)}. Look at: conditions on rank, step or data"
            f" {_between(before.place.line, call.place.line)}."
        )
    return lines


def _survived_exception(rank_calls: RankCalls, record: int) -> list[str]:
    """An exception shortly before a record that the rank survived."""
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
            f"Rank {rank_calls.rank} raised an exception earlier and continued: {text}"
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
    """The ranks that wait in the same call, and where."""
    together = sorted(
        rank
        for rank, other in context.waits.items()
        if (other.key, other.number) == (wait.key, wait.number)
    )
    if not together:  # all ranks with data issued it: they wait for a rank without data
        together = [
            rank
            for rank in context.job_calls.members(wait.key)
            if rank in context.job_calls.by_rank
        ]
    places = {in_place(context.place(rank)) for rank in together}
    waiting = f"waiting: {ranks_phrase(together)}"
    return [
        (
            f"  {waiting}, {places.pop()}"
            if len(places) == 1
            else f"  {waiting}, in {len(places)} different places"
        )
    ]


def on_missing(context: Context, blamed: list[int], wait: Wait) -> tuple[str, ...]:
    if _is_inside(context, blamed[0], wait):
        return (
            (
                f"{ranks_phrase(blamed).capitalize()} reached {_awaited_text(context, wait)}, but"
                " cannot complete it."
            ),
            *_waiting(context, wait),
            *_held_text(context, blamed),
            *_branch(context, blamed, wait),
        )
    lines = [_never_issued_text(context, blamed, wait), *_waiting(context, wait)]
    for rank in blamed[:4]:
        if not context.job_calls.has_data(rank):
            lines.append(_no_data_text(context, rank))
            continue
        if context.place(rank).certainty is Certainty.UNKNOWN:
            lines.append(
                f"  rank {rank} was last seen {in_place(context.place(rank))}; its"
                f" {context.run.noun} does not show where it is now"
            )
            continue
        lines.append(
            f"  rank {rank} is instead {in_place(context.place(rank))}:"
            f" {context.detail(rank) or context.state(rank)}"
        )
    if len(blamed) > 4:
        lines.append(f"  and {len(blamed) - 4} more")
    with_data = [rank for rank in blamed if context.job_calls.has_data(rank)]
    if with_data and wait.number:
        lines += _branch(context, with_data, wait)
    return (*lines, *_doubts(context, blamed, wait))


def _never_issued_text(context: Context, blamed: list[int], wait: Wait) -> str:
    ranks, call = ranks_phrase(blamed).capitalize(), _awaited_text(context, wait)
    if all(
        rank in context.job_calls.by_rank and context.exits.outlived_its_watch(rank)
        for rank in blamed
    ):
        watched = "it was watched" if len(blamed) == 1 else "they were watched"
        return f"{ranks} did not issue {call} while {watched}."
    has_data = any(context.job_calls.has_data(rank) for rank in blamed)
    return f"{ranks} {'never' if has_data else 'may never have'} issued {call}."


def _no_data_text(context: Context, rank: int) -> str:
    if rank in context.job_calls.stale:
        return (
            f"  rank {rank} was last seen {in_place(context.place(rank))}; its later calls are"
            " unknown"
        )
    return f"  rank {rank} left no {context.run.noun}; its location is unknown"


def _doubts(context: Context, blamed: list[int], wait: Wait) -> list[str]:
    """Other explanations that the data does not exclude."""
    if not any(context.job_calls.has_data(rank) for rank in blamed):
        they = "they" if len(blamed) > 1 else "it"
        return [
            (
                f"There is no data for {ranks_phrase(blamed)}. If {they} reached this collective"
                " too, no rank is missing: suspect the network or a device."
            )
        ]
    others = [rank for rank in wait.no_data if rank not in blamed]
    lines = [f"  it is unknown whether {ranks_phrase(others)} reached it"] if others else []
    if not context.is_live:
        lines.append(
            "It is unknown how long they had waited when the job ended: a healthy job may also have"
            " been between two collectives."
        )
    return lines


def _is_inside(context: Context, rank: int, wait: Wait) -> bool:
    """Whether a rank that others wait for has issued the call itself."""
    rank_calls = context.job_calls.by_rank.get(rank)
    return rank_calls is not None and rank_calls.counts.get(wait.key, 0) > wait.number


def _awaited_text(context: Context, wait: Wait) -> str:
    """The awaited call: the collective, or the other end of a message."""
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
    lines = [
        f"  rank {rank} is {in_place(context.place(rank))}:"
        f" {context.detail(rank) or context.state(rank)}"
        for rank in blamed[:4]
    ]
    return lines + ([f"  and {len(blamed) - 4} more"] if len(blamed) > 4 else [])


def on_excused(excused: dict[int, int]) -> tuple[str, ...]:
    """Ranks that others wait for, and that may wait for a rank without data."""
    lines = [
        f"Rank {rank} may itself be waiting for rank {other}, which left no data."
        for rank, other in excused.items()
    ]
    return (*lines[:4], "The culprit is unknown.") if lines else ()


def _branch(context: Context, blamed: list[int], wait: Wait) -> list[str]:
    if all(context.state(rank) is State.STOPPED for rank in blamed):
        return ["Look at: what stopped it (a debugger, a shell, a scheduler that suspends jobs)."]
    before = context.job_calls.by_rank[blamed[0]].issued(wait.key, wait.number - 1)
    call = context.job_calls.by_rank[wait.rank].issued(wait.key, wait.number)
    lines = []
    rank_calls = context.job_calls.by_rank[blamed[0]]
    lines += (
        _survived_exception(rank_calls, rank_calls.rank_summary.records)
        if not context.exits.was_ended_externally(blamed[0])
        else []
    )
    if before is not None and call is not None and call.place.line:
        is_are = "is" if len(blamed) == 1 else "are"
        after = f"{before.place.line or 'its last collective'}{_step(before)}"
        lines.append(
            f"Likely cause: {ranks_phrase(blamed)} took a different code path, or {is_are} blocked,"
            f" after {after}. Look at: conditions on rank, step or data before {call.place.line}."
        )
    return lines


def on_exit(context: Context, blamed: list[int], wait: Wait | None) -> tuple[str, ...]:
    lines = _ends(context, blamed)
    if wait is not None:
        call = context.job_calls.by_rank[wait.rank].issued(wait.key, wait.number)
        group = context.job_calls.group(wait.key)
        them = "it" if len(blamed) == 1 else "them"
        lines.append(
            f"The others wait for {them} in {what_text(call)}, #{wait.number} of group"
            f' "{group.title}".'
        )
        lines += _waiting(context, wait)
        if all(
            rank in context.job_calls.by_rank and context.state(rank) is State.FINISHED
            for rank in blamed
        ):
            lines.append(
                "Likely cause: it had fewer batches, left a loop early, or skipped a step. Look at:"
                " the condition that ends its loop."
            )
    if context.exits.were_killed_together and not any(
        context.job_calls.by_rank[rank].end for rank in blamed
    ):
        noticed = ranks_phrase(context.exits.failed()).capitalize()
        lines.append(
            f"{noticed} noticed that a process had exited; then all processes were gone. They may"
            " have been killed at the same time."
        )
    return tuple(lines)


def _ends(context: Context, ranks_exited: list[int]) -> list[str]:
    """How and where each rank exited; ranks that exited alike share a sentence."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank in ranks_exited:
        alike.setdefault(_end(context, rank), []).append(rank)
    lines = []
    for (how, *details), ranks in list(alike.items())[:4]:
        lines += [f"{ranks_phrase(ranks).capitalize()} {how}", *details]
    return lines


def _end(context: Context, rank: int) -> tuple[str, ...]:
    if rank not in context.job_calls.by_rank:
        return (
            (
                "may have exited first: the others report that a peer closed the connection, and it"
                " left no readable box."
            ),
        )
    rank_calls = context.job_calls.by_rank[rank]
    verb = "finished" if context.state(rank) is State.FINISHED else "exited"
    error = rank_calls.exception
    where = error.place if error is not None else context.place(rank)
    text = _gist(context.detail(rank) or context.exits.how(rank)).removesuffix(".")
    before = (
        _survived_exception(rank_calls, error.number)
        if error is not None and context.exits.has_failed(rank)
        else []
    )
    how = f"{verb} and {text}" if text == NO_EXIT_RECORD else f"{verb}: {text}"
    return (f"{how}.", f"  its last place: {place_text(where)}", *before)


def _gist(text: str) -> str:
    """The first line of an exception. If it contains another traceback, also that one's last
    line."""
    first, _, rest = text.partition("\n")
    last = (
        rest.strip().rpartition("\n")[2].strip()
        if "Traceback (most recent call last)" in rest
        else ""
    )
    return f"{first[:200]}: {last[:200]}" if last else first_line(text)


def on_consequential_exits(context: Context, failed: list[int]) -> tuple[str, ...]:
    """Ranks exited only because a peer did: it is unknown which rank was first."""
    if context.exits.could_not_connect(failed):
        return (
            (
                f"{ranks_phrase(failed).capitalize()} could not connect to another rank. The boxes"
                " do not show whether that rank had already exited:"
            ),
            f"  {first_line(str(context.detail(failed[0])))}",
            (
                "Look at: the logs of the other ranks, the rendezvous address and port, the network"
                " interfaces."
            ),
        )
    unrecorded = [
        rank
        for rank in context.job_calls.by_rank
        if rank not in failed and context.state(rank) is State.DEAD
    ]
    lines = [
        (
            "A process exited, and it is unknown which rank exited first."
            f" {ranks_phrase(failed).capitalize()} failed because of it:"
        ),
        f"  {first_line(str(context.detail(failed[0])))}",
    ]
    if unrecorded:
        lines.append(
            f"  one of {ranks_phrase(unrecorded)} exited first: none of them left an exit record,"
            " and no monitor saw when they exited"
        )
    return tuple(lines)
