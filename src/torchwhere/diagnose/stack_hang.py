"""Finds what is wrong with a job that torchwhere does not watch, from the stacks of its ranks.

Takes what was seen of each rank for some seconds. Stacks show in which function a rank is, not
which call of a group it is, nor the members of a group. So a rank is named only if it is clear: it
is stopped, or it is not in the collective in which the others wait. If all ranks run, the finding
says only that no hang was seen, not that the job is healthy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torchwhere.core.grouping import grouped
from torchwhere.core.place import Certainty
from torchwhere.core.rank_text import Ranks
from torchwhere.diagnose.doctor.finding import Cause, Finding
from torchwhere.diagnose.doctor.verdict import VerdictKind
from torchwhere.diagnose.stack_position import (
    WAITS_FOR_ONE,
    PositionKind,
    StackPosition,
    position_of,
)
from torchwhere.processes.observation import RankObservation


@dataclass(frozen=True, slots=True)
class ObservedCall:
    """Ranks that wait in the same collective, at the same line."""

    op: str
    ranks: Ranks


@dataclass(frozen=True)
class ObservedJob:
    """All ranks of a job that were seen."""

    ranks: Mapping[int, RankObservation]

    @cached_property
    def positions(self) -> dict[int, StackPosition]:
        return {rank: position_of(observation) for rank, observation in sorted(self.ranks.items())}

    @cached_property
    def seconds(self) -> float:
        """How long all ranks were looked at."""
        return min((observation.seconds for observation in self.ranks.values()), default=0.0)

    @cached_property
    def world_size(self) -> int | None:
        """The number of ranks of the job; None if no rank has it in its environment."""
        sizes = [
            observation.world_size
            for observation in self.ranks.values()
            if observation.world_size is not None
        ]
        return max([*sizes, 1 + max(self.ranks)]) if sizes else None

    @cached_property
    def unseen(self) -> Ranks:
        """Ranks of the job without an observation."""
        return tuple(rank for rank in range(self.world_size or 0) if rank not in self.ranks)

    @property
    def on_other_hosts(self) -> Ranks:
        """Ranks without an observation that may run on other hosts."""
        is_one_host = all(
            observation.local_world_size == self.world_size for observation in self.ranks.values()
        )
        return () if is_one_host else self.unseen

    @property
    def is_complete(self) -> bool:
        """Whether all ranks of the job were seen."""
        return self.world_size is not None and not self.unseen

    def of_kind(self, *kinds: PositionKind) -> Ranks:
        return tuple(rank for rank, position in self.positions.items() if position.kind in kinds)

    @cached_property
    def waiting(self) -> Ranks:
        """Ranks that waited in the same collective all the time."""
        return tuple(rank for rank, position in self.positions.items() if position.is_waiting)

    @cached_property
    def on_device(self) -> Ranks:
        """Ranks that waited for their device all the time."""
        devices = self.of_kind(PositionKind.DEVICE)
        return tuple(rank for rank in devices if self.positions[rank].is_still)

    @cached_property
    def elsewhere(self) -> Ranks:
        return self.of_kind(PositionKind.ELSEWHERE)

    @cached_property
    def unclear(self) -> Ranks:
        """Ranks that may be in a collective or not."""
        kinds = (PositionKind.UNCLEAR, PositionKind.UNKNOWN, PositionKind.DEVICE)
        return self.of_kind(*kinds) if self.waiting else self.of_kind(*kinds[:2])

    @cached_property
    def calls(self) -> tuple[ObservedCall, ...]:
        """The collectives in which ranks wait, the largest first."""
        positions = self.positions
        by_call = grouped(
            ((positions[rank].op, positions[rank].line), rank) for rank in self.waiting
        )
        calls = [ObservedCall(op or "", tuple(ranks)) for (op, _), ranks in by_call.items()]
        return tuple(sorted(calls, key=lambda call: (-len(call.ranks), call.ranks)))


# -- causes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AwaitedRanks(Cause):
    """Ranks that are not in the collective in which others wait, or that are stopped."""

    job: ObservedJob
    ranks: Ranks


@dataclass(frozen=True, slots=True)
class OpenWait(Cause):
    """Ranks wait for other ranks or for their devices, and it is unknown for which rank."""

    job: ObservedJob


@dataclass(frozen=True, slots=True)
class AllWait(Cause):
    """All ranks of the job wait for other ranks."""

    job: ObservedJob


@dataclass(frozen=True, slots=True)
class AllBlocked(Cause):
    """No rank ran, and none waits in a collective."""

    job: ObservedJob


@dataclass(frozen=True, slots=True)
class GoneRanks(Cause):
    """Ranks exited while they were looked at."""

    job: ObservedJob
    ranks: Ranks
    are_awaited: bool  # others are left, and wait


@dataclass(frozen=True, slots=True)
class NoHangSeen(Cause):
    """All ranks that were seen ran."""

    job: ObservedJob


@dataclass(frozen=True, slots=True)
class PartlyBlocked(Cause):
    """Some ranks ran, some did not or have no stack, and none waits in a collective."""

    job: ObservedJob
    blocked: Ranks
    unknown: Ranks


# -- search ----------------------------------------------------------------------------------------


def find_stack_hang(job: ObservedJob) -> Finding:
    """Find what the stacks show."""
    gone = job.of_kind(PositionKind.GONE)
    if gone:
        return _of_gone(job, gone)
    stopped = job.of_kind(PositionKind.STOPPED)
    if stopped:
        return _awaited(job, stopped)
    if job.waiting:
        return _of_waiting(job)
    if job.on_device:
        return _of_devices(job)
    return _of_no_wait(job)


def _of_gone(job: ObservedJob, gone: Ranks) -> Finding:
    """Ranks exited. They are named only if others wait: else the job may have finished, or a
    launcher may have ended all ranks because of one of them."""
    are_awaited = bool(job.waiting or job.on_device)
    return Finding(
        VerdictKind.DEAD,
        GoneRanks(job, gone, are_awaited),
        culprits=gone if are_awaited else (),
        certainty=Certainty.INFERRED if are_awaited else Certainty.UNKNOWN,
    )


def _of_waiting(job: ObservedJob) -> Finding:
    """Ranks wait in a collective: for ranks elsewhere, or for ranks of which little is known."""
    is_moving = len(job.of_kind(PositionKind.COLLECTIVE)) > len(job.waiting)
    if job.elsewhere:
        is_clear = _is_clear(job) and not is_moving
        return _awaited(job, job.elsewhere) if is_clear else _open(job)
    if job.unclear or is_moving or not job.is_complete:
        return _open(job)
    return Finding(
        VerdictKind.TOGETHER if len(job.calls) == 1 else VerdictKind.DEADLOCK,
        AllWait(job),
        certainty=Certainty.INFERRED,
        stalled_s=job.seconds,
        blocked=frozenset(job.waiting),
    )


def _is_clear(job: ObservedJob) -> bool:
    """Whether the ranks elsewhere are the ones that the others wait for.

    If all waiting ranks are in one collective, it lacks every rank that is elsewhere. If they are
    in several, or in messages, only a single rank, or ranks at one place, can be the reason. A rank
    that saves or compiles may only be slow. A rank that works may not be a member of the group: it
    is named only if it is the only rank that is not in the one collective.
    """
    positions = [job.positions[rank] for rank in job.elsewhere]
    if any(position.is_long_work for position in positions):
        return False
    is_one_collective = len(job.calls) == 1 and job.calls[0].op not in WAITS_FOR_ONE
    if any(position.is_working for position in positions):
        return is_one_collective and len(positions) == 1
    if is_one_collective:
        return True
    places = {(position.line, position.library_line) for position in positions}
    return len(positions) == 1 or (len(places) == 1 and not job.unclear and job.is_complete)


def _of_devices(job: ObservedJob) -> Finding:
    """Ranks wait for their devices: what is queued there, only the flight recorder shows."""
    elsewhere = job.elsewhere
    is_single = len(elsewhere) == 1 and job.positions[elsewhere[0]].is_still
    others = len(job.on_device) + len(elsewhere) == len(job.ranks)
    return _awaited(job, elsewhere) if is_single and others else _open(job)


def _of_no_wait(job: ObservedJob) -> Finding:
    still = tuple(rank for rank, position in job.positions.items() if position.is_still)
    unknown = job.of_kind(PositionKind.UNKNOWN)
    if still and len(still) == len(job.ranks):
        return Finding(
            VerdictKind.TOGETHER,
            AllBlocked(job),
            certainty=Certainty.INFERRED,
            stalled_s=job.seconds,
        )
    if still or unknown:
        return Finding(
            VerdictKind.HEALTHY, PartlyBlocked(job, still, unknown), certainty=Certainty.UNKNOWN
        )
    return Finding(
        VerdictKind.HEALTHY,
        NoHangSeen(job),
        certainty=Certainty.INFERRED,
        facts={"no_hang_seen": True},
    )


def _awaited(job: ObservedJob, ranks: Ranks) -> Finding:
    return Finding(
        VerdictKind.MISSING,
        AwaitedRanks(job, ranks),
        culprits=ranks,
        certainty=Certainty.INFERRED,
        stalled_s=job.seconds,
        blocked=frozenset((*job.waiting, *job.on_device)) - set(ranks),
    )


def _open(job: ObservedJob) -> Finding:
    return Finding(
        VerdictKind.MISSING,
        OpenWait(job),
        certainty=Certainty.UNKNOWN,
        stalled_s=job.seconds,
        blocked=frozenset((*job.waiting, *job.on_device)),
    )
