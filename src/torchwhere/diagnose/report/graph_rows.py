"""The graphs of a report: what was compiled, on which ranks, how often, and why again. From the
compilations in the boxes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchwhere.diagnose.report.digest import CompilationRow, Summary
from torchwhere.diagnose.report.texts import milliseconds

_MOST_GRAPHS = 500
_MOST_REASONS = 4
_NUMBERS = re.compile(r"\d+")


@dataclass(slots=True)
class GraphRow:
    """One graph, by dynamo's id of it (`0/1` is the second variant of the first frame), on all
    ranks that compiled it."""

    name: str
    part: str
    rank: int  # the first that compiled it
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
        """How often the function had been compiled before: dynamo counts the variants of a
        frame."""
        variant = self.name.rpartition("/")[2].partition("_")[0]
        return int(variant) if "/" in self.name and variant.isascii() and variant.isdigit() else 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "part": self.part,
            "rank": self.rank,
            "ranks": len(self.ranks),
            "count": self.count,
            "recompiles": self.recompiles,
            "reasons": self.reasons,
            "step": self.step,
            "ms": milliseconds(self.took_ns) if self.took_ns is not None else None,
        }


def graphs(summaries: Mapping[int, Summary]) -> list[GraphRow]:
    """All graphs, by their ids."""
    found: dict[tuple[str, str], GraphRow] = {}
    for rank, summary in summaries.items():
        for one in summary.compilations:
            key = one.graph, one.part
            if key not in found:
                found[key] = GraphRow(one.graph, one.part, rank, one.step)
            found[key].add(rank, one)
    return sorted(found.values(), key=_order)[:_MOST_GRAPHS]


def _order(row: GraphRow) -> tuple[Any, ...]:
    return (
        [int(number) for number in _NUMBERS.findall(row.name)[:8]],
        row.name,
        row.part != "forward",
    )
