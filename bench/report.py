"""Measures how long the report page takes: to write it for ten thousand ranks with 1,000 events
each, and to load it in a browser.

    python -m bench.report [RANKS]

`tests/synthetic_boxes.py` makes the boxes; the folder for temporary files needs 2 GB. Headless
Chromium opens the page from disk. First paint is when the verdict is visible, and the page is
complete when all its sections exist. Without Chromium or playwright these two figures are missing.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent / "tests"
RANKS = 9_984  # the largest multiple of the job's meshes below ten thousand
MAKERS = 2
ROUNDS = 3
NEEDED_BYTES = 2 << 30

Row = tuple[str, float, str]


def rows(ranks: int = RANKS) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="torchwhere-bench-") as name:
        if shutil.disk_usage(name).free < NEEDED_BYTES:
            raise OSError(f"{name} has less than {NEEDED_BYTES >> 30} GB for the boxes; set TMPDIR")
        folder = Path(name)
        _make(ranks, folder / "boxes")
        page = folder / "report.html"
        command = [
            sys.executable,
            "-m",
            "torchwhere",
            "report",
            str(folder / "boxes"),
            "-o",
            str(page),
        ]
        seconds = [_seconds(command) for _ in range(ROUNDS)]
        table = [
            (f"report page made, {ranks:,} ranks", statistics.median(seconds), "s"),
            (f"report page, {ranks:,} ranks", page.stat().st_size / 1e6, "MB"),
        ]
        return table + _rows_in_browser(page)


def _make(ranks: int, folder: Path) -> None:
    options = [
        "--ranks",
        str(ranks),
        "--fault",
        "missing",
        "--victim",
        str(ranks * 3 // 5 + 3),
        "--steps",
        "21",
        "--records",
        "1024",
    ]
    command = [sys.executable, str(TESTS / "synthetic_boxes.py"), str(folder), *options]
    makers = [
        subprocess.Popen([*command, "--part", str(part), str(MAKERS)]) for part in range(MAKERS)
    ]
    codes = [maker.wait() for maker in makers]
    if any(codes):
        raise RuntimeError("the boxes could not be made")


def _seconds(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    return time.perf_counter() - begin


def _rows_in_browser(page: Path) -> list[Row]:
    if shutil.which("chromium") is None or not all(
        map(importlib.util.find_spec, ("playwright", "pytest"))
    ):
        return []
    sys.path.insert(0, str(TESTS))
    from browser import browser

    with browser() as chromium:
        times = [_opened(chromium, page) for _ in range(ROUNDS)]
    paint, whole = (statistics.median(figures) for figures in zip(*times, strict=True))
    return [
        ("report page, first paint in Chromium", paint, "ms"),
        ("report page, whole in Chromium", whole, "ms"),
    ]


def _opened(chromium: Any, page: Path) -> tuple[float, float]:
    # with a setting, so that the page gets a new window
    with chromium.opened(page, color_scheme="light") as opened:
        whole: float = opened.page.evaluate("performance.now()")
        return opened.first_paint_ms(), whole


if __name__ == "__main__":
    for name, figure, unit in rows(*map(int, sys.argv[1:])):
        print(f"{name:40} {figure:10.2f} {unit}")
