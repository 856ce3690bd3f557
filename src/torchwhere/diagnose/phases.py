"""The time that each phase of a step takes, for one rank or many.

Takes the sums stored in a box, or the live sums of this process, and gives `Phases`: one row for
each phase path, with its times on each rank. The sums are exact even if the ring has overwritten
the events. Times of concurrent tasks and threads are added, so they can exceed the phase around
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.device import device_lanes
from torchwhere.blackbox.phase_sums import PhaseKey, PhaseSum, phase_sums
from torchwhere.blackbox.run import BoxRun
from torchwhere.core.results import Shown, Tabular, plain, plain_fields
from torchwhere.diagnose.clocks.host_clocks import align_hosts
from torchwhere.diagnose.device_time.job import JobDeviceTimes, device_times_of
from torchwhere.diagnose.step_parts import JobStepParts, step_parts_of

STEPS = PhaseKey((), True)
_SUMMED = ("count", "total_ns", "self_ns", "running", "running_ns")  # over the ranks


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """The time of one phase on one rank, or on all.

    Attributes:
        count: How often the phase ended.
        total_ns: The time in it, including runs that have not ended.
        max_ns: The longest run that ended.
        self_ns: The time in it without the phases inside it.
        share: Its share of the watched time; None if that is unknown.
        running: How many runs have not ended.
        running_ns: The time of these runs.
    """

    count: int
    total_ns: int
    max_ns: int
    self_ns: int
    share: float | None
    running: int = 0
    running_ns: int = 0

    @property
    def mean_ns(self) -> float:
        """The mean time of a run that ended."""
        return (self.total_ns - self.running_ns) / self.count if self.count else 0.0

    def to_dict(self) -> dict[str, Any]:
        times = ("total_ns", "mean_ns", "max_ns", "self_ns")
        return plain_fields(self, "count", *times, "share", "running", "running_ns")


@dataclass(frozen=True, slots=True, repr=False)
class PhaseRow(Shown):
    """One phase on all ranks that ran it.

    Attributes:
        path: The names of the phases around it, outermost first, and its own.
        is_main: Whether it ran on the main thread. All other threads of a rank count together.
        by_rank: Its times on each rank.
        all: The sum over all ranks; `share` is the share of the watched time of all ranks.
    """

    path: tuple[str, ...]
    is_main: bool
    by_rank: dict[int, PhaseTimes]
    all: PhaseTimes

    @property
    def name(self) -> str:
        """The name of the phase, without the phases around it."""
        return self.path[-1]

    @property
    def fastest(self) -> int:
        """The rank that spent the least time in it, among those that ran it."""
        return min(self.by_rank, key=lambda rank: (self.by_rank[rank].total_ns, rank))

    @property
    def slowest(self) -> int:
        """The rank that spent the most time in it."""
        return max(self.by_rank, key=lambda rank: (self.by_rank[rank].total_ns, -rank))

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": list(self.path),
            "thread": "main" if self.is_main else "other",
            **self.all.to_dict(),
            **plain_fields(self, "fastest", "slowest", "by_rank"),
        }


@dataclass(frozen=True, slots=True, repr=False)
class Phases(Shown, Tabular):
    """The phases of one rank or many.

    Attributes:
        rows: The phases in program order; a phase precedes the phases inside it.
        steps: For each rank, all steps as one phase; `count` leaves out the running step.
        remarks: Sentences about missing or uncertain data.
        device: The time of each step on the devices; None if no box has it.
        parts: The parts of the last steps, which need no phases; None if no box has them.

    Example:
        phases = torchwhere.phases("run/")
        print(phases["forward", "attention"].all.total_ns)
    """

    rows: tuple[PhaseRow, ...]
    steps: dict[int, PhaseTimes]
    remarks: tuple[str, ...] = ()
    device: JobDeviceTimes | None = None
    parts: JobStepParts | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks in the table."""
        return tuple(self.steps)

    @property
    def watched_ns(self) -> int:
        """The time from the start of the first step to the last event, summed over all ranks."""
        return sum(times.total_ns for times in self.steps.values())

    def __iter__(self) -> Iterator[PhaseRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, path: str | tuple[str, ...]) -> PhaseRow:
        """The row of a phase: `phases["forward", "attention"]`, or `phases["data"]` for an
        outermost one."""
        wanted = (path,) if isinstance(path, str) else tuple(path)
        for row in self.rows:
            if row.path == wanted:
                return row
        raise KeyError(path)

    def inside(self, row: PhaseRow | None, *, is_main: bool = True) -> list[PhaseRow]:
        """Return the rows directly inside a phase; the outermost ones for None."""
        path, main = (row.path, row.is_main) if row is not None else ((), is_main)
        return [inner for inner in self.rows if inner.path[:-1] == path and inner.is_main == main]

    def as_rows(self) -> list[dict[str, Any]]:
        """Return one row for each phase and rank.

        The name of a phase is its path from the outermost phase.
        """
        return [
            {
                "phase": " > ".join(row.path),
                "thread": "main" if row.is_main else "other",
                "rank": rank,
            }
            | times.to_dict()
            for row in self.rows
            for rank, times in row.by_rank.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the table as values for JSON."""
        measured = {"parts": self.parts, "device": self.device}
        return {
            **plain_fields(self, "ranks", "steps"),
            "phases": plain(self.rows),
            "remarks": list(self.remarks),
            **{name: times.to_dict() for name, times in measured.items() if times is not None},
        }


# -- from sums -------------------------------------------------------------------------------------


def phases(run: BoxRun, *, ranks: set[int] | None = None) -> Phases:
    """The phases of a run, on all its ranks or on `ranks`."""
    sums, has_device = {}, False
    for rank, box in run.in_order(ranks):
        sums[rank] = phase_sums(box), last_ns(box)
        has_device |= bool(device_lanes(box))

    def boxes() -> Iterator[Box]:
        return (box for _, box in run.in_order())

    clocks = align_hosts(run)
    return replace(
        table(sums),
        parts=step_parts_of(boxes, clocks=clocks, ranks=ranks),
        device=device_times_of(boxes, clocks=clocks, ranks=ranks) if has_device else None,
    )


def table(sums: Mapping[int, tuple[Mapping[PhaseKey, PhaseSum], int]]) -> Phases:
    """The table of some ranks, from their sums and the time at which each sum was read."""
    by_rank = {rank: _times(of_rank, now_ns) for rank, (of_rank, now_ns) in sums.items()}
    steps = {
        rank: times.pop(STEPS, PhaseTimes(0, 0, 0, 0, None)) for rank, times in by_rank.items()
    }
    keys = list(dict.fromkeys(key for times in by_rank.values() for key in times))
    watched_ns = sum(times.total_ns for times in steps.values())
    rows = []
    for key in _in_tree_order(keys):
        rank_times = {rank: times[key] for rank, times in by_rank.items() if key in times}
        rows.append(PhaseRow(key.path, key.is_main, rank_times, _added(rank_times, watched_ns)))
    return Phases(tuple(rows), steps)


def last_ns(box: Box) -> int:
    """The latest time in the box, on the clock of its records."""
    latest = int(box.records["t_ns"].max()) if len(box.records) else 0
    return max([latest, *(cursor.t_ns - box.wall_ns(0) for cursor in box.cursors())])


def _times(sums: Mapping[PhaseKey, PhaseSum], now_ns: int) -> dict[PhaseKey, PhaseTimes]:
    totals = {key: phase.total_ns + _running_ns(phase, now_ns) for key, phase in sums.items()}
    inside = dict.fromkeys(sums, 0)
    for key, total in totals.items():
        around = PhaseKey(key.path[:-1], key.is_main)
        if key.path and around in inside:
            inside[around] += total
    watched_ns = totals.get(STEPS, 0)
    return {
        key: PhaseTimes(
            count=phase.count,
            total_ns=totals[key],
            max_ns=phase.max_ns,
            self_ns=max(0, totals[key] - inside[key]),
            share=totals[key] / watched_ns if watched_ns else None,
            running=phase.running,
            running_ns=totals[key] - phase.total_ns,
        )
        for key, phase in sums.items()
        if phase.count or phase.running
    }


def _running_ns(phase: PhaseSum, now_ns: int) -> int:
    """The time of the phases that still run. 0 if the two values are from different moments and
    do not fit."""
    running_ns = phase.running * now_ns - phase.begun_ns
    return running_ns if 0 < running_ns < phase.running * now_ns else 0


def _added(by_rank: Mapping[int, PhaseTimes], watched_ns: int) -> PhaseTimes:
    times = by_rank.values()
    sums = {name: sum(getattr(own, name) for own in times) for name in _SUMMED}
    return PhaseTimes(
        **sums,
        max_ns=max(own.max_ns for own in times),
        share=sums["total_ns"] / watched_ns if watched_ns else None,
    )


def _in_tree_order(keys: list[PhaseKey]) -> list[PhaseKey]:
    """Main thread first, each phase before those inside it, siblings in order of first use."""
    first = {key: at for at, key in enumerate(keys)}

    def place(key: PhaseKey) -> list[int]:
        around = [PhaseKey(key.path[: depth + 1], key.is_main) for depth in range(len(key.path))]
        return [not key.is_main, *(first.get(outer, len(keys)) for outer in around)]

    return sorted(keys, key=place)
