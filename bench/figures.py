"""Turns times into figures: what each contender adds in each round, and the targets of
torchwhere."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.contenders import (
    MOD_TRACKER,
    MODULE_EVENTS,
    PYTHON,
    PYTHON_EVENTS,
    TORCHWHERE,
    UNWATCHED,
)
from bench.rounds import Times
from bench.workloads import Workload


@dataclass(frozen=True, slots=True)
class Figure:
    """One contender on one workload. `added` has one number per round, in the unit of the
    column."""

    contender: str
    added: tuple[float, ...] = ()
    times_torchwhere: float | None = None  # added time, as a multiple of what torchwhere adds
    error: str | None = None

    @property
    def median(self) -> float | None:
        return statistics.median(self.added) if self.added and self.error is None else None

    @property
    def spread(self) -> float:
        """The median distance from the median."""
        middle = statistics.median(self.added)
        return statistics.median(abs(value - middle) for value in self.added)

    def to_dict(self) -> dict[str, object]:
        return {
            "contender": self.contender,
            "median": self.median,
            "spread": self.spread if self.added else None,
            "least": min(self.added, default=None),
            "most": max(self.added, default=None),
            "times_torchwhere": self.times_torchwhere,
            "error": self.error,
            "rounds": list(self.added),
        }


@dataclass(frozen=True, slots=True)
class Column:
    """All figures of one workload."""

    key: str
    title: str
    unit: str
    unwatched_ms: float  # of a step, or of an interpreter, without a watch
    figures: tuple[Figure, ...]
    rounds: int
    remark: str = ""

    def of(self, contender: str) -> Figure | None:
        return next((figure for figure in self.figures if figure.contender == contender), None)

    def to_dict(self) -> dict[str, object]:
        return {
            "workload": self.key,
            "title": self.title,
            "unit": self.unit,
            "unwatched_ms": self.unwatched_ms,
            "rounds": self.rounds,
            "remark": self.remark,
            "figures": [figure.to_dict() for figure in self.figures],
        }


def column(workload: Workload, times: Sequence[Times]) -> Column:
    """Compare each contender with the unwatched time of the same round."""
    by_name = {timed.contender: timed for timed in times}
    plain = by_name[UNWATCHED].seconds
    own = added(by_name[TORCHWHERE].seconds, plain, workload.units)
    return Column(
        key=workload.key,
        title=workload.title,
        unit=workload.unit,
        unwatched_ms=statistics.median(plain) * 1e3,
        figures=tuple(
            _figure(timed, added(timed.seconds, plain, workload.units), own)
            for timed in times
            if timed.contender != UNWATCHED
        ),
        rounds=len(plain),
    )


def _figure(timed: Times, values: tuple[float, ...], own: tuple[float, ...]) -> Figure:
    if timed.error is not None:
        return Figure(timed.contender, error=timed.error)
    return Figure(timed.contender, values, _ratio(values, own))


def added(seconds: Sequence[float], plain: Sequence[float], units: int | None) -> tuple[float, ...]:
    """Return what was added in each round: microseconds per unit, or percent of the step."""
    pairs = list(zip(seconds, plain, strict=False))  # a contender that failed has fewer rounds
    if units is None:
        return tuple((watched / alone - 1) * 100 for watched, alone in pairs)
    return tuple((watched - alone) / units * 1e6 for watched, alone in pairs)


def _ratio(added: Sequence[float], by_torchwhere: Sequence[float]) -> float | None:
    """Return a lower bound of the ratio of the medians: if the cost of torchwhere is below the
    noise, the noise stands for it."""
    own = Figure(TORCHWHERE, tuple(by_torchwhere))
    if not added or own.median is None or own.median <= 0:
        return None
    return statistics.median(added) / max(own.median, own.spread)


@dataclass(frozen=True, slots=True)
class Target:
    """A target that the table shows beside the measured figure. Nothing fails if it is missed."""

    workload: str
    text: str
    contender: str = TORCHWHERE
    as_ratio: bool = False

    def measured(self, columns: Sequence[Column]) -> float | None:
        figure = next((c.of(self.contender) for c in columns if c.key == self.workload), None)
        if figure is None:
            return None
        return figure.times_torchwhere if self.as_ratio else figure.median


TARGETS = (
    Target("modules", "at most 3 us a module call"),
    Target("modules", "the same, Python only", PYTHON),
    Target("modules", "at most 5 us a module call with module events", MODULE_EVENTS),
    Target("modules", "the same, Python only", PYTHON_EVENTS),
    Target("modules", "at least 25 times less than ModTracker", MOD_TRACKER, as_ratio=True),
    Target("collectives", "at most 20 us a collective"),
    Target("buckets", "at most 20 us a collective (DDP, in backward)"),
    Target("buckets", "the same, Python only", PYTHON),
    Target("nccl", "at most 20 us a collective (NCCL)"),
    Target("ddp_batch1", "at most 2 % of a CPU-bound step (DDP)"),
    Target("ddp_batch1", "the same, Python only", PYTHON),
    Target("fsdp2_batch1", "at most 2 % of a CPU-bound step (FSDP2)"),
    Target("fsdp2_batch1", "the same, Python only", PYTHON),
    Target("ddp_batch8", "at most 1 % of a GPU-bound step (DDP)"),
    Target("fsdp2_batch8", "at most 1 % of a GPU-bound step (FSDP2)"),
    Target("import", "at most 30 ms to import"),
)
