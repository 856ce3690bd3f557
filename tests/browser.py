"""A real browser for the report page: Debian's Chromium without a screen, driven by playwright.

Every page that is opened is listened to: what it asks for, what goes wrong in its script, what its
policy had to refuse.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
MUST_BE_THERE = os.environ.get("TORCHWHERE_NEEDS_BROWSER") == "1"
_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
)
_LISTEN = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => window.violations.push(event.violatedDirective));
"""


@dataclass
class Opened:
    """A page of the report, and what was heard of it."""

    page: Any
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def violations(self) -> list[str]:
        found: list[str] = self.page.evaluate("window.violations")
        return found

    def first_paint_ms(self) -> float:
        found: float = self.page.evaluate(
            "performance.getEntriesByName('first-contentful-paint')[0].startTime"
        )
        return found


class Browser:
    """One Chromium for many pages."""

    def __init__(self, chromium: Any) -> None:
        self._chromium = chromium

    @contextmanager
    def opened(self, path: Path, *, script: str = "", **context: Any) -> Iterator[Opened]:
        """The page in a window of its own, with all its sections there. `script` runs before the
        page's own."""
        settings = {"viewport": {"width": 1366, "height": 768}, "color_scheme": "light"} | context
        window = self._chromium.new_context(**settings)
        window.add_init_script(_LISTEN + script)
        window.set_default_timeout(10_000)
        found = Opened(window.new_page())
        found.page.on("request", lambda request: found.requests.append(request.url))
        found.page.on("pageerror", lambda error: found.errors.append(str(error)))
        found.page.on(
            "console",
            lambda said: (
                found.errors.append(said.text) if said.type in ("error", "warning") else None
            ),
        )
        found.page.on(
            "dialog",
            lambda dialog: (found.errors.append(f"dialog {dialog.message}"), dialog.dismiss()),
        )
        try:
            found.page.goto(path.as_uri())
            found.page.wait_for_selector("html[data-ready]", timeout=30_000)
            yield found
        finally:
            window.close()


@contextmanager
def browser() -> Iterator[Browser]:
    """Where there is none the tests are skipped; where one must be (TORCHWHERE_NEEDS_BROWSER=1)
    they fail."""
    has_driver = importlib.util.find_spec("playwright") is not None
    if CHROMIUM is None or not has_driver:
        missing = (
            "no playwright here: pip install playwright"
            if CHROMIUM
            else "no Chromium here: apt-get install chromium"
        )
        if MUST_BE_THERE:
            pytest.fail(missing)
        pytest.skip(missing)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=list(_ARGUMENTS))
        yield Browser(chromium)
        chromium.close()
