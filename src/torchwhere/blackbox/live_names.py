"""The names that a live view of a box needs: modules, lines, phases, threads, groups, collectives.

A `NameReader` reads the tables of many boxes and shares equal parts: the ranks of one job have
almost the same table.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from torchwhere.blackbox.file_format import EntryType
from torchwhere.blackbox.string_table import (
    Group,
    Name,
    TableReader,
    group_of,
    json_value,
    op_of,
)

_PLACE_TYPES = (EntryType.MODULE, EntryType.LINE, EntryType.PHASE, EntryType.THREAD)


@dataclass(slots=True)
class BoxNames:
    """The parts of one box's table that a live view needs."""

    places: dict[int, str]  # shared with boxes that have the same names
    later: dict[int, str]  # names added since
    groups: dict[int, Group]
    ops: dict[int, tuple[str, str]]  # by COLLECTIVE id: the op and the name of its group
    steps_id: int = 0  # id in the counter of steps

    def name(self, entry_id: int) -> str | None:
        return self.later.get(entry_id, self.places.get(entry_id))

    def op(self, entry_id: int) -> tuple[str, str]:
        """The op of a COLLECTIVE entry and the name of its group."""
        return self.ops.get(entry_id) or op_of(None)

    def group(self, name: str) -> Group | None:
        """The group of this name. Of several entries the last one counts."""
        return {group.name: group for group in self.groups.values()}.get(name)


class NameReader:
    """Reads the tables of many boxes and keeps equal ones once."""

    def __init__(self) -> None:
        self._tables = TableReader()
        self._places: dict[tuple[tuple[int, str], ...], dict[int, str]] = {}
        self._group = cache(lambda text: group_of(json_value(text)))
        self._op = cache(lambda text: op_of(json_value(text)))

    def read(self, data: bytes) -> BoxNames:
        entries = self._tables.read(data).names
        places = _place_names(entries)
        names = BoxNames(self._places.setdefault(tuple(places.items()), places), {}, {}, {})
        self._add_others(names, entries)
        return names

    def extend(self, names: BoxNames, data: bytes) -> None:
        """Add the entries that were appended to a table."""
        entries = TableReader().read(data).names
        names.later.update(_place_names(entries))
        self._add_others(names, entries)

    def _add_others(self, names: BoxNames, entries: dict[int, Name]) -> None:
        for entry_id, (entry_type, text) in entries.items():
            if entry_type == EntryType.GROUP:
                group = self._group(text)
                if group is not None:
                    names.groups[entry_id] = group
            elif entry_type == EntryType.COLLECTIVE:
                names.ops[entry_id] = self._op(text)
            elif entry_type == EntryType.PHASE_PATH and text == "[]":
                names.steps_id = entry_id


def _place_names(entries: dict[int, Name]) -> dict[int, str]:
    return {
        entry_id: text
        for entry_id, (entry_type, text) in entries.items()
        if entry_type in _PLACE_TYPES
    }
