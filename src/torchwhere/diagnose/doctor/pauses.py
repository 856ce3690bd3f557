"""Recognizes the pauses of a healthy job: ranks do work that takes long, and others wait for them.

Takes the ranks that others wait for. Their stacks show whether they save, load, compile, evaluate
or start; the box shows whether a rank still enters modules. `core/stall.py` has the policy: how
long a pause may last. Until then, a rank that hangs inside such work looks like a pause.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torchwhere.core.stall import wait_limit_s
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.stacks import (
    Activity,
    holding,
    is_evaluating,
    is_importing,
    long_work,
)
from torchwhere.diagnose.doctor.waits import Wait

MOST_ASKED = 16  # ranks whose stacks the doctor gets; they represent all
_MOVED_S = 5.0  # a rank that entered or left a module in this time is at work
_MOVED_SHARE = 0.5  # of `stall_s` and of the wait, if one of them is less


class PauseKind(StrEnum):
    """What the awaited ranks do."""

    SAVING = "saving"
    LOADING = "loading a checkpoint"
    COMPILING = "compiling"
    EVALUATING = "evaluating"
    RUNNING_MODULES = "running modules"
    STARTING = "starting"


_WORK = {
    Activity.SAVING: PauseKind.SAVING,
    Activity.LOADING_CHECKPOINT: PauseKind.LOADING,
    Activity.COMPILATION: PauseKind.COMPILING,
}
# What a rank does before the first collective of a job while its process sleeps.
_STARTS = (Activity.BUILD, Activity.SOCKET)
_WORKS = ("R", "D")  # states of a process that computes, or waits for a disk


@dataclass(frozen=True, slots=True)
class Pause:
    """A wait for ranks that may continue by themselves."""

    ranks: tuple[int, ...]  # the awaited ranks
    kinds: tuple[PauseKind | None, ...]  # what the first of them do; None: nothing shows that
    earlier_s: float  # the longest earlier wait at the same call site; 0 if there was none
    limit_s: float  # after this time the wait is called a hang

    @property
    def kind(self) -> PauseKind | None:
        """What the ranks do; None if the work of one of them does not explain the wait."""
        return self.kinds[0] if self.kinds and None not in self.kinds else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "activity": str(self.kind) if self.kind is not None else None,
            "ranks": list(self.ranks),
            "longest_earlier_s": round(self.earlier_s, 3),
            "limit_s": round(self.limit_s, 3),
        }


def pause_of(context: Context, ranks: Collection[int], wait: Wait | None = None) -> Pause:
    """How long others may wait for these ranks, and what the ranks do.

    Args:
        context: The job. It must be running.
        ranks: The ranks that others wait for.
        wait: The wait, if it is in a collective.
    """
    asked = list(ranks)[:MOST_ASKED]
    kinds = tuple(_kind(context, rank, wait) for rank in asked)
    is_pause = bool(kinds) and None not in kinds
    earlier_s = context.timing.paused_s(wait) if wait is not None else 0.0
    limit_s = wait_limit_s(context.timing.stall_s, earlier_s=earlier_s, is_pause=is_pause)
    return Pause(tuple(ranks), kinds, earlier_s, limit_s)


def _kind(context: Context, rank: int, wait: Wait | None) -> PauseKind | None:
    """What a rank does that takes long in a healthy job too; None if nothing shows that."""
    rank_calls = context.by_rank.get(rank)
    status = context.status(rank)
    if rank_calls is None or status.is_stopped or not status.alive:
        return None
    work = long_work(status.stack)
    if work is None and rank_calls.is_compiling:
        work = Activity.COMPILATION
    if work is not None:
        return _WORK[work]
    if is_evaluating(status.stack):
        return PauseKind.EVALUATING
    if wait is not None and _is_moving(context, rank, wait):
        return PauseKind.RUNNING_MODULES
    return PauseKind.STARTING if _is_starting(context, rank) else None


def _is_moving(context: Context, rank: int, wait: Wait) -> bool:
    """Whether a rank has just entered or left a module: it is at work while others wait. Before the
    wait began, all ranks were at work."""
    timing = context.timing
    since_s = timing.since_s(context.by_rank[rank].rank_summary.moved_ns)
    shorter_s = min(timing.stall_s, timing.waited_s(wait) or 0.0)
    return since_s is not None and since_s < min(_MOVED_S, _MOVED_SHARE * shorter_s)


def _is_starting(context: Context, rank: int) -> bool:
    """Whether a rank prepares for training, in a job that has completed no collective and no step.

    A rank that only sleeps, or that waits for a lock, does not.
    """
    if not context.has_not_begun:
        return False
    status = context.status(rank)
    if status.state in _WORKS or is_importing(status.stack):
        return True
    hold = holding(context.by_rank[rank], status)
    return hold is not None and hold.activity in _STARTS
