"""Which collectives each part of the model causes: a tree of modules, with counts and bytes per
pass.

Takes a run, or what was counted live (`sums.py`), gives `Comms`: the tree as recorded. Counts and
bytes are added over all ranks; a `CommsSum` says which ranks, in how many steps, from which lines.
`outline.py` makes of it what people want to read.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.run import BoxRun
from torchwhere.core.place import Pass
from torchwhere.core.results import Shown, Tabular
from torchwhere.diagnose.comms.sums import Sums, sums

PASSES = ("forward", "recompute", "backward", "optimizer", "outside")  # in the order of a step
_PASS_LABELS = {int(pass_): pass_.label for pass_ in Pass}
_DEEPEST = 64  # a name with more dots is not split further: nothing here may recurse without end

Sorting = TypeVar("Sorting", bound=str | None)
# what a collective is for: a unit's name, or names of parameters
Aim = str | tuple[str, ...] | None


class CommsKey(NamedTuple):
    """What is counted together."""

    pass_: str
    op: str
    group: str
    beneficiary: Aim


@dataclass(slots=True)
class CommsSum:
    """A sum over events."""

    count: int = 0
    bytes: int = 0
    ranks: set[int] = field(default_factory=set)
    steps: int = 0  # in how many steps of how many ranks, added
    sizes: set[int] = field(default_factory=set)  # bytes of one call
    # how many from each line of the user's code
    lines: dict[str, int] = field(default_factory=dict)

    def add(self, other: CommsSum) -> None:
        self.count += other.count
        self.bytes += other.bytes
        self.ranks |= other.ranks
        self.steps += other.steps
        self.sizes |= other.sizes
        for line, count in other.lines.items():
            self.lines[line] = self.lines.get(line, 0) + count

    def to_dict(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "bytes": self.bytes,
            "ranks": sorted(self.ranks),
            "steps": self.steps,
            "lines": self.lines,
        }


@dataclass(slots=True, repr=False)
class CommsNode(Shown):
    """A module: what it issued itself, and what is below it."""

    name: str | None  # None: outside any module
    own: dict[CommsKey, CommsSum] = field(default_factory=dict)
    children: dict[str, CommsNode] = field(default_factory=dict)

    def total(self) -> CommsSum:
        """Of this module and everything below it."""
        total = CommsSum()
        for counter in self.own.values():
            total.add(counter)
        for child in self.children.values():
            total.add(child.total())
        return total

    def entries(self) -> list[tuple[CommsKey, CommsSum]]:
        """What it issued itself, in the order of a step; in the same order for modules that do the
        same."""

        def order(entry: tuple[CommsKey, CommsSum]) -> tuple[Any, ...]:
            pass_, op, group, beneficiary = entry[0]
            return PASSES.index(pass_), op, group, repr(relative(beneficiary, self.name or ""))

        return sorted(self.own.items(), key=order)

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
                    "for": key.beneficiary,
                    **counter.to_dict(),
                }
                for key, counter in self.entries()
            ],
            "children": [child.to_dict() for child in self.children.values()],
        }


@dataclass(slots=True, repr=False)
class Comms(Shown, Tabular):
    """The collectives of a run: below the model's root, and outside any module."""

    root: CommsNode = field(default_factory=lambda: CommsNode(name=""))
    outside: CommsNode = field(default_factory=lambda: CommsNode(name=None))
    ranks: set[int] = field(default_factory=set)
    steps: tuple[int, int] | None = None  # first and last step with a collective
    # size of each group, by the label used in the keys
    groups: dict[str, int] = field(default_factory=dict)
    # by rank: events older than its ring, not counted here
    overwritten: dict[int, int] = field(default_factory=dict)

    def walk(self) -> Iterator[tuple[str | None, CommsKey, CommsSum]]:
        """Everything that was counted: the module that issued it, what it is, and how much of it.
        In the tree's order."""
        pending = [self.outside, self.root]
        while pending:
            node = pending.pop()
            yield from ((node.name, key, counter) for key, counter in node.entries())
            pending += reversed(node.children.values())

    @property
    def counts(self) -> Counter[str]:
        """How often each collective was issued, by its public name."""
        return self._by(lambda module, key: None)[None]

    @property
    def by_module(self) -> dict[str | None, Counter[str]]:
        """The same by the very module that issued it: "" is the root, None outside any module."""
        return self._by(lambda module, key: module)

    @property
    def by_pass(self) -> dict[str, Counter[str]]:
        return self._by(lambda module, key: key.pass_)

    @property
    def by_group(self) -> dict[str, Counter[str]]:
        return self._by(lambda module, key: key.group)

    @property
    def by_line(self) -> dict[str | None, Counter[str]]:
        """By the line of the user's code that led to it; None where there is none."""
        found: defaultdict[str | None, Counter[str]] = defaultdict(Counter)
        for _, key, counter in self.walk():
            for line, count in counter.lines.items():
                found[line][key.op] += count
            if rest := counter.count - sum(counter.lines.values()):
                found[None][key.op] += rest
        return found

    def _by(self, sort: Callable[[str | None, CommsKey], Sorting]) -> dict[Sorting, Counter[str]]:
        found: defaultdict[Sorting, Counter[str]] = defaultdict(Counter)
        for module, key, counter in self.walk():
            found[sort(module, key)][key.op] += counter.count
        return found

    @property
    def bytes(self) -> int:
        return self.root.total().bytes + self.outside.total().bytes

    def only(
        self,
        *,
        module: str | None = None,
        pass_: str | None = None,
        group: str | None = None,
        for_: str | None = None,
    ) -> Comms:
        """What is left of it: issued in a module and those below it, in a pass, on a group, to
        serve a module."""
        found = Comms(
            ranks=self.ranks, steps=self.steps, groups=self.groups, overwritten=self.overwritten
        )
        for name, key, counter in self.walk():
            is_wanted = (module is None or (name is not None and is_within(name, module))) and (
                (pass_ is None or key.pass_ == pass_) and (group is None or key.group == group)
            )
            if is_wanted and (for_ is None or _serves(key.beneficiary, name, for_)):
                node = found.outside if name is None else descend(found.root, name)
                node.own[key] = counter
        return found

    def as_rows(self) -> list[dict[str, Any]]:
        """What was counted, one a row: module, pass, op, group, what for; calls and bytes of all
        ranks, and of how many."""
        return [
            {
                "module": module,
                "pass": key.pass_,
                "op": key.op,
                "group": key.group,
                "for": key.beneficiary,
            }
            | {
                "count": counter.count,
                "bytes": counter.bytes,
                "ranks": len(counter.ranks),
                "steps": counter.steps,
            }
            for module, key, counter in self.walk()
        ]

    def to_dict(self) -> dict[str, Any]:
        return {
            "ranks": sorted(self.ranks),
            "steps": list(self.steps) if self.steps else None,
            "groups": self.groups,
            "overwritten": {str(rank): count for rank, count in self.overwritten.items()},
            "root": self.root.to_dict(),
            "outside": self.outside.to_dict(),
        }


def is_within(name: str, module: str) -> bool:
    """Whether a module, or a parameter, is that module or below it."""
    return not module or name == module or name.startswith(f"{module}.")


def _serves(beneficiary: Aim, issuer: str | None, module: str) -> bool:
    """Whether a collective moves what belongs to a module. One that says nothing else serves the
    module that issued it."""
    names = (
        (issuer,)
        if beneficiary is None
        else beneficiary
        if isinstance(beneficiary, tuple)
        else (beneficiary,)
    )
    return any(name is not None and is_within(name, module) for name in names)


def comms(run: BoxRun, *, ranks: set[int] | None = None) -> Comms:
    """Add up the collectives of a run, of all its ranks or of some."""
    found = Comms()
    for rank, box in run.in_order():
        if ranks is None or rank in ranks:
            if box.counts.overwritten:
                found.overwritten[rank] = box.counts.overwritten
            add(found, box, sums(box.records))
    return found


def add(found: Comms, box: Box, counted: Sums) -> None:
    """Add what was counted on one rank; the box says what the numbers in it mean."""
    if not counted.counts:
        return
    if (span := counted.span) is not None:
        first, last = found.steps or span
        found.steps = min(first, span[0]), max(last, span[1])
    found.ranks.add(box.rank)
    counters = [
        _count(found, box, key, count)
        for key, count in zip(counted.keys, counted.counts, strict=True)
    ]
    _add_steps(counters, counted.which, counted.steps)
    sort_children(found.root)


def _count(found: Comms, box: Box, counted: tuple[int, ...], count: int) -> CommsSum:
    """Add `count` collectives that are alike to the counter they belong to."""
    pass_, module_id, what, aim_id, line = counted
    call = box.value(what)
    call = call if isinstance(call, dict) else {}
    module = box.name(module_id) if module_id else None
    node = found.outside if module is None else descend(found.root, module)
    beneficiary = box.value(aim_id) if aim_id else None
    key = CommsKey(
        _PASS_LABELS.get(pass_, "outside"),
        str(call.get("op") or "?"),
        _group_label(found, box, str(call.get("group"))),
        tuple(map(str, beneficiary))
        if isinstance(beneficiary, list)
        else beneficiary
        if beneficiary is None
        else str(beneficiary),
    )
    size = call.get("bytes")
    size = size if isinstance(size, int) else 0
    lines = {box.name(line) or "?": count} if line else {}
    counter = node.own.setdefault(key, CommsSum())
    counter.add(CommsSum(count, count * size, {box.rank}, 0, {size}, lines))
    return counter


def _add_steps(counters: list[CommsSum], which: Any, steps: Any) -> None:
    """Add to each counter in how many steps it was met; `which` says for each step in `steps` the
    place of its counter."""
    # calls of several shapes share a counter
    distinct = list({id(counter): counter for counter in counters}.values())
    numbers = {id(counter): number for number, counter in enumerate(distinct)}
    number_of = np.array([numbers[id(counter)] for counter in counters])
    met = np.unique(number_of[which] << 32 | steps) >> 32
    for counter, count in zip(distinct, np.bincount(met, minlength=len(distinct)), strict=True):
        counter.steps += int(count)


def descend(root: CommsNode, module: str) -> CommsNode:
    """The node of a module below a root, made where there is none."""
    node, path = root, ""
    for part in module.split(".", _DEEPEST) if module else ():
        path = f"{path}.{part}" if path else part
        node = node.children.setdefault(part, CommsNode(name=path))
    return node


def group_label(box: Box, name: str) -> str:
    """What to call a group: its mesh dimension or description. Sibling groups of one dimension
    share the label."""
    group = box.groups().get(name, {})
    desc = str(group.get("desc") or "")
    return str(
        group.get("mesh_dim") or (desc if desc not in ("", "undefined") else f"group {name}")
    )


def _group_label(found: Comms, box: Box, name: str) -> str:
    label, members = group_label(box, name), box.groups().get(name, {}).get("ranks")
    found.groups[label] = max(
        found.groups.get(label, 0), len(members) if isinstance(members, list) else 0
    )
    return label


def sort_children(node: CommsNode) -> None:
    """Children in the order they were first seen; numbered ones by number, wherever the ring
    begins."""
    if all(map(is_number, node.children)):
        node.children = dict(sorted(node.children.items(), key=lambda item: int(item[0])))
    for child in node.children.values():
        sort_children(child)


def is_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) < 10


def relative(beneficiary: Aim, seen_from: str) -> Aim:
    """`layers.0.up` seen from `layers.1` is `layers.<-1>.up`."""
    if isinstance(beneficiary, tuple):
        return tuple(str(relative(name, seen_from)) for name in beneficiary)
    parts = (beneficiary or "").split(".")
    for at, (part, own) in enumerate(zip(parts, seen_from.split("."), strict=False)):
        if is_number(part) and is_number(own):
            parts[at] = f"<{int(part) - int(own):+d}>"
        elif part != own:
            break
    return beneficiary if beneficiary is None else ".".join(parts)
