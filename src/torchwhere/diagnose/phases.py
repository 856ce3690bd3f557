"""Where the time of a step goes: the table of phases, of one rank or of many.

Takes the sums that a box keeps (or those of this process, live), gives `Phases`: a row for every
phase by its path, with what it took on each rank. The sums are exact however often the ring has
gone round. Times of tasks and threads that run side by side are added: they may be more than the
phase around them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.phase_sums import PhaseKey, PhaseSum, phase_sums
from torchwhere.blackbox.run import BoxRun
from torchwhere.core.results import Shown, Tabular

STEPS = PhaseKey((), True)


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """What one phase took on one rank. What still runs is in `total_ns`, and not in `count` nor
    `max_ns`."""

    count: int
    total_ns: int
    max_ns: int
    self_ns: int  # without the phases inside it
    share: float | None  # of the time watched; None where that is not known
    running: int = 0
    running_ns: int = 0

    @property
    def mean_ns(self) -> float:
        return (self.total_ns - self.running_ns) / self.count if self.count else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "total_ns": self.total_ns,
            "mean_ns": self.mean_ns,
            "max_ns": self.max_ns,
            "self_ns": self.self_ns,
            "share": self.share,
            "running": self.running,
            "running_ns": self.running_ns,
        }


@dataclass(frozen=True, slots=True, repr=False)
class PhaseRow(Shown):
    """One phase on all ranks that had it."""

    path: tuple[str, ...]
    is_main: bool  # on the main thread; the other threads of a rank are counted together
    by_rank: dict[int, PhaseTimes]
    all: PhaseTimes  # of all ranks, added; its share is of the time that all ranks were watched

    @property
    def name(self) -> str:
        return self.path[-1]

    @property
    def fastest(self) -> int:
        """The rank that spent the least time in it, among those that had it."""
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
            "fastest": self.fastest,
            "slowest": self.slowest,
            "by_rank": {str(rank): times.to_dict() for rank, times in self.by_rank.items()},
        }


@dataclass(frozen=True, slots=True, repr=False)
class Phases(Shown, Tabular):
    """The phases of one rank or of many: rows in the order of the program, each phase before those
    inside it."""

    rows: tuple[PhaseRow, ...]
    # by rank: the steps themselves, as one phase; the one that is running is not in `count`
    steps: dict[int, PhaseTimes]
    remarks: tuple[str, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.steps)

    @property
    def watched_ns(self) -> int:
        """The time from the first step's beginning to the last event, of all ranks, added."""
        return sum(times.total_ns for times in self.steps.values())

    def __iter__(self) -> Iterator[PhaseRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, path: str | tuple[str, ...]) -> PhaseRow:
        """The row of a phase: `phases["forward", "attention"]`, or `phases["data"]` for one inside
        no other."""
        wanted = (path,) if isinstance(path, str) else tuple(path)
        for row in self.rows:
            if row.path == wanted:
                return row
        raise KeyError(path)

    def inside(self, row: PhaseRow | None, *, is_main: bool = True) -> list[PhaseRow]:
        """The rows directly inside a phase; those inside no other for None."""
        path, main = (row.path, row.is_main) if row is not None else ((), is_main)
        return [inner for inner in self.rows if inner.path[:-1] == path and inner.is_main == main]

    def as_rows(self) -> list[dict[str, Any]]:
        """One a row for each phase and rank; a phase's name is its path, from the outermost on."""
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
        return {
            "ranks": list(self.ranks),
            "steps": {str(rank): times.to_dict() for rank, times in self.steps.items()},
            "phases": [row.to_dict() for row in self.rows],
            "remarks": list(self.remarks),
        }


# -- from sums -------------------------------------------------------------------------------------


def phases(run: BoxRun, *, ranks: set[int] | None = None) -> Phases:
    """The phases of a run, of all its ranks or of some."""
    chosen = ((rank, box) for rank, box in run.in_order() if ranks is None or rank in ranks)
    return table({rank: (phase_sums(box), last_ns(box)) for rank, box in chosen})


def table(sums: Mapping[int, tuple[Mapping[PhaseKey, PhaseSum], int]]) -> Phases:
    """The table of some ranks, from the sums of each and the time up to which they are true."""
    by_rank = {rank: _times(of_rank, now_ns) for rank, (of_rank, now_ns) in sums.items()}
    keys = [
        key
        for key in dict.fromkeys(key for times in by_rank.values() for key in times)
        if key != STEPS
    ]
    steps = {
        rank: times.get(STEPS, PhaseTimes(0, 0, 0, 0, None)) for rank, times in by_rank.items()
    }
    watched_ns = sum(times.total_ns for times in steps.values())
    rows = []
    for key in _in_tree_order(keys):
        found = {rank: times[key] for rank, times in by_rank.items() if key in times}
        rows.append(PhaseRow(key.path, key.is_main, found, _added(found, watched_ns)))
    return Phases(tuple(rows), steps)


def last_ns(box: Box) -> int:
    """The latest moment that the box knows of, by the clock of its records."""
    latest = int(box.records["t_ns"].max()) if len(box.records) else 0
    return max([latest, *(cursor.t_ns - box.wall_ns(0) for cursor in box.cursors())])


def _times(sums: Mapping[PhaseKey, PhaseSum], now_ns: int) -> dict[PhaseKey, PhaseTimes]:
    totals = {key: found.total_ns + _running_ns(found, now_ns) for key, found in sums.items()}
    inside = dict.fromkeys(sums, 0)
    for key, total in totals.items():
        around = PhaseKey(key.path[:-1], key.is_main)
        if key.path and around in inside:
            inside[around] += total
    watched_ns = totals.get(STEPS, 0)
    return {
        key: PhaseTimes(
            count=found.count,
            total_ns=totals[key],
            max_ns=found.max_ns,
            self_ns=max(0, totals[key] - inside[key]),
            share=totals[key] / watched_ns if watched_ns else None,
            running=found.running,
            running_ns=totals[key] - found.total_ns,
        )
        for key, found in sums.items()
        if found.count or found.running
    }


def _running_ns(found: PhaseSum, now_ns: int) -> int:
    """How long those that still run have been running. 0 if two words of different moments do not
    fit together."""
    running_ns = found.running * now_ns - found.begun_ns
    return running_ns if 0 < running_ns < found.running * now_ns else 0


def _added(by_rank: Mapping[int, PhaseTimes], watched_ns: int) -> PhaseTimes:
    times = by_rank.values()
    total_ns = sum(one.total_ns for one in times)
    return PhaseTimes(
        count=sum(one.count for one in times),
        total_ns=total_ns,
        max_ns=max(one.max_ns for one in times),
        self_ns=sum(one.self_ns for one in times),
        share=total_ns / watched_ns if watched_ns else None,
        running=sum(one.running for one in times),
        running_ns=sum(one.running_ns for one in times),
    )


def _in_tree_order(keys: list[PhaseKey]) -> list[PhaseKey]:
    """Main thread first; each phase before those inside it; these in the order they were first
    seen."""
    first = {key: at for at, key in enumerate(keys)}

    def place(key: PhaseKey) -> list[int]:
        around = [PhaseKey(key.path[: depth + 1], key.is_main) for depth in range(len(key.path))]
        return [not key.is_main, *(first.get(one, len(keys)) for one in around)]

    return sorted(keys, key=place)
