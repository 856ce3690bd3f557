"""What users hold in their hands: the public names and their arguments, and the pages that explain
them."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchwhere
from torchwhere.core.events import KIND_LABELS

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in (
            "quickstart",
            "place",
            "callbacks",
            "collectives",
            "layout",
            "events",
            "names",
            "ranks",
            "flight-recorder",
            "phases",
            "diff",
            "backward",
            "graphs",
            "hosts",
            "export",
            "notebook",
            "how-it-works",
            "limits",
            "report",
            "top",
            "trace",
        )
    ),
]

PUBLIC = [
    "Certainty",
    "DevicePlace",
    "Event",
    "Layout",
    "ModuleCall",
    "Place",
    "PlaceFilter",
    "RankHandler",
    "Run",
    "TorchwhereError",
    "Verdict",
    "__version__",
    "backward_graph",
    "comms",
    "describe",
    "doctor",
    "export",
    "forward_line",
    "forward_lines",
    "graphs",
    "layout",
    "names",
    "note",
    "on_module",
    "phase",
    "phases",
    "print_rank",
    "rank_log",
    "read_run",
    "start",
    "step",
    "stop",
    "watch",
    "where",
]


# -- names -----------------------------------------------------------------------------------------


def test_public_names() -> None:
    """The public names are these, sorted, and all of them are there: adding or removing one is a
    decision."""
    assert torchwhere.__all__ == PUBLIC == sorted(PUBLIC)
    assert dir(torchwhere) == PUBLIC
    assert all(getattr(torchwhere, name) is not None for name in PUBLIC)


def test_public_arguments() -> None:
    """The arguments of the public functions are these: everything after the first is
    keyword-only."""
    arguments = {
        name: list(inspect.signature(getattr(torchwhere, name)).parameters.values())
        for name in (
            (
                "layout",
                "note",
                "on_module",
                "phase",
                "read_run",
                "start",
                "step",
                "stop",
                "watch",
                "where",
            )
            + ("backward_graph", "forward_line", "graphs")
            + ("describe", "names", "print_rank", "rank_log", "comms", "phases", "doctor", "export")
        )
    }
    assert {name: [p.name for p in found] for name, found in arguments.items()} == {
        "backward_graph": ["tensors", "model", "freed"],
        "forward_line": ["origin"],
        "graphs": [],
        "layout": ["model"],
        "note": ["text", "fields"],
        "on_module": ["enter", "exit", "backward_enter", "backward_exit"],
        "phase": ["name"],
        "phases": ["run", "ranks"],
        "read_run": ["folder"],
        "start": ["model", "out", "module_events", "records"],
        "step": ["number"],
        "stop": ["reason"],
        "watch": ["model", "out", "module_events", "records"],
        "where": ["device"],
        "comms": ["model"],
        "describe": ["thing"],
        "doctor": ["folder", "stall_s"],
        "export": ["folder", "out", "ranks", "kinds", "force", "on_progress"],
        "names": ["model"],
        "print_rank": ["values", "ranks", "place", "sep", "end", "file", "flush"],
        "rank_log": ["values", "folder", "rank", "place", "sep", "end"],
    }
    for found in arguments.values():
        assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in found[1:])


def test_unknown_name() -> None:
    """A name that is not there is an ordinary AttributeError."""
    with pytest.raises(AttributeError, match=r"^module 'torchwhere' has no attribute 'nope'$"):
        torchwhere.nope  # noqa: B018


# -- pages -----------------------------------------------------------------------------------------

# Runs every program it is given, each as `train.py` in a folder of its own, and gives back what
# each printed.
RUNNER = """
import contextlib, io, json, os, sys, tempfile, traceback
printed = []
for program in json.load(sys.stdin):
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as out:
        os.chdir(folder)
        try:
            exec(compile(program, os.path.join(os.getcwd(), "train.py"), "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc(file=out)
        printed.append(out.getvalue())
        os.chdir("/")
json.dump(printed, sys.stdout)
"""


def test_examples_print_what_stands_below_them() -> None:
    """Every Python example on the pages runs, and prints exactly what the page says it prints."""
    found = [
        (page.name, program, output)
        for page in PAGES
        for program, output in re.findall(
            r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?", page.read_text(), re.DOTALL
        )
    ]
    assert {name for name, _, _ in found} >= {"README.md", "quickstart.md", "place.md", "events.md"}
    programs = json.dumps([program for _, program, _ in found])
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")
    }
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=programs,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert (done.returncode, done.stderr) == (0, "")
    for (name, program, output), printed in zip(found, json.loads(done.stdout), strict=True):
        assert printed == output, f"{name}: {program}"


def test_links_lead_somewhere() -> None:
    """Every link on the pages to a file of this repository leads to one."""
    for page in [
        *PAGES,
        *(ROOT / name for name in ("docs/README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    ]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_documented_options_exist() -> None:
    """The options on the quickstart page are those of `torchwhere run`."""
    page = (ROOT / "docs" / "quickstart.md").read_text()
    documented = set(re.findall(r"^\| `(--?[\w-]+)", page, re.MULTILINE))
    done = subprocess.run(
        [sys.executable, "-m", "torchwhere", "run", "--help"],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert set(re.findall(r"^  (--?[\w-]+)", done.stdout, re.MULTILINE)) - {"-h"} == documented


def test_documented_kinds_exist() -> None:
    """The kinds on the events page are those that are recorded."""
    page = (ROOT / "docs" / "events.md").read_text()
    table = page.partition("## Kinds")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(KIND_LABELS)


def test_changelog_knows_the_version() -> None:
    """The newest entry of the CHANGELOG is about this version."""
    assert (
        re.findall(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0].rstrip(
            ","
        )
        == torchwhere.__version__
    )
