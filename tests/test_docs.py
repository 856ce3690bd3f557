"""The documentation as a whole: every page is listed and reachable, a test runs every example, and
every command, option and public name is documented."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import torchwhere
from test_surface import PAGES
from torchwhere import cli

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
QUESTIONS = sorted(path for path in DOCS.glob("*.md") if path.name not in ("README.md", "index.md"))
REFERENCE = sorted((DOCS / "reference").glob("*.md"))
RECIPES = sorted((DOCS / "recipes").glob("*.md"))
DROP_INS = ("aot_logging", "comm_mode", "deepspeed_debug", "fsdp_debug", "mod_tracker")
INTEGRATIONS = ("accelerate", "lightning", "ray", "transformers")
# the tests of each drop-in run its example, next to the original
RUN_ELSEWHERE = {"migrating.md"}
LINK = re.compile(r"\]\(([^)\s]+)\)")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """The anchors of the headings, as GitHub and the site make them."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL), re.MULTILINE
    )
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def test_every_page_is_listed() -> None:
    """The list of pages on GitHub and the contents of the site have every page once, and nothing
    else; only the site lists the reference."""
    names = [path.stem for path in QUESTIONS]
    listed = re.findall(r"\]\(([\w-]+)\.md\)", text_of(DOCS / "README.md"))
    contents = re.findall(r"```\{toctree\}\n(.*?)```", text_of(DOCS / "index.md"), re.DOTALL)
    in_site = [
        line for part in contents for line in part.splitlines() if line and not line.startswith(":")
    ]
    assert sorted(listed) == names
    reference = [f"reference/{path.stem}" for path in REFERENCE]
    assert sorted(in_site) == sorted([*names, "recipes/index", *reference])
    recipes = text_of(DOCS / "recipes" / "index.md")
    pages = sorted(path.stem for path in RECIPES if path.stem != "index")
    assert sorted(re.findall(r"\]\(([\w-]+)\.md\)", recipes)) == pages
    contents = re.findall(r"```\{toctree\}\n(.*?)```", recipes, re.DOTALL)
    assert sorted(re.findall(r"^[\w-]+$", contents[0], re.MULTILINE)) == pages


def test_every_page_asks_one_thing() -> None:
    """A page has one title, and it is the first line."""
    for page in [*QUESTIONS, *REFERENCE, *RECIPES]:
        lines = re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL).splitlines()
        assert [at for at, line in enumerate(lines) if line.startswith("# ")] == [0], page.name


def test_links_lead_somewhere() -> None:
    """Every link between the pages leads to a page and a heading that exist; none leads out of the
    site."""
    links = 0
    for page in [*QUESTIONS, *REFERENCE, *RECIPES, DOCS / "index.md", DOCS / "README.md"]:
        for target in LINK.findall(text_of(page)):
            if re.match(r"https?:", target):
                continue
            name, _, anchor = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            assert path.is_relative_to(DOCS), f"{page.name}: {target}"
            assert path.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(path), f"{page.name}: {target}"
            links += 1
    assert links > 80


def test_every_example_is_run() -> None:
    """Each page with a program is in the list of pages whose programs a test runs, or a test of its
    own runs them."""
    with_programs = {page.name for page in QUESTIONS if "```python\n" in text_of(page)}
    assert with_programs <= {page.name for page in PAGES} | RUN_ELSEWHERE
    assert len(with_programs) > 10


def parsers() -> dict[str, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    for command in cli.COMMANDS:
        command.add(subparsers)
    return dict(subparsers.choices)


def shown_options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [
        action
        for action in parser._actions
        if action.option_strings and action.help != argparse.SUPPRESS and action.dest != "help"
    ]


@pytest.mark.parametrize("name", sorted(parsers()))
def test_every_command_and_option_is_explained(name: str) -> None:
    """Some page shows how a command is called, and some page names each of its options."""
    pages = [page for page in map(text_of, QUESTIONS) if f"torchwhere {name} " in page]
    assert pages, f"no page says: torchwhere {name} ..."
    explained = {
        option for page in pages for option in re.findall(r"(?<![\w-])--?[a-z][\w-]*", page)
    }
    for action in shown_options(parsers()[name]):
        assert explained & set(action.option_strings), (
            f"no page says what {action.option_strings} of torchwhere {name} is"
        )


# -- the reference ---------------------------------------------------------------------------------


def extension(name: str) -> ModuleType:
    """Import a module of docs/extensions without leaving it in `sys.modules`."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "extensions" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # for the dataclasses in it
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


def test_the_command_reference_has_every_command() -> None:
    """The command reference has every command, and each of its arguments with its default."""
    commands = {command.name: command for command in extension("command_help").all_commands()}
    assert set(commands) == set(parsers())
    for name, parser in parsers().items():
        spellings = " ".join(argument.spelling for argument in commands[name].arguments)
        for action in shown_options(parser):
            assert set(action.option_strings) <= set(re.split(r"[ ,]+", spellings)), name
        texts = [argument.text for argument in commands[name].arguments]
        assert all(texts), name
        assert not any("%(" in text for text in texts), name
    stall = next(
        argument for argument in commands["doctor"].arguments if "--stall" in argument.spelling
    )
    assert stall.text.endswith("(default: 30)")


def test_the_site_shows_the_command_reference(tmp_path: Path) -> None:
    """Sphinx builds the page of all commands, with a heading for each of them."""
    pytest.importorskip("myst_parser", reason="needs Sphinx: make docs")
    (tmp_path / "conf.py").write_text(
        f"import sys; sys.path.insert(0, {str(DOCS / 'extensions')!r})\n"
        "extensions = ['command_reference', 'myst_parser']\n"
    )
    (tmp_path / "index.md").write_text("# All\n\n```{command-reference}\n```\n")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "text", ".", "out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = text_of(tmp_path / "out" / "index.txt").splitlines()
    for name in parsers():
        assert f"torchwhere {name}" in lines, name


def test_every_public_name_is_in_the_reference() -> None:
    """The reference has every public name of torchwhere, and the modules of all drop-ins."""
    pages = "\n".join(map(text_of, REFERENCE))
    listed = re.findall(r"^\.\. auto(?:function|class|exception|module):: ([\w.]+)$", pages, re.M)
    assert len(listed) == len(set(listed))
    public = set(torchwhere.__all__) - {"__version__"}
    assert {name for name in listed if "." not in name} == public
    drop_ins = {f"torchwhere.drop_in.{name}" for name in DROP_INS}
    assert {name for name in listed if name.startswith("torchwhere.drop_in.")} == drop_ins
    in_integrations = {name for name in listed if name.startswith("torchwhere.integrations.")}
    assert {name.split(".")[2] for name in in_integrations} == set(INTEGRATIONS)
    for name in in_integrations:  # not imported: each needs its framework
        *_, module, thing = name.split(".")
        source = text_of(ROOT / "src" / "torchwhere" / "integrations" / f"{module}.py")
        assert re.search(rf"^(class|def) {thing}\(", source, re.MULTILINE), name
    for name in listed:
        if "." in name and name not in drop_ins | in_integrations:
            module, _, thing = name.rpartition(".")
            assert hasattr(importlib.import_module(module), thing), name


@pytest.mark.parametrize("name", sorted(set(torchwhere.__all__) - {"__version__"}))
def test_every_public_name_has_a_docstring(name: str) -> None:
    """Every public name has a docstring of its own, whose first paragraph ends with a full stop."""
    text = vars(getattr(torchwhere, name)).get("__doc__") or getattr(torchwhere, name).__doc__
    assert text, name
    summary = " ".join(text.strip().partition("\n\n")[0].split())
    assert summary.endswith((".", ":")), f"{name}: {summary}"


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        (["Ask `x` once."], ["Ask ``x`` once."]),
        (
            ["Watch:", "", "    with watch():", "        `run`", "", "Then stop."],
            ["Watch:", "", ".. code-block:: python", ""]
            + ["", "    with watch():", "        `run`", "", "Then stop."],
        ),
        (
            ["Example:", "    print(where())"],
            [".. rubric:: Example", "", ".. code-block:: python", "", "    print(where())"],
        ),
        (["Args:", "    x: The `x`."], ["Args:", "    x: The ``x``."]),
    ],
)
def test_code_in_docstrings_is_shown_as_code(docstring: list[str], expected: list[str]) -> None:
    """In the reference, `x`, indented blocks and the body of `Example:` are code; sections stay."""
    pytest.importorskip("sphinx", reason="needs Sphinx: make docs")
    assert extension("docstring_code").mark_code(docstring) == expected


# -- the README and the site -----------------------------------------------------------------------


def test_every_promise_names_the_test_that_holds_it() -> None:
    """Each promise in the README names a test that exists."""
    _, section = text_of(ROOT / "README.md").split("## What it promises\n")
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", section.partition("\n## ")[0], re.MULTILINE)
    assert len(rows) >= 12
    for promise, tests in rows[1:]:  # after the titles
        named = re.findall(r"`(tests/\w+\.py)(?:::(\w+))?`", tests)
        assert named, promise
        for path, name in named:
            assert (ROOT / path).is_file(), path
            assert not name or f"def {name}(" in text_of(ROOT / path), f"{path}::{name}"


def test_the_site_knows_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The site shows the version of torchwhere."""
    monkeypatch.syspath_prepend(str(DOCS))
    import conf  # type: ignore[import-not-found]

    sys.modules.pop("conf")
    assert conf.release == torchwhere.__version__
