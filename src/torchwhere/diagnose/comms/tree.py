"""Counts and bytes of the collectives that each module causes, as a tree of modules.

Takes a run, or the live counts of `sums.py`, gives `Comms`. Counts and bytes are summed over all
ranks; a `CommsSum` also has the ranks, the number of steps and the source lines. `outline.py`
folds equal layers for display.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.run import BoxRun
from torchwhere.blackbox.string_table import json_int, shown_description
from torchwhere.core.place import PASS_LABELS, line_text
from torchwhere.core.results import Shown, Tabular, plain_fields
from torchwhere.diagnose.comms.sums import Sums, sums

PASSES = ("forward", "recompute", "backward", "optimizer", "outside")  # in the order of a step
_DEEPEST = 64  # limits recursion: a name with more dots is not split further

GroupKey = TypeVar("GroupKey", bound=str | None)
# what a collective serves: the name of a unit, or the names of parameters
Beneficiary = str | tuple[str, ...] | None


class CommsKey(NamedTuple):
    """Calls with the same key are counted together."""

    pass_: str
    op: str
    group: str
    beneficiary: Beneficiary

    def to_dict(self) -> dict[str, Any]:
        return dict(zip(("pass", "op", "group", "for"), self, strict=True))


@dataclass(slots=True)
class CommsSum:
    """Totals over the calls of one key."""

    count: int = 0
    bytes: int = 0
    ranks: set[int] = field(default_factory=set)
    steps: int = 0  # number of (rank, step) pairs with such a call
    sizes: set[int] = field(default_factory=set)  # bytes of one call
    lines: dict[str, int] = field(default_factory=dict)  # calls from each line of the user's code

    def add(self, other: CommsSum) -> None:
        self.count += other.count
        self.bytes += other.bytes
        self.ranks |= other.ranks
        self.steps += other.steps
        self.sizes |= other.sizes
        for line, count in other.lines.items():
            self.lines[line] = self.lines.get(line, 0) + count

    def to_dict(self) -> dict[str, Any]:
        return plain_fields(self, "count", "bytes", "ranks", "steps", "lines")


@dataclass(slots=True, repr=False)
class CommsNode(Shown):
    """A module: the collectives it issued itself, and its child modules."""

    name: str | None  # None: outside any module
    own: dict[CommsKey, CommsSum] = field(default_factory=dict)
    children: dict[str, CommsNode] = field(default_factory=dict)

    def total(self) -> CommsSum:
        """The totals of this module and everything below it."""
        total = CommsSum()
        for counter in self.own.values():
            total.add(counter)
        for child in self.children.values():
            total.add(child.total())
        return total

    def entries(self) -> list[tuple[CommsKey, CommsSum]]:
        """Its own collectives in the order of a step. Modules with equal collectives list them in
        equal order."""

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
            "collectives": [key.to_dict() | counter.to_dict() for key, counter in self.entries()],
            "children": [child.to_dict() for child in self.children.values()],
        }


@dataclass(slots=True, repr=False)
class Comms(Shown, Tabular):
    """The collectives of a run or of a block, as a tree of modules. `str()` shows the tree.

    Attributes:
        root: The root module of the model, with the modules below it.
        outside: The collectives outside any module.
        ranks: The ranks that were counted.
        steps: The first and the last step with a collective.
        groups: The size of each process group, by its label.
        overwritten: For each rank, the number of events that its ring has overwritten. They are not
            counted.

    Example:
        comms = torchwhere.read_run("run/").comms()
        print(comms.counts["all_reduce"], comms.bytes)
    """

    root: CommsNode = field(default_factory=lambda: CommsNode(name=""))
    outside: CommsNode = field(default_factory=lambda: CommsNode(name=None))
    ranks: set[int] = field(default_factory=set)
    steps: tuple[int, int] | None = None
    groups: dict[str, int] = field(default_factory=dict)
    overwritten: dict[int, int] = field(default_factory=dict)

    def walk(self) -> Iterator[tuple[str | None, CommsKey, CommsSum]]:
        """Yield all totals in tree order, with the module that issued the calls and their key."""
        pending = [self.outside, self.root]
        while pending:
            node = pending.pop()
            yield from ((node.name, key, counter) for key, counter in node.entries())
            pending += reversed(node.children.values())

    @property
    def counts(self) -> Counter[str]:
        """Calls of each collective, by its public name."""
        return self._by(lambda module, key: None)[None]

    @property
    def by_module(self) -> dict[str | None, Counter[str]]:
        """Calls by the module that issued them: "" is the root, None is outside any module."""
        return self._by(lambda module, key: module)

    @property
    def by_pass(self) -> dict[str, Counter[str]]:
        """Calls by pass."""
        return self._by(lambda module, key: key.pass_)

    @property
    def by_group(self) -> dict[str, Counter[str]]:
        """Calls by process group: its mesh dimension, or else its description."""
        return self._by(lambda module, key: key.group)

    @property
    def by_line(self) -> dict[str | None, Counter[str]]:
        """Calls by line of the user's code; None where the line is unknown."""
        counts: defaultdict[str | None, Counter[str]] = defaultdict(Counter)
        for _, key, counter in self.walk():
            for line, count in counter.lines.items():
                counts[line][key.op] += count
            if rest := counter.count - sum(counter.lines.values()):
                counts[None][key.op] += rest
        return counts

    def _by(
        self, group_key: Callable[[str | None, CommsKey], GroupKey]
    ) -> dict[GroupKey, Counter[str]]:
        counts: defaultdict[GroupKey, Counter[str]] = defaultdict(Counter)
        for module, key, counter in self.walk():
            counts[group_key(module, key)][key.op] += counter.count
        return counts

    @property
    def bytes(self) -> int:
        """Bytes of all collectives, summed over all ranks."""
        return self.root.total().bytes + self.outside.total().bytes

    def only(
        self,
        *,
        module: str | None = None,
        pass_: str | None = None,
        group: str | None = None,
        for_: str | None = None,
    ) -> Comms:
        """Return some of the collectives. Without arguments it returns all of them.

        Args:
            module: Only collectives issued in this module or below it.
            pass_: Only collectives of this pass.
            group: Only collectives on this process group.
            for_: Only collectives that move parameters of this module.
        """
        chosen = Comms(
            ranks=self.ranks, steps=self.steps, groups=self.groups, overwritten=self.overwritten
        )
        for name, key, counter in self.walk():
            if (
                (module is None or (name is not None and is_within(name, module)))
                and pass_ in (None, key.pass_)
                and group in (None, key.group)
                and (for_ is None or _serves(key.beneficiary, name, for_))
            ):
                node = chosen.outside if name is None else descend(chosen.root, name)
                node.own[key] = counter
        return chosen

    def as_rows(self) -> list[dict[str, Any]]:
        """Return one row for each module, pass, op, group and beneficiary.

        A row has the calls and bytes summed over all ranks, and the number of ranks and steps.
        """
        return [
            {
                "module": module,
                **key.to_dict(),
                "count": counter.count,
                "bytes": counter.bytes,
                "ranks": len(counter.ranks),
                "steps": counter.steps,
            }
            for module, key, counter in self.walk()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the tree as values for JSON."""
        names = ("ranks", "steps", "groups", "overwritten", "root", "outside")
        return plain_fields(self, *names)


def is_within(name: str, module: str) -> bool:
    """Whether a module or parameter is `module` or lies below it."""
    return not module or name == module or name.startswith(f"{module}.")


def _serves(beneficiary: Beneficiary, issuer: str | None, module: str) -> bool:
    """Whether a collective moves data of a module. Without a beneficiary it serves its issuer."""
    served = issuer if beneficiary is None else beneficiary
    names = served if isinstance(served, tuple) else (served,)
    return any(name is not None and is_within(name, module) for name in names)


def comms(run: BoxRun, *, ranks: set[int] | None = None) -> Comms:
    """Sum the collectives of a run over all its ranks, or over `ranks`."""
    total = Comms()
    for rank, box in run.in_order(ranks):
        if box.counts.overwritten:
            total.overwritten[rank] = box.counts.overwritten
        add(total, box, sums(box.records))
    return total


def add(total: Comms, box: Box, counted: Sums) -> None:
    """Add the counts of one rank. The box resolves the ids in the keys."""
    if not counted.counts:
        return
    if (span := counted.span) is not None:
        first, last = total.steps or span
        total.steps = min(first, span[0]), max(last, span[1])
    total.ranks.add(box.rank)
    counters = [
        _count(total, box, key, count)
        for key, count in zip(counted.keys, counted.counts, strict=True)
    ]
    _add_steps(counters, counted.key_index, counted.steps)
    sort_children(total.root)


def _count(total: Comms, box: Box, ids: tuple[int, ...], count: int) -> CommsSum:
    """Add `count` equal collectives to their counter."""
    pass_, module_id, call_id, beneficiary_id, line_id = ids
    call = box.value(call_id)
    call = call if isinstance(call, dict) else {}
    module = box.name(module_id) if module_id else None
    node = total.outside if module is None else descend(total.root, module)
    key = CommsKey(
        PASS_LABELS.get(pass_, "outside"),
        str(call.get("op") or "?"),
        _group_label(total, box, str(call.get("group"))),
        _beneficiary(box.value(beneficiary_id) if beneficiary_id else None),
    )
    size = json_int(call, "bytes")
    lines = {line_text(box.name(line_id) or "?"): count} if line_id else {}
    counter = node.own.setdefault(key, CommsSum())
    counter.add(CommsSum(count, count * size, {box.rank}, 0, {size}, lines))
    return counter


def _beneficiary(value: Any) -> Beneficiary:
    if isinstance(value, list):
        return tuple(map(str, value))
    return None if value is None else str(value)


def _add_steps(counters: list[CommsSum], key_index: Any, steps: Any) -> None:
    """Add to each counter its number of steps; `key_index[i]` is the counter of `steps[i]`."""
    # calls of several shapes share a counter
    distinct = list({id(counter): counter for counter in counters}.values())
    numbers = {id(counter): number for number, counter in enumerate(distinct)}
    number_of = np.array([numbers[id(counter)] for counter in counters])
    with_step = np.unique(number_of[key_index] << 32 | steps) >> 32
    counts = np.bincount(with_step, minlength=len(distinct))
    for counter, count in zip(distinct, counts, strict=True):
        counter.steps += int(count)


def descend(root: CommsNode, module: str) -> CommsNode:
    """The node of a module below a root. Creates missing nodes."""
    node, path = root, ""
    for part in module.split(".", _DEEPEST) if module else ():
        path = f"{path}.{part}" if path else part
        node = node.children.setdefault(part, CommsNode(name=path))
    return node


def group_label(box: Box, name: str) -> str:
    """The displayed name of a group: its mesh dimension or description. Sibling groups of one
    dimension share it."""
    group = box.groups().get(name, {})
    desc = shown_description(str(group.get("desc") or ""))
    return str(group.get("mesh_dim") or desc or f"group {name}")


def _group_label(total: Comms, box: Box, name: str) -> str:
    label, members = group_label(box, name), box.groups().get(name, {}).get("ranks")
    size = len(members) if isinstance(members, list) else 0
    total.groups[label] = max(total.groups.get(label, 0), size)
    return label


def sort_children(node: CommsNode) -> None:
    """Sort numbered children by number, since the ring may begin anywhere. Others keep the order
    of first use."""
    if all(map(is_number, node.children)):
        node.children = dict(sorted(node.children.items(), key=lambda item: int(item[0])))
    for child in node.children.values():
        sort_children(child)


def is_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) < 10


def relative(beneficiary: Beneficiary, seen_from: str) -> Beneficiary:
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
