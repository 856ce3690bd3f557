"""Sentences on ranks that wait while they create a process group."""

from __future__ import annotations

from torchwhere.core.rank_text import ranks_phrase
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.rules.group_creation import DifferentGroups, PendingGroup
from torchwhere.diagnose.doctor.verdict import State
from torchwhere.render.verdict_text.phrases import (
    agree,
    all_ranks_text,
    detail_text,
    in_place,
    subject_text,
)

_INIT = "init_process_group"
_MOST_RANKS = 4  # with their own line
_ORDER_OF_GROUPS = (
    "All ranks must create all groups in the same order, including groups they are not members of;"
    " or pass use_local_synchronization=True."
)
_NETWORK = (
    "the rendezvous address and port, the world size, firewalls and network interfaces between the"
    " hosts"
)
_VERBS = {State.DEAD: "has exited", State.FINISHED: "has finished"}


def different_groups_text(cause: DifferentGroups, context: Context) -> list[str]:
    return [
        "The ranks create different groups at the same time, so they wait for each other.",
        *(
            f"  {ranks_phrase(ranks)}: {_creation_text(call.op, call.ranks)}, {in_place(place)}"
            for call, ranks, place in cause.cohorts
        ),
        _ORDER_OF_GROUPS,
    ]


def pending_group_text(cause: PendingGroup, context: Context) -> list[str]:
    creation = _creation_text(cause.creation.op, cause.creation.ranks)
    waiting = ranks_phrase(cause.there)
    verb = agree(cause.there, "waits", "wait")
    where = f"  waiting: {waiting}, {in_place(cause.creation.place)}"
    if cause.absent:
        lines = [
            (f"{subject_text(cause.absent)} never called {creation}, where {waiting} {verb}."),
            where,
        ]
        lines += [f"  {_elsewhere_text(context, rank)}" for rank in cause.absent[:_MOST_RANKS]]
        return lines + ([_ORDER_OF_GROUPS] if cause.creation.op != _INIT else [])
    if context.no_data:
        return [
            (
                f"{waiting.capitalize()} {verb} in {creation}, and there is no data for"
                f" {ranks_phrase(context.no_data)}."
            ),
            where,
            (
                f"{agree(context.no_data, 'It', 'They')} may not have started yet, or may have"
                " exited before the watch began. Look at:"
                f" {agree(context.no_data, 'its', 'their')} own log."
            ),
        ]
    if cause.is_alone:
        return [
            (
                f"{waiting.capitalize()} waits in {creation} for other ranks, and no other rank has"
                " a box."
            ),
            where,
            f"The others may not have started yet. If they have, look at: {_NETWORK}.",
        ]
    wait = all_ranks_text(len(cause.there), single="waits", several="wait")
    return [
        f"{wait} in {creation}, and no rank is missing.",
        where,
        f"Likely cause: the network. Look at: {_NETWORK}.",
    ]


def _creation_text(op: str, ranks: tuple[int, ...] | None) -> str:
    return f"{op} of {ranks_phrase(ranks)}" if ranks else op


def _elsewhere_text(context: Context, rank: int) -> str:
    detail, verb = context.detail(rank), _VERBS.get(context.state(rank), "is instead")
    text = f"rank {rank} {verb} {in_place(context.place(rank))}"
    return f"{text}: {detail_text(detail)}" if detail is not None else text
