"""Sentences on deadlocks and on messages with the wrong peer."""

from __future__ import annotations

from torchwhere.core.events import Event
from torchwhere.core.rank_text import ranks_phrase
from torchwhere.diagnose.doctor.call_patterns import Deviation
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.deadlocks import Blame
from torchwhere.diagnose.doctor.rules.deadlock import Deadlock
from torchwhere.diagnose.doctor.rules.wrong_peer import WrongPeers
from torchwhere.diagnose.doctor.waits import Wait
from torchwhere.render.verdict_text.phrases import call_text, op_text, records_text, subject_text

_MOST_LINKS = 16  # waits that are printed
_MOST_DEVIATIONS = 4


def deadlock_text(cause: Deadlock, context: Context) -> list[str]:
    count = len(cause.cycle)
    lines = [f"{count} ranks wait for each other in a cycle:"]
    lines += [_link_text(context, wait) for wait in cause.cycle[:_MOST_LINKS]]
    if count > _MOST_LINKS:
        lines.append(f"  and {count - _MOST_LINKS} more, back to rank {cause.cycle[0].rank}")
    return lines + blame_text(context, cause.blame, ranks=count)


def blame_text(context: Context, blame: Blame, *, ranks: int) -> list[str]:
    """The culprits among `ranks` ranks that wait for each other, and why."""
    if blame.deviations:
        return _deviations_text(context, blame)
    return [_culprits_text(context, blame, ranks), "Look at: the order of the calls above."]


def _link_text(context: Context, wait: Wait) -> str:
    call = context.issued(wait)
    waits_for = [rank for rank in wait.missing if rank in context.waits]
    title = context.title(wait.key)
    description = call_text(call) if call is not None else "a collective"
    return (
        f'  rank {wait.rank} in #{wait.number} of "{title}" ({description}) waits for'
        f" {ranks_phrase(waits_for[:4])}"
    )


def _deviations_text(context: Context, blame: Blame) -> list[str]:
    """How the culprits deviated from their usual call patterns."""
    by_rank = {deviation.rank: deviation for deviation in blame.deviations[::-1]}
    lines = [_deviation_text(context, deviation) for deviation in by_rank.values()]
    lines = lines[:_MOST_DEVIATIONS]
    same = [rank for rank in blame.culprits if rank not in by_rank]
    if same:
        lines.append(f"{subject_text(same)} did the same.")
    if blame.is_sure:
        lines.append("The others followed their usual call pattern.")
    return lines


def _culprits_text(context: Context, blame: Blame, count: int) -> str:
    if not 0 < len(blame.culprits) < count:
        return (
            "One of them skipped a call, issued one too many, or issued them in a different order:"
            f" the {records_text(context)} do not show which one."
        )
    why = "fewer ranks wait there than elsewhere"
    if blame.have_stayed:
        why = "most others continued without it"
    elif blame.is_outvoted:
        why = "most ranks with the same earlier calls took a different path"
    return f"Likely culprit: {ranks_phrase(blame.culprits)}, because {why}. This is not proof."


def _deviation_text(context: Context, deviation: Deviation) -> str:
    rank_calls = context.by_rank[deviation.rank]
    due, issued = rank_calls.issued(*deviation.like), rank_calls.issued(*deviation.issued)
    usual, instead = _line_text(op_text(due), due), _line_text(op_text(issued), issued)
    due_key, issued_key = deviation.like[0], deviation.issued[0]
    if due_key.group != issued_key.group:
        usual = _line_text(f'{op_text(due)} of group "{context.title(due_key)}"', due)
        instead = _line_text(f'{op_text(issued)} of group "{context.title(issued_key)}"', issued)
    rank, times = deviation.rank, f"at least {deviation.rounds} times"
    if deviation.is_early:
        return (
            f"Likely cause: rank {rank} issued {instead} out of order, or once too often, where it"
            f" had always issued {usual} ({times}). Look at: the code path that leads there."
        )
    if deviation.is_new and not deviation.is_skip:
        line = _line(issued)
        return (
            f"Likely cause: rank {rank} issued {instead} where it had always issued {usual}"
            f" ({times}). Look at: the code path that leads {f'to {line}' if line else 'there'}."
        )
    return (
        f"Likely cause: rank {rank} skipped {usual}, which it had always issued there ({times}),"
        f" and continued with {instead}. Look at: conditions on rank, step or data around"
        f" {_line(due) or 'the skipped call'}."
    )


def _line(call: Event | None) -> str | None:
    return call.place.full_line or None if call is not None else None


def _line_text(text: str, call: Event | None) -> str:
    line = _line(call)
    return f"{text}, {line}" if line else text


def wrong_peers_text(cause: WrongPeers, context: Context) -> list[str]:
    lines = []
    for wait in cause.waits[:_MOST_LINKS]:
        call = context.issued(wait)
        message = call_text(call) if call is not None else "a message"
        other = (*wait.missing, *wait.no_data)[0]
        op = "recv" if wait.key.source == wait.rank else "send"
        lines += [
            (
                f"Rank {wait.rank} waits on the wrong peer: {message}; rank {other} has posted no"
                f" matching {op}."
            ),
            (
                "  Another rank has posted a send to it, or a recv from it, that has no match."
                " Look at: the peer in that line."
            ),
        ]
    if len(cause.waits) > _MOST_LINKS:
        lines.append(f"And {len(cause.waits) - _MOST_LINKS} more.")
    return lines
