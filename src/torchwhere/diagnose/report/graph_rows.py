"""The graphs section of a report: compiled graphs, their ranks and counts, and why they recompiled.

Takes the compilations in the boxes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchwhere.core.results import plain_fields
from torchwhere.diagnose.report.digest import CompilationRow, DigestedBox
from torchwhere.diagnose.report.texts import milliseconds

_MOST_GRAPHS = 500
_MOST_REASONS = 4
_NUMBERS = re.compile(r"\d+")


@dataclass(slots=True)
class GraphRow:
    """One graph on all ranks that compiled it. Its name is dynamo's id: `0/1` is the second variant
    of the first frame."""

    name: str
    part: str
    rank: int  # the first rank that compiled it
    step: int | None
    ranks: set[int] = field(default_factory=set)
    count: int = 0
    reasons: list[str] = field(default_factory=list)
    took_ns: int | None = None  # the longest

    def add(self, rank: int, compilation: CompilationRow) -> None:
        self.ranks.add(rank)
        self.count += 1
        if compilation.took_ns is not None:
            self.took_ns = max(self.took_ns or 0, compilation.took_ns)
        because = compilation.because
        if because and because not in self.reasons and len(self.reasons) < _MOST_REASONS:
            self.reasons.append(because)

    @property
    def recompiles(self) -> int:
        """The number of earlier compilations of the function: dynamo counts the variants of a
        frame."""
        variant = self.name.rpartition("/")[2].partition("_")[0]
        return int(variant) if "/" in self.name and variant.isascii() and variant.isdigit() else 0

    def to_dict(self) -> dict[str, Any]:
        return {
            **plain_fields(self, "name", "part", "rank"),
            "ranks": len(self.ranks),
            **plain_fields(self, "count", "recompiles", "reasons", "step"),
            "ms": milliseconds(self.took_ns) if self.took_ns is not None else None,
        }


def graphs(boxes: Mapping[int, DigestedBox]) -> list[GraphRow]:
    """All graphs in the order of their ids."""
    rows: dict[tuple[str, str], GraphRow] = {}
    for rank, box in boxes.items():
        for compilation in box.compilations:
            graph, part = compilation.graph, compilation.part
            row = rows.setdefault((graph, part), GraphRow(graph, part, rank, compilation.step))
            row.add(rank, compilation)
    return sorted(rows.values(), key=_order)[:_MOST_GRAPHS]


def _order(row: GraphRow) -> tuple[Any, ...]:
    return (
        [int(number) for number in _NUMBERS.findall(row.name)[:8]],
        row.name,
        row.part != "forward",
    )
