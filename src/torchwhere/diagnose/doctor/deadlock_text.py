"""Why ranks wait for each other, and what to look at: the sentences on a circle, and on messages to the wrong one."""

from __future__ import annotations

from typing import Any

from torchwhere.core.events import Event
from torchwhere.diagnose.doctor.call_patterns import Departure
from torchwhere.diagnose.doctor.context import Case
from torchwhere.diagnose.doctor.deadlocks import Blame
from torchwhere.diagnose.doctor.wait_text import call_said, ranks_said, what_said
from torchwhere.diagnose.doctor.waits import Wait

_MOST_LINKS = 16  # of a circle that are shown


def on_deadlock(case: Case, found: list[Wait], blamed: Blame) -> tuple[str, ...]:
    said = [f"{len(found)} ranks wait for each other in a circle:"]
    for wait in found[:_MOST_LINKS]:
        call = case.hearing.testimonies[wait.rank].issued(wait.key, wait.number)
        waits_for = [rank for rank in wait.missing if rank in case.waits]
        title = case.hearing.group(wait.key).title
        what = call_said(call) if call is not None else "a collective"
        said.append(f'  rank {wait.rank} in #{wait.number} of "{title}" ({what}) waits for {ranks_said(waits_for[:4])}')
    if len(found) > _MOST_LINKS:
        said.append(f"  and so on, {len(found) - _MOST_LINKS} more, back to rank {found[0].rank}")
    said += [_departed(case, departure) for departure in {each.rank: each for each in blamed.departures[::-1]}.values()][:4]
    same = [rank for rank in blamed.culprits if all(each.rank != rank for each in blamed.departures)]
    if blamed.departures:
        said += [f"{ranks_said(same).capitalize()} did the same."] if same else []
        return (*said, "The others do as they always did.") if blamed.is_sure else tuple(said)
    if 0 < len(blamed.culprits) < len(found):
        why = "fewer ranks wait there than elsewhere"
        if blamed.have_stayed:
            why = "most others went on without it"
        elif blamed.is_outvoted:
            why = "most ranks that had issued the same calls before went another way"
        said.append(f"Likely: {ranks_said(blamed.culprits)}, as {why}. That does not prove it.")
    else:
        said.append("One of them left a call out, issued one too many, or took them in another order: which one does not show.")
    return (*said, "Look at: the order of the lines above.")


def _departed(case: Case, departure: Departure) -> str:
    """What a rank did otherwise than it always had."""
    testimony = case.hearing.testimonies[departure.rank]
    due, issued = testimony.issued(*departure.like), testimony.issued(*departure.issued)
    of, instead_of = _groups_said(case, departure)
    what, instead = f"{what_said(due)}{of}{_line(due)}", f"{what_said(issued)}{instead_of}{_line(issued)}"
    if departure.is_early:
        return (
            f"Likely: rank {departure.rank} issued {instead} out of turn, or once too often: "
            f"there it had always issued {what}, {departure.rounds} times or more. Look at: what led it to that."
        )
    if departure.is_new and not departure.is_skip:
        return (
            f"Likely: rank {departure.rank} issued {instead} where it had always issued {what}, "
            f"{departure.rounds} times or more. Look at: what led it to{_line(issued).lstrip(',') or ' that'}."
        )
    return (
        f"Likely: rank {departure.rank} left out {what}, which it had always issued there, {departure.rounds} times or more, "
        f"and went on to {instead}. "
        f"Look at: conditions on rank, step or data around{_line(due).lstrip(',') or ' what was left out'}."
    )


def _groups_said(case: Case, departure: Departure) -> tuple[str, str]:
    """Of what groups the two calls are, where they are of different ones."""
    keys = departure.like[0], departure.issued[0]
    due, issued = (f' of group "{case.hearing.group(key).title}"' for key in keys)
    return (due, issued) if keys[0].group != keys[1].group else ("", "")


def _line(call: Event | None) -> str:
    return f", {call.place.line}" if call is not None and call.place.line else ""


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
