"""Model layouts in the table of a black box.

A layout is compressed JSON, split into table entries. The writer stores one after the first step,
and another at the end if it has changed. `docs/format.md` describes this under LAYOUT.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import ENTRY_MOST_BYTES, EntryType

_PART_BYTES = ENTRY_MOST_BYTES // 2
_MAX_BYTES = 1 << 28  # of a layout as JSON: a larger one is damaged or malicious


def pack(number: int, layout: dict[str, Any]) -> list[str]:
    """The table entries of layout number `number`."""
    packed = zlib.compress(json.dumps(layout, separators=(",", ":")).encode(), 6)
    data = base64.b64encode(packed).decode()
    parts = [data[at : at + _PART_BYTES] for at in range(0, len(data), _PART_BYTES)]
    return [f"{number}\t{index}\t{len(parts)}\t{part}" for index, part in enumerate(parts)]


def layouts_in(box: Box) -> list[dict[str, Any]]:
    """The complete layouts in the order they were written. Never raises: skips damaged layouts."""
    parts_by_number: dict[int, dict[int, str]] = {}
    counts: dict[int, int] = {}
    for entry_type, text in box.names.values():
        fields = text.split("\t") if entry_type == EntryType.LAYOUT else []
        if len(fields) == 4 and all(field.isascii() and field.isdigit() for field in fields[:3]):
            number, part, count = map(int, fields[:3])
            parts_by_number.setdefault(number, {})[part] = fields[3]
            counts[number] = count
    whole = [
        parts for number, parts in sorted(parts_by_number.items()) if len(parts) == counts[number]
    ]
    unpacked = (_unpack("".join(text for _, text in sorted(parts.items()))) for parts in whole)
    return [layout for layout in unpacked if isinstance(layout, dict)]


def _unpack(data: str) -> Any:
    try:
        inflater = zlib.decompressobj()
        text = inflater.decompress(base64.b64decode(data, validate=True), _MAX_BYTES)
        return json.loads(text) if inflater.eof else None
    except (ValueError, zlib.error, RecursionError):
        return None
