"""Facts about a comparison that a person should know: what it left out, and how ranks continue."""

from __future__ import annotations

from dataclasses import dataclass

from torchwhere.core.rank_text import Ranks
from torchwhere.core.results import Fact


@dataclass(frozen=True, slots=True)
class LogsCut(Fact):
    """A log is longer than `lines`: the rest was not compared."""

    lines: int


@dataclass(frozen=True, slots=True)
class MoreDivergences(Fact):
    """`count` divergences are not listed."""

    count: int


@dataclass(frozen=True, slots=True)
class WindowStarts(Fact):
    """The comparison starts at `step`: the rings of `ranks` hold no earlier step completely."""

    step: int
    ranks: Ranks


@dataclass(frozen=True, slots=True)
class NoCommonStep(Fact):
    """No step is complete in all rings."""


@dataclass(frozen=True, slots=True)
class NotEnded(Fact):
    """These ranks wrote no end record: they still run or were killed."""

    ranks: Ranks


@dataclass(frozen=True, slots=True)
class OtherThreads(Fact):
    """Events of threads without a fixed order were left out."""

    events: int


@dataclass(frozen=True, slots=True)
class GraphCounts(Fact):
    """Most ranks compiled `usual` graphs, these ranks another number."""

    usual: int
    by_rank: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class PipelineStages(Fact):
    """Whole pipeline stages differ, as they should; `first_event` is the first such event."""

    stages: tuple[Ranks, ...]
    step: int
    first_event: str
    first_ranks: Ranks


@dataclass(frozen=True, slots=True)
class EventCounts(Fact):
    """The minority and the majority have different numbers of such events in a step."""

    step: int
    kind: str
    group: str
    minority: Ranks
    minority_events: int
    majority: Ranks
    majority_events: int


@dataclass(frozen=True, slots=True)
class DifferingSteps(Fact):
    """The number of steps in which two cohorts differ, of all their common steps."""

    differing: int
    common: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class LogsRejoin(Fact):
    """The logs agree again after these cohorts' extra lines: (number of lines, ranks)."""

    extra_lines: tuple[tuple[int, Ranks], ...]


@dataclass(frozen=True, slots=True)
class LogsStayApart(Fact):
    """The logs do not agree again within the next `lines` lines."""

    lines: int
