"""The tree of collectives as people want to read it: layers that do exactly the same are one line,
`layers.1-31`.

Takes the root of a `Comms`, gives a `OutlineLine`. Numbered neighbours are folded only if
everything that is shown is the same for all of them; what each is for may be its own neighbour. A
module that only holds others gets no line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torchwhere.diagnose.comms.tree import Aim, CommsKey, CommsNode, CommsSum, is_number, relative


@dataclass(slots=True)
class OutlineLine:
    """A line of the outline: one module, or several neighbours that do the same (`layers.1-31`)."""

    label: str  # relative to the branch above
    nodes: list[CommsNode]
    branches: list[OutlineLine]

    @property
    def name(self) -> str | None:
        """The full name: `layers.1-31`."""
        first, last = self.nodes[0].name, self.nodes[-1].name
        return first if first is None or last is None else _span(first, last)

    @property
    def is_single(self) -> bool:
        """Whether one line says it all."""
        return not self.branches and len(self.nodes[0].own) == 1

    def total(self) -> CommsSum:
        total = CommsSum()
        for node in self.nodes:
            total.add(node.total())
        return total

    def entries(self) -> Iterator[tuple[CommsKey, CommsSum]]:
        """What these modules issued themselves, added up; an aim that differs from one to the next
        is given as a span."""
        for same in zip(*(node.entries() for node in self.nodes), strict=True):
            counter = CommsSum()
            for _, one in same:
                counter.add(one)
            counter.steps = max(one.steps for _, one in same)  # the same steps, not as many again
            first, last = same[0][0], same[-1][0]
            yield (
                first._replace(beneficiary=_aim_span(first.beneficiary, last.beneficiary)),
                counter,
            )


def outline(root: CommsNode) -> OutlineLine:
    """The tree below a root, folded."""
    return OutlineLine(label="", nodes=[root], branches=_branches([root]))


def _branches(nodes: list[CommsNode]) -> list[OutlineLine]:
    """What is below some modules that do the same."""
    found = []
    for names in _alike(nodes[0]):
        label = names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"
        below = [node.children[name] for node in nodes for name in names]
        branch = OutlineLine(label=label, nodes=below, branches=_branches(below))
        found += _hoisted(branch) if _is_container(branch) else [branch]
    return found


def _is_container(branch: OutlineLine) -> bool:
    """A module that issues nothing itself needs no line of its own if there is one thing below it,
    a list of layers, or nothing but single lines."""
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


def _alike(node: CommsNode) -> Iterator[list[str]]:
    """The children's names; neighbours by number that do the same are in one list."""
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
    """Everything a module and those below it do, with the names in it seen from one of them: equal
    if they do the same."""
    own = [
        (*key[:3], relative(key.beneficiary, seen_from), t.count, t.bytes, t.steps, sorted(t.ranks))
        for key, t in node.own.items()
    ]
    return sorted(own, key=repr), [
        (name, _shape(child, seen_from)) for name, child in node.children.items()
    ]


def _aim_span(first: Aim, last: Aim) -> Aim:
    if isinstance(first, tuple) and isinstance(last, tuple):
        return tuple(_span(*pair) for pair in zip(first, last, strict=True))
    return _span(first, last) if isinstance(first, str) and isinstance(last, str) else first


def _span(first: str, last: str) -> str:
    """Two names that differ in their numbers as one: `layers.0`, `layers.30` is `layers.0-30`."""
    pairs = zip(first.split("."), last.split("."), strict=True)
    return ".".join(a if a == b else f"{a}-{b}" for a, b in pairs)


def params_text(names: Iterable[str]) -> str:
    """A list of parameters, shortened."""
    listed = list(names)
    return (
        ", ".join(listed)
        if len(listed) <= 2
        else f"{listed[0]} .. {listed[-1]} ({len(listed)} parameters)"
    )
