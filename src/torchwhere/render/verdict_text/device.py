"""Sentences on devices that do not progress."""

from __future__ import annotations

from torchwhere.core.device_place import CallState, DevicePlace
from torchwhere.core.grouping import grouped
from torchwhere.core.rank_text import ranks_phrase
from torchwhere.diagnose.doctor.context import Context
from torchwhere.diagnose.doctor.device_stalls import StalledDevice
from torchwhere.diagnose.doctor.rules.device_hang import (
    BlockedDevices,
    DeviceDeadlock,
    DevicesBlockedTogether,
)
from torchwhere.render.verdict_text.deadlock import blame_text
from torchwhere.render.verdict_text.phrases import (
    agree,
    more_text,
    numbered_call_text,
    place_text,
)

_MOST_RANKS = 4  # with their own lines
_MOST_CALLS = 4


def blocked_devices_text(cause: BlockedDevices, context: Context) -> list[str]:
    ranks = [device.rank for device in cause.blocked]
    first = cause.blocked[0]
    noun = agree(ranks, "device", "devices")
    has = agree(ranks, "has", "have")
    subject = f"The {noun} of {ranks_phrase(ranks)} {has} not"
    if first.next is None:
        lines = [f"{subject} progressed for {first.lasted_s:.0f} s."]
    else:
        call = numbered_call_text(context, first.next)
        cpu = agree(ranks, "the CPU", "their CPUs")
        lines = [f"{subject} reached {call}, which {cpu} issued {first.lasted_s:.0f} s ago."]
    return lines + _waiting_text(context, cause.waiting) + _cause_text(context, cause)


def blocked_together_text(cause: DevicesBlockedTogether, context: Context) -> list[str]:
    devices = cause.devices
    calls = {device.reached[:1] for device in devices}
    ranks = ranks_phrase([device.rank for device in devices])
    lines = [f"The devices of {ranks} do not progress. All have reached the same collectives."]
    if len(calls) == 1 and devices[0].reached:
        lines.append(f"  last reached: {numbered_call_text(context, devices[0].reached[0])}")
    return [
        *lines,
        (
            "Likely cause: the network between the devices, or the same kernel on all of them. Look"
            " at: the NCCL log, the network links, and kernels issued after that collective. A long"
            " kernel on all devices looks the same until it ends."
        ),
    ]


def device_deadlock_text(cause: DeviceDeadlock, context: Context) -> list[str]:
    lines = ["The devices wait for each other, in different collectives."]
    for cohort in cause.cohorts[:_MOST_RANKS]:
        ranks = ranks_phrase([device.rank for device in cohort])
        call = cohort[0].waits_in or cohort[0].reached[0]
        lines.append(f"  waiting: {ranks}, in {numbered_call_text(context, call)}")
    lines.append(
        "The collectives of these groups run on one stream: all ranks must issue the same ones, in"
        " the same order."
    )
    return lines + blame_text(context, cause.blame, ranks=sum(map(len, cause.cohorts)))


def _waiting_text(context: Context, waiting: tuple[StalledDevice, ...]) -> list[str]:
    """The devices that wait, one line for each of the first few collectives that they wait in."""
    cohorts = grouped(
        (device.waits_in[:2], device) for device in waiting if device.waits_in is not None
    )
    lines = [
        f"  waiting on the device: {ranks_phrase([device.rank for device in cohort])}, in"
        f" {numbered_call_text(context, cohort[0].waits_in)}"
        for cohort in sorted(cohorts.values(), key=len, reverse=True)
        if cohort[0].waits_in is not None
    ]
    return lines[:_MOST_CALLS] + more_text(lines, _MOST_CALLS)


def _cause_text(context: Context, cause: BlockedDevices) -> list[str]:
    device, ranks = cause.blocked[0], [device.rank for device in cause.blocked]
    on = agree(ranks, "that device", "each of these devices")
    likely = f"Likely cause: a kernel or a copy on {on} does not end"
    hosts = agree(ranks, "host", "hosts")
    look_at = (
        f"Look at: nvidia-smi and the kernel log (Xid) on the {hosts} of {ranks_phrase(ranks)}"
    )
    points = _points_text(cause.between) if cause.between is not None else []
    if points:
        cpu = agree(ranks, "the CPU", f"the CPU of rank {device.rank}")
        kernels = f"the kernels that {cpu} issued between these two points:"
        return [f"{likely}. {look_at}, and {kernels}", *points]
    issued = ""
    if device.next is not None:
        call = context.issued(device.next)
        issued = f", issued before that call ({place_text(call.place)})" if call is not None else ""
    elif device.place is not None:
        issued = f", issued after {place_text(device.place)}"
    return [f"{likely}{issued}. {look_at}, and the kernels of that code."]


def _points_text(device: DevicePlace) -> list[str]:
    """The last point that a device has reached, and the next one; empty if it is inside a
    collective, or if the two read the same."""
    call, reached, following = device.next_collective, device.reached_text(), device.next_text()
    is_inside = call is not None and call.state is not CallState.ISSUED
    if device.place is None or following in (None, reached) or is_inside:
        return []
    return [f"  reached: {reached}", f"  not reached: {following}"]
