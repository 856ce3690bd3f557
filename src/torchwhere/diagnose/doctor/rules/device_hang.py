"""Rule: a device has not reached a collective that its CPU issued long ago.

The CPUs may all have issued the same calls. The culprit is the rank whose device does not progress
and waits for no other rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchwhere.core.device_place import DevicePlace
from torchwhere.core.grouping import grouped
from torchwhere.core.place import Certainty
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.deadlocks import Blame, blame
from torchwhere.diagnose.doctor.device_stalls import DeviceStalls, StalledDevice, hangs_between
from torchwhere.diagnose.doctor.finding import CallRef, Cause, Finding, exact_if
from torchwhere.diagnose.doctor.rules.missing import MissingRanks
from torchwhere.diagnose.doctor.verdict import VerdictKind
from torchwhere.diagnose.doctor.waits import Wait, cycle


@dataclass(frozen=True, slots=True)
class BlockedDevices(Cause):
    """Devices that do not progress, and the devices that wait for them."""

    blocked: tuple[StalledDevice, ...]
    waiting: tuple[StalledDevice, ...]
    between: DevicePlace | None = None  # the two marks between which the first device hangs


@dataclass(frozen=True, slots=True)
class DevicesBlockedTogether(Cause):
    """All devices are blocked after the same collective, which all have reached."""

    devices: tuple[StalledDevice, ...]


@dataclass(frozen=True, slots=True)
class DeviceDeadlock(Cause):
    """Devices that wait for each other, in groups by the collective that they wait in."""

    cohorts: tuple[tuple[StalledDevice, ...], ...]  # the largest first
    blame: Blame


def find_device_hang(context: Context) -> Finding | None:
    if all(rank_calls.rank_summary.device is None for rank_calls in context.by_rank.values()):
        return None
    stalls = DeviceStalls(context.job_calls, context.timing)
    if not stalls.by_rank:
        return None
    blocked = [device for device in stalls.blocked() if not device.may_wait_for]
    unclear = [
        device._replace(waits_in=device.may_wait_in)
        for device in stalls.blocked()
        if device.may_wait_for
    ]
    waiting = stalls.waiting() + unclear
    if not blocked and unclear:
        return _no_data(unclear, waiting)
    if not blocked:
        return _unable_to_run(context, waiting) or _deadlock(context, stalls)
    if not waiting and len(blocked) == len(context.by_rank) > 1:
        return _together(context, blocked)
    if stalls.may_be_usual({device.rank for device in blocked}):
        return None
    first = max(blocked, key=lambda device: device.lasted_s)
    return Finding(
        VerdictKind.MISSING,
        BlockedDevices(
            tuple(blocked), tuple(waiting), hangs_between(context.by_rank[blocked[0].rank])
        ),
        culprits=tuple(device.rank for device in blocked),
        call=first.next,
        certainty=exact_if(not context.no_data),
        stalled_s=first.lasted_s,
        facts=_facts(blocked, waiting),
        blocked=frozenset(device.rank for device in waiting),
    )


def _no_data(unclear: list[StalledDevice], waiting: list[StalledDevice]) -> Finding:
    """Devices that wait, or may wait, for ranks without data."""
    first = max(unclear, key=lambda device: device.lasted_s)
    ranks = tuple(sorted({rank for device in unclear for rank in device.may_wait_for}))
    call = _waits_in(first)
    wait = Wait(first.rank, call.key, call.number, (), ranks)
    return Finding(
        VerdictKind.MISSING,
        MissingRanks(ranks, wait),
        culprits=ranks,
        call=call,
        certainty=Certainty.INFERRED,
        stalled_s=first.lasted_s,
        facts={"waiting_devices": sorted(device.rank for device in waiting)},
        blocked=frozenset(device.rank for device in waiting),
    )


def _together(context: Context, devices: list[StalledDevice]) -> Finding | None:
    """Devices that are all stalled at the same point.

    None if the job was ended before that had lasted as long as a hang: it may have been a long
    kernel of all ranks.
    """
    if any(device.lasted_s < context.timing.stall_s for device in devices):
        return None
    return Finding(
        VerdictKind.TOGETHER,
        DevicesBlockedTogether(tuple(devices)),
        call=devices[0].reached[0] if devices[0].reached else devices[0].next,
        certainty=Certainty.INFERRED,  # it may be a long kernel, which ends
        stalled_s=min(device.lasted_s for device in devices),
        facts=_facts(devices, []),
        blocked=frozenset(device.rank for device in devices),
    )


def _unable_to_run(context: Context, waiting: list[StalledDevice]) -> Finding | None:
    """Devices that wait for ranks whose processes are stopped, or had no heartbeat."""
    ranks = {rank for device in waiting for rank in device.waits_for}
    ranks -= {device.rank for device in waiting}
    if not ranks or not ranks <= context.timing.unable_to_run:
        return None
    first = max(
        (device for device in waiting if not ranks.isdisjoint(device.waits_for)),
        key=lambda device: device.lasted_s,
    )
    culprits = tuple(sorted(ranks))
    return Finding(
        VerdictKind.MISSING,
        MissingRanks(culprits, _wait(first)),
        culprits=culprits,
        call=_waits_in(first),
        certainty=exact_if(not context.no_data),
        stalled_s=first.lasted_s,
        facts={"waiting_devices": [device.rank for device in waiting]},
        blocked=frozenset(device.rank for device in waiting),
    )


def _deadlock(context: Context, stalls: DeviceStalls) -> Finding | None:
    """Devices that wait for each other: groups were used in different orders.

    None if one of them waits for a rank whose device is not stalled: that rank is late on the CPU.
    """
    waiting = stalls.waiting()
    ranks = {device.rank for device in waiting}
    if not all(ranks.issuperset(device.waits_for) for device in waiting):
        return None
    cohorts = grouped((_waits_in(device)[:2], device) for device in waiting)
    ordered = sorted(cohorts.values(), key=len, reverse=True)
    if len(ordered) < 2:
        return None
    blamed = _blame(context, stalls)
    culprits = blamed.culprits or tuple(sorted(ranks))
    return Finding(
        VerdictKind.DEADLOCK,
        DeviceDeadlock(tuple(map(tuple, ordered)), blamed),
        culprits=culprits,
        call=_waits_in(stalls.by_rank[culprits[0]]),
        certainty=Certainty.INFERRED if context.no_data else blamed.certainty,
        stalled_s=min(device.lasted_s for device in waiting),
        facts=_facts([], waiting),
        blocked=frozenset(ranks),
    )


def _blame(context: Context, stalls: DeviceStalls) -> Blame:
    """The ranks that deviated from their call pattern before the devices came to wait."""
    waits = {device.rank: _wait(device) for device in stalls.waiting()}
    circle = cycle(waits)
    if not circle:
        return Blame()
    return blame(stalls.reached_calls(), circle, waits, unread=context.incomplete)


def _wait(device: StalledDevice) -> Wait:
    call = _waits_in(device)
    return Wait(device.rank, call.key, call.number, device.waits_for, ())


def _waits_in(device: StalledDevice) -> CallRef:
    """The call that a waiting device waits in."""
    assert device.waits_in is not None
    return device.waits_in


def _facts(blocked: list[StalledDevice], waiting: list[StalledDevice]) -> dict[str, object]:
    return {
        "on_device": True,
        "blocked_devices": [device.rank for device in blocked],
        "waiting_devices": [device.rank for device in waiting],
    }
