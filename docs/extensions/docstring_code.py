"""Sphinx extension: shows the code in docstrings as code, and result classes without a signature.

The docstrings use three habits that reStructuredText reads differently: `x` is code, an indented
block after a blank line is code, and the body of an `Example:` section is code. This extension
rewrites the three before napoleon parses the docstring.

Programs do not create results and enumerations, so their long signatures are left out: the
docstrings describe the fields.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import groupby
from typing import Any

from sphinx.application import Sphinx
from sphinx.domains.python import PyObject

_EXAMPLE = re.compile(r"Examples?:")
_NO_CODE_AFTER = re.compile(
    r"(Args|Attributes|Notes?|Raises|Returns|Warnings?|Yields):$"  # a section
    r"|[-*] |\.\. "  # an item of a list, a directive
)
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_CODE = ".. code-block:: python"


def mark_code(lines: Sequence[str]) -> list[str]:
    """Return the lines of a docstring as reStructuredText."""
    marked: list[str] = []
    for is_code, group in groupby(_lines_with_code(lines), key=lambda pair: pair[0]):
        text = "\n".join(line for _, line in group)
        marked += (text if is_code else _SPAN.sub(r"``\1``", text)).split("\n")
    return marked


def _lines_with_code(lines: Sequence[str]) -> Iterator[tuple[bool, str]]:
    """Yield each line, and whether it is code. Directives are added before blocks of code."""
    code_indent: int | None = None
    for number, line in enumerate(lines):
        if code_indent is not None and (not line.strip() or _indent(line) > code_indent):
            yield True, line
            continue
        code_indent = None
        margin = " " * _indent(line)
        following = next((other for other in lines[number + 1 :] if other.strip()), "")
        if _begins_code(lines, number) and _indent(following) > _indent(line):
            code_indent = _indent(line)
            is_example = _EXAMPLE.fullmatch(line.strip()) is not None
            yield False, f"{margin}.. rubric:: Example" if is_example else line
            yield False, ""
            yield False, f"{margin}{_CODE}"
            yield False, ""
        else:
            yield False, line


def _begins_code(lines: Sequence[str], number: int) -> bool:
    text = lines[number].strip()
    if _EXAMPLE.fullmatch(text):
        return True
    is_before_blank_line = number + 1 < len(lines) and not lines[number + 1].strip()
    return bool(text) and is_before_blank_line and not _NO_CODE_AFTER.match(text)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _process(
    _app: Sphinx, what: str, _name: str, _thing: object, _options: object, lines: list[str]
) -> None:
    lines[:] = mark_code(lines)
    if what in ("attribute", "data", "property"):
        lines.insert(0, "")  # napoleon reads a colon in the first line as "type: description"


def _without_signature(
    _app: Sphinx, _what: str, _name: str, thing: object, *_details: object
) -> tuple[str, None] | None:
    is_plain_data = isinstance(thing, type) and (
        dataclasses.is_dataclass(thing) or issubclass(thing, Enum)
    )
    return ("", None) if is_plain_data else None


def setup(app: Sphinx) -> dict[str, Any]:
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-docstring", _process, priority=100)  # before napoleon
    app.connect("autodoc-process-signature", _without_signature)
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"  # instead of Variables
    return {"parallel_read_safe": True}
