"""Builds the report page: one HTML file that loads nothing else.

Takes the report as `Report.to_dict()` gives it, gives the text of the page. The verdict, missing
data and the settings are plain HTML; the page's own script (`script/`) builds all other sections
from the JSON in the page. The content security policy names that script and the style sheet by
their hashes: nothing else runs, nothing is loaded, nothing is sent.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from torchwhere.render.page.front import front_html, inert_html, missing_html, settings_html

# In this order: each script may use those before it.
SCRIPTS = (
    "texts",
    "elements",
    "colours",
    "tables",
    "heat_map",
    "rank_grid",
    "rank_map",
    "ranks",
    "modules",
    "collectives",
    "steps",
    "device",
    "records",
    "theme",
    "start",
)
SECTIONS = {
    "ranks": "Ranks",
    "modules": "Modules",
    "collectives": "Collectives",
    "steps": "Steps",
    "device": "Device",
    "phases": "Phases",
    "layout": "Layout",
    "graphs": "Graphs",
    "log": "Log and notes",
    "missing": "Missing",
    "settings": "Settings",
}
OPTIONAL = {"device"}  # without data, the page does not have these sections
# Characters that could end the script element, or a line of a script, inside a JSON text.
_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def page_html(report: Mapping[str, Any]) -> str:
    """The whole page."""
    script, style = _script(), _part("report.css")
    policy = (
        f"default-src 'none'; script-src 'sha256-{_hash(script)}'; style-src"
        f" 'sha256-{_hash(style)}'; base-uri 'none'; form-action 'none'"
    )
    title = inert_html(str(report.get("title") or "run"))
    sections = {
        key: label for key, label in SECTIONS.items() if key not in OPTIONAL or report.get(key)
    }
    body = {"missing": missing_html(report), "settings": settings_html(report)}
    return "".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            (
                '<meta name="color-scheme" content="light dark">\n<meta name="referrer"'
                ' content="no-referrer">\n'
            ),
            f"<title>{title} · torchwhere</title>\n<style>{style}</style>\n</head>\n<body>\n",
            '<a class="skip" href="#ranks">Skip to the ranks</a>\n',
            front_html(report),
            _navigation(sections),
            "<main>\n",
            *(_section(key, label, body.get(key)) for key, label in sections.items()),
            "</main>\n",
            f'<script type="application/json" id="report">{page_json(report)}</script>\n',
            f"<script>{script}</script>\n</body>\n</html>\n",
        )
    )


def page_json(report: Mapping[str, Any]) -> str:
    """The data of the page, escaped so that it cannot end the script element it is in."""
    return json.dumps(
        _finite(report), separators=(",", ":"), allow_nan=False, default=str
    ).translate(_ESCAPES)


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _navigation(sections: Mapping[str, str]) -> str:
    links = "".join(f'<a href="#{key}">{label}</a>' for key, label in sections.items())
    return f'<nav aria-label="Sections"><div>{links}</div></nav>\n'


def _section(key: str, label: str, body: str | None) -> str:
    wait = '<p class="nothing">This part needs the page\'s script.</p>'
    heading = f'<h2 id="{key}-heading">{label}</h2>'
    return (
        f'<section id="{key}" aria-labelledby="{key}-heading">{heading}<div'
        f' class="body">{body or wait}</div></section>\n'
    )


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _part(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _script() -> str:
    """All scripts as one, in their own scope."""
    parts = "\n".join(_part(f"script/{name}.js") for name in SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}}})();\n'
