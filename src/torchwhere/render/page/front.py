"""The parts of the report page that need no script: the verdict, missing data, the settings.

Takes the report, gives HTML in which every text from outside is sanitized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from torchwhere.render.verdict import TITLES, text_lines

# -- safe texts ------------------------------------------------------------------------------------
# `texts.js` does the same for texts that the script shows. Control and direction characters become
# visible symbols, markup is escaped, and absurd lengths are cut, with the whole text in the title.
# The page shows a symbol for each control character, where `core/sanitize.py`, for terminals, has
# one replacement for all.

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


_SYMBOLS = {  # beside the title of the verdict: never a colour alone
    "missing": "■",
    "mismatch": "≠",
    "deadlock": "∞",
    "dead": "✕",
    "straggler": "▸",
    "together": "■",
    "partial": "?",
    "healthy": "✓",
}
_STACK_BEGINS, _STACK_LINE, _NOT_KNOWN = "  stack of rank", "    ", "Not known: "
_MOST_LINKS = 12
_LONGEST_LINE = 600


def front_html(report: Mapping[str, Any]) -> str:
    """The head of the page: the title of the run, and the verdict."""
    verdict = report.get("verdict") or {}
    kind = str(verdict.get("kind"))
    word, symbol = TITLES.get(kind, kind.upper()), _SYMBOLS.get(kind, "?")
    lines = text_lines(verdict)
    headline = str(verdict.get("headline") or (lines[1] if len(lines) > 1 else word))
    evidence, stacks, unknown = _sorted(lines[1:], headline)
    folder = f"{(report.get('settings') or {}).get('folder')}/"
    of = lines[0].partition("  ")[2] if lines else ""
    return (
        f'<header class="{inert_html(kind)}">'
        '<div class="top"><span class="mark-of">torchwhere</span>'
        f'<span class="title">{name_html(str(report.get("title") or ""))}</span>'
        f'<span class="made">{inert_html(str(report.get("made_at") or ""))}</span>'
        '<button type="button" id="theme" hidden>Dark</button></div>'
        f'<p class="kind-of"><span class="badge"><span aria-hidden="true">{symbol}</span>'
        f" {inert_html(word)}</span> "
        f"{inert_html(of)}</p>"
        f"<h1>{name_html(_sentence(headline), longest=_LONGEST_LINE)}</h1>"
        f"{_culprits(verdict.get('culprits') or ())}{_evidence(evidence)}"
        f"{''.join(_stack(title, lines, folder) for title, lines in stacks)}{_unknown(unknown)}"
        "<noscript><p>Everything below needs the script of this page, which this browser does not"
        " run.</p></noscript>"
        "</header>\n"
    )


def _sentence(headline: str) -> str:
    """End a headline with a full stop. In the text a colon may lead to the lines below it."""
    return f"{headline[:-1]}." if headline.endswith(":") else headline


def _sorted(
    lines: Sequence[str], headline: str
) -> tuple[list[str], list[tuple[str, list[str]]], list[str]]:
    """Sort the lines of a verdict's text into evidence, stacks, and what is not known."""
    evidence: list[str] = []
    stacks: list[tuple[str, list[str]]] = []
    unknown: list[str] = []
    for line in lines:
        if line.startswith(_STACK_BEGINS):
            stacks.append((line.strip().rstrip(":"), []))
        elif stacks and line.startswith(_STACK_LINE):
            stacks[-1][1].append(line.strip())
        elif line.startswith(_NOT_KNOWN):
            unknown.append(line.removeprefix(_NOT_KNOWN))
        elif line.strip() and not line.strip().startswith(headline.strip().removesuffix("…")):
            evidence.append(line)
    return evidence, stacks, unknown


def _culprits(culprits: Sequence[Any]) -> str:
    """Links to the cells of the culprits."""
    if not culprits:
        return ""
    links = " ".join(
        f'<a href="#ranks" data-rank="{int(rank)}">rank {int(rank)}</a>'
        for rank in culprits[:_MOST_LINKS]
    )
    more = f" and {len(culprits) - _MOST_LINKS:,} more" if len(culprits) > _MOST_LINKS else ""
    return f'<p class="culprits">Look at {links}{more}</p>'


def _items(lines: Sequence[str]) -> str:
    return "".join(f"<li>{name_html(line, longest=_LONGEST_LINE)}</li>" for line in lines)


def _evidence(lines: Sequence[str]) -> str:
    return f'<ul class="evidence">{_items([line.strip() for line in lines])}</ul>' if lines else ""


def _stack(title: str, lines: Sequence[str], folder: str) -> str:
    """One stack, with paths relative to the job's folder."""
    shown = "".join(f"<li>{name_html(line.removeprefix(folder))}</li>" for line in lines)
    return (
        f"<details><summary>{inert_html(title[:1].upper() + title[1:])}</summary><ol"
        f' class="stack">{shown}</ol></details>'
    )


def _unknown(lines: Sequence[str]) -> str:
    if not lines:
        return ""
    return (
        "<details><summary>Data that the verdict lacks"
        f" ({len(lines)})</summary><ul>{_items(lines)}</ul></details>"
    )


def missing_html(report: Mapping[str, Any]) -> str:
    """The data that was missing or damaged."""
    lines = [str(line) for line in report.get("missing") or ()]
    if not lines:
        return '<p class="nothing">Nothing: every rank has a complete box.</p>'
    return f"<ul>{_items(lines)}</ul>"


def settings_html(report: Mapping[str, Any]) -> str:
    """The settings of the run, and when this page was made by which version."""
    settings = dict(report.get("settings") or {})
    settings |= {"page made": f"{report.get('made_at')}, by torchwhere {report.get('torchwhere')}"}
    rows = (
        f'<tr><th scope="row">{name_html(str(key))}</th><td>{name_html(str(value))}</td></tr>'
        for key, value in settings.items()
        if value not in (None, "")
    )
    return (
        '<table class="settings"><caption'
        f' class="unseen">Settings</caption><tbody>{"".join(rows)}</tbody></table>'
    )
