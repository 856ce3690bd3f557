"""Golden snapshots of the collectives: a file with today's counts, so that a test notices changes.

Takes `Comms`, gives rows. The file has one JSON row a line in tree order, so that a diff of the
file shows which module changed. It leaves out lines, steps and ranks: they change when the
collectives do not. `differences` compares two snapshots by module and pass.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from torchwhere.diagnose.comms.tree import PASSES, Beneficiary, Comms

VERSION = 1


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """The calls of one module with one key."""

    module: str | None
    pass_: str
    op: str
    group: str
    beneficiary: Beneficiary
    count: int
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        names = {"pass_": "pass", "beneficiary": "for"}
        return {names.get(name, name): value for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class CommsDifference:
    """The missing and the new rows of one module and pass."""

    module: str | None
    pass_: str
    expected: tuple[SnapshotRow, ...]
    actual: tuple[SnapshotRow, ...]


def rows(comms: Comms) -> list[SnapshotRow]:
    return [
        SnapshotRow(module, *key, counter.count, counter.bytes)
        for module, key, counter in comms.walk()
    ]


def dumps(rows: Iterable[SnapshotRow]) -> str:
    """The text of a snapshot file."""
    lines = ",\n".join(f" {json.dumps(row.to_dict())}" for row in rows)
    return f'{{"comms snapshot": {VERSION}, "collectives": [\n{lines}\n]}}\n'


def loads(text: str) -> list[SnapshotRow]:
    """The rows of a snapshot file; ValueError for any other text."""
    try:
        content = json.loads(text)
        version = content["comms snapshot"]
        loaded = [_row(fields) for fields in content["collectives"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a snapshot of collectives: {error}") from None
    if version != VERSION:
        raise ValueError(
            f"snapshot of version {version}; this torchwhere reads version {VERSION}: regenerate it"
        )
    return loaded


def _row(fields: dict[str, Any]) -> SnapshotRow:
    beneficiary = fields["for"]
    return SnapshotRow(
        fields["module"],
        str(fields["pass"]),
        str(fields["op"]),
        str(fields["group"]),
        tuple(map(str, beneficiary)) if isinstance(beneficiary, list) else beneficiary,
        int(fields["count"]),
        int(fields["bytes"]),
    )


def differences(
    expected: Iterable[SnapshotRow], actual: Iterable[SnapshotRow]
) -> list[CommsDifference]:
    """The rows that only one of the snapshots has, by module and pass in tree order."""
    old, new = list(expected), list(actual)
    old_set, new_set = set(old), set(new)
    modules = list(dict.fromkeys(row.module for row in (*new, *old)))
    changed: dict[tuple[str | None, str], tuple[list[SnapshotRow], list[SnapshotRow]]] = {}
    for row in old:
        if row not in new_set:
            changed.setdefault((row.module, row.pass_), ([], []))[0].append(row)
    for row in new:
        if row not in old_set:
            changed.setdefault((row.module, row.pass_), ([], []))[1].append(row)
    module_order = {module: at for at, module in enumerate(modules)}
    pass_order = {pass_: at for at, pass_ in enumerate(PASSES)}

    def order(place: tuple[str | None, str]) -> tuple[int, int]:
        module, pass_ = place
        return module_order[module], pass_order.get(pass_, len(PASSES))

    return [
        CommsDifference(*place, *map(tuple, changed[place])) for place in sorted(changed, key=order)
    ]
