"""Facts of a report that the page shows as sentences."""

from __future__ import annotations

from dataclasses import dataclass

from torchwhere.core.events import Event
from torchwhere.core.rank_text import Ranks
from torchwhere.core.results import Fact


@dataclass(frozen=True, slots=True)
class EarlierBoxes(Fact):
    """The folder has boxes of earlier runs or restarts, which the report leaves out."""

    count: int


@dataclass(frozen=True, slots=True)
class NoDeviceTimes(Fact):
    """The run has too many ranks: the report leaves out the times of their devices."""

    ranks: int
    most: int


@dataclass(frozen=True, slots=True)
class NoStepParts(Fact):
    """The run has too many ranks: the report leaves out the parts of their steps."""

    ranks: int
    most: int


@dataclass(frozen=True, slots=True)
class ModulesNote(Fact):
    """Whether module times were recorded, and the number of rows that the tree leaves out."""

    has_time: bool
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class ShownCalls(Fact):
    """The numbers of the shown calls of a group, and the clocks that compare their arrivals."""

    first: int
    last: int
    issued: int
    clocks: str
    on_device: bool = False  # arrivals are those of the devices


@dataclass(frozen=True, slots=True)
class DifferingCall(Fact):
    """The call that ranks issued; None if their rings have overwritten it."""

    call: Event | None


@dataclass(frozen=True, slots=True)
class ComparedLayouts(Fact):
    """The layouts of only some ranks were compared."""

    compared: int
    of: int


@dataclass(frozen=True, slots=True)
class MoreLayouts(Fact):
    """Further cohorts have other layouts and are not shown."""

    cohorts: int


@dataclass(frozen=True, slots=True)
class CohortDiffers(Fact):
    """A difference of some ranks to the largest cohort."""

    ranks: Ranks
    difference: Fact


@dataclass(frozen=True, slots=True)
class UnusualShard(Fact):
    """A shard that differs from its placements."""

    fact: Fact


@dataclass(frozen=True, slots=True)
class DiffersByDesign(Fact):
    """A difference that the parallelism implies."""

    fact: Fact


@dataclass(frozen=True, slots=True)
class LayoutsEqual(Fact):
    """All ranks have equal layouts."""
