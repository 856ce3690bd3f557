"""Why ranks wait for each other, and what to look at: the sentences on a circle, and on messages to
the wrong one."""

from __future__ import annotations

from typing import Any

from torchwhere.core.events import Event
from torchwhere.diagnose.doctor.call_patterns import Deviation
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.deadlocks import Blame
from torchwhere.diagnose.doctor.wait_text import call_text, ranks_text, what_text
from torchwhere.diagnose.doctor.waits import Wait

_MOST_LINKS = 16  # of a circle that are shown


def on_deadlock(context: Context, found: list[Wait], blamed: Blame) -> tuple[str, ...]:
    said = [f"{len(found)} ranks wait for each other in a circle:"]
    for wait in found[:_MOST_LINKS]:
        call = context.job_calls.by_rank[wait.rank].issued(wait.key, wait.number)
        waits_for = [rank for rank in wait.missing if rank in context.waits]
        title = context.job_calls.group(wait.key).title
        what = call_text(call) if call is not None else "a collective"
        said.append(
            f'  rank {wait.rank} in #{wait.number} of "{title}" ({what}) waits for'
            f" {ranks_text(waits_for[:4])}"
        )
    if len(found) > _MOST_LINKS:
        said.append(f"  and so on, {len(found) - _MOST_LINKS} more, back to rank {found[0].rank}")
    said += [
        _deviated(context, deviation)
        for deviation in {each.rank: each for each in blamed.deviations[::-1]}.values()
    ][:4]
    same = [
        rank for rank in blamed.culprits if all(each.rank != rank for each in blamed.deviations)
    ]
    if blamed.deviations:
        said += [f"{ranks_text(same).capitalize()} did the same."] if same else []
        return (*said, "The others do as they always did.") if blamed.is_sure else tuple(said)
    if 0 < len(blamed.culprits) < len(found):
        why = "fewer ranks wait there than elsewhere"
        if blamed.have_stayed:
            why = "most others went on without it"
        elif blamed.is_outvoted:
            why = "most ranks that had issued the same calls before went another way"
        said.append(f"Likely: {ranks_text(blamed.culprits)}, as {why}. That does not prove it.")
    else:
        said.append(
            "One of them left a call out, issued one too many, or took them in another order: which"
            " one does not show."
        )
    return (*said, "Look at: the order of the lines above.")


def _deviated(context: Context, deviation: Deviation) -> str:
    """What a rank did otherwise than it always had."""
    rank_calls = context.job_calls.by_rank[deviation.rank]
    due, issued = rank_calls.issued(*deviation.like), rank_calls.issued(*deviation.issued)
    of, instead_of = _groups_text(context, deviation)
    what, instead = (
        f"{what_text(due)}{of}{_line(due)}",
        f"{what_text(issued)}{instead_of}{_line(issued)}",
    )
    if deviation.is_early:
        return (
            f"Likely: rank {deviation.rank} issued {instead} out of turn, or once too often: there"
            f" it had always issued {what}, {deviation.rounds} times or more. Look at: what led it"
            " to that."
        )
    if deviation.is_new and not deviation.is_skip:
        return (
            f"Likely: rank {deviation.rank} issued {instead} where it had always issued {what},"
            f" {deviation.rounds} times or more. Look at: what led it"
            f" to{_line(issued).lstrip(',') or ' that'}."
        )
    return (
        f"Likely: rank {deviation.rank} left out {what}, which it had always issued there,"
        f" {deviation.rounds} times or more, and went on to {instead}. Look at: conditions on rank,"
        f" step or data around{_line(due).lstrip(',') or ' what was left out'}."
    )


def _groups_text(context: Context, deviation: Deviation) -> tuple[str, str]:
    """Of what groups the two calls are, where they are of different ones."""
    keys = deviation.like[0], deviation.issued[0]
    due, issued = (f' of group "{context.job_calls.group(key).title}"' for key in keys)
    return (due, issued) if keys[0].group != keys[1].group else ("", "")


def _line(call: Event | None) -> str:
    return f", {call.place.line}" if call is not None and call.place.line else ""


def on_wrong_peer(context: Context, strays: list[Wait]) -> tuple[str, ...]:
    said = []
    for wait in strays[:_MOST_LINKS]:
        call = context.job_calls.by_rank[wait.rank].issued(wait.key, wait.number)
        what = call_text(call) if call is not None else "a message"
        other = (*wait.missing, *wait.no_data)[0]
        answer = (
            "does not listen to it"
            if wait.key.source == wait.rank
            else "has no such message for it"
        )
        said.append(f"Rank {wait.rank} waits for the wrong one: {what}; rank {other} {answer}.")
        said.append(
            "  Another rank has written to it, or listens to it, and gets no answer. Look at: the"
            " peer in that line."
        )
    return (
        (*said, f"And {len(strays) - _MOST_LINKS} more.")
        if len(strays) > _MOST_LINKS
        else tuple(said)
    )


def link(context: Context, wait: Wait) -> dict[str, Any]:
    """One link of a circle, for JSON."""
    return {
        "rank": wait.rank,
        "waits_for": list(wait.missing[:16]),
        "collective": context.collective(wait.key, wait.number, wait.rank),
        "place": context.place(wait.rank).to_dict(),
    }


def links(context: Context, found: list[Wait]) -> list[dict[str, Any]]:
    """A circle, for JSON: the first links of it."""
    return [link(context, wait) for wait in found[:_MOST_LINKS]]
