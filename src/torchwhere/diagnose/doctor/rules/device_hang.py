"""Rule: a device has not reached a collective that its CPU issued long ago.

The CPUs may all have issued the same calls. The culprit is the rank whose device does not progress
and waits for no other rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchwhere.core.place import Certainty
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.device_stalls import DeviceStalls, StalledDevice
from torchwhere.diagnose.doctor.finding import Cause, Finding
from torchwhere.diagnose.doctor.verdict import VerdictKind


@dataclass(frozen=True, slots=True)
class BlockedDevices(Cause):
    """Devices that do not progress, and the devices that wait for them."""

    blocked: tuple[StalledDevice, ...]
    waiting: tuple[StalledDevice, ...]


@dataclass(frozen=True, slots=True)
class DevicesBlockedTogether(Cause):
    """All devices are blocked after the same collective, which all have reached."""

    devices: tuple[StalledDevice, ...]


@dataclass(frozen=True, slots=True)
class DeviceDeadlock(Cause):
    """Devices that wait for each other, in groups by the collective that they wait in."""

    cohorts: tuple[tuple[StalledDevice, ...], ...]  # the largest first


def find_device_hang(context: Context) -> Finding | None:
    stalls = DeviceStalls(context.job_calls, context.timing)
    if not stalls.by_rank:
        return None
    blocked, waiting = stalls.blocked(), stalls.waiting()
    if not blocked:
        return _deadlock(context, waiting)
    if not waiting and len(blocked) == len(context.job_calls.by_rank) > 1:
        return _together(context, blocked)
    first = min(blocked, key=lambda device: -device.lasted_s)
    return Finding(
        VerdictKind.MISSING,
        BlockedDevices(tuple(blocked), tuple(waiting)),
        culprits=tuple(device.rank for device in blocked),
        call=first.next,
        certainty=Certainty.INFERRED if context.no_data else Certainty.EXACT,
        stalled_s=first.lasted_s,
        facts=_facts(blocked, waiting),
        blocked=frozenset(device.rank for device in waiting),
    )


def _together(context: Context, devices: list[StalledDevice]) -> Finding:
    return Finding(
        VerdictKind.TOGETHER,
        DevicesBlockedTogether(tuple(devices)),
        call=devices[0].reached[0] if devices[0].reached else devices[0].next,
        certainty=Certainty.INFERRED if context.no_data else Certainty.EXACT,
        stalled_s=min(device.lasted_s for device in devices),
        facts=_facts(devices, []),
        blocked=frozenset(device.rank for device in devices),
    )


def _deadlock(context: Context, waiting: list[StalledDevice]) -> Finding | None:
    """Devices that wait for each other: groups were used in different orders.

    None if one of them waits for a rank whose device is not stalled: that rank is late on the CPU.
    """
    ranks = {device.rank for device in waiting}
    if not all(ranks.issuperset(device.waits_for) for device in waiting):
        return None
    cohorts: dict[object, list[StalledDevice]] = {}
    for device in waiting:
        cohorts.setdefault(device.reached[0][:2], []).append(device)
    ordered = sorted(cohorts.values(), key=len, reverse=True)
    if len(ordered) < 2:
        return None
    is_clear = len(ordered[0]) > len(ordered[1])
    others = [device for cohort in ordered[1:] for device in cohort] if is_clear else waiting
    return Finding(
        VerdictKind.DEADLOCK,
        DeviceDeadlock(tuple(map(tuple, ordered))),
        culprits=tuple(sorted(device.rank for device in others)),
        call=others[0].reached[0],
        certainty=Certainty.EXACT if is_clear and not context.no_data else Certainty.INFERRED,
        stalled_s=min(device.lasted_s for device in waiting),
        facts=_facts([], waiting),
        blocked=frozenset(ranks),
    )


def _facts(blocked: list[StalledDevice], waiting: list[StalledDevice]) -> dict[str, object]:
    return {
        "on_device": True,
        "blocked_devices": [device.rank for device in blocked],
        "waiting_devices": [device.rank for device in waiting],
    }
