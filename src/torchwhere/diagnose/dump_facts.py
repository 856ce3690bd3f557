"""Facts that dumps add to a verdict, and what dumps do not contain.

Each fact is a dataclass; `str()` gives its sentence, which `render/flight_recorder_text.py` writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchwhere.core.results import Shown

Ranks = tuple[int, ...]


class DumpFact(Shown):
    """A fact from dumps, or about dumps."""

    __slots__ = ()


# -- explanations of a verdict ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DumpsAgree(DumpFact):
    """All dumps agree, and nothing is pending."""

    ranks: int


@dataclass(frozen=True, slots=True)
class HeldInCall(DumpFact):
    """Ranks are still in a call that all ranks have issued, while others went on."""

    ranks: Ranks
    number: int
    group: str
    went_on: Ranks


@dataclass(frozen=True, slots=True)
class UnrecordedArguments(DumpFact):
    """Dumps lack the arguments that could explain why such a call hangs."""


@dataclass(frozen=True, slots=True)
class AlsoHeld(DumpFact):
    """These ranks are missing too, but are still in an earlier call that all ranks have issued."""

    ranks: Ranks


@dataclass(frozen=True, slots=True)
class CompletedCalls(DumpFact):
    """The last completed call of a group, with the ranks that completed it; -1: none."""

    group: str
    by_number: tuple[tuple[int, Ranks], ...]


@dataclass(frozen=True, slots=True)
class DeviceStates(DumpFact):
    """The state of a call on the device of each rank."""

    group: str
    number: int
    by_state: tuple[tuple[str, Ranks], ...]


@dataclass(frozen=True, slots=True)
class DevicesBehind(DumpFact):
    """The devices of these ranks have not reached the call that others have started."""

    ranks: Ranks


@dataclass(frozen=True, slots=True)
class AllDevicesInCall(DumpFact):
    """All devices have started the call."""


# -- missing data ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GlooLimits(DumpFact):
    """Some dumps are of gloo, whose recorder leaves out a lot."""


@dataclass(frozen=True, slots=True)
class NoStacks(DumpFact):
    """No dump has stacks."""


@dataclass(frozen=True, slots=True)
class OnlyIssuedCalls(DumpFact):
    """Dumps hold issued calls and no places."""


@dataclass(frozen=True, slots=True)
class WrappedRings(DumpFact):
    """The rings of so many ranks have wrapped."""

    ranks: int


@dataclass(frozen=True, slots=True)
class OtherDumps(DumpFact):
    """The folder has so many other dumps, older ones or with another prefix."""

    count: int


@dataclass(frozen=True, slots=True)
class GroupLost(DumpFact):
    """The rings of these ranks hold nothing of a group any more."""

    ranks: Ranks
    group: str
    number: int


@dataclass(frozen=True, slots=True)
class MessagesLost(DumpFact):
    """The rings of these ranks have lost their first messages."""

    ranks: Ranks


@dataclass(frozen=True, slots=True)
class TooManyDumps(DumpFact):
    """More dumps were found than are read without being asked."""

    count: int
    folder: Path
