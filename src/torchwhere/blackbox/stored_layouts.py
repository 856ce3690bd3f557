"""Layouts in a black box: how they are put into the table, and how they are found there again.

A layout is JSON, compressed, and cut into entries that the table takes. One is written after the
first step, another at the end if it has changed. `docs/format.md` says the same under LAYOUT.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import ENTRY_MOST_BYTES, EntryType

_PART_BYTES = ENTRY_MOST_BYTES // 2
_MOST_BYTES = 1 << 28  # of a layout as JSON: what is larger is damage, or meant to harm


def pack(number: int, layout: dict[str, Any]) -> list[str]:
    """The entries for the layout number `number` of a box."""
    packed = zlib.compress(json.dumps(layout, separators=(",", ":")).encode(), 6)
    data = base64.b64encode(packed).decode()
    parts = [data[at : at + _PART_BYTES] for at in range(0, len(data), _PART_BYTES)]
    return [f"{number}\t{at}\t{len(parts)}\t{part}" for at, part in enumerate(parts)]


def layouts_in(box: Box) -> list[dict[str, Any]]:
    """The layouts that are whole, in the order they were written. Never raises: a damaged one is
    left out."""
    found: dict[int, dict[int, str]] = {}
    counts: dict[int, int] = {}
    for sort, text in box.names.values():
        fields = text.split("\t") if sort == EntryType.LAYOUT else []
        if len(fields) == 4 and all(field.isascii() and field.isdigit() for field in fields[:3]):
            number, part, count = map(int, fields[:3])
            found.setdefault(number, {})[part] = fields[3]
            counts[number] = count
    whole = [parts for number, parts in sorted(found.items()) if len(parts) == counts[number]]
    unpacked = (_unpack("".join(text for _, text in sorted(parts.items()))) for parts in whole)
    return [layout for layout in unpacked if isinstance(layout, dict)]


def _unpack(data: str) -> Any:
    try:
        inflater = zlib.decompressobj()
        text = inflater.decompress(base64.b64decode(data, validate=True), _MOST_BYTES)
        return json.loads(text) if inflater.eof else None
    except (ValueError, zlib.error, RecursionError):
        return None
