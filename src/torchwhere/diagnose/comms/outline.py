"""Folds the tree of collectives for display: equal layers become one line, `layers.1-31`.

Takes the root of a `Comms`, gives an `OutlineLine`. Numbered neighbours are folded if everything
on their lines is equal; the beneficiary may differ by the same offset (each layer prefetches the
next one). A module without collectives of its own usually has no line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torchwhere.diagnose.comms.tree import (
    Beneficiary,
    CommsKey,
    CommsNode,
    CommsSum,
    is_number,
    relative,
)


@dataclass(slots=True)
class OutlineLine:
    """A line of the outline: one module, or several equal neighbours (`layers.1-31`)."""

    label: str  # relative to the line above
    nodes: list[CommsNode]
    branches: list[OutlineLine]

    @property
    def name(self) -> str | None:
        """The full name: `layers.1-31`."""
        first, last = self.nodes[0].name, self.nodes[-1].name
        return first if first is None or last is None else _span(first, last)

    @property
    def is_single(self) -> bool:
        """Whether it takes one line: nothing below it, and one kind of collective."""
        return not self.branches and len(self.nodes[0].own) == 1

    def total(self) -> CommsSum:
        total = CommsSum()
        for node in self.nodes:
            total.add(node.total())
        return total

    def entries(self) -> Iterator[tuple[CommsKey, CommsSum]]:
        """The collectives of these modules themselves, summed. A beneficiary that differs between
        modules becomes a span."""
        for same in zip(*(node.entries() for node in self.nodes), strict=True):
            counter = CommsSum()
            for _, entry_sum in same:
                counter.add(entry_sum)
            # the modules share their steps: do not add them
            counter.steps = max(entry_sum.steps for _, entry_sum in same)
            first, last = same[0][0], same[-1][0]
            beneficiary = _beneficiary_span(first.beneficiary, last.beneficiary)
            yield first._replace(beneficiary=beneficiary), counter


def outline(root: CommsNode) -> OutlineLine:
    """The folded tree below a root."""
    return OutlineLine(label="", nodes=[root], branches=_branches([root]))


def _branches(nodes: list[CommsNode]) -> list[OutlineLine]:
    """The lines below some equal modules."""
    lines = []
    for names in _equal_runs(nodes[0]):
        label = names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"
        below = [node.children[name] for node in nodes for name in names]
        branch = OutlineLine(label=label, nodes=below, branches=_branches(below))
        lines += _hoisted(branch) if _is_container(branch) else [branch]
    return lines


def _is_container(branch: OutlineLine) -> bool:
    """Whether a module without own collectives needs no line: it has one line below it, a list of
    layers, or only single lines."""
    node, below = branch.nodes[0], branch.branches
    if node.own:
        return False
    is_layer = branch.label[-1:].isdigit()
    return (
        len(below) == 1
        or all(map(is_number, node.children))
        or (not is_layer and all(b.is_single for b in below))
    )


def _hoisted(branch: OutlineLine) -> list[OutlineLine]:
    return [
        OutlineLine(f"{branch.label}.{below.label}", below.nodes, below.branches)
        for below in branch.branches
    ]


def _equal_runs(node: CommsNode) -> Iterator[list[str]]:
    """The children's names; equal children with consecutive numbers are in one list."""
    run: list[str] = []
    before: Any = None
    for name, child in node.children.items():
        shape = _shape(child, child.name or "")
        if run and _follows(run[-1], name) and shape == before:
            run.append(name)
            continue
        if run:
            yield run
        run, before = [name], shape
    if run:
        yield run


def _follows(name: str, following: str) -> bool:
    return is_number(name) and is_number(following) and int(following) == int(name) + 1


def _shape(node: CommsNode, seen_from: str) -> Any:
    """A value that is equal for modules with equal collectives, in themselves and below them.
    Names in it are relative to `seen_from`."""
    own = [
        (*key[:3], relative(key.beneficiary, seen_from), t.count, t.bytes, t.steps, sorted(t.ranks))
        for key, t in node.own.items()
    ]
    below = [(name, _shape(child, seen_from)) for name, child in node.children.items()]
    return sorted(own, key=repr), below


def _beneficiary_span(first: Beneficiary, last: Beneficiary) -> Beneficiary:
    if isinstance(first, tuple) and isinstance(last, tuple):
        return tuple(_span(*pair) for pair in zip(first, last, strict=True))
    return _span(first, last) if isinstance(first, str) and isinstance(last, str) else first


def _span(first: str, last: str) -> str:
    """One name for two that differ in numbers: `layers.0` and `layers.30` give `layers.0-30`."""
    pairs = zip(first.split("."), last.split("."), strict=True)
    return ".".join(a if a == b else f"{a}-{b}" for a, b in pairs)


def params_text(names: Iterable[str]) -> str:
    """A list of parameters; a long one is shortened."""
    listed = list(names)
    if len(listed) <= 2:
        return ", ".join(listed)
    return f"{listed[0]} .. {listed[-1]} ({len(listed)} parameters)"
