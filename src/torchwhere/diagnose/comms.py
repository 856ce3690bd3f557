"""Which collectives each part of the model causes: a tree of modules, with counts and bytes per pass.

Takes a run, gives a `CommsNode` tree. Counts are added over all ranks; `ranks` says how many took part.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torchwhere.blackbox.run import Run
from torchwhere.place import shown

OUTSIDE = None


@dataclass(frozen=True, slots=True, order=True)
class CommsKey:
    """What is counted together."""

    pass_: str
    op: str
    group: str
    aim: str  # what it is for, where that is another module than the one that issued it


@dataclass(slots=True)
class Tally:
    """A sum over events."""

    count: int = 0
    bytes: int = 0
    ranks: set[int] = field(default_factory=set)

    def add(self, rank: int, nbytes: int) -> None:
        self.count += 1
        self.bytes += nbytes
        self.ranks.add(rank)


@dataclass(slots=True)
class CommsNode:
    """A module: what it issued itself, and what is below it."""

    name: str | None  # None: outside any module
    own: dict[CommsKey, Tally] = field(default_factory=dict)
    children: dict[str, CommsNode] = field(default_factory=dict)

    def total(self) -> Tally:
        """Of this module and everything below it."""
        total = Tally()
        pending = [self]
        while pending:
            node = pending.pop()
            for tally in node.own.values():
                total.count += tally.count
                total.bytes += tally.bytes
                total.ranks |= tally.ranks
            pending.extend(node.children.values())
        return total

    def to_dict(self) -> dict[str, Any]:
        total = self.total()
        return {
            "module": self.name,
            "count": total.count,
            "bytes": total.bytes,
            "collectives": [
                {
                    "pass": key.pass_,
                    "op": key.op,
                    "group": key.group,
                    "for": key.aim or None,
                    "count": tally.count,
                    "bytes": tally.bytes,
                    "ranks": sorted(tally.ranks),
                }
                for key, tally in sorted(self.own.items())
            ],
            "children": [child.to_dict() for child in self.children.values()],
        }


@dataclass(slots=True)
class Comms:
    """The collectives of a run: below the model's root, and outside any module."""

    root: CommsNode
    outside: CommsNode
    ranks: int
    steps: tuple[int, int] | None  # first and last step seen

    def to_dict(self) -> dict[str, Any]:
        return {
            "ranks": self.ranks,
            "steps": list(self.steps) if self.steps else None,
            "root": self.root.to_dict(),
            "outside": self.outside.to_dict(),
        }


def comms(run: Run, *, ranks: set[int] | None = None) -> Comms:
    """Add up the collectives of a run."""
    root, outside = CommsNode(name=""), CommsNode(name=OUTSIDE)
    steps: list[int] = []
    seen: set[int] = set()
    labels = _group_labels(run)
    for event in run.events(ranks=ranks, kinds={"collective"}):
        place, fields = event.place, event.fields
        node = outside if place.module is None else _descend(root, place.module)
        group = labels.get(str(fields.get("group")), str(fields.get("group")))
        key = CommsKey(place.pass_, str(fields.get("op")), group, _aim(fields.get("for"), place.module))
        node.own.setdefault(key, Tally()).add(place.rank, int(fields.get("bytes") or 0))
        seen.add(place.rank)
        if place.step is not None:
            steps.append(place.step)
    return Comms(root=root, outside=outside, ranks=len(seen), steps=(min(steps), max(steps)) if steps else None)


def _descend(root: CommsNode, module: str) -> CommsNode:
    node, path = root, ""
    for part in module.split(".") if module else ():
        path = f"{path}.{part}" if path else part
        node = node.children.setdefault(part, CommsNode(name=path))
    return node


def _aim(aim: Any, module: str | None) -> str:
    if aim is None or aim == module:
        return ""
    if isinstance(aim, list):
        return _params(aim)
    return shown(str(aim))


def _params(names: Iterable[str]) -> str:
    listed = list(names)
    if len(listed) <= 2:
        return ", ".join(listed)
    return f"{listed[0]} .. {listed[-1]} ({len(listed)} parameters)"


def _group_labels(run: Run) -> dict[str, str]:
    """What to call a group: its mesh dimension or description. Sibling groups of one dimension share the label."""
    labels: dict[str, str] = {}
    for box in run.boxes.values():
        for name, group in box.groups().items():
            desc = str(group.get("desc") or "")
            labels[name] = str(group.get("mesh_dim") or (desc if desc not in ("", "undefined") else f"group {name}"))
    return labels
