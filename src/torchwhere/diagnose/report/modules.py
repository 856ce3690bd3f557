"""The module tree of a report: calls, time and collectives of each module and pass.

Takes the calls of a job and the digested boxes, gives `Modules`. Numbers are sums over all ranks.
Equal layers share a row (`layers.0-31`). Layers are equal if they do the same in a step: neither
times nor an incomplete step prevent folding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from torchwhere.core.arrays import Bools
from torchwhere.core.grouping import grouped
from torchwhere.core.place import PASS_LABELS, shown
from torchwhere.core.results import plain, plain_fields
from torchwhere.diagnose.calls.job_calls import CallCounts, JobCalls
from torchwhere.diagnose.comms.outline import OutlineLine, outline
from torchwhere.diagnose.comms.tree import PASSES, CommsKey, CommsNode, CommsSum, descend, is_number
from torchwhere.diagnose.report.digest import DigestedBox
from torchwhere.diagnose.report.facts import ModulesNote
from torchwhere.diagnose.report.texts import cut, milliseconds

OUTSIDE = "(outside modules)"
_MOST_ROWS = 1500
_CALLED = ""  # instead of an operation: the calls of a module


@dataclass(slots=True)
class PassCell:
    """The numbers of one pass of a module, summed over all ranks."""

    calls: int | None = None
    total_ns: int | None = None
    self_ns: int | None = None
    collectives: int = 0
    bytes: int = 0

    def add(self, other: PassCell) -> None:
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
    """A module, or several equal neighbours. `collectives` and `bytes` leave out the modules
    below."""

    name: str
    depth: int
    parent: int  # index of an earlier row; -1: none
    times: int  # number of modules
    ranks: int  # number of ranks with these modules
    cells: dict[str, PassCell]

    def to_dict(self) -> dict[str, Any]:
        return plain_fields(self) | {"name": cut(self.name)}


@dataclass(frozen=True, slots=True)
class Modules:
    """The tree as rows, each after its parent."""

    rows: tuple[ModuleRow, ...]
    has_time: bool
    note: ModulesNote | None

    def to_dict(self) -> dict[str, Any]:
        used = {pass_ for row in self.rows for pass_ in row.cells}
        return {
            "passes": [pass_ for pass_ in PASSES if pass_ in used],
            "has_time": self.has_time,
            "note": None if self.note is None else str(self.note),
            "rows": plain(self.rows),
        }


def modules(job_calls: JobCalls, boxes: Mapping[int, DigestedBox]) -> Modules:
    """The tree of all ranks."""
    sums = _ModuleSums(list(boxes))
    sums.add_times(boxes)
    spans = {rank: box.complete_steps for rank, box in boxes.items()}
    complete = {rank: span for rank, span in spans.items() if span is not None}
    steps = {rank: last - first + 1 for rank, (first, last) in complete.items()}
    for counted in job_calls.count_calls(complete):
        sums.add_calls(job_calls, counted, steps)
    has_time = any(box.modules for box in boxes.values())
    rows, left_out = _fitting(list(sums.rows()))
    return Modules(tuple(rows), has_time, ModulesNote(has_time, left_out) if rows else None)


@dataclass(slots=True)
class _ModuleSums:
    """Sums by module: the cells of its passes, its calls in a step, and its ranks."""

    ranks: list[int]
    cells: dict[str | None, dict[str, PassCell]] = field(default_factory=dict)
    in_step: dict[str | None, dict[CommsKey, float]] = field(default_factory=dict)
    present: dict[str | None, Bools] = field(default_factory=dict)
    _at: dict[int, int] = field(default_factory=dict)  # index of each rank in `present`

    def __post_init__(self) -> None:
        self._at = {rank: at for at, rank in enumerate(self.ranks)}

    def add_times(self, boxes: Mapping[int, DigestedBox]) -> None:
        """Add the times of modules. Ranks with the same modules are summed as arrays."""
        same_modules = grouped((box.modules, rank) for rank, box in boxes.items() if box.modules)
        for keys, ranks in same_modules.items():
            numbers = np.sum([boxes[rank].module_numbers for rank in ranks], axis=0)
            per_step = [boxes[r].module_numbers[3] / max(1, len(boxes[r].steps)) for r in ranks]
            rates = np.sum(per_step, axis=0).tolist()
            at = [self._at[rank] for rank in ranks]
            for (module, pass_), row, rate in zip(keys, numbers.T.tolist(), rates, strict=True):
                calls, total_ns, self_ns, _ = row
                key = CommsKey(pass_, _CALLED, "", None)
                self._add(module, pass_, PassCell(calls, total_ns, self_ns), key, rate)
                self.present[module][at] = True

    def add_calls(self, job_calls: JobCalls, counted: CallCounts, steps: Mapping[int, int]) -> None:
        """Add the collectives of some ranks. Each distinct call is decoded once for all ranks."""
        codes = counted.pairs[:, 0].astype(np.int64) << 32 | counted.pairs[:, 1]
        distinct, code_of = np.unique(codes, return_inverse=True)
        counts = np.bincount(code_of, counted.counts, len(distinct)).astype(np.int64).tolist()
        rank_list = counted.ranks.tolist()
        in_step = counted.within / np.array([steps.get(rank, 1) for rank in rank_list], np.int64)
        rates = np.bincount(code_of, in_step, len(distinct)).tolist()
        at = np.array([self._at.get(rank, -1) for rank in rank_list], np.int64)
        order = np.argsort(code_of, kind="stable")
        sizes = np.bincount(code_of, minlength=len(distinct))
        members = np.split(at[order], np.cumsum(sizes)[:-1])
        keys = [
            self._key(job_calls, counted, code >> 32, code & 0xFFFFFFFF)
            for code in distinct.tolist()
        ]
        # By name: the ids of workers depend on what they have read before.
        for number in sorted(range(len(keys)), key=lambda number: keys[number][0] or ""):
            module, key, size = keys[number]
            cell = PassCell(collectives=counts[number], bytes=counts[number] * size)
            self._add(module, key.pass_, cell, key, rates[number])
            ranks = members[number]
            self.present[module][ranks[ranks >= 0]] = True

    def _key(
        self, job_calls: JobCalls, counted: CallCounts, signature_id: int, site_id: int
    ) -> tuple[str | None, CommsKey, int]:
        signature = counted.signatures[signature_id]
        module, pass_number, _, _ = counted.call_sites[site_id].site_id
        title = job_calls.shared_ids.groups[counted.groups[signature.group]].title
        pass_ = PASS_LABELS.get(pass_number, "outside")
        key = CommsKey(pass_, f"{signature.op} {signature.bytes}", title, None)
        return module, key, signature.bytes

    def _add(
        self, module: str | None, pass_: str, cell: PassCell, key: CommsKey, rate: float
    ) -> None:
        cells = self.cells.get(module)
        if cells is None:
            cells = self.cells[module] = {}
            self.in_step[module] = {}
            self.present[module] = np.zeros(len(self.ranks), np.bool_)
        cells.setdefault(pass_, PassCell()).add(cell)
        self.in_step[module][key] = self.in_step[module].get(key, 0.0) + rate

    # -- rows --------------------------------------------------------------------------------------

    def rows(self) -> Iterator[ModuleRow]:
        root = CommsNode(name="")
        for module, rates in self.in_step.items():
            if module is not None:
                ranks = max(1, int(self.present[module].sum()))
                # The calls of one rank in one step: layers are equal if these are, on any ranks.
                descend(root, module).own = {
                    key: CommsSum(count=round(1000 * rate / ranks)) for key, rate in rates.items()
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
        total: dict[str, PassCell] = {}
        ranks = np.zeros(len(self.ranks), np.bool_)
        count = 0
        for module in names:
            count += 1
            for pass_, cell in self.cells.get(module, {}).items():
                total.setdefault(pass_, PassCell()).add(cell)
            if module in self.present:
                ranks |= self.present[module]
        cells = {pass_: total[pass_] for pass_ in PASSES if pass_ in total}
        return ModuleRow(name, depth, parent, count, int(ranks.sum()), cells)


def _order(node: CommsNode, labels: dict[str, int]) -> None:
    """Sort numbered children by number, others by first use anywhere: then all layers list them in
    one order, wherever a ring begins."""
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
    """As many levels of the tree as fit, and the number of rows left out."""
    deepest = max((row.depth for row in rows), default=0)
    while deepest and sum(row.depth <= deepest for row in rows) > _MOST_ROWS:
        deepest -= 1
    numbers: dict[int, int] = {-1: -1}
    shown_rows: list[ModuleRow] = []
    for number, row in enumerate(rows):
        if row.depth <= deepest and len(shown_rows) < _MOST_ROWS:
            numbers[number] = len(shown_rows)
            shown_rows.append(replace(row, parent=numbers[row.parent]))
    return shown_rows, len(rows) - len(shown_rows)
