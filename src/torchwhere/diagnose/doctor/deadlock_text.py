"""Sentences of a verdict on deadlocks and on messages with the wrong peer."""

from __future__ import annotations

from typing import Any

from torchwhere.core.events import Event
from torchwhere.core.rank_text import ranks_phrase
from torchwhere.diagnose.doctor.call_patterns import Deviation
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.deadlocks import Blame
from torchwhere.diagnose.doctor.wait_text import call_text, what_text
from torchwhere.diagnose.doctor.waits import Wait

_MOST_LINKS = 16  # waits of a cycle that are printed


def on_deadlock(context: Context, cycle: list[Wait], blamed: Blame) -> tuple[str, ...]:
    lines = [f"{len(cycle)} ranks wait for each other in a cycle:"]
    for wait in cycle[:_MOST_LINKS]:
        call = context.job_calls.by_rank[wait.rank].issued(wait.key, wait.number)
        waits_for = [rank for rank in wait.missing if rank in context.waits]
        title = context.job_calls.group(wait.key).title
        what = call_text(call) if call is not None else "a collective"
        lines.append(
            f'  rank {wait.rank} in #{wait.number} of "{title}" ({what}) waits for'
            f" {ranks_phrase(waits_for[:4])}"
        )
    if len(cycle) > _MOST_LINKS:
        lines.append(f"  and {len(cycle) - _MOST_LINKS} more, back to rank {cycle[0].rank}")
    lines += [
        _deviated(context, deviation)
        for deviation in {each.rank: each for each in blamed.deviations[::-1]}.values()
    ][:4]
    same = [
        rank for rank in blamed.culprits if all(each.rank != rank for each in blamed.deviations)
    ]
    if blamed.deviations:
        lines += [f"{ranks_phrase(same).capitalize()} did the same."] if same else []
        return (
            (*lines, "The others followed their usual call pattern.")
            if blamed.is_sure
            else tuple(lines)
        )
    if 0 < len(blamed.culprits) < len(cycle):
        why = "fewer ranks wait there than elsewhere"
        if blamed.have_stayed:
            why = "most others continued without it"
        elif blamed.is_outvoted:
            why = "most ranks with the same earlier calls took a different path"
        lines.append(
            f"Likely culprit: {ranks_phrase(blamed.culprits)}, because {why}. This is not proof."
        )
    else:
        lines.append(
            "One of them skipped a call, issued one too many, or issued them in a different order:"
            " the boxes do not show which one."
        )
    return (*lines, "Look at: the order of the calls above.")


def _deviated(context: Context, deviation: Deviation) -> str:
    """How a rank deviated from its usual call pattern."""
    rank_calls = context.job_calls.by_rank[deviation.rank]
    due, issued = rank_calls.issued(*deviation.like), rank_calls.issued(*deviation.issued)
    of, instead_of = _groups_text(context, deviation)
    what, instead = (
        f"{what_text(due)}{of}{_line(due)}",
        f"{what_text(issued)}{instead_of}{_line(issued)}",
    )
    if deviation.is_early:
        return (
            f"Likely cause: rank {deviation.rank} issued {instead} out of order, or once too often,"
            f" where it had always issued {what} (at least {deviation.rounds} times). Look at: the"
            " code path that leads there."
        )
    line = _line(issued).lstrip(", ")
    if deviation.is_new and not deviation.is_skip:
        return (
            f"Likely cause: rank {deviation.rank} issued {instead} where it had always issued"
            f" {what} (at least {deviation.rounds} times). Look at: the code path that leads"
            f" {f'to {line}' if line else 'there'}."
        )
    return (
        f"Likely cause: rank {deviation.rank} skipped {what}, which it had always issued there (at"
        f" least {deviation.rounds} times), and continued with {instead}. Look at: conditions on"
        f" rank, step or data around {_line(due).lstrip(', ') or 'the skipped call'}."
    )


def _groups_text(context: Context, deviation: Deviation) -> tuple[str, str]:
    """The groups of the two calls, if they differ."""
    keys = deviation.like[0], deviation.issued[0]
    due, issued = (f' of group "{context.job_calls.group(key).title}"' for key in keys)
    return (due, issued) if keys[0].group != keys[1].group else ("", "")


def _line(call: Event | None) -> str:
    return f", {call.place.line}" if call is not None and call.place.line else ""


def on_wrong_peer(context: Context, strays: list[Wait]) -> tuple[str, ...]:
    lines = []
    for wait in strays[:_MOST_LINKS]:
        call = context.job_calls.by_rank[wait.rank].issued(wait.key, wait.number)
        what = call_text(call) if call is not None else "a message"
        other = (*wait.missing, *wait.no_data)[0]
        op = "recv" if wait.key.source == wait.rank else "send"
        lines.append(
            f"Rank {wait.rank} waits on the wrong peer: {what}; rank {other} has posted no matching"
            f" {op}."
        )
        lines.append(
            "  Another rank has posted a send to it, or a recv from it, that has no match. Look at:"
            " the peer in that line."
        )
    return (
        (*lines, f"And {len(strays) - _MOST_LINKS} more.")
        if len(strays) > _MOST_LINKS
        else tuple(lines)
    )


def link(context: Context, wait: Wait) -> dict[str, Any]:
    """One wait of the cycle, for JSON."""
    return {
        "rank": wait.rank,
        "waits_for": list(wait.missing[:16]),
        "collective": context.collective(wait.key, wait.number, wait.rank),
        "place": context.place(wait.rank).to_dict(),
    }


def links(context: Context, cycle: list[Wait]) -> list[dict[str, Any]]:
    """The first waits of the cycle, for JSON."""
    return [link(context, wait) for wait in cycle[:_MOST_LINKS]]
