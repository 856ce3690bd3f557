"""Sentences on ranks that issued a call which the others, which have finished, never issued."""

from __future__ import annotations

from torchwhere.core.rank_text import ranks_phrase
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.rules.extra_call import ExtraCall
from torchwhere.diagnose.doctor.stacks import holding
from torchwhere.render.verdict_text.phrases import (
    hold_text,
    in_place,
    issued_call,
    op_text,
    place_text,
)

_MOST_RANKS = 4  # with their own line


def extra_call_text(cause: ExtraCall, context: Context) -> list[str]:
    call = issued_call(context.job_calls, cause.wait)
    title = context.job_calls.group(cause.wait.key).title
    lines = [
        (
            f"{ranks_phrase(cause.ranks).capitalize()} issued {op_text(call)}, #{cause.wait.number}"
            f' of group "{title}", but {ranks_phrase(cause.finished)} finished without it.'
        )
    ]
    lines += [f"  {_blocked_text(context, rank)}" for rank in cause.ranks[:_MOST_RANKS]]
    if call is None:
        return lines
    return [
        *lines,
        (
            "Likely cause: more batches than on the other ranks, or a collective inside a"
            f" condition. Look at: {place_text(call.place)}."
        ),
    ]


def _blocked_text(context: Context, rank: int) -> str:
    hold = holding(context.job_calls.by_rank[rank], context.status(rank))
    text = f"rank {rank} is {in_place(context.place(rank))}"
    return f"{text}: {hold_text(hold)}" if hold is not None else text
