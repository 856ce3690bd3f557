"""A real browser for the report page: Debian's Chromium without a screen, driven by playwright.

Every open page is observed: its requests, the errors of its script, and what its policy refuses.
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
_SIZE = {"width": 1366, "height": 768}
_LISTEN = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => window.violations.push(event.violatedDirective));
"""


@dataclass
class Opened:
    """A page of the report, with the requests and the errors since it was opened."""

    page: Any
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def violations(self) -> list[str]:
        directives: list[str] = self.page.evaluate("window.violations")
        return directives

    def first_paint_ms(self) -> float:
        start_ms: float = self.page.evaluate(
            "performance.getEntriesByName('first-contentful-paint')[0].startTime"
        )
        return start_ms

    def load(self, path: Path) -> None:
        """Load a file anew and wait until all its sections are filled."""
        self.requests.clear()
        self.errors.clear()
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready]", timeout=30_000)

    def listen(self) -> None:
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._on_console)
        self.page.on("dialog", self._on_dialog)

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def _on_dialog(self, dialog: Any) -> None:
        self.errors.append(f"dialog {dialog.message}")
        dialog.dismiss()


class Browser:
    """One Chromium for many pages.

    Pages that need nothing special are loaded one after another in the same window: a new window
    takes 1 s more of CPU time.
    """

    def __init__(self, chromium: Any) -> None:
        self._chromium = chromium
        self._shared: Opened | None = None

    @contextmanager
    def opened(self, path: Path, *, script: str = "", **settings: Any) -> Iterator[Opened]:
        """Open a page with all its sections filled. A page with settings or with a `script`, which
        runs before its own script, gets its own window."""
        if script or settings:
            window = self._window(script, **settings)
            try:
                window.load(path)
                yield window
            finally:
                window.page.context.close()
            return
        if self._shared is None:
            self._shared = self._window()
        self._shared.page.set_viewport_size(_SIZE)
        self._shared.page.mouse.move(0, 0)
        self._shared.load(path)
        yield self._shared

    def _window(self, script: str = "", **settings: Any) -> Opened:
        context = self._chromium.new_context(
            **{"viewport": _SIZE, "color_scheme": "light"} | settings
        )
        context.add_init_script(_LISTEN + script)
        context.set_default_timeout(10_000)
        opened = Opened(context.new_page())
        opened.listen()
        return opened


@contextmanager
def browser() -> Iterator[Browser]:
    """Start Chromium. Without it, tests are skipped; with TORCHWHERE_NEEDS_BROWSER=1 they fail."""
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
