"""Text from outside, made safe for a terminal: names and messages may hold anything."""

from __future__ import annotations

from collections.abc import Collection

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def printable(text: object, *, longest: int | None = None) -> str:
    """Replace control characters, line breaks and direction marks: a terminal would obey them.

    With `longest`, cut the text after that many characters.
    """
    shown = str(text)
    if longest is not None and len(shown) > longest:
        shown = shown[:longest] + "\N{HORIZONTAL ELLIPSIS}"
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else _REPLACEMENT for c in shown)


def steps_span(steps: Collection[int], *, to: str = "-") -> str:
    """`step 3`, `steps 0-5`."""
    first, last = min(steps), max(steps)
    return f"step {first}" if first == last else f"steps {first}{to}{last}"


def plural(count: int, noun: str) -> str:
    """`1 rank`, `2 ranks`, `1,024 ranks`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
