"""Which collectives each part of the model causes: a tree of modules, with counts and bytes per pass.

Takes a run, gives `Comms`: the tree as recorded. `outline` gives the same tree as people want to read it, with layers that do
exactly the same folded into one. Counts and bytes are added over all ranks; a `Tally` says which ranks and in how many steps.
Records are counted with numpy: about 0.02 s for the full ring of a rank, where one event after the other takes 1 s.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from torchwhere.blackbox.layout import NO_STEP
from torchwhere.blackbox.reader import Box
from torchwhere.blackbox.run import Run
from torchwhere.events import Kind
from torchwhere.place import Pass

_PASS_ORDER = ("forward", "recompute", "backward", "optimizer", "outside")
_PASS_LABELS = {int(pass_): pass_.label for pass_ in Pass}
_DEEPEST = 64  # a name with more dots is not split further: nothing here may recurse without end

Aim = str | tuple[str, ...] | None  # what a collective is for: a unit's name, or names of parameters


class CommsKey(NamedTuple):
    """What is counted together."""

    pass_: str
    op: str
    group: str
    aim: Aim


@dataclass(slots=True)
class Tally:
    """A sum over events."""

    count: int = 0
    bytes: int = 0
    ranks: set[int] = field(default_factory=set)
    steps: int = 0  # in how many steps of how many ranks, added
    sizes: set[int] = field(default_factory=set)  # bytes of one call

    def add(self, other: Tally) -> None:
        self.count += other.count
        self.bytes += other.bytes
        self.ranks |= other.ranks
        self.steps += other.steps
        self.sizes |= other.sizes

    def to_dict(self) -> dict[str, Any]:
        return {"count": self.count, "bytes": self.bytes, "ranks": sorted(self.ranks), "steps": self.steps}


@dataclass(slots=True)
class CommsNode:
    """A module: what it issued itself, and what is below it."""

    name: str | None  # None: outside any module
    own: dict[CommsKey, Tally] = field(default_factory=dict)
    children: dict[str, CommsNode] = field(default_factory=dict)

    def total(self) -> Tally:
        """Of this module and everything below it."""
        total = Tally()
        for tally in self.own.values():
            total.add(tally)
        for child in self.children.values():
            total.add(child.total())
        return total

    def entries(self) -> list[tuple[CommsKey, Tally]]:
        """What it issued itself, in the order of a step; in the same order for modules that do the same."""

        def order(entry: tuple[CommsKey, Tally]) -> tuple[Any, ...]:
            pass_, op, group, aim = entry[0]
            return _PASS_ORDER.index(pass_), op, group, repr(_relative(aim, self.name or ""))

        return sorted(self.own.items(), key=order)

    def to_dict(self) -> dict[str, Any]:
        total = self.total()
        return {
            "module": self.name,
            "count": total.count,
            "bytes": total.bytes,
            "collectives": [
                {"pass": key.pass_, "op": key.op, "group": key.group, "for": key.aim, **tally.to_dict()}
                for key, tally in self.entries()
            ],
            "children": [child.to_dict() for child in self.children.values()],
        }


@dataclass(slots=True)
class Comms:
    """The collectives of a run: below the model's root, and outside any module."""

    root: CommsNode
    outside: CommsNode
    ranks: set[int] = field(default_factory=set)
    steps: tuple[int, int] | None = None  # first and last step with a collective
    groups: dict[str, int] = field(default_factory=dict)  # size of each group, by the label used in the keys
    overwritten: dict[int, int] = field(default_factory=dict)  # by rank: events older than its ring, not counted here

    def to_dict(self) -> dict[str, Any]:
        return {
            "ranks": sorted(self.ranks),
            "steps": list(self.steps) if self.steps else None,
            "groups": self.groups,
            "overwritten": {str(rank): count for rank, count in self.overwritten.items()},
            "root": self.root.to_dict(),
            "outside": self.outside.to_dict(),
        }


def comms(run: Run, *, ranks: set[int] | None = None) -> Comms:
    """Add up the collectives of a run, of all its ranks or of some."""
    found = Comms(root=CommsNode(name=""), outside=CommsNode(name=None))
    for rank, box in sorted(run.boxes.items()):
        if ranks is None or rank in ranks:
            _add_box(found, box)
    _sort(found.root)
    return found


def _add_box(found: Comms, box: Box) -> None:
    rows = box.records[box.records["kind"] == Kind.COLLECTIVE]
    if box.counts.overwritten:
        found.overwritten[box.rank] = box.counts.overwritten
    if not len(rows):
        return
    if len(steps := rows["step"][rows["step"] != NO_STEP]):
        first, last = found.steps or (int(steps[0]), int(steps[0]))
        found.steps = min(first, int(steps.min())), max(last, int(steps.max()))
    found.ranks.add(box.rank)
    which = _numbered(rows[name] for name in ("pass", "module", "what", "aim"))
    _, first_at, counts = np.unique(which, return_index=True, return_counts=True)
    tallies = {at: _count(found, box, rows[first_at[at]], int(counts[at])) for at in map(int, np.argsort(first_at))}
    _add_steps([tallies[at] for at in range(len(tallies))], which, rows["step"])


def _numbered(columns: Iterable[Any]) -> Any:
    """A number for each row, the same for equal rows: column by column, which takes a fifth of sorting whole rows."""
    numbers: Any = 0
    for column in columns:
        values, own = np.unique(column, return_inverse=True)
        _, numbers = np.unique(numbers * len(values) + own, return_inverse=True)
    return numbers


def _count(found: Comms, box: Box, row: Any, count: int) -> Tally:
    """Add `count` collectives like the one in `row` to the tally they belong to."""
    call = box.value(int(row["what"]))
    call = call if isinstance(call, dict) else {}
    module = box.name(int(row["module"])) if row["module"] else None
    node = found.outside if module is None else _descend(found.root, module)
    aim = box.value(int(row["aim"])) if row["aim"] else None
    key = CommsKey(
        _PASS_LABELS.get(int(row["pass"]), "outside"),
        str(call.get("op") or "?"),
        _group_label(found, box, str(call.get("group"))),
        tuple(map(str, aim)) if isinstance(aim, list) else aim if aim is None else str(aim),
    )
    size = call.get("bytes")
    size = size if isinstance(size, int) else 0
    tally = node.own.setdefault(key, Tally())
    tally.add(Tally(count, count * size, {box.rank}, 0, {size}))
    return tally


def _add_steps(tallies: list[Tally], which: Any, steps: Any) -> None:
    """Add to each tally in how many steps it was met; `which` says for each step in `steps` the place of its tally."""
    distinct = list({id(tally): tally for tally in tallies}.values())  # calls of several shapes share a tally
    numbers = {id(tally): number for number, tally in enumerate(distinct)}
    number_of = np.array([numbers[id(tally)] for tally in tallies])
    met = np.unique(number_of[which] << 32 | steps) >> 32
    for tally, count in zip(distinct, np.bincount(met, minlength=len(distinct)), strict=True):
        tally.steps += int(count)


def _descend(root: CommsNode, module: str) -> CommsNode:
    node, path = root, ""
    for part in module.split(".", _DEEPEST) if module else ():
        path = f"{path}.{part}" if path else part
        node = node.children.setdefault(part, CommsNode(name=path))
    return node


def _group_label(found: Comms, box: Box, name: str) -> str:
    """What to call a group: its mesh dimension or description. Sibling groups of one dimension share the label."""
    group = box.groups().get(name, {})
    desc = str(group.get("desc") or "")
    label = str(group.get("mesh_dim") or (desc if desc not in ("", "undefined") else f"group {name}"))
    members = group.get("ranks")
    found.groups[label] = max(found.groups.get(label, 0), len(members) if isinstance(members, list) else 0)
    return label


def _sort(node: CommsNode) -> None:
    """Children in the order they were first seen; numbered ones by number, wherever the ring begins."""
    if all(map(_is_number, node.children)):
        node.children = dict(sorted(node.children.items(), key=lambda item: int(item[0])))
    for child in node.children.values():
        _sort(child)


# -- as people want to read it ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Branch:
    """A line of the outline: one module, or several neighbours that do the same (`layers.1-31`)."""

    label: str  # relative to the branch above
    nodes: list[CommsNode]
    branches: list[Branch]

    @property
    def name(self) -> str | None:
        """The full name: `layers.1-31`."""
        first, last = self.nodes[0].name, self.nodes[-1].name
        return first if first is None or last is None else _span(first, last)

    @property
    def is_single(self) -> bool:
        """Whether one line says it all."""
        return not self.branches and len(self.nodes[0].own) == 1

    def total(self) -> Tally:
        total = Tally()
        for node in self.nodes:
            total.add(node.total())
        return total

    def entries(self) -> Iterator[tuple[CommsKey, Tally]]:
        """What these modules issued themselves, added up; an aim that differs from one to the next is given as a span."""
        for same in zip(*(node.entries() for node in self.nodes), strict=True):
            tally = Tally()
            for _, one in same:
                tally.add(one)
            tally.steps = max(one.steps for _, one in same)  # the same steps, not as many again
            first, last = same[0][0], same[-1][0]
            yield first._replace(aim=_aim_span(first.aim, last.aim)), tally


def outline(root: CommsNode) -> Branch:
    """The tree below a root, folded."""
    return Branch(label="", nodes=[root], branches=_branches([root]))


def _branches(nodes: list[CommsNode]) -> list[Branch]:
    """What is below some modules that do the same."""
    found = []
    for names in _alike(nodes[0]):
        label = names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"
        below = [node.children[name] for node in nodes for name in names]
        branch = Branch(label=label, nodes=below, branches=_branches(below))
        found += _hoisted(branch) if _is_container(branch) else [branch]
    return found


def _is_container(branch: Branch) -> bool:
    """A module that issues nothing itself needs no line of its own if there is one thing below it, a list of layers, or
    nothing but single lines."""
    node, below = branch.nodes[0], branch.branches
    if node.own:
        return False
    is_layer = branch.label[-1:].isdigit()
    return len(below) == 1 or all(map(_is_number, node.children)) or (not is_layer and all(b.is_single for b in below))


def _hoisted(branch: Branch) -> list[Branch]:
    return [Branch(f"{branch.label}.{below.label}", below.nodes, below.branches) for below in branch.branches]


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
    return _is_number(name) and _is_number(following) and int(following) == int(name) + 1


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) < 10


def _shape(node: CommsNode, seen_from: str) -> Any:
    """Everything a module and those below it do, with the names in it seen from one of them: equal if they do the same."""
    own = [(*key[:3], _relative(key.aim, seen_from), t.count, t.bytes, t.steps, sorted(t.ranks)) for key, t in node.own.items()]
    return sorted(own, key=repr), [(name, _shape(child, seen_from)) for name, child in node.children.items()]


def _relative(aim: Aim, seen_from: str) -> Aim:
    """`layers.0.up` seen from `layers.1` is `layers.<-1>.up`."""
    if isinstance(aim, tuple):
        return tuple(str(_relative(name, seen_from)) for name in aim)
    parts = (aim or "").split(".")
    for at, (part, own) in enumerate(zip(parts, seen_from.split("."), strict=False)):
        if _is_number(part) and _is_number(own):
            parts[at] = f"<{int(part) - int(own):+d}>"
        elif part != own:
            break
    return aim if aim is None else ".".join(parts)


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
    return ", ".join(listed) if len(listed) <= 2 else f"{listed[0]} .. {listed[-1]} ({len(listed)} parameters)"
