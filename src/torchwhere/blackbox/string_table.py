"""Reads the table of a box: the names that the ids in its records refer to.

Takes the bytes of the section, returns the names by id, and counts torn entries. A `TableReader`
reads the tables of many boxes. The ranks of one job have almost the same table, so it keeps the
last one, and takes equal bytes from there, already checked and decoded. (Of 16,384 ranks, each
table lists all 16,384 as the members of the default group.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchwhere.blackbox.file_format import ENTRY, ENTRY_MARK, ENTRY_MOST_BYTES, sealed_crc

Name = tuple[int, str]  # entry type and text
Entry = tuple[int, Name]
_HEAD = ENTRY.size
_BLOCK = 32  # entries in one comparison
_ALIKE = 0.5  # a table that shares less than this with the kept one replaces it


def json_value(text: str | None) -> Any:
    """The value of a JSON text; None if it is not JSON."""
    try:
        return json.loads(text or "null")
    except (ValueError, RecursionError):
        return None


def json_object(text: str | None) -> dict[str, Any]:
    """The object of a JSON text; empty if it is not one."""
    value = json_value(text)
    return value if isinstance(value, dict) else {}


def json_int(entry: Mapping[str, Any], key: str) -> int:
    """An integer in a JSON object; 0 if there is none."""
    value = entry.get(key)
    return value if isinstance(value, int) else 0


@dataclass(slots=True)
class StringTable:
    """The names by id, in the order they were written."""

    names: dict[int, Name] = field(default_factory=dict)
    torn: int = 0


class TableReader:
    """Reads tables, and keeps one to compare the next with."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._raw: list[bytes] = []  # of each entry
        self._blocks: list[bytes] = []  # of `_BLOCK` entries each

    def read(self, data: bytes) -> StringTable:
        entries: list[Entry] = []
        at = index = shared = torn = 0
        while at + _HEAD <= len(data):
            count, end = self._equal_entries(data, at, index)
            if count:
                entries += self._entries[index : index + count]
                shared += count
                index += count
            else:
                entry, end = _entry(data, at)
                index += 1
                if entry is not None:
                    entries.append(entry)
                else:
                    torn += 1
            at = end
        torn += at < len(data)
        if not torn and shared < _ALIKE * len(entries):
            self._keep(data, entries)
        return StringTable(dict(entries), torn)

    def _equal_entries(self, data: bytes, at: int, index: int) -> tuple[int, int]:
        """How many kept entries, from `index` on, are also at this position, and their end."""
        if index >= len(self._raw):
            return 0, at
        if index % _BLOCK == 0 and data.startswith(self._blocks[index // _BLOCK], at):
            block = self._blocks[index // _BLOCK]
            return min(_BLOCK, len(self._raw) - index), at + len(block)
        raw = self._raw[index]
        return (1, at + len(raw)) if data.startswith(raw, at) else (0, at)

    def _keep(self, data: bytes, entries: list[Entry]) -> None:
        self._entries, self._raw, at = entries, [], 0
        for _ in entries:
            end = at + _HEAD + int(ENTRY.unpack_from(data, at)[3])
            self._raw.append(data[at:end])
            at = end
        self._blocks = [
            b"".join(self._raw[start : start + _BLOCK]) for start in range(0, len(entries), _BLOCK)
        ]


def half_written(data: bytes) -> int:
    """Number of bytes at the end of a table that are not a whole entry yet."""
    at = data.rfind(ENTRY_MARK)
    if at < 0:
        return len(data)
    if at + ENTRY.size > len(data):
        return len(data) - at
    end = at + ENTRY.size + int(ENTRY.unpack_from(data, at)[3])
    return len(data) - at if end > len(data) else len(data) - end


def _entry(data: bytes, at: int) -> tuple[Entry | None, int]:
    """The entry at a position and the position after it. For a torn entry, None and the position of
    the next mark."""
    mark, entry_id, entry_type, length, crc = ENTRY.unpack_from(data, at)
    payload = data[at + _HEAD : at + _HEAD + min(length, ENTRY_MOST_BYTES)]
    is_whole = mark == ENTRY_MARK and len(payload) == length
    if is_whole and sealed_crc(data[at : at + _HEAD - 4], payload) == crc:
        return (entry_id, (entry_type, payload.decode("utf-8", "replace"))), at + _HEAD + length
    next_mark = data.find(ENTRY_MARK, at + 1)
    return None, next_mark if next_mark >= 0 else len(data)


# -- process groups --------------------------------------------------------------------------------
# A box describes a group by a JSON object in its table. The same group has the same description on
# all its ranks.


P2P = frozenset({"send", "recv"})
UNKNOWN_OP = "a collective"
DEFAULT_GROUP = "default"  # torch describes it as "default_pg"


@dataclass(frozen=True, slots=True)
class Group:
    """A process group. It is equal on all its ranks."""

    name: str
    ranks: tuple[int, ...]
    desc: str = field(default="", compare=False)
    backend: str | None = field(default=None, compare=False)
    mesh_dim: str | None = field(default=None, compare=False)

    @property
    def description(self) -> str:
        """Torch's description as all views show it; empty if there is none."""
        return shown_description(self.desc, name=self.name)

    @property
    def title(self) -> str:
        """The name that users know: the mesh dimension, the description, or the name."""
        if self.mesh_dim:
            return self.mesh_dim
        if self.name == "" and self.desc == "":
            return DEFAULT_GROUP
        return self.description or self.name


def shown_description(desc: str, *, name: str = "") -> str:
    """The description of a group as all views show it; empty if torch has none."""
    if desc == "default_pg" or (desc == "" and name == "0"):
        return DEFAULT_GROUP
    return desc if desc != "undefined" else ""


def title_in(fields: Mapping[str, Any]) -> str | None:
    """The title of the group in the fields of a collective; None if the group is unknown."""
    name, desc = str(fields.get("group") or ""), str(fields.get("group_desc") or "")
    mesh_dim = str(fields.get("mesh_dim") or "")
    return Group(name, (), desc=desc, mesh_dim=mesh_dim).title if name or desc or mesh_dim else None


class StreamName(NamedTuple):
    """Names a stream: calls that share one sequence of numbers on all their ranks.

    A stream holds either the collectives of a group (`source` and `destination` are -1) or the
    messages from one rank to another.
    """

    group: str
    source: int = -1
    destination: int = -1

    @property
    def is_p2p(self) -> bool:
        return self.source >= 0 or self.destination >= 0


def group_of(entry: Any) -> Group | None:
    """Reads the JSON value of a group entry; None if it does not describe a group."""
    name = text_of(entry, "name") if isinstance(entry, dict) else None
    if name is None:
        return None
    return Group(
        name,
        ranks_of(entry.get("ranks")),
        desc=text_of(entry, "desc") or "",
        backend=text_of(entry, "backend"),
        mesh_dim=text_of(entry, "mesh_dim"),
    )


def op_of(entry: Any) -> tuple[str, str]:
    """The op in the JSON value of a COLLECTIVE entry, and the name of its group."""
    fields = entry if isinstance(entry, dict) else {}
    return text_of(fields, "op") or UNKNOWN_OP, text_of(fields, "group") or ""


def text_of(entry: Mapping[str, Any], key: str) -> str | None:
    """A text in a JSON object; None if there is none."""
    value = entry.get(key)
    return value if isinstance(value, str) else None


def ranks_of(value: Any) -> tuple[int, ...]:
    """A JSON list of ranks; empty if it is not a list."""
    return tuple(rank for rank in value if isinstance(rank, int)) if isinstance(value, list) else ()


def stream_ends(op: str, *, rank: int, peer: int) -> tuple[int, int]:
    """Source and destination of the stream that a rank counts a call in; -1 for a collective.

    `peer` is -1 if it is unknown.
    """
    if op not in P2P:
        return -1, -1
    return (rank, peer) if op == "send" else (peer, rank)
