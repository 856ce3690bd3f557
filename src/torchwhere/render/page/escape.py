"""Texts from outside, made harmless for a page: `texts.js` does the same for what the script shows.

Control and direction characters become visible signs; markup is escaped; absurd lengths are cut,
with the whole in the title.
"""

from __future__ import annotations

from html import escape

LONGEST = 240
LONGEST_TITLE = 20_000


def inert(text: str) -> str:
    return text if text.isprintable() else "".join(map(_visible, text))


def _visible(sign: str) -> str:
    if sign.isprintable():
        return sign
    code = ord(sign)
    if code < 0x20:
        return chr(0x2400 + code)  # the picture of that control character
    return "\N{SYMBOL FOR DELETE}" if code == 0x7F else "\N{REPLACEMENT CHARACTER}"


def inert_html(text: str, *, longest: int = LONGEST) -> str:
    shown = inert(text)
    return escape(shown if len(shown) <= longest else shown[:longest] + "…", quote=True)


def name_html(text: str, *, longest: int = LONGEST) -> str:
    """Isolated: its direction ends with it."""
    title = f' title="{inert_html(text, longest=LONGEST_TITLE)}"' if len(text) > longest else ""
    return f"<bdi{title}>{inert_html(text, longest=longest)}</bdi>"
