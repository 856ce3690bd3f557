"""Rules: ranks exited, or finished, while others wait for them; ranks failed; a rank exited before
the others."""

from __future__ import annotations

from dataclasses import dataclass

from torchwhere.core.place import Certainty
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.finding import CallRef, Cause, Finding, exact_if
from torchwhere.diagnose.doctor.rules.missing import MissingRanks, is_usual_delay
from torchwhere.diagnose.doctor.verdict import State, VerdictKind
from torchwhere.diagnose.doctor.waits import Wait, awaited, waiting_for


@dataclass(frozen=True, slots=True)
class ExitedRanks(Cause):
    """Ranks that exited first, and the wait for them, if others wait."""

    ranks: tuple[int, ...]
    wait: Wait | None


@dataclass(frozen=True, slots=True)
class UnknownFirstExit(Cause):
    """Ranks that failed because another rank exited: it is unknown which."""

    failed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TimedOutTogether(Cause):
    """All ranks timed out in one collective, and no rank is missing from it."""

    example_rank: int


@dataclass(frozen=True, slots=True)
class ExitedBeforeOthers(Cause):
    """Ranks that exited before the others and left no exit record."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExtraCall(Cause):
    """Ranks that issued a call which the others, which have finished, never issued."""

    ranks: tuple[int, ...]
    finished: tuple[int, ...]
    wait: Wait


def find_exited(context: Context) -> Finding | None:
    exits = context.exits
    if exited := _awaited_exits(context):
        others = [rank for rank in awaited(context.waits) if rank not in exited]
        if others and all(map(exits.reacted, exited)):
            return _not_seen_to_exit(context, others)
        return _exited(context, exits.first_of_awaited(exited, context.incomplete), exited)
    if likely := _likely_exited(context):
        return _exited(context, likely, [], certainty=Certainty.INFERRED)
    failed = exits.failed()
    if context.waits or exits.were_killed_together or not failed:
        return None
    first = exits.first(context.incomplete)
    if not first and exits.may_have_caught_sigterm(failed):
        return None
    if any(map(exits.timed_out, failed)) and set(first) <= set(context.incomplete):
        return _timed_out(context, first)
    return _exited(context, first, failed)


def _awaited_exits(context: Context) -> list[int]:
    """The ranks that others wait for and that have exited by themselves."""
    exits = context.exits
    return [
        rank
        for rank in awaited(context.waits)
        if context.state(rank) in (State.DEAD, State.FINISHED)
        and not exits.exited_with_the_job(rank)
        and not exits.outlived_its_watch(rank)
        and not exits.is_doubtful(rank)
        and not _was_missing(context, rank)
    ]


def _was_missing(context: Context, rank: int) -> bool:
    """Whether an awaited rank was missing for long before it was killed."""
    wait = context.first_wait_for([rank])
    began_ns = context.timing.began_ns(wait) if wait is not None else 0
    return began_ns > 0 and context.was_missing(rank, since_ns=began_ns)


def _not_seen_to_exit(context: Context, ranks: list[int]) -> Finding:
    """The awaited ranks that did not exit in reaction to another rank: they are missing, or they
    exited without a trace if others lost a peer."""
    exits = context.exits
    is_alive = any(context.status(rank).alive for rank in ranks)
    if not is_alive and any(map(exits.lost_its_peer, exits.failed())):
        return _exited(context, ranks, [], certainty=Certainty.INFERRED)
    wait = context.first_wait_for(ranks)
    assert wait is not None  # they are awaited
    return Finding(
        VerdictKind.MISSING,
        MissingRanks(tuple(ranks), wait),
        culprits=tuple(ranks),
        call=CallRef.of(wait),
        certainty=exact_if(is_alive and not wait.no_data),
        stalled_s=context.timing.waited_s(wait),
    )


def _exited(
    context: Context,
    ranks: list[int],
    failed: list[int],
    *,
    certainty: Certainty = Certainty.EXACT,
) -> Finding:
    if _is_shared_failure(context, ranks):
        ranks, failed = [], ranks
    wait = context.first_wait_for(ranks)
    is_sure = (
        bool(ranks)
        and not set(ranks) & set(context.incomplete)
        and not any(map(context.exits.crashed_in_collective, ranks))
        and not _may_be_usual(context, ranks, wait)
        and not _may_share_a_failure(context, ranks)
    )
    return Finding(
        VerdictKind.DEAD,
        ExitedRanks(tuple(ranks), wait) if ranks else UnknownFirstExit(tuple(failed)),
        culprits=tuple(ranks),
        call=CallRef.of(wait) if wait is not None else None,
        certainty=certainty if is_sure else Certainty.INFERRED,
        facts=_device_errors(context, ranks),
    )


def _is_shared_failure(context: Context, ranks: list[int]) -> bool:
    """Whether the devices of ranks that share one all failed, and there is no data for a rank: it
    may have been killed before. If ranks share a device through MPS, all of them fail then."""
    exits = context.exits
    failed = [rank for rank in ranks if rank in context.by_rank and exits.device_error(rank)]
    is_shared = any(not set(failed).isdisjoint(exits.on_same_device(rank)) for rank in failed)
    return bool(context.no_data) and is_shared


def _may_be_usual(context: Context, ranks: list[int], wait: Wait | None) -> bool:
    """Whether ranks have finished that others wait for, and one of their group has no data: if it
    has finished too, the ranks that wait may have done too much."""
    no_data = wait is not None and wait.no_data
    return bool(no_data) and all(_has_finished(context, rank) for rank in ranks)


def _may_share_a_failure(context: Context, ranks: list[int]) -> bool:
    """Whether the device of a rank failed that others share, and a rank has no data."""
    exits = context.exits
    return bool(context.no_data) and any(
        exits.device_error(rank) and exits.on_same_device(rank) for rank in ranks
    )


def _device_errors(context: Context, ranks: list[int]) -> dict[str, object]:
    by_rank = {rank: context.exits.device_error(rank) for rank in ranks if rank in context.by_rank}
    errors = {rank: str(error) for rank, error in by_rank.items() if error is not None}
    return {"device_errors": errors} if errors else {}


def _likely_exited(context: Context) -> list[int]:
    """The likely first exit, where all processes are gone and none was observed since a rank lost
    its peer.

    It is the rank that the others wait for, if they had only just begun to wait and all other ranks
    were alive after the failure. If they had waited long, the rank was missing before it exited. A
    rank that waited itself may have exited just as well.
    """
    exits, timing = context.exits, context.timing
    if not exits.were_killed_together or not exits.failed_unseen:
        return []
    ranks = awaited(context.waits)
    wait = context.first_wait_for(ranks)
    if wait is None or len(ranks) > 1 or exits.has_failed(ranks[0]):
        return []
    if is_usual_delay(context, wait) or not exits.is_only_candidate(ranks[0]):
        return []
    is_short = timing.recorded_s(wait) < timing.patience_s(wait.rank, wait.key)
    return ranks if is_short else []


def _timed_out(context: Context, no_data: list[int]) -> Finding:
    """All ranks with data timed out in one collective: a rank without data is missing, or none
    is."""
    call = context.last_call
    if no_data and call is not None:
        wait = Wait(call.rank, call.key, call.number, (), tuple(no_data))
        return Finding(
            VerdictKind.MISSING,
            MissingRanks(tuple(no_data), wait),
            culprits=tuple(no_data),
            call=call,
            certainty=Certainty.INFERRED,
        )
    first = next(rank for rank in context.by_rank if context.exits.timed_out(rank))
    return Finding(
        VerdictKind.TOGETHER, TimedOutTogether(first), call=call, certainty=Certainty.INFERRED
    )


# -- ranks that wait for finished ranks ------------------------------------------------------------


def find_extra_call(context: Context) -> Finding | None:
    """A few ranks wait in a collective that most ranks never issued, because those have finished.

    A rank that issued one collective too many often gets to `destroy_process_group`, and hangs
    there: the group waits for this collective. The ranks that finished did as most ranks did.
    """
    finished = awaited(context.waits)
    wait = context.first_wait_for(finished)
    if wait is None or not all(_has_finished(context, rank) for rank in finished):
        return None
    ranks = tuple(sorted(other.rank for other in waiting_for(context.waits, finished)))
    if len(ranks) >= len(finished):
        return None
    return Finding(
        VerdictKind.MISMATCH,
        ExtraCall(ranks, tuple(finished), wait),
        culprits=ranks,
        call=CallRef.of(wait),
        certainty=exact_if(not wait.no_data),
        stalled_s=context.timing.waited_s(wait),
    )


def _has_finished(context: Context, rank: int) -> bool:
    if rank not in context.by_rank or context.exits.outlived_its_watch(rank):
        return False
    return context.state(rank) is State.FINISHED


# -- exits that leave no rank waiting -------------------------------------------------------------


def find_first_exit(context: Context) -> Finding | None:
    """Ranks exited before the others without an exit record, and nothing else is wrong."""
    ranks = context.exits.exited_first()
    if not ranks:
        return None
    codes = {rank: code for rank in ranks if (code := context.status(rank).exit_code) is not None}
    is_seen = all(map(context.exits.was_seen_to_exit, ranks)) and not context.incomplete
    return Finding(
        VerdictKind.DEAD,
        ExitedBeforeOthers(tuple(ranks)),
        culprits=tuple(ranks),
        certainty=exact_if(is_seen),
        facts={"exit_codes": codes} if codes else {},
    )


def find_unexplained_failure(context: Context) -> Finding | None:
    """Ranks failed because another one exited, and no rank waits: it is unknown which was first."""
    failed = context.exits.failed()
    if not context.timing.is_over or not failed or context.exits.were_killed_together:
        return None
    return Finding(VerdictKind.DEAD, UnknownFirstExit(tuple(failed)), certainty=Certainty.UNKNOWN)
