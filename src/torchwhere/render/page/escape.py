"""Sanitizes texts for the page; `texts.js` does the same for texts that the script shows.

Control and direction characters become visible symbols, markup is escaped, and absurd lengths are
cut, with the whole text in the title. The page shows a symbol for each control character, where
`core/sanitize.py`, for terminals, has one replacement for all.
"""

from __future__ import annotations

from html import escape

LONGEST = 240
LONGEST_TITLE = 20_000


def inert(text: str) -> str:
    return text if text.isprintable() else "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character.isprintable():
        return character
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)  # the symbol of that control character
    return "\N{SYMBOL FOR DELETE}" if code == 0x7F else "\N{REPLACEMENT CHARACTER}"


def inert_html(text: str, *, longest: int = LONGEST) -> str:
    shown = inert(text)
    return escape(shown if len(shown) <= longest else shown[:longest] + "…", quote=True)


def name_html(text: str, *, longest: int = LONGEST) -> str:
    """A name from outside, isolated: right-to-left text does not reorder its neighbours."""
    title = f' title="{inert_html(text, longest=LONGEST_TITLE)}"' if len(text) > longest else ""
    return f"<bdi{title}>{inert_html(text, longest=longest)}</bdi>"
