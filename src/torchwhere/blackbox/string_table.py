"""The table of a box: what the ids in its records stand for.

Takes the bytes of the section, gives the names by id, and counts what is torn. A `TableReader`
reads the tables of many boxes: ranks of one job have nearly the same table, so what is byte for
byte as in a table it knows is taken from there, already checked and decoded. (Of 16,384 ranks, each
one's table lists all 16,384 as the members of the world.)
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from torchwhere.blackbox.file_format import ENTRY, ENTRY_MARK, ENTRY_MOST_BYTES

Name = tuple[int, str]  # what sort of thing, and its text
Entry = tuple[int, Name]
_HEAD = ENTRY.size
_BLOCK = 32  # entries that are compared at once
_ALIKE = 0.5  # a table of which less was known is the one to know from now on


@dataclass(slots=True)
class StringTable:
    """What was read: names by id, in the order they were written."""

    names: dict[int, Name] = field(default_factory=dict)
    torn: int = 0


class TableReader:
    """Reads tables, and knows one of them."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._raw: list[bytes] = []  # of each entry
        self._blocks: list[bytes] = []  # of so many entries each

    def read(self, data: bytes) -> StringTable:
        entries: list[Entry] = []
        at = index = known = torn = 0
        while at + _HEAD <= len(data):
            count, end = self._same(data, at, index)
            if count:
                entries += self._entries[index : index + count]
                known += count
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
        if not torn and known < _ALIKE * len(entries):
            self._know(data, entries)
        return StringTable(dict(entries), torn)

    def _same(self, data: bytes, at: int, index: int) -> tuple[int, int]:
        """How many of the known entries, from `index` on, stand at a position; and where they
        end."""
        if index >= len(self._raw):
            return 0, at
        if index % _BLOCK == 0 and data.startswith(self._blocks[index // _BLOCK], at):
            block = self._blocks[index // _BLOCK]
            return min(_BLOCK, len(self._raw) - index), at + len(block)
        raw = self._raw[index]
        return (1, at + len(raw)) if data.startswith(raw, at) else (0, at)

    def _know(self, data: bytes, entries: list[Entry]) -> None:
        self._entries, self._raw, at = entries, [], 0
        for _ in entries:
            end = at + _HEAD + int(ENTRY.unpack_from(data, at)[3])
            self._raw.append(data[at:end])
            at = end
        self._blocks = [
            b"".join(self._raw[start : start + _BLOCK]) for start in range(0, len(entries), _BLOCK)
        ]


def _entry(data: bytes, at: int) -> tuple[Entry | None, int]:
    """The entry at a position and where the next one is looked for; without an entry, where the
    next mark stands."""
    mark, entry_id, sort, length, crc = ENTRY.unpack_from(data, at)
    payload = data[at + _HEAD : at + _HEAD + min(length, ENTRY_MOST_BYTES)]
    if (
        mark == ENTRY_MARK
        and len(payload) == length
        and zlib.crc32(payload, zlib.crc32(data[at : at + _HEAD - 4])) == crc
    ):
        return (entry_id, (sort, payload.decode("utf-8", "replace"))), at + _HEAD + length
    found = data.find(ENTRY_MARK, at + 1)
    return None, found if found >= 0 else len(data)
