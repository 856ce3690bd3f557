"""The module tree of a report: calls and time of each module and pass where they were recorded, and
the collectives it issued.

Takes a hearing and the summaries of the boxes, gives `Modules`. Numbers are added over all ranks.
Layers that do the same are one row (`layers.0-31`): they are told apart by what they do in a step,
so that neither time nor a step that was cut short keeps them from being folded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from torchwhere.core.place import PASS_LABELS, shown
from torchwhere.diagnose.calls.job_calls import Counted
from torchwhere.diagnose.calls.rank_calls import JobCalls
from torchwhere.diagnose.comms.outline import OutlineLine, outline
from torchwhere.diagnose.comms.tree import PASSES, CommsKey, CommsNode, CommsSum, descend, is_number
from torchwhere.diagnose.report.digest import Summary
from torchwhere.diagnose.report.texts import cut, milliseconds

OUTSIDE = "(outside modules)"
NO_TIMES = (
    "No time per module was recorded. To have it, record with: torchwhere run --module-events"
)
ONLY_FORWARD = (
    "Time is that of forward and recompute calls, on the clock of the CPU: a backward has no module"
    " calls to time."
)
_MOST_ROWS = 1500
_CALLED = ""  # in the place of an operation: the calls of a module


@dataclass(slots=True)
class Cell:
    """What one pass of a module took, on all ranks."""

    calls: int | None = None
    total_ns: int | None = None
    self_ns: int | None = None
    collectives: int = 0
    bytes: int = 0

    def add(self, other: Cell) -> None:
        if other.calls is not None:
            self.calls = (self.calls or 0) + other.calls
            self.total_ns = (self.total_ns or 0) + (other.total_ns or 0)
            self.self_ns = (self.self_ns or 0) + (other.self_ns or 0)
        self.collectives += other.collectives
        self.bytes += other.bytes

    def to_dict(self) -> dict[str, Any]:
        return {
            "calls": self.calls,
            "ms": None if self.total_ns is None else milliseconds(self.total_ns),
            "self_ms": None if self.self_ns is None else milliseconds(self.self_ns),
            "collectives": self.collectives,
            "bytes": self.bytes,
        }


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """A module, or several neighbours that do the same. `collectives` and `bytes` are its own, not
    those of modules below."""

    name: str
    depth: int
    parent: int  # index of a row before this one; -1: none
    times: int  # how many modules
    ranks: int  # that had them
    cells: dict[str, Cell]

    def to_dict(self) -> dict[str, Any]:
        found = {
            "name": cut(self.name),
            "depth": self.depth,
            "parent": self.parent,
            "times": self.times,
            "ranks": self.ranks,
        }
        return found | {"cells": {pass_: cell.to_dict() for pass_, cell in self.cells.items()}}


@dataclass(frozen=True, slots=True)
class Modules:
    """The tree as rows, each after the one it is below."""

    rows: tuple[ModuleRow, ...]
    has_time: bool
    note: str | None

    def to_dict(self) -> dict[str, Any]:
        used = {pass_ for row in self.rows for pass_ in row.cells}
        return {
            "passes": [pass_ for pass_ in PASSES if pass_ in used],
            "has_time": self.has_time,
            "note": self.note,
            "rows": [row.to_dict() for row in self.rows],
        }


def modules(job_calls: JobCalls, summaries: Mapping[int, Summary]) -> Modules:
    """The tree of all ranks."""
    found = _Sums(list(summaries))
    found.add_times(summaries)
    whole = {
        rank: span for rank, summary in summaries.items() if (span := summary.whole) is not None
    }
    steps = {rank: last - first + 1 for rank, (first, last) in whole.items()}
    for counted in job_calls.counted(whole):
        found.add_calls(job_calls, counted, steps)
    has_time = any(summary.modules for summary in summaries.values())
    rows, left_out = _fitting(list(found.rows()))
    notes = [
        ONLY_FORWARD if has_time else NO_TIMES,
        *([f"{left_out} rows of deeper modules are left out."] if left_out else []),
    ]
    return Modules(tuple(rows), has_time, " ".join(notes) if rows else None)


@dataclass(slots=True)
class _Sums:
    """What is added up: cells by module and pass; what a module does in a step; which ranks have
    it."""

    ranks: list[int]
    cells: dict[str | None, dict[str, Cell]] = field(default_factory=dict)
    in_step: dict[str | None, dict[CommsKey, float]] = field(default_factory=dict)
    present: dict[str | None, npt.NDArray[np.bool_]] = field(default_factory=dict)
    _at: dict[int, int] = field(default_factory=dict)  # of each rank, its place in `present`

    def __post_init__(self) -> None:
        self._at = {rank: at for at, rank in enumerate(self.ranks)}

    def add_times(self, summaries: Mapping[int, Summary]) -> None:
        """What modules took: ranks that have the same modules are added up at once."""
        alike: dict[tuple[Any, ...], list[int]] = {}
        for rank, summary in summaries.items():
            if summary.modules:
                alike.setdefault(summary.modules, []).append(rank)
        for keys, ranks in alike.items():
            numbers = np.sum([summaries[rank].module_numbers for rank in ranks], axis=0)
            rates = np.sum(
                [
                    summaries[rank].module_numbers[3] / max(1, len(summaries[rank].steps))
                    for rank in ranks
                ],
                axis=0,
            )
            at = [self._at[rank] for rank in ranks]
            for (module, pass_), (calls, total, own, _), rate in zip(
                keys, numbers.T.tolist(), rates.tolist(), strict=True
            ):
                self._add(
                    module, pass_, Cell(calls, total, own), CommsKey(pass_, _CALLED, "", None), rate
                )
                self.present[module][at] = True

    def add_calls(self, job_calls: JobCalls, counted: Counted, steps: Mapping[int, int]) -> None:
        """What some ranks issued: each sort of call is looked at once, however many ranks have
        it."""
        sorts = counted.pairs[:, 0].astype(np.int64) << 32 | counted.pairs[:, 1]
        distinct, which = np.unique(sorts, return_inverse=True)
        counts = np.bincount(which, counted.counts, len(distinct)).astype(np.int64).tolist()
        in_step = counted.within / np.array(
            [steps.get(rank, 1) for rank in counted.ranks.tolist()], np.int64
        )
        in_steps = np.bincount(which, in_step, len(distinct)).tolist()
        at = np.array([self._at.get(rank, -1) for rank in counted.ranks.tolist()], np.int64)
        order = np.argsort(which, kind="stable")
        members = np.split(at[order], np.cumsum(np.bincount(which, minlength=len(distinct)))[:-1])
        keys = [
            self._key(job_calls, counted, sort >> 32, sort & 0xFFFFFFFF)
            for sort in distinct.tolist()
        ]
        # By name: the numbers of clerks depend on what they have read before.
        for number in sorted(range(len(keys)), key=lambda number: keys[number][0] or ""):
            (module, key, size), count, rate, ranks = (
                keys[number],
                counts[number],
                in_steps[number],
                members[number],
            )
            self._add(module, key.pass_, Cell(collectives=count, bytes=count * size), key, rate)
            self.present[module][ranks[ranks >= 0]] = True

    def _key(
        self, job_calls: JobCalls, counted: Counted, signature: int, spot: int
    ) -> tuple[str | None, CommsKey, int]:
        call, (module, pass_number, _, _) = (
            counted.signatures[signature],
            counted.call_sites[spot].site_id,
        )
        title, size = (
            job_calls.shared_ids.groups.thing(counted.groups[call.group]).title,
            call.bytes,
        )
        return (
            module,
            CommsKey(PASS_LABELS.get(pass_number, "outside"), f"{call.op} {size}", title, None),
            size,
        )

    def _add(self, module: str | None, pass_: str, cell: Cell, key: CommsKey, rate: float) -> None:
        cells = self.cells.get(module)
        if cells is None:
            cells = self.cells[module] = {}
            self.in_step[module] = {}
            self.present[module] = np.zeros(len(self.ranks), np.bool_)
        cells.setdefault(pass_, Cell()).add(cell)
        self.in_step[module][key] = self.in_step[module].get(key, 0.0) + rate

    # -- rows --------------------------------------------------------------------------------------

    def rows(self) -> Iterator[ModuleRow]:
        root = CommsNode(name="")
        for module, shape in self.in_step.items():
            if module is not None:
                ranks = max(1, int(self.present[module].sum()))
                # What one rank does in one step: two layers are alike if that is, on whatever ranks
                # they are.
                descend(root, module).own = {
                    key: CommsSum(count=round(1000 * rate / ranks)) for key, rate in shape.items()
                }
        _order(root, {})
        if root.own or root.children:
            yield from self._below(outline(root), 0, -1, iter(range(1 << 31)))
        if None in self.cells:
            yield self._row(OUTSIDE, [None], 0, -1)

    def _below(
        self, branch: OutlineLine, depth: int, parent: int, numbers: Iterator[int]
    ) -> Iterator[ModuleRow]:
        number = next(numbers)
        yield self._row(shown(branch.name), [node.name for node in branch.nodes], depth, parent)
        for below in branch.branches:
            yield from self._below(below, depth + 1, number, numbers)

    def _row(self, name: str, names: Iterable[str | None], depth: int, parent: int) -> ModuleRow:
        total: dict[str, Cell] = {}
        ranks = np.zeros(len(self.ranks), np.bool_)
        count = 0
        for each in names:
            count += 1
            for pass_, cell in self.cells.get(each, {}).items():
                total.setdefault(pass_, Cell()).add(cell)
            if each in self.present:
                ranks |= self.present[each]
        cells = {pass_: total[pass_] for pass_ in PASSES if pass_ in total}
        return ModuleRow(name, depth, parent, count, int(ranks.sum()), cells)


def _order(node: CommsNode, labels: dict[str, int]) -> None:
    """Children by number, others as they were first met anywhere: in the same order below every
    layer, wherever a ring begins."""
    for name in node.children:
        labels.setdefault(name, len(labels))
    in_order = sorted(
        node.children.items(),
        key=lambda item: (0, int(item[0])) if is_number(item[0]) else (1, labels[item[0]]),
    )
    node.children = dict(in_order)
    for child in node.children.values():
        _order(child, labels)


def _fitting(rows: list[ModuleRow]) -> tuple[list[ModuleRow], int]:
    """As many levels of the tree as there is room for; and how many rows are left out."""
    deepest = max((row.depth for row in rows), default=0)
    while deepest and sum(row.depth <= deepest for row in rows) > _MOST_ROWS:
        deepest -= 1
    numbers: dict[int, int] = {-1: -1}
    kept: list[ModuleRow] = []
    for number, row in enumerate(rows):
        if row.depth <= deepest and len(kept) < _MOST_ROWS:
            numbers[number] = len(kept)
            kept.append(
                ModuleRow(row.name, row.depth, numbers[row.parent], row.times, row.ranks, row.cells)
            )
    return kept, len(rows) - len(kept)
