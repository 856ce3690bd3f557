"""A golden snapshot of the collectives: what a program does today, kept in a file, to be told when
it does something else.

Takes `Comms`, gives rows; a file holds one row a line, as JSON, in the order of the tree, so that a
reviewer sees in a diff of the file which module does what. Lines, steps and ranks are not kept:
they change when nothing has. `differences` puts what parted side by side, by module and pass.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from torchwhere.diagnose.comms.tree import PASSES, Aim, Comms

VERSION = 1


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """So many collectives of one sort."""

    module: str | None
    pass_: str
    op: str
    group: str
    beneficiary: Aim
    count: int
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        names = {"pass_": "pass", "beneficiary": "for"}
        return {names.get(name, name): value for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class CommsDifference:
    """What a module did not do any more in a pass, and what it did instead."""

    module: str | None
    pass_: str
    expected: tuple[SnapshotRow, ...]
    found: tuple[SnapshotRow, ...]


def rows(found: Comms) -> list[SnapshotRow]:
    return [
        SnapshotRow(module, *key, counter.count, counter.bytes)
        for module, key, counter in found.walk()
    ]


def dumps(kept: Iterable[SnapshotRow]) -> str:
    """The text of a snapshot file."""
    lines = ",\n".join(f" {json.dumps(row.to_dict())}" for row in kept)
    return f'{{"comms snapshot": {VERSION}, "collectives": [\n{lines}\n]}}\n'


def loads(text: str) -> list[SnapshotRow]:
    """The rows of a snapshot file; ValueError if it is none."""
    try:
        read = json.loads(text)
        version = read["comms snapshot"]
        kept = [_row(one) for one in read["collectives"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a snapshot of collectives: {error}") from None
    if version != VERSION:
        raise ValueError(f"a snapshot of version {version}, this torchwhere reads {VERSION}")
    return kept


def _row(fields: dict[str, Any]) -> SnapshotRow:
    beneficiary = fields["for"]
    count, size = int(fields["count"]), int(fields["bytes"])
    beneficiary = tuple(map(str, beneficiary)) if isinstance(beneficiary, list) else beneficiary
    return SnapshotRow(
        fields["module"],
        str(fields["pass"]),
        str(fields["op"]),
        str(fields["group"]),
        beneficiary,
        count,
        size,
    )


def differences(
    expected: Iterable[SnapshotRow], found: Iterable[SnapshotRow]
) -> list[CommsDifference]:
    """What is in one and not in the other, module by module, as the tree has them."""
    were, are = list(expected), list(found)
    modules = {
        module: at for at, module in enumerate(dict.fromkeys(row.module for row in (*are, *were)))
    }
    parted: dict[tuple[str | None, str], tuple[list[SnapshotRow], list[SnapshotRow]]] = {}
    for side, (own, other) in enumerate(((were, set(are)), (are, set(were)))):
        for row in own:
            if row not in other:
                parted.setdefault((row.module, row.pass_), ([], []))[side].append(row)

    def order(place: tuple[str | None, str]) -> tuple[int, int]:
        return modules[place[0]], PASSES.index(place[1]) if place[1] in PASSES else len(PASSES)

    return [
        CommsDifference(*place, *map(tuple, parted[place])) for place in sorted(parted, key=order)
    ]
