"""Where two layouts part: the first module, unit or parameter that should be the same on both and
is not.

`CanonicalKey` numbers modules by what should be the same on all ranks; `differences` walks two
layouts together, only into what has different numbers.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torchwhere.core.model_layout import Branch, Layout, Mesh, Node, Param, Unit, is_number
from torchwhere.core.place import ROOT

Branches = tuple[Branch, ...]


@dataclass(frozen=True, slots=True)
class LayoutDifference:
    """Where two layouts part: a module or parameter, what of it, and how it is here and on the
    ranks compared with."""

    where: str
    what: str
    here: str
    there: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what} is {self.here}, elsewhere {self.there}"

    def to_dict(self) -> dict[str, str]:
        return {"where": self.where, "what": self.what, "here": self.here, "there": self.there}


# -- what should be the same -----------------------------------------------------------------------


class CanonicalKey:
    """Gives equal numbers to nodes that are laid out alike, on whatever rank: without what is a
    rank's own."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def key(self, layout: Layout) -> tuple[Any, ...]:
        seen: dict[int, int] = {}
        return tuple(
            (root.name, root.count, self._number(root.node, layout.meshes, seen))
            for root in layout.roots
        )

    def numbers(self, layout: Layout) -> dict[int, int]:
        """The numbers of all nodes of a layout, by id."""
        seen: dict[int, int] = {}
        for root in layout.roots:
            self._number(root.node, layout.meshes, seen)
        return seen

    def _number(self, node: Node, meshes: tuple[Mesh, ...], seen: dict[int, int]) -> int:
        known = seen.get(id(node))
        if known is None:
            facts = (
                (node.cls, node.plan, node.same_as, node.note),
                tuple(_unit_facts(unit, meshes) for unit in node.units),
                tuple((param.name, *_param_facts(param, meshes).values()) for param in node.params),
                tuple(
                    _refolded(
                        (b.name, b.count, self._number(b.node, meshes, seen)) for b in node.children
                    )
                ),
            )
            known = seen[id(node)] = self._numbers.setdefault(facts, len(self._numbers))
        return known


def _refolded(runs: Iterable[tuple[str, int, int]]) -> Iterator[tuple[str, int, int]]:
    """Without what is a rank's own, neighbours may be alike that were not: an FSDP1 unit is cut in
    the middle of a layer."""
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
    return (
        f"{meshes[number].label} on {meshes[number].device}"
        if meshes[number].device
        else meshes[number].label
    )


def _unit_facts(unit: Unit, meshes: tuple[Mesh, ...]) -> tuple[tuple[str, str], ...]:
    """What of a unit should be the same on all ranks, as texts."""
    facts = {
        "unit": unit.kind,
        "mesh": _mesh(unit.mesh, meshes),
        "placements": ", ".join(unit.placements) or "none",
        "reshard": unit.reshard or "none",
        "offload": unit.offload or "none",
        "modules in the unit": ", ".join(unit.also) or "one",
        **{f"{use} dtype": str(dtype) for use, dtype in unit.dtypes},
        **{str(name): str(value) for name, value in unit.settings},
    }
    return tuple(facts.items())


def _param_facts(param: Param, meshes: tuple[Mesh, ...]) -> dict[str, str]:
    """What of a parameter should be the same on all ranks, as texts."""
    return {
        "shape": str(list(param.shape)),
        "dtype": param.dtype,
        "placements": f"{', '.join(param.placements) or 'whole'} ({_mesh(param.mesh, meshes)})",
        "requires_grad": str(param.requires_grad),
        "device": param.device or "not known",
        "managing unit": "none" if param.unit is None else f"number {param.unit} around it",
        "tied to": param.tied or "nothing",
        "note": param.note or "none",
    }


# -- where two layouts part ------------------------------------------------------------------------


def differences(here: Layout, there: Layout, canon: CanonicalKey) -> Iterator[LayoutDifference]:
    numbers = canon.numbers(here) | canon.numbers(there)
    yield from _Parting(here.meshes, there.meshes, numbers).of_children("", here.roots, there.roots)


@dataclass(slots=True)
class _Parting:
    """Walks two layouts together, and only where they differ."""

    meshes_here: tuple[Mesh, ...]
    meshes_there: tuple[Mesh, ...]
    numbers: dict[int, int]

    def of_children(
        self, above: str, here: Branches, there: Branches
    ) -> Iterator[LayoutDifference]:
        for label, first, node, other in _side_by_side(here, there):
            if node is None or other is None:
                what = "module" if label else "model"
                kept = (node or other).cls if (node or other) else ""  # type: ignore[union-attr]
                yield LayoutDifference(
                    _below(above, label),
                    what,
                    *(("missing", kept) if node is None else (kept, "missing")),
                )
            elif self.numbers[id(node)] != self.numbers[id(other)]:
                yield from self._of_nodes(_below(above, first), node, other)

    def _of_nodes(self, name: str, here: Node, there: Node) -> Iterator[LayoutDifference]:
        shown = name or ROOT
        for what in ("cls", "plan", "same_as", "note"):
            if getattr(here, what) != getattr(there, what):
                label = {"cls": "class", "same_as": "the same module as"}.get(what, what)
                yield LayoutDifference(
                    shown, label, getattr(here, what) or "none", getattr(there, what) or "none"
                )
        yield from self._of_units(shown, here.units, there.units)
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
            ours, theirs = (
                dict(_unit_facts(unit, self.meshes_here)),
                dict(_unit_facts(other, self.meshes_there)),
            )
            yield from _of_facts(f"{unit.kind} unit {name}", ours, theirs)

    def _of_params(
        self, above: str, here: tuple[Param, ...], there: tuple[Param, ...]
    ) -> Iterator[LayoutDifference]:
        ours, theirs = {param.name: param for param in here}, {param.name: param for param in there}
        for name in ours | theirs:
            full = _below(above, name)
            if name not in ours or name not in theirs:
                yield LayoutDifference(
                    full,
                    "parameter",
                    *(("missing", "there") if name not in ours else ("there", "missing")),
                )
                continue
            facts = (
                _param_facts(ours[name], self.meshes_here),
                _param_facts(theirs[name], self.meshes_there),
            )
            yield from _of_facts(full, *facts)


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
    """Children of the same names: label, first name, and the node on either side. Runs are cut
    where either one ends."""
    ours, theirs = (
        {b.name: b.node for b in side if not is_number(b.name)} for side in (here, there)
    )
    for name in ours | theirs:
        yield name, name, ours.get(name), theirs.get(name)
    runs_here, runs_there = _runs(here), _runs(there)
    edges = sorted({edge for start, end, _ in (*runs_here, *runs_there) for edge in (start, end)})
    for start, end in itertools.pairwise(edges):
        node, other = _at(runs_here, start), _at(runs_there, start)
        if node is not None or other is not None:
            yield str(start) if end == start + 1 else f"{start}-{end - 1}", str(start), node, other


def _runs(branches: Branches) -> list[tuple[int, int, Node]]:
    numbered = [branch for branch in branches if is_number(branch.name)]
    return sorted(
        ((int(b.name), int(b.name) + b.count, b.node) for b in numbered), key=lambda run: run[0]
    )


def _at(runs: list[tuple[int, int, Node]], number: int) -> Node | None:
    at = bisect.bisect_right(runs, number, key=lambda run: run[0]) - 1
    return runs[at][2] if at >= 0 and number < runs[at][1] else None
