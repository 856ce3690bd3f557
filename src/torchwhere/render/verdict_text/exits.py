"""Sentences on ranks that exited: why, and which others failed because of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchwhere.core.device_errors import DeviceError
from torchwhere.core.grouping import grouped
from torchwhere.core.place import Certainty
from torchwhere.core.rank_text import ranks_phrase
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.exit_records import ExitReason, survived_exception
from torchwhere.diagnose.doctor.exits import Reaction
from torchwhere.diagnose.doctor.rules.exited import (
    ExitedBeforeOthers,
    ExitedRanks,
    ExtraCall,
    UnknownFirstExit,
)
from torchwhere.diagnose.doctor.rules.no_fault import EndedUnfinished
from torchwhere.diagnose.doctor.stacks import holding
from torchwhere.diagnose.doctor.verdict import State
from torchwhere.diagnose.doctor.waits import Wait
from torchwhere.render.verdict_text.missing import waiting_text
from torchwhere.render.verdict_text.phrases import (
    NO_EXIT_RECORD,
    agree,
    detail_text,
    exit_text,
    first_line,
    hold_text,
    in_place,
    numbered_call_text,
    place_text,
    rank_detail_text,
    subject_text,
    survived_text,
)

_MOST_KINDS = 4  # of exits
_MOST_RANKS = 4  # with their own line
_CAUSES = {
    DeviceError.ASSERT: "an index or a label is out of range in a kernel",
    DeviceError.ADDRESS: "a kernel reads or writes outside of its tensors",
    DeviceError.MEMORY: "the memory of the GPU is faulty",
    DeviceError.LINK: "an NVLink of the GPU is faulty",
    DeviceError.OTHER: "a kernel, the driver or the GPU failed",
}
_OF_KERNEL = "the log of {rank} and a run with CUDA_LAUNCH_BLOCKING=1, which shows the line"
_OF_DEVICE = "nvidia-smi -q and the kernel log (Xid) on the host of {rank}"
_LOOK_AT = {
    DeviceError.ASSERT: _OF_KERNEL,
    DeviceError.ADDRESS: f"{_OF_KERNEL}; compute-sanitizer",
    DeviceError.MEMORY: _OF_DEVICE,
    DeviceError.LINK: f"nvidia-smi nvlink -e, {_OF_DEVICE}",
    DeviceError.OTHER: f"{_OF_DEVICE}, {_OF_KERNEL}",
}
_OF_CODE = frozenset({DeviceError.ASSERT, DeviceError.ADDRESS, DeviceError.OTHER})
_LATER = " The CPU may report the error after it has passed the failing line."
_REACTIONS = {
    Reaction.TIMED_OUT: "a collective timed out",
    Reaction.LOST_PEER: "the connection to another rank was lost",
    Reaction.RAISED_AGAIN: "an exception of another rank was raised again",
    Reaction.SHARED_DEVICE: "a process that shared its device was gone",
}


def exited_ranks_text(cause: ExitedRanks, context: Context) -> list[str]:
    lines = _exits_text(context, cause.ranks) + _device_errors_text(context, cause.ranks)
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
    are_gone = all(context.status(rank).alive is False for rank in context.by_rank)
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
    them = agree(ranks, "it", "them")
    return [
        (
            f"{subject_text(ranks)} may have exited first:"
            f" {ranks_phrase(cause.waiting)} waited for {them}. All ranks may also have been killed"
            " at the same time."
        )
    ]


def unknown_first_exit_text(cause: UnknownFirstExit, context: Context) -> list[str]:
    failed = subject_text(cause.failed)
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
        them = agree(cause.failed, "it", "them")
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
        for rank in context.by_rank
        if rank not in cause.failed and context.state(rank) is State.DEAD
    ]
    if unrecorded:
        lines.append(
            f"  one of {ranks_phrase(unrecorded)} exited first: none of them left an exit record,"
            " and no monitor saw when they exited"
        )
    return lines


def extra_call_text(cause: ExtraCall, context: Context) -> list[str]:
    call = context.issued(cause.wait)
    lines = [
        (
            f"{subject_text(cause.ranks)} issued {numbered_call_text(context, cause.wait)}, but"
            f" {ranks_phrase(cause.finished)} finished without it."
        )
    ]
    for rank in cause.ranks[:_MOST_RANKS]:
        hold = holding(context.by_rank[rank], context.status(rank))
        blocked = f": {hold_text(hold)}" if hold is not None else ""
        lines.append(f"  rank {rank} is {in_place(context.place(rank))}{blocked}")
    if call is not None:
        lines.append(
            "Likely cause: more batches than on the other ranks, or a collective inside a"
            f" condition. Look at: {place_text(call.place)}."
        )
    return lines


# -- how ranks exited ------------------------------------------------------------------------------


def _exits_text(context: Context, ranks: Sequence[int]) -> list[str]:
    """How and where each rank exited; ranks that exited alike share a sentence."""
    alike = grouped((_exit_lines(context, rank), rank) for rank in ranks)
    lines = []
    for (how, *details), same in list(alike.items())[:_MOST_KINDS]:
        lines += [f"{subject_text(same)} {how}", *details]
    return lines


def _exit_lines(context: Context, rank: int) -> tuple[str, ...]:
    rank_calls = context.by_rank.get(rank)
    if rank_calls is None:
        code = context.status(rank).exit_code
        if code is not None and code < 0:
            killed = exit_text(ExitReason(exit_code=code))
            return (f"may have exited first: {killed}, and it left no readable box.",)
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
    is_inferred = error is not None and where.certainty is Certainty.INFERRED
    last_place = f"{place_text(where)}, (inferred)" if is_inferred else place_text(where)
    return (how, f"  last place: {last_place}", *survived_text(before))


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
    them = agree(ranks, "it", "them")
    lines = [
        f"The others wait for {them} in {numbered_call_text(context, wait)}.",
        waiting_text(context, wait),
    ]
    if all(rank in context.by_rank and context.state(rank) is State.FINISHED for rank in ranks):
        lines.append(
            "Likely cause: it had fewer batches, left a loop early, or skipped a step. Look at: the"
            " condition that ends its loop."
        )
    return lines


def _killed_together_text(context: Context, ranks: Sequence[int]) -> list[str]:
    exits, by_rank = context.exits, context.by_rank
    if not exits.were_killed_together or any(by_rank[rank].end for rank in ranks):
        return []
    noticed = subject_text(exits.failed())
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
    alike = grouped((exits.how(rank), rank) for rank in sorted(ranks))
    return [
        f"  {ranks_phrase(same)}: {first_line(exit_text(how))}"
        for how, same in list(alike.items())[:_MOST_KINDS]
    ]


# -- why ranks failed ------------------------------------------------------------------------------


def _device_errors_text(context: Context, ranks: Sequence[int]) -> list[str]:
    """What failed on the devices of ranks, where each device was, and what to look at."""
    lines = []
    for rank in ranks:
        rank_calls = context.by_rank.get(rank)
        error = context.exits.device_error(rank) if rank_calls is not None else None
        if rank_calls is None or error is None:
            continue
        state = rank_calls.rank_summary.device
        if state is not None and state.place is not None:
            lines.append(f"  rank {rank}, device: last reached {place_text(state.place)}")
        late = _LATER if error in _OF_CODE else ""
        look_at = _LOOK_AT[error].format(rank=f"rank {rank}")
        lines.append(f"Likely cause: {_CAUSES[error]}.{late} Look at: {look_at}.")
    return lines


def reactions_text(reactions: Mapping[Reaction, list[int]]) -> list[str]:
    """The ranks that failed only because of the culprits."""
    return [
        f"Because of it, {ranks_phrase(ranks)} failed: {_REACTIONS[reaction]}."
        for reaction, ranks in reactions.items()
        if reaction in _REACTIONS
    ]
