"""The place of a device: the last point that the accelerator of a rank has reached, and its CPU.

On a GPU the CPU issues work and continues, so the two places differ. This file does not import
torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torchwhere.core.place import RANK_FIELDS, Place
from torchwhere.core.results import Shown
from torchwhere.core.sanitize import plural, printable


class CallState(StrEnum):
    """How far a device has come with a collective.

    Attributes:
        ISSUED: The CPU has issued it, and the device has not reached it.
        REACHED: The device has reached it. It is not known whether the collective is done.
        RUNNING: The device has reached it, and it is not done: the device waits or transfers data.
        DONE: It is done.
    """

    ISSUED = "issued"
    REACHED = "reached"
    RUNNING = "running"
    DONE = "done"


_PREPOSITIONS = {
    CallState.REACHED: "at",
    CallState.RUNNING: "in",
    CallState.DONE: "after",
}


@dataclass(frozen=True, slots=True)
class DeviceCall:
    """A collective, and how far a device has come with it."""

    op: str
    group: str  # as users know it
    number: int
    state: CallState

    @property
    def short_text(self) -> str:
        """`in all_reduce #23`; without a preposition if the device has not reached it."""
        return f"{_PREPOSITIONS.get(self.state, '')} {self.op} #{self.number}".lstrip()

    def to_dict(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "group": self.group,
            "number": self.number,
            "state": str(self.state),
        }


@dataclass(frozen=True, slots=True, repr=False)
class DevicePlace(Shown):
    """Where the device of a rank is, beside its CPU. `str()` gives both on one line.

    torchwhere marks steps, modules and collectives on the streams of the device. The place of the
    device is the last mark that it has reached.

    Attributes:
        cpu: Where the CPU is.
        place: The last place that the device has reached; None if it is not known.
        collective: The collective that the device has reached there, if it is one: `op`, `group`,
            `number`, and `state` (`reached`, `running` or `done`).
        next: The first place that the device has not reached; None if there is none.
        next_collective: The collective there, if it is one.
        pending: How many marks the device has not reached.
        collectives_behind: How many collectives the CPU has issued and the device has not reached,
            as of the last look at the device.
        t_ns: When the device reached `place`, in ns since 1970; 0 if it is not known.
        looked_ns: When the device was last looked at, in ns since 1970; 0 if it is not known.
        problem: Why nothing is known about the device; None if something is known.
        cpu_waits_in: The function in which the CPU waits for the device, such as `.item()`, if its
            stack shows that. `where(device=True)` never waits, so there it is None.

    Example:
        device = torchwhere.where(device=True)
        print(device.place, device.steps_behind)
        print(device)  # CPU: forward of head, train.py:33, step 7; GPU: forward of layers.1, step 6
    """

    cpu: Place
    place: Place | None = None
    collective: DeviceCall | None = None
    next: Place | None = None
    next_collective: DeviceCall | None = None
    pending: int = 0
    collectives_behind: int = 0
    t_ns: int = 0
    looked_ns: int = 0
    problem: str | None = None
    cpu_waits_in: str | None = None

    @property
    def steps_behind(self) -> int:
        """How many steps the device is behind the CPU."""
        if not self.pending or self.place is None or self.place.step is None:
            return 0
        return max(0, (self.cpu.step or 0) - self.place.step)

    def __repr__(self) -> str:
        return f"<DevicePlace {self}>"

    def __str__(self) -> str:
        return printable(f"CPU: {self.cpu_text()}; {self.device_text()}")

    def cpu_text(self) -> str:
        """Return where the CPU is, without its rank, and in which function it waits."""
        place = _point_text(self.cpu, None)
        return f"waiting in {self.cpu_waits_in}, {place}" if self.cpu_waits_in else place

    def device_text(self) -> str:
        """Return where the device is, and how far it is behind, on one line."""
        if self.problem is not None:
            return f"device progress: not known ({self.problem})"
        behind = self.behind_text()
        return printable(f"GPU: {self.reached_text()}{f' ({behind})' if behind else ''}")

    def reached_text(self) -> str:
        """Return the last place that the device has reached, without its rank."""
        if self.place is None:
            return "at the start: no mark was reached"
        return _point_text(self.place, self.collective)

    def next_text(self) -> str | None:
        """Return the first place that the device has not reached, without its rank."""
        return _point_text(self.next, self.next_collective) if self.next is not None else None

    def behind_text(self) -> str:
        """Return how far the device is behind the CPU; empty if it has reached everything."""
        counts = ((self.steps_behind, "step"), (self.collectives_behind, "collective"))
        amounts = " and ".join(plural(count, noun) for count, noun in counts if count)
        if not amounts:
            return ""
        # what was issued after the last look: the device may have reached it
        return f"{amounts} behind" if self.pending else f"{amounts} issued since it was looked at"

    def to_dict(self) -> dict[str, Any]:
        """Return the place of the device as values for JSON, without that of the CPU."""
        following = None
        if self.next is not None:
            following = _fields(self.next) | {"collective": _call(self.next_collective)}
        return {
            **_fields(self.place),
            "collective": _call(self.collective),
            "next": following,
            "steps_behind": self.steps_behind,
            "collectives_behind": self.collectives_behind,
            "t_ns": self.t_ns or None,
            "problem": self.problem,
            "cpu_waits_in": self.cpu_waits_in,
        }


def _point_text(place: Place, call: DeviceCall | None) -> str:
    """`in all_reduce #23 of group dp, backward of layers.0, train.py:35, step 6`."""
    parts = []
    if call is not None:
        parts.append(f"{call.short_text} of group {call.group}")
    if call is None or place.module is not None or place.pass_ != "outside":
        parts.append(place.activity())
    if place.line is not None:
        parts.append(place.full_line)
    if place.step is not None:
        parts.append(f"step {place.step}")
    return ", ".join(parts)


def _fields(place: Place | None) -> dict[str, Any]:
    values = place.to_dict() if place is not None else {}
    return {key: values.get(key) for key in RANK_FIELDS}


def _call(call: DeviceCall | None) -> dict[str, Any] | None:
    return call.to_dict() if call is not None else None
