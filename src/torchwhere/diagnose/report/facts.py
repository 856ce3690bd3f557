"""Facts of a report that the page shows as sentences.

Each fact is a dataclass; `str()` gives its sentence, which `render/report_text.py` writes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchwhere.core.events import Event
from torchwhere.core.results import Shown

Ranks = tuple[int, ...]


class ReportFact(Shown):
    """A fact of one section."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class EarlierBoxes(ReportFact):
    """The folder has boxes of earlier runs or restarts, which the report leaves out."""

    count: int


@dataclass(frozen=True, slots=True)
class ModulesNote(ReportFact):
    """Whether module times were recorded, and the number of rows that the tree leaves out."""

    has_time: bool
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class CallWindow(ReportFact):
    """The numbers of the shown calls of a group, and the clocks that compare their arrivals."""

    first: int
    last: int
    issued: int
    clocks: str


@dataclass(frozen=True, slots=True)
class IssuedCall(ReportFact):
    """The call that ranks issued; None if their rings have overwritten it."""

    call: Event | None


@dataclass(frozen=True, slots=True)
class ComparedLayouts(ReportFact):
    """The layouts of only some ranks were compared."""

    compared: int
    of: int


@dataclass(frozen=True, slots=True)
class MoreLayouts(ReportFact):
    """Further cohorts have other layouts and are not shown."""

    cohorts: int


@dataclass(frozen=True, slots=True)
class CohortDiffers(ReportFact):
    """A difference of some ranks to the largest cohort."""

    ranks: Ranks
    difference: Shown


@dataclass(frozen=True, slots=True)
class UnusualShard(ReportFact):
    """A shard that differs from its placements."""

    fact: Shown


@dataclass(frozen=True, slots=True)
class DiffersByDesign(ReportFact):
    """A difference that the parallelism implies."""

    fact: Shown


@dataclass(frozen=True, slots=True)
class LayoutsEqual(ReportFact):
    """All ranks have equal layouts."""


@dataclass(frozen=True, slots=True)
class LayoutsChanged(ReportFact):
    """The layouts of these ranks changed after the first step."""

    ranks: Ranks


@dataclass(frozen=True, slots=True)
class NoLayouts(ReportFact):
    """These ranks recorded no layout."""

    ranks: Ranks
