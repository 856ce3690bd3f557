"""Text from outside, made safe for a terminal: names and messages may hold anything."""

from __future__ import annotations

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def printable(text: object) -> str:
    """Replace control characters, line breaks and direction marks: a terminal would obey them."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else _REPLACEMENT for c in shown)


def plural(count: int, noun: str) -> str:
    """`1 rank`, `2 ranks`, `1,024 ranks`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
