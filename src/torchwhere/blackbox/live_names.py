"""The names that a glance at a box needs: what its table says of modules, lines, threads, groups
and collectives.

`NameReader` reads the tables of many boxes, and keeps what they have in common once: ranks of one
job have nearly the same table.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchwhere.blackbox.file_format import ENTRY, ENTRY_MARK, EntryType
from torchwhere.blackbox.string_table import TableReader

UNKNOWN_OP: tuple[str, str | None] = ("a collective", None)
_PLACE_SORTS = (EntryType.MODULE, EntryType.LINE, EntryType.PHASE, EntryType.THREAD)


class GroupEntry(NamedTuple):
    """A process group as a box has it."""

    name: str
    desc: str
    mesh_dim: str | None
    ranks: tuple[int, ...]


@dataclass(slots=True)
class BoxNames:
    """The table of one box, as far as a glance needs it."""

    places: dict[int, str]  # shared with the boxes that have the same
    grown: dict[int, str]  # what came later
    groups: dict[int, GroupEntry]
    # of what is issued again and again: the op, and the name of its group
    ops: dict[int, tuple[str, str | None]]
    steps_id: int = 0  # of the counter that counts steps

    def name(self, entry: int) -> str | None:
        return self.grown.get(entry, self.places.get(entry))


class NameReader:
    """Reads the tables of many boxes; equal ones are kept once."""

    def __init__(self) -> None:
        self._tables = TableReader()
        self._places: dict[tuple[tuple[int, str], ...], dict[int, str]] = {}
        self._groups: dict[str, GroupEntry | None] = {}
        self._ops: dict[str, tuple[str, str | None]] = {}

    def read(self, data: bytes) -> BoxNames:
        names = self._tables.read(data).names
        places = {entry: text for entry, (sort, text) in names.items() if sort in _PLACE_SORTS}
        known = BoxNames(self._places.setdefault(tuple(places.items()), places), {}, {}, {})
        self._add_others(known, names)
        return known

    def grow(self, known: BoxNames, data: bytes) -> None:
        names = TableReader().read(data).names
        known.grown.update(
            (entry, text) for entry, (sort, text) in names.items() if sort in _PLACE_SORTS
        )
        self._add_others(known, names)

    def _add_others(self, known: BoxNames, names: dict[int, tuple[int, str]]) -> None:
        for entry, (sort, text) in names.items():
            if sort == EntryType.GROUP:
                if text not in self._groups:
                    self._groups[text] = _group(loaded(text))
                if (group := self._groups[text]) is not None:
                    known.groups[entry] = group
            elif sort == EntryType.COLLECTIVE:
                if text not in self._ops:
                    self._ops[text] = _op(loaded(text))
                known.ops[entry] = self._ops[text]
            elif sort == EntryType.PHASE_PATH and text == "[]":
                known.steps_id = entry


def half_written(data: bytes) -> int:
    """Bytes at the end of a table that are no whole entry yet."""
    at = data.rfind(ENTRY_MARK)
    if at < 0:
        return len(data)
    if at + ENTRY.size > len(data):
        return len(data) - at
    end = at + ENTRY.size + int(ENTRY.unpack_from(data, at)[3])
    return len(data) - at if end > len(data) else len(data) - end


def loaded(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "null")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _op(entry: dict[str, Any]) -> tuple[str, str | None]:
    op, group = entry.get("op"), entry.get("group")
    return op if isinstance(op, str) and op else UNKNOWN_OP[0], group if isinstance(
        group, str
    ) else None


def _group(entry: dict[str, Any]) -> GroupEntry | None:
    name, desc, mesh_dim, ranks = (entry.get(key) for key in ("name", "desc", "mesh_dim", "ranks"))
    if not isinstance(name, str):
        return None
    members = (
        tuple(rank for rank in ranks if isinstance(rank, int)) if isinstance(ranks, list) else ()
    )
    return GroupEntry(
        name,
        desc if isinstance(desc, str) else "",
        mesh_dim if isinstance(mesh_dim, str) else None,
        members,
    )
