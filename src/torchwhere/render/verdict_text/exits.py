"""Sentences on ranks that exited."""

from __future__ import annotations

from collections.abc import Sequence

from torchwhere.core.rank_text import ranks_phrase
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.exit_records import ExitReason, survived_exception
from torchwhere.diagnose.doctor.rules.exited import (
    ExitedBeforeOthers,
    ExitedRanks,
    UnknownFirstExit,
)
from torchwhere.diagnose.doctor.rules.no_fault import EndedUnfinished
from torchwhere.diagnose.doctor.verdict import State
from torchwhere.diagnose.doctor.waits import Wait
from torchwhere.render.verdict_text.failures import device_errors_text
from torchwhere.render.verdict_text.missing import waiting_text
from torchwhere.render.verdict_text.phrases import (
    NO_EXIT_RECORD,
    detail_text,
    exit_text,
    first_line,
    issued_call,
    op_text,
    place_text,
    rank_detail_text,
    survived_text,
)

_MOST_KINDS = 4  # of exits


def exited_ranks_text(cause: ExitedRanks, context: Context) -> list[str]:
    lines = _exits_text(context, cause.ranks) + device_errors_text(context, cause.ranks)
    if cause.wait is not None:
        lines += _awaited_text(context, cause.ranks, cause.wait)
    return lines + _killed_together_text(context, cause.ranks)


def exited_before_others_text(cause: ExitedBeforeOthers, context: Context) -> list[str]:
    lines = _exits_text(context, cause.ranks) + _killed_together_text(context, cause.ranks)
    others = _how_text(context, besides=cause.ranks)
    return (
        [*lines, "The others exited too:", *others] if others and context.timing.is_over else lines
    )


def ended_text(context: Context) -> list[str]:
    """How the ranks of an unfinished job ended."""
    are_gone = all(context.status(rank).alive is False for rank in context.job_calls.by_rank)
    head = "No process is left" if are_gone else "No process is known to be left"
    return [
        f"{head}, and the job had not finished. It is unknown which rank exited first.",
        *_how_text(context),
    ]


def gone_first_text(cause: EndedUnfinished) -> list[str]:
    """The ranks that may have exited first: the others had begun to wait for them."""
    ranks = cause.may_have_gone_first
    if not ranks:
        return []
    them = "it" if len(ranks) == 1 else "them"
    return [
        (
            f"{ranks_phrase(ranks).capitalize()} may have exited first:"
            f" {ranks_phrase(cause.waiting)} waited for {them}. All ranks may also have been killed"
            " at the same time."
        )
    ]


def unknown_first_exit_text(cause: UnknownFirstExit, context: Context) -> list[str]:
    failed = ranks_phrase(cause.failed).capitalize()
    example = f"  {first_line(rank_detail_text(context, cause.failed[0]))}"
    if context.exits.could_not_connect(list(cause.failed)):
        return [
            (
                f"{failed} could not connect to another rank. The boxes do not show whether that"
                " rank had already exited:"
            ),
            example,
            (
                "Look at: the logs of the other ranks, the rendezvous address and port, the network"
                " interfaces."
            ),
        ]
    if context.exits.may_have_caught_sigterm(list(cause.failed)):
        them = "it" if len(cause.failed) == 1 else "them"
        return [
            "The job had not finished. It is unknown which rank exited first.",
            *_how_text(context),
            (
                f"{failed} failed, or a handler of SIGTERM ended {them} after another rank had been"
                " killed."
            ),
        ]
    lines = [
        (
            f"A process exited, and it is unknown which rank exited first. {failed} failed because"
            " of it:"
        ),
        example,
    ]
    unrecorded = [
        rank
        for rank in context.job_calls.by_rank
        if rank not in cause.failed and context.state(rank) is State.DEAD
    ]
    if unrecorded:
        lines.append(
            f"  one of {ranks_phrase(unrecorded)} exited first: none of them left an exit record,"
            " and no monitor saw when they exited"
        )
    return lines


# -- how ranks exited ------------------------------------------------------------------------------


def _exits_text(context: Context, ranks: Sequence[int]) -> list[str]:
    """How and where each rank exited; ranks that exited alike share a sentence."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank in ranks:
        alike.setdefault(_exit_lines(context, rank), []).append(rank)
    lines = []
    for (how, *details), same in list(alike.items())[:_MOST_KINDS]:
        lines += [f"{ranks_phrase(same).capitalize()} {how}", *details]
    return lines


def _exit_lines(context: Context, rank: int) -> tuple[str, ...]:
    rank_calls = context.job_calls.by_rank.get(rank)
    if rank_calls is None:
        return (
            (
                "may have exited first: the others report that a peer closed the connection, and it"
                " left no readable box."
            ),
        )
    verb = "finished" if context.state(rank) is State.FINISHED else "exited"
    error = rank_calls.exception
    text = _gist(detail_text(context.detail(rank) or context.exits.how(rank))).removesuffix(".")
    how = f"{verb} and {text}." if text == NO_EXIT_RECORD else f"{verb}: {text}."
    where = error.place if error is not None else context.place(rank)
    before = None
    if error is not None and context.exits.has_failed(rank):
        before = survived_exception(rank_calls, error.number)
    return (how, f"  last place: {place_text(where)}", *survived_text(before))


def _gist(text: str) -> str:
    """The first line of an exception. If it contains another traceback, also that one's last
    line."""
    first, _, rest = text.partition("\n")
    if "Traceback (most recent call last)" not in rest:
        return first_line(text)
    last = rest.strip().rpartition("\n")[2].strip()
    return f"{first[:200]}: {last[:200]}" if last else first_line(text)


def _awaited_text(context: Context, ranks: Sequence[int], wait: Wait) -> list[str]:
    """The ranks that wait for exited ranks."""
    title = context.job_calls.group(wait.key).title
    them = "it" if len(ranks) == 1 else "them"
    call = op_text(issued_call(context.job_calls, wait))
    lines = [
        f'The others wait for {them} in {call}, #{wait.number} of group "{title}".',
        waiting_text(context, wait),
    ]
    if all(
        rank in context.job_calls.by_rank and context.state(rank) is State.FINISHED
        for rank in ranks
    ):
        lines.append(
            "Likely cause: it had fewer batches, left a loop early, or skipped a step. Look at: the"
            " condition that ends its loop."
        )
    return lines


def _killed_together_text(context: Context, ranks: Sequence[int]) -> list[str]:
    exits, by_rank = context.exits, context.job_calls.by_rank
    if not exits.were_killed_together or any(by_rank[rank].end for rank in ranks):
        return []
    noticed = ranks_phrase(exits.failed()).capitalize()
    return [
        (
            f"{noticed} noticed that a process had exited; then all processes were gone. They may"
            " have been killed at the same time."
        )
    ]


def _how_text(context: Context, *, besides: Sequence[int] = ()) -> list[str]:
    """How the ranks of an unfinished job exited."""
    exits = context.exits
    ranks = {*exits.killed(), *exits.terminated(), *exits.failed()} - set(besides)
    alike: dict[ExitReason, list[int]] = {}
    for rank in sorted(ranks):
        alike.setdefault(exits.how(rank), []).append(rank)
    return [
        f"  {ranks_phrase(same)}: {first_line(exit_text(how))}"
        for how, same in list(alike.items())[:_MOST_KINDS]
    ]
