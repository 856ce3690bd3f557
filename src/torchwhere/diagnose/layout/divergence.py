"""Finds where two layouts diverge: modules, units and parameters that should be equal and are not.

`CanonicalKey` numbers modules by what should be equal on all ranks. `differences` walks two
layouts together and skips modules with equal numbers.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torchwhere.core.model_layout import Branch, Layout, Mesh, Node, Param, Unit, is_number
from torchwhere.core.place import ROOT
from torchwhere.diagnose.layout.facts import LayoutDifference

Branches = tuple[Branch, ...]


# -- what should be equal --------------------------------------------------------------------------


class CanonicalKey:
    """Gives equal numbers to modules with equal layouts on any rank. Leaves out what differs from
    rank to rank by design."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def key(self, layout: Layout) -> tuple[Any, ...]:
        seen: dict[int, int] = {}
        return tuple(
            (root.name, root.count, self._number(root.node, layout.meshes, seen))
            for root in layout.roots
        )

    def numbers(self, layout: Layout) -> dict[int, int]:
        """The numbers of all modules of a layout, by `id()` of the node."""
        seen: dict[int, int] = {}
        for root in layout.roots:
            self._number(root.node, layout.meshes, seen)
        return seen

    def _number(self, node: Node, meshes: tuple[Mesh, ...], seen: dict[int, int]) -> int:
        number = seen.get(id(node))
        if number is None:
            children = [
                (b.name, b.count, self._number(b.node, meshes, seen)) for b in node.children
            ]
            facts = (
                tuple(_node_facts(node).values()),
                tuple(tuple(_unit_facts(unit, meshes).items()) for unit in node.units),
                tuple((param.name, *_param_facts(param, meshes).values()) for param in node.params),
                tuple(_refolded(children)),
            )
            number = seen[id(node)] = self._numbers.setdefault(facts, len(self._numbers))
        return number


def _refolded(runs: Iterable[tuple[str, int, int]]) -> Iterator[tuple[str, int, int]]:
    """Fold equal neighbours that the layout did not fold: FSDP1 may cut its flat parameter in the
    middle of a layer, and then local shapes differ."""
    last: tuple[str, int, int] | None = None
    for name, count, number in runs:
        if (
            last is not None
            and last[2] == number
            and is_number(last[0])
            and name == str(int(last[0]) + last[1])
        ):
            last = last[0], last[1] + count, number
            continue
        if last is not None:
            yield last
        last = name, count, number
    if last is not None:
        yield last


def _mesh(number: int | None, meshes: tuple[Mesh, ...]) -> str:
    if number is None or not 0 <= number < len(meshes):
        return "no mesh"
    mesh = meshes[number]
    return f"{mesh.label} on {mesh.device}" if mesh.device else mesh.label


def _node_facts(node: Node) -> dict[str, str]:
    """The properties of a module that should be equal on all ranks, as text."""
    return {
        "class": node.cls or "none",
        "plan": node.plan or "none",
        "the same module as": node.same_as or "none",
        "note": node.note or "none",
    }


def _unit_facts(unit: Unit, meshes: tuple[Mesh, ...]) -> dict[str, str]:
    """The properties of a unit that should be equal on all ranks, as text."""
    return {
        "unit": unit.kind,
        "mesh": _mesh(unit.mesh, meshes),
        "placements": ", ".join(unit.placements) or "none",
        "reshard": unit.reshard or "none",
        "offload": unit.offload or "none",
        "modules in the unit": ", ".join(unit.also) or "one",
        **{f"{use} dtype": str(dtype) for use, dtype in unit.dtypes},
        **{str(name): str(value) for name, value in unit.settings},
    }


def _param_facts(param: Param, meshes: tuple[Mesh, ...]) -> dict[str, str]:
    """The properties of a parameter that should be equal on all ranks, as text."""
    return {
        "shape": str(list(param.shape)),
        "dtype": param.dtype,
        "placements": f"{', '.join(param.placements) or 'whole'} ({_mesh(param.mesh, meshes)})",
        "requires_grad": str(param.requires_grad),
        "device": param.device or "unknown",
        "managing unit": "none" if param.unit is None else f"number {param.unit} around it",
        "tied to": param.tied or "nothing",
        "note": param.note or "none",
    }


# -- where two layouts diverge ---------------------------------------------------------------------


def differences(here: Layout, there: Layout, canon: CanonicalKey) -> Iterator[LayoutDifference]:
    numbers = canon.numbers(here) | canon.numbers(there)
    walk = _LayoutWalk(here.meshes, there.meshes, numbers)
    yield from walk.of_children("", here.roots, there.roots)


@dataclass(slots=True)
class _LayoutWalk:
    """Walks two layouts together, and only where they differ."""

    meshes_here: tuple[Mesh, ...]
    meshes_there: tuple[Mesh, ...]
    numbers: dict[int, int]

    def of_children(
        self, above: str, here: Branches, there: Branches
    ) -> Iterator[LayoutDifference]:
        for label, first, node, other in _side_by_side(here, there):
            if node is not None and other is not None:
                if self.numbers[id(node)] != self.numbers[id(other)]:
                    yield from self._of_nodes(_below(above, first), node, other)
                continue
            here_cls = "missing" if node is None else node.cls
            there_cls = "missing" if other is None else other.cls
            kind = "module" if label else "model"
            yield LayoutDifference(_below(above, label), kind, here_cls, there_cls)

    def _of_nodes(self, name: str, here: Node, there: Node) -> Iterator[LayoutDifference]:
        where = name or ROOT
        yield from _of_facts(where, _node_facts(here), _node_facts(there))
        yield from self._of_units(where, here.units, there.units)
        yield from self._of_params(name, here.params, there.params)
        yield from self.of_children(name, here.children, there.children)

    def _of_units(
        self, name: str, here: tuple[Unit, ...], there: tuple[Unit, ...]
    ) -> Iterator[LayoutDifference]:
        for unit, other in itertools.zip_longest(here, there):
            if unit is None or other is None or unit.kind != other.kind:
                yield LayoutDifference(
                    name, "unit", unit.kind if unit else "none", other.kind if other else "none"
                )
                continue
            own, others = _unit_facts(unit, self.meshes_here), _unit_facts(other, self.meshes_there)
            yield from _of_facts(f"{unit.kind} unit {name}", own, others)

    def _of_params(
        self, above: str, here: tuple[Param, ...], there: tuple[Param, ...]
    ) -> Iterator[LayoutDifference]:
        own, other = {param.name: param for param in here}, {param.name: param for param in there}
        for name in own | other:
            where = _below(above, name)
            if name not in own:
                yield LayoutDifference(where, "parameter", "missing", "there")
            elif name not in other:
                yield LayoutDifference(where, "parameter", "there", "missing")
            else:
                yield from _of_facts(
                    where,
                    _param_facts(own[name], self.meshes_here),
                    _param_facts(other[name], self.meshes_there),
                )


def _of_facts(
    where: str, here: dict[str, str], there: dict[str, str]
) -> Iterator[LayoutDifference]:
    for what in here | there:
        if here.get(what, "none") != there.get(what, "none"):
            yield LayoutDifference(where, what, here.get(what, "none"), there.get(what, "none"))


def _below(above: str, name: str) -> str:
    return f"{above}.{name}" if above and name else above or name


def _side_by_side(
    here: Branches, there: Branches
) -> Iterator[tuple[str, str, Node | None, Node | None]]:
    """Pair children of equal names: label, first name, and the node of either side. Runs of layers
    are cut where either side's run ends."""
    own, other = ({b.name: b.node for b in side if not is_number(b.name)} for side in (here, there))
    for name in own | other:
        yield name, name, own.get(name), other.get(name)
    runs_here, runs_there = _runs(here), _runs(there)
    edges = sorted({edge for start, end, _ in (*runs_here, *runs_there) for edge in (start, end)})
    for start, end in itertools.pairwise(edges):
        node, node_there = _at(runs_here, start), _at(runs_there, start)
        if node is not None or node_there is not None:
            label = str(start) if end == start + 1 else f"{start}-{end - 1}"
            yield label, str(start), node, node_there


def _runs(branches: Branches) -> list[tuple[int, int, Node]]:
    numbered = [branch for branch in branches if is_number(branch.name)]
    return sorted(
        ((int(b.name), int(b.name) + b.count, b.node) for b in numbered), key=lambda run: run[0]
    )


def _at(runs: list[tuple[int, int, Node]], number: int) -> Node | None:
    at = bisect.bisect_right(runs, number, key=lambda run: run[0]) - 1
    return runs[at][2] if at >= 0 and number < runs[at][1] else None
