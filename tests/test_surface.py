"""What users hold in their hands: the public names and their arguments, and the pages that explain them."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchwhere

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("quickstart", "place", "collectives", "events"))]

PUBLIC = [
    "Certainty",
    "Event",
    "Place",
    "Run",
    "TorchwhereError",
    "__version__",
    "note",
    "phase",
    "read_run",
    "start",
    "step",
    "stop",
    "watch",
    "where",
]


# -- names -----------------------------------------------------------------------------------------------------------------


def test_public_names() -> None:
    """The public names are these, sorted, and all of them are there: adding or removing one is a decision."""
    assert torchwhere.__all__ == PUBLIC == sorted(PUBLIC)
    assert dir(torchwhere) == PUBLIC
    assert all(getattr(torchwhere, name) is not None for name in PUBLIC)


def test_public_arguments() -> None:
    """The arguments of the public functions are these: everything after the first is keyword-only."""
    arguments = {
        name: list(inspect.signature(getattr(torchwhere, name)).parameters.values())
        for name in ("note", "phase", "read_run", "start", "step", "stop", "watch", "where")
    }
    assert {name: [p.name for p in found] for name, found in arguments.items()} == {
        "note": ["text", "fields"],
        "phase": ["name"],
        "read_run": ["folder"],
        "start": ["model", "out", "module_events", "records"],
        "step": ["number"],
        "stop": ["reason"],
        "watch": ["model", "out", "module_events", "records"],
        "where": [],
    }
    for found in arguments.values():
        assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in found[1:])


def test_unknown_name() -> None:
    """A name that is not there is an ordinary AttributeError."""
    with pytest.raises(AttributeError, match=r"^module 'torchwhere' has no attribute 'nope'$"):
        torchwhere.nope  # noqa: B018
