"""The pages as a whole: each is listed and reachable, every example is run by a test, every command
and option is explained."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import pytest

from test_surface import PAGES
from torchwhere import cli

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
QUESTIONS = sorted(path for path in DOCS.glob("*.md") if path.name not in ("README.md", "index.md"))
# its examples stand beside the originals, in the tests of each drop-in
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
    """Every page is in the list of pages on GitHub and in the contents of the site, once, and both
    list nothing else."""
    names = [path.stem for path in QUESTIONS]
    listed = re.findall(r"\]\(([\w-]+)\.md\)", text_of(DOCS / "README.md"))
    contents = re.findall(r"```\{toctree\}\n(.*?)```", text_of(DOCS / "index.md"), re.DOTALL)
    in_site = [
        line for part in contents for line in part.splitlines() if line and not line.startswith(":")
    ]
    assert sorted(listed) == names
    assert sorted(in_site) == names


def test_every_page_asks_one_thing() -> None:
    """A page has one title, and it is the first line."""
    for page in QUESTIONS:
        lines = re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL).splitlines()
        assert [at for at, line in enumerate(lines) if line.startswith("# ")] == [0], page.name


def test_links_lead_somewhere() -> None:
    """Every link between the pages leads to a page and a heading that are there; none leads out of
    the site."""
    found = 0
    for page in [*QUESTIONS, DOCS / "index.md", DOCS / "README.md"]:
        for target in LINK.findall(text_of(page)):
            if re.match(r"https?:", target):
                continue
            name, _, anchor = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            assert path.is_relative_to(DOCS), f"{page.name}: {target}"
            assert path.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(path), f"{page.name}: {target}"
            found += 1
    assert found > 80


def test_every_example_is_run() -> None:
    """A page with a program on it is among those whose programs are run, or its programs are run by
    a test of their own."""
    with_programs = {page.name for page in QUESTIONS if "```python\n" in text_of(page)}
    assert with_programs <= {page.name for page in PAGES} | RUN_ELSEWHERE
    assert len(with_programs) > 10


def commands() -> dict[str, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    for command in cli.COMMANDS:
        command.add(subparsers)
    return dict(subparsers.choices)


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_command_and_option_is_explained(name: str) -> None:
    """Some page shows how a command is called, and some page names each of its options."""
    pages = [text_of(page) for page in QUESTIONS]
    of_command = [page for page in pages if f"torchwhere {name} " in page]
    assert of_command, f"no page says: torchwhere {name} ..."
    told = {
        option for page in of_command for option in re.findall(r"(?<![\w-])--?[a-z][\w-]*", page)
    }
    for action in commands()[name]._actions:
        if action.option_strings and action.help != argparse.SUPPRESS and action.dest != "help":
            assert told & set(action.option_strings), (
                f"no page says what {action.option_strings} of torchwhere {name} is"
            )


def test_every_promise_names_the_test_that_holds_it() -> None:
    """Each promise in the README names a test that exists."""
    rows = re.findall(r"^\| .+? \| (`tests/.+) \|$", text_of(ROOT / "README.md"), re.MULTILINE)
    assert len(rows) >= 9
    for path, name in re.findall(r"`(tests/\w+\.py)(?:::(\w+))?`", " ".join(rows)):
        assert (ROOT / path).is_file(), path
        assert not name or f"def {name}(" in text_of(ROOT / path), f"{path}::{name}"


def test_the_site_knows_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The site says which version it is about."""
    import torchwhere

    monkeypatch.syspath_prepend(str(DOCS))
    import conf  # type: ignore[import-not-found]

    sys.modules.pop("conf")
    assert conf.release == torchwhere.__version__
