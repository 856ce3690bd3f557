"""Facts that dumps add to a verdict, and what dumps do not contain."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchwhere.core.rank_text import Ranks
from torchwhere.core.results import Fact


class DumpFact(Fact):
    """A fact from dumps, or about dumps."""

    __slots__ = ()


# -- explanations of a verdict ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DumpsAgree(DumpFact):
    """All dumps agree, and nothing is pending."""

    ranks: int


@dataclass(frozen=True, slots=True)
class JobContinued(DumpFact):
    """The calls in which ranks differ are complete, and all later ones."""


@dataclass(frozen=True, slots=True)
class EarlierMismatch(DumpFact):
    """A mismatch that is over: its call is complete, and the ranks agree after it."""

    ranks: Ranks  # of the smaller side; all of them in a tie
    group: str
    number: int
    differs_in: tuple[str, ...]


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
class UnseenHangs(DumpFact):
    """Some hangs leave nothing pending in the dumps."""


@dataclass(frozen=True, slots=True)
class OnlyActiveCalls(DumpFact):
    """The dumps of these ranks list only calls in flight."""

    ranks: Ranks


@dataclass(frozen=True, slots=True)
class WrappedRings(DumpFact):
    """The rings of this number of ranks have wrapped."""

    ranks: int


@dataclass(frozen=True, slots=True)
class OtherDumps(DumpFact):
    """The folder has this number of other dumps, which are older or have another prefix."""

    count: int


@dataclass(frozen=True, slots=True)
class GroupLost(DumpFact):
    """The rings of these ranks no longer hold calls of a group."""

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


@dataclass(frozen=True, slots=True)
class DumpCaveat(DumpFact):
    """A caveat of dumps in a verdict that also has the caveats of boxes."""

    caveat: str
