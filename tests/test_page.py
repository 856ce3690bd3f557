"""The report page in a real browser: what it shows, how it reacts, and that no content becomes code
and no request leaves it."""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from browser import Browser, Opened, browser
from synthetic_boxes import make
from synthetic_job import Job
from torchwhere.cli import main
from torchwhere.pipeline.report import report_json, report_on
from torchwhere.render.page.page import SECTIONS, page_html, page_json

VICTIM = 33
MANY = 10_000
BIN = Path(sys.executable).parent
TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def boxes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 ranks on 8 hosts; one rank never issues the collective that the others wait for."""
    folder = tmp_path_factory.mktemp("boxes") / "run"
    make(Job(64, steps=8, records=1024, fault="missing", victim=VICTIM), folder)
    return folder


@pytest.fixture(scope="module")
def report(boxes: Path) -> dict[str, Any]:
    """The facts of the boxes, plus those that synthetic boxes lack: phases, graphs, a layout,
    notes, module times."""
    return report_json(report_on(boxes)) | json.loads((TESTS / "report_parts.json").read_text())


@pytest.fixture(scope="module")
def page(report: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(report, tmp_path_factory.mktemp("page"))


def written(report: dict[str, Any], folder: Path) -> Path:
    path = folder / "report.html"
    path.write_text(page_html(report), encoding="utf-8")
    return path


def widened(report: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The same job with more ranks: the facts of the first ranks are repeated."""
    found = copy.deepcopy(report)
    columns = found["ranks"]
    size = len(columns["rank"])
    for name in (
        "state",
        "step",
        "behind",
        "behind_calls",
        "place",
        "last",
        "last_number",
        "pid",
        "age_ms",
    ):
        columns[name] = [columns[name][rank % size] for rank in range(ranks)]
    columns["rank"] = list(range(ranks))
    columns["host"], columns["hosts"] = (
        [rank // 8 for rank in range(ranks)],
        [f"node{at:05}" for at in range(-(-ranks // 8))],
    )
    for mesh in columns["meshes"]:
        mesh["of"] = [mesh["of"][rank % size] for rank in range(ranks)]
    return found | {"world_size": ranks}


def unharmed(opened: Opened, path: Path) -> None:
    """Check that the page requested only its own file, raised no script error and violated no
    policy."""
    assert opened.requests == [path.as_uri()]
    assert opened.errors == []
    assert opened.violations() == []


def chosen(opened: Opened) -> str:
    """The rank whose card is visible."""
    found: str = opened.page.inner_text("#ranks .card h3")
    return found.split()[1]


def column(opened: Opened, place: str, at: int) -> list[str]:
    found: list[str] = opened.page.locator(f"{place} tbody tr > :nth-child({at})").all_inner_texts()
    return found


# -- the page --------------------------------------------------------------------------------------


def test_every_section_is_filled(chromium: Browser, page: Path, report: dict[str, Any]) -> None:
    """Every section exists and has content, and the page fetches nothing."""
    with chromium.opened(page) as opened:
        for section in SECTIONS:
            text = opened.page.inner_text(f"#{section} .body")
            assert text.strip(), section
            assert "could not be shown" not in text
            assert "needs the page's script" not in text
        assert f"Rank {VICTIM}" in opened.page.inner_text("h1")
        assert "waiting: rank" in opened.page.inner_text(".evidence")
        assert report["verdict"]["headline"] in opened.page.inner_text("h1")
        unharmed(opened, page)


def test_verdict_needs_no_script(chromium: Browser, page: Path) -> None:
    """The verdict, its evidence, the missing data and the settings are visible before any script
    runs."""
    text = page.read_text().partition("<script")[0]
    for said in (
        f"Rank {VICTIM} never issued",
        "waiting: rank",
        "no process of this job was seen alive",
        "world size",
    ):
        assert said in text


def test_sections_without_data_say_how_to_get_it(
    chromium: Browser, boxes: Path, tmp_path: Path
) -> None:
    """A section without data says in one line how to record it."""
    path = written(report_json(report_on(boxes)), tmp_path)
    with chromium.opened(path) as opened:
        assert (
            opened.page.inner_text("#phases .body")
            == 'No phase was recorded. Put with torchwhere.phase("data"): around a part of the'
            " step."
        )
        assert opened.page.inner_text("#graphs .body").startswith(
            "No compiled graph was recorded. "
        )
        assert opened.page.inner_text("#log .body").startswith(
            "No note, exception or log line was recorded. "
        )
        assert opened.page.inner_text("#layout .body").startswith("No layout was recorded. ")
        unharmed(opened, path)


def test_an_empty_report(chromium: Browser, report: dict[str, Any], tmp_path: Path) -> None:
    """A report in which everything is empty is still a valid page."""
    none = {"rows": [], "passes": [], "note": None, "has_time": False}
    ranks = {name: [] for name in report["ranks"]}
    steps = {"steps": [], "rows": [], "median_ms": [], "stragglers": []}
    path = written(
        report
        | {"ranks": ranks, "details": {}, "modules": none, "collectives": [], "steps": steps}
        | {
            "phases": {"rows": [], "heat": {"phases": [], "ranks": [], "ms": []}},
            "layout": {"cohorts": [], "difference": []},
        }
        | {
            "graphs": [],
            "log": {"ranks": [], "rows": [], "first_difference": None},
            "missing": [],
            "settings": {},
        },
        tmp_path,
    )
    with chromium.opened(path) as opened:
        assert opened.page.locator("main p.nothing").count() == 9
        assert opened.page.inner_text("#missing .body") == "Nothing: every rank has a complete box."
        unharmed(opened, path)


# -- what can be done ------------------------------------------------------------------------------


def test_click_a_rank(chromium: Browser, page: Path) -> None:
    """The page first shows the rank that the verdict names; a click shows another rank; the link in
    the verdict returns to it."""
    with chromium.opened(page) as opened:
        assert chosen(opened) == str(VICTIM)
        assert opened.page.locator("#ranks .card tbody tr").count() == 12
        opened.page.click("#ranks canvas", position={"x": 70, "y": 40})
        assert chosen(opened) == "1"
        opened.page.click(f"header a[data-rank='{VICTIM}']")
        assert chosen(opened) == str(VICTIM)
        unharmed(opened, page)


def test_hover_a_rank(chromium: Browser, page: Path) -> None:
    """The pointer over a cell shows the rank's state, step, place and host."""
    with chromium.opened(page) as opened:
        opened.page.hover("#ranks canvas", position={"x": 20, "y": 40})
        said = opened.page.inner_text(".tip").splitlines()
        assert said[0] == "rank 0: waiting"
        assert said[1] == "step 8"
        assert "train.py:" in said[2]
        assert said[-1] == "node0000"


def test_keys_on_the_rank_map(chromium: Browser, page: Path) -> None:
    """Tab reaches the map with its focus visible; arrows move, Enter chooses, Home and End go to
    the ends."""
    with chromium.opened(page) as opened:
        opened.page.focus("#ranks input")
        opened.page.keyboard.press("Tab")
        assert opened.page.locator(":focus").get_attribute("aria-roledescription") == "rank map"
        assert (
            opened.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        )
        for keys, rank in (
            ("ArrowRight", 34),
            ("ArrowLeft", 33),
            ("ArrowUp", 17),
            ("ArrowDown", 33),
            ("Home", 0),
            ("End", 63),
        ):
            opened.page.keyboard.press(keys)
            opened.page.keyboard.press("Enter")
            assert chosen(opened) == str(rank), keys
        assert opened.page.inner_text("#ranks [role=status].unseen").startswith(
            "rank 63: waiting, step 8"
        )
        unharmed(opened, page)


def test_find_a_rank(chromium: Browser, page: Path) -> None:
    """A rank number or a part of a host name finds a rank; the page says when nothing matches."""
    with chromium.opened(page) as opened:
        for text, rank in (("47", "47"), ("node0002", "16"), ("NODE0007", "56")):
            opened.page.fill("#ranks input", text)
            assert chosen(opened) == rank
        opened.page.fill("#ranks input", "64")
        assert opened.page.inner_text("#ranks .found") == "no such rank; there are ranks 0 to 63"
        assert chosen(opened) == "56"


def test_group_and_colour(chromium: Browser, page: Path) -> None:
    """Ranks can be grouped by host and by every mesh dimension, and coloured by how far behind they
    are."""
    with chromium.opened(page) as opened:
        colour, group = opened.page.locator("#ranks select").all()
        assert group.locator("option").all_inner_texts()[:2] == ["rank", "host"]
        assert {"mesh dimension tp", "mesh dimension dp"} <= set(
            group.locator("option").all_inner_texts()
        )
        said = opened.page.inner_text("#ranks .legend").splitlines()
        assert {"1 running", "63 waiting in a collective", "named by the verdict"} <= {
            line.strip() for line in said
        }
        heights = set()
        for value in group.locator("option").all_inner_texts():
            group.select_option(label=value)
            heights.add(opened.page.evaluate("document.querySelector('#ranks canvas').height"))
        assert len(heights) > 1
        for value in ("behind", "calls", "age"):
            colour.select_option(value)
            assert opened.page.locator("#ranks .legend .swatch").count() == 7
        unharmed(opened, page)


def test_sort_a_table(chromium: Browser, page: Path, report: dict[str, Any]) -> None:
    """A click on a heading sorts its table, a second click reverses it, and the heading shows the
    order; it works by keyboard."""
    with chromium.opened(page) as opened:
        head = opened.page.locator("#phases thead th").nth(1)
        expected = [
            row["name"] for row in sorted(report["phases"]["rows"], key=lambda row: row["total_ms"])
        ]
        head.locator("button").click()
        assert (head.get_attribute("aria-sort"), column(opened, "#phases", 1)) == (
            "descending",
            expected[::-1],
        )
        opened.page.keyboard.press("Enter")
        assert (head.get_attribute("aria-sort"), column(opened, "#phases", 1)) == (
            "ascending",
            expected,
        )
        assert opened.page.locator("#phases thead th").nth(0).get_attribute("aria-sort") == "none"


def test_ranks_as_a_table(chromium: Browser, page: Path) -> None:
    """All ranks are also a table, sorted as numbers, and its ranks link to their cards."""
    with chromium.opened(page) as opened:
        opened.page.click("#ranks summary")
        opened.page.wait_for_selector("#ranks details table")
        table = "#ranks details"
        assert column(opened, table, 1) == [str(rank) for rank in range(64)]
        opened.page.click(f"{table} thead th:first-child button")
        assert column(opened, table, 1) == [str(rank) for rank in reversed(range(64))]
        opened.page.click(f"{table} tbody tr:first-child button")
        assert chosen(opened) == "63"


def test_search_modules(chromium: Browser, page: Path) -> None:
    """A search shows matches with their parents; the page says when nothing matches; an empty
    search shows everything again."""
    with chromium.opened(page) as opened:
        before = column(opened, "#modules", 1)
        opened.page.fill("#modules input", "1-5.UP")
        found = column(opened, "#modules", 1)
        assert 0 < len(found) < len(before)
        assert "up" in found[-1]
        assert re.fullmatch(r"\d+ modules? found", opened.page.inner_text("#modules .found"))
        opened.page.fill("#modules input", "nowhere")
        assert opened.page.inner_text("#modules .found") == "no module name contains that"
        opened.page.fill("#modules input", "")
        assert column(opened, "#modules", 1) == before


def test_module_tree(chromium: Browser, page: Path) -> None:
    """Modules collapse and expand, by mouse and by arrow keys, and sorting keeps children below
    their parents."""
    with chromium.opened(page) as opened:
        every = column(opened, "#modules", 1)
        opened.page.click("#modules button:has-text('Collapse all')")
        roots = column(opened, "#modules", 1)
        assert len(roots) < len(every)
        opened.page.focus("#modules button.twisty")
        opened.page.keyboard.press("ArrowRight")
        assert len(column(opened, "#modules", 1)) > len(roots)
        opened.page.keyboard.press("ArrowLeft")
        assert column(opened, "#modules", 1) == roots
        opened.page.click("#modules button:has-text('Expand all')")
        opened.page.click("#modules thead tr:nth-child(2) th:first-child button")
        assert sorted(column(opened, "#modules", 1)) == sorted(every)
        depths = opened.page.eval_on_selector_all(
            "#modules tbody th", "all => all.map((one) => parseInt(one.style.paddingLeft))"
        )
        assert depths[0] == min(depths)
        assert all(after - before <= 16 for before, after in itertools.pairwise(depths))


def test_collectives(chromium: Browser, page: Path, report: dict[str, Any]) -> None:
    """The group of the verdict comes first, with the ranks that have not arrived; another group can
    be chosen; the heat map reacts to keys."""
    with chromium.opened(page) as opened:
        groups = opened.page.locator("#collectives select option").all_inner_texts()
        assert len(groups) == len(report["collectives"])
        short = [row for row in report["collectives"][0]["rows"] if row["arrived"] < row["of"]]
        newest = opened.page.locator("#collectives tbody tr").first.inner_text()
        assert f"{short[-1]['arrived']} of {short[-1]['of']} ◆" in newest
        opened.page.focus("#collectives .heatmap")
        opened.page.keyboard.press("ArrowDown")
        opened.page.keyboard.press("ArrowDown")
        said = opened.page.inner_text(".tip").splitlines()[0]
        assert re.match(r"rank \d+ at #\d+: (arrived|has not arrived)", said)
        opened.page.select_option("#collectives select", "1")
        assert opened.page.locator("#collectives tbody tr").count() > 0
        unharmed(opened, page)


def test_first_difference(chromium: Browser, page: Path) -> None:
    """The first line in which the notes of ranks differ is marked, also in text."""
    with chromium.opened(page) as opened:
        first = opened.page.locator("#log tr.first")
        assert first.count() == 1
        assert first.inner_text().split() == [
            "≠",
            "12",
            "first",
            "difference",
            "loss",
            "0.015",
            "loss",
            "0.015",
            "—",
            "loss",
            "0.015",
        ]
        assert opened.page.locator("#log tr.differs").count() == 2
        assert opened.page.locator("#log b").count() == 3


def test_stragglers_are_marked(chromium: Browser, page: Path) -> None:
    """Stragglers are named above the heat map of steps."""
    with chromium.opened(page) as opened:
        assert opened.page.inner_text("#steps .callout") == "▸ Stragglers: rank 2"
        opened.page.select_option("#steps select", "over")
        assert opened.page.locator("#steps canvas").count() == 1
        unharmed(opened, page)


# -- how it looks ----------------------------------------------------------------------------------

DARK, LIGHT = "rgb(20, 23, 28)", "rgb(255, 255, 255)"


def background(opened: Opened) -> str:
    found: str = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    return found


def test_theme(chromium: Browser, page: Path) -> None:
    """The theme follows the system; the switch changes it, by keyboard too, and the page remembers
    it."""
    with chromium.opened(page, color_scheme="dark") as opened:
        assert background(opened) == DARK
        before = opened.page.locator("#ranks canvas").screenshot()
        opened.page.focus("#theme")
        opened.page.keyboard.press("Enter")
        assert (background(opened), opened.page.inner_text("#theme")) == (LIGHT, "Dark")
        assert opened.page.locator("#ranks canvas").screenshot() != before
        opened.page.reload()
        opened.page.wait_for_selector("html[data-ready]")
        assert background(opened) == LIGHT
        assert opened.errors == []
    with chromium.opened(page) as opened:
        assert background(opened) == LIGHT


def test_theme_without_storage(chromium: Browser, page: Path) -> None:
    """The switch works if the browser denies storage to the page."""
    closed = (
        "Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('closed',"
        " 'SecurityError'); }});"
    )
    with chromium.opened(page, script=closed) as opened:
        opened.page.click("#theme")
        assert background(opened) == DARK
        unharmed(opened, page)


CONTRAST = """
() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (c) => c.slice(0, 3).map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  const behind = (one) => {
    for (let at = one; at; at = at.parentElement) {
      const found = parse(getComputedStyle(at).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const one of document.querySelectorAll("body *")) {
    const hasText = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!hasText || one.closest("script, noscript, .unseen, [hidden]") || !one.checkVisibility()) continue;
    const found = ratio(parse(getComputedStyle(one).color), behind(one));
    if (found < 4.5) low.push([one.tagName, one.className, one.textContent.slice(0, 30), found.toFixed(2)]);
  }
  const probe = document.body.appendChild(document.createElement("i"));
  const colour = (name) => ((probe.style.color = `var(${name})`), parse(getComputedStyle(probe).color));
  const pairs = ["running", "waiting", "stopped", "dead", "finished"].map((state) => [`--on-${state}`, `--state-${state}`]);
  for (let at = 0; at < 7; at++) pairs.push([at < 4 ? "--heat-text-low" : "--heat-text-high", `--heat-${at}`]);
  pairs.push(["--text", "--bar"], ["--text", "--page"], ["--bad", "--page"]);
  return low.concat(pairs.filter(([text, page]) => ratio(colour(text), colour(page)) < 4.5));
}
"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast(chromium: Browser, page: Path, theme: str) -> None:
    """Every text has a contrast of at least 4.5 to its background, also in the cells of maps (WCAG
    AA)."""
    with chromium.opened(page, color_scheme=theme) as opened:
        assert opened.page.evaluate(CONTRAST) == []


def test_not_by_colour_alone(
    chromium: Browser, page: Path, report: dict[str, Any], tmp_path: Path
) -> None:
    """With one colour for all states, the maps of one and of two states still differ: letters tell
    states apart."""
    same = (
        ":root { --state-running: #888 !important; --state-waiting: #888 !important; --on-running:"
        " #000 !important; "
    )
    same += "--on-waiting: #000 !important; --bad: #888 !important }"
    pictures = []
    for state in (0, 1):
        changed = copy.deepcopy(report)
        changed["ranks"]["states"] = ["running", "waiting"]
        changed["ranks"]["state"] = [0] * 63 + [state]
        path = written(changed, tmp_path)
        path.write_text(
            path.read_text().replace("style-src 'sha256", "style-src 'unsafe-inline' 'x-sha256")
        )
        path.write_text(path.read_text().replace("</head>", f"<style>{same}</style></head>"))
        with chromium.opened(path) as opened:
            pictures.append(opened.page.locator("#ranks canvas").screenshot())
    assert pictures[0] != pictures[1]


def test_widths(chromium: Browser, page: Path) -> None:
    """From phone to desktop width and back, the page is never wider than the screen, and its maps
    fit."""
    with chromium.opened(page) as opened:
        for width in (360, 390, 768, 1920, 360):
            opened.page.set_viewport_size({"width": width, "height": 800})
            opened.page.evaluate(
                "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
            )
            assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
            right = opened.page.eval_on_selector_all(
                "canvas", "all => Math.max(...all.map((one) => one.getBoundingClientRect().right))"
            )
            assert width / 2 < right <= width
        unharmed(opened, page)


def test_print(chromium: Browser, page: Path) -> None:
    """In print, all sections are open, controls are hidden and the theme is light; afterwards the
    page is as before."""
    with chromium.opened(page, color_scheme="dark") as opened:
        assert opened.page.locator("details:not([open])").count() > 0
        opened.page.emulate_media(media="print")
        opened.page.wait_for_selector("details:not([open])", state="detached")
        assert not opened.page.is_visible("nav")
        assert not opened.page.is_visible("#ranks .controls")
        assert column(opened, "#ranks details", 1)[:3] == ["0", "1", "2"]
        assert (
            opened.page.evaluate("getComputedStyle(document.documentElement).colorScheme")
            == "light"
        )
        assert opened.page.pdf()[:5] == b"%PDF-"
        opened.page.emulate_media(media="screen")
        opened.page.wait_for_selector("details:not([open])")
        assert background(opened) == DARK
        unharmed(opened, page)


BROKEN_WORDS = """() => {
  const found = [];
  for (const cell of document.querySelectorAll("#ranks details tbody tr td")) {
    if (cell.querySelector("bdi, code")) continue;  // a name may be longer than the sheet is wide
    const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
      const range = document.createRange();
      range.selectNodeContents(texts.currentNode);
      if (!/\\s/.test(texts.currentNode.data) && range.getClientRects().length > 1) found.push(texts.currentNode.data);
    }
  }
  return found;
}"""


def test_words_are_whole_on_paper(chromium: Browser, page: Path) -> None:
    """In print, states and numbers are not broken across lines."""
    with chromium.opened(page, viewport={"width": 680, "height": 980}) as opened:
        opened.page.emulate_media(media="print")
        opened.page.wait_for_selector("details:not([open])", state="detached")
        assert "waiting" in opened.page.inner_text("#ranks details tbody")
        assert opened.page.evaluate(BROKEN_WORDS) == []


# -- nothing gets in, nothing gets out -------------------------------------------------------------

HOSTILE = (
    "</script><img src=x onerror=window.pwned=1><b>bold</b>\"'>&lt;`${window.pwned=1}` <!-- -->"
    " \x1b[31mred\x1b[0m \u202eright to left\u202c \u2066x\u2069 two\nlines\r\0\x7f\u2028\u2029"
    " \ud800 "
)
LONG = ("very long " * 1000, "verylong" * 1250)
seen = itertools.count()


def poisoned(value: Any, *, key: str = "") -> Any:
    """Appends hostile text to every string, sometimes very long, including strings that the page
    itself uses."""
    if isinstance(value, str):
        return value + HOSTILE + {0: LONG[0], 1: LONG[1]}.get(next(seen) % 20, "")
    if isinstance(value, dict):
        keys = key in ("settings", "cells")
        return {name + HOSTILE * keys: poisoned(inner, key=name) for name, inner in value.items()}
    return [poisoned(inner, key=key) for inner in value] if isinstance(value, list) else value


def test_hostile_names(chromium: Browser, report: dict[str, Any], tmp_path: Path) -> None:
    """Markup, escape sequences, direction marks, line breaks and 10,000 characters are shown as
    text and have no effect."""
    worst = poisoned(report) | {
        "details": {rank: poisoned(known) for rank, known in report["details"].items()}
    }
    path = written(worst, tmp_path)
    with chromium.opened(path) as opened:
        opened.page.click("#ranks summary")
        opened.page.wait_for_selector("#ranks details table")
        opened.page.click("#modules button:has-text('Expand all')")
        assert (
            opened.page.locator(
                "img, iframe, svg, header b, bdi b, script:not([id]) ~ script"
            ).count()
            == 0
        )
        assert opened.page.evaluate("document.scripts.length") == 2
        assert opened.page.evaluate("window.pwned") is None
        assert opened.page.evaluate(
            f"document.getElementById('ranks').textContent.includes({json.dumps('</script><img')})"
        )
        shown = opened.page.evaluate(
            "[document.body.innerText, ...[...document.querySelectorAll('[title], [aria-label]')]"
            ".map((one) => one.title + one.ariaLabel)].join(' ')"
        )
        assert not re.search(
            r"[\x00-\x08\x0b-\x1f\x7f\u200e\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069]", shown
        )
        assert "could not be shown" not in shown
        longest = opened.page.eval_on_selector_all(
            "main bdi", "all => Math.max(...all.map((one) => one.textContent.length))"
        )
        assert longest <= 601
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= 1366
        assert (
            opened.page.evaluate("getComputedStyle(document.querySelector('main bdi')).unicodeBidi")
            == "isolate"
        )
        unharmed(opened, path)


def test_policy_holds(chromium: Browser, page: Path) -> None:
    """The content policy refuses inline scripts, handlers, pictures and requests."""
    with chromium.opened(page) as opened:
        opened.page.evaluate("""() => {
              const script = document.createElement("script");
              script.textContent = "window.pwned = 1";
              document.body.append(script);
              document.body.setAttribute("onclick", "window.pwned = 2");
              document.body.click();
              document.body.append(Object.assign(new Image(), {src: "http://127.0.0.1:9/x.png"}));
              return fetch("http://127.0.0.1:9/").catch(() => null);
            }""")
        assert opened.page.evaluate("window.pwned") is None
        assert set(opened.violations()) >= {
            "script-src-elem",
            "script-src-attr",
            "img-src",
            "connect-src",
        }


def test_text_never_becomes_markup() -> None:
    """The page's script never makes markup out of text, and has no handler or style in an
    attribute."""
    text = "".join(
        path.read_text()
        for path in (TESTS.parent / "src/torchwhere/render/page/script").glob("*.js")
    )
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        "new Function",
        "DOMParser",
        "http:",
        "https:",
    ):
        assert word not in text, word


def test_numbers_that_json_does_not_have() -> None:
    """NaN and infinities become unknown values, in the page and in its JSON."""
    assert (
        page_json({"a": [float("nan"), float("inf"), 1.5], "b": (float("-inf"),)})
        == '{"a":[null,null,1.5],"b":[null]}'
    )
    assert page_json({"a": "</script>&\u2028"}) == '{"a":"\\u003c/script\\u003e\\u0026\\u2028"}'


# -- thousands -------------------------------------------------------------------------------------


def test_ten_thousand_ranks(chromium: Browser, report: dict[str, Any], tmp_path: Path) -> None:
    """A page of 10,000 ranks is smaller than 5 MB, opens, and every rank can be found, clicked and
    reached by keys."""
    path = written(widened(report, MANY), tmp_path)
    assert path.stat().st_size < 5_000_000
    with chromium.opened(path) as opened:
        print(f"first paint, with the verdict, of {MANY:,} ranks: {opened.first_paint_ms():.0f} ms")
        opened.page.fill("#ranks input", "9999")
        assert chosen(opened) == "9999"
        opened.page.click("#ranks canvas", position={"x": 4, "y": 4})
        assert chosen(opened) == "0"
        opened.page.keyboard.press("Tab")
        opened.page.focus("#ranks .rankmap")
        for key in ("ArrowDown", "ArrowRight", "Enter"):
            opened.page.keyboard.press(key)
        assert int(chosen(opened)) > 16
        for by in ("host", "mesh 0"):
            opened.page.locator("#ranks select").nth(1).select_option(by)
        opened.page.click("#ranks summary")
        opened.page.wait_for_selector("#ranks details table")
        assert len(column(opened, "#ranks details", 1)) == 100
        opened.page.click("#ranks details thead th:first-child button")
        assert column(opened, "#ranks details", 1)[0] == "9999"
        unharmed(opened, path)


@pytest.mark.parametrize(
    "ranks",
    [1, 25, *(pytest.param(ranks, marks=pytest.mark.exhaustive) for ranks in (4, 24, 1000))],
)
def test_any_number_of_ranks(
    chromium: Browser, report: dict[str, Any], tmp_path: Path, ranks: int
) -> None:
    """For any number of ranks, each rank has a cell that can be clicked, including the last one."""
    path = written(widened(report, ranks), tmp_path)
    with chromium.opened(path) as opened:
        opened.page.focus("#ranks .rankmap")
        opened.page.keyboard.press("End")
        opened.page.keyboard.press("Enter")
        assert chosen(opened) == str(ranks - 1)
        opened.page.click("#ranks canvas", position={"x": 5, "y": 22})
        assert chosen(opened) == "0"
        unharmed(opened, path)


# -- the command -----------------------------------------------------------------------------------


class Done(NamedTuple):
    """The output of a command."""

    returncode: int
    stdout: str
    stderr: str


Call = Callable[..., Done]


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    """Runs the command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: Done(main(["report", *map(str, arguments)]), *capsys.readouterr())


def test_command(chromium: Browser, boxes: Path, tmp_path: Path) -> None:
    """The command writes the page, prints its path and size, and leaves no other file; a second
    call replaces the page."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")
    }
    for _ in range(2):
        done = subprocess.run(
            [BIN / "torchwhere", "report", boxes],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert re.fullmatch(r"report\.html  \d+(\.\d)? [KM]B\n", done.stdout)
    assert os.listdir(tmp_path) == ["report.html"]
    with chromium.opened(tmp_path / "report.html") as opened:
        assert chosen(opened) == str(VICTIM)
        unharmed(opened, tmp_path / "report.html")


def test_command_json(call: Call, boxes: Path, tmp_path: Path) -> None:
    """`--json` writes the page's data to standard output or into a file."""
    done = call(boxes, "--json")
    assert (done.returncode, done.stderr, os.listdir(tmp_path)) == (0, "", [])
    printed = json.loads(done.stdout)
    assert (printed["version"], printed["verdict"]["culprits"], printed["world_size"]) == (
        1,
        [VICTIM],
        64,
    )
    done = call(boxes, "--json", "-o", "report.json")
    assert json.loads(done.stdout) == {
        "file": "report.json",
        "bytes": (tmp_path / "report.json").stat().st_size,
    }
    written_ = json.loads((tmp_path / "report.json").read_text())
    assert written_ | {"made_at": ""} == printed | {"made_at": ""}


def test_command_bad_places(call: Call, boxes: Path, tmp_path: Path) -> None:
    """If the page cannot be written, the command says so before it reads anything, with exit code
    2; an older page stays complete."""
    (tmp_path / "folder").mkdir()
    for out, said in (
        ("folder", "cannot write folder: it is a folder; give the name of a file"),
        (
            "no/report.html",
            ("cannot write no/report.html: there is no folder no; create it, or give another name"),
        ),
        ("/dev/full", "cannot write /dev/full: No space left on device"),
    ):
        done = call(boxes, "-o", out)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"torchwhere: {said}\n")
    (tmp_path / "old.html").write_text("old")
    for out in ("/proc/report.html", "/dev/full"):  # root may open it, but not write to it
        done = call("nothing to read here", "-o", out)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"torchwhere: cannot write {out}: ")
    assert sorted(os.listdir(tmp_path)) == ["folder", "old.html"]


def test_command_through_a_link(call: Call, boxes: Path, tmp_path: Path) -> None:
    """A link to a page stays a link, and a device stays a device."""
    (tmp_path / "there").mkdir()
    (tmp_path / "page.html").symlink_to("there/real.html")
    assert call(boxes, "-o", "page.html").returncode == 0
    assert (tmp_path / "page.html").is_symlink()
    assert (tmp_path / "there" / "real.html").read_text().startswith("<!doctype html>")
    assert call(boxes, "-o", "/dev/null").returncode == 0
    assert Path("/dev/null").is_char_device()


def test_command_nothing_to_read(call: Call, tmp_path: Path) -> None:
    """For an empty folder and a missing one, the command prints one line, exits with 2 and writes
    no page."""
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "nowhere"):
        done = call(folder, "-o", "page.html")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert re.match(f"torchwhere: .*{folder}", done.stderr)
    assert os.listdir(tmp_path) == ["empty"]


def test_command_damaged_boxes(call: Call, chromium: Browser, boxes: Path, tmp_path: Path) -> None:
    """Cut, foreign and deleted boxes still give a page, which says what is missing."""
    folder = tmp_path / "run"
    folder.mkdir()
    for rank in range(8):
        content = (boxes / f"rank{rank}.box").read_bytes()
        (folder / f"rank{rank}.box").write_bytes(content[: len(content) // (rank + 1)])
    (folder / "rank2.box").write_text("no box")
    done = call(folder)
    assert done.returncode == 0
    with chromium.opened(tmp_path / "report.html") as opened:
        said = opened.page.inner_text("#missing .body")
        assert "7 of 64 ranks are watched: no box of ranks 2, 8-63" in said
        assert "rank 7: cut short" in said
        unharmed(opened, tmp_path / "report.html")


def test_options_are_documented() -> None:
    """The docs page about the report lists exactly the options of the command."""
    page = (TESTS.parent / "docs" / "report.md").read_text()
    helped = subprocess.run(
        [BIN / "torchwhere", "report", "--help"], capture_output=True, text=True, timeout=400
    ).stdout
    options = set(re.findall(r"^  (--?[\w-]+)", helped, re.MULTILINE)) - {"-h"}
    assert options == set(re.findall(r"^\| `(--?[\w-]+)", page, re.MULTILINE))


def test_fields_are_documented(report: dict[str, Any]) -> None:
    """The docs page about the report explains every field of its JSON."""
    page = (TESTS.parent / "docs" / "report.md").read_text()
    assert set(report) == set(
        re.findall(r"^\| `(\w+)`", page.partition("## The JSON")[2], re.MULTILINE)
    )
