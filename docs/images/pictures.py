"""Makes the pictures of the report page: from a real run with a planted hang, and from synthetic
boxes.

    python docs/images/pictures.py

It needs what the tests need: Chromium and playwright. If `pngquant` is installed, it makes the
pictures smaller.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).parent
ROOT = IMAGES.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from browser import Browser, browser  # noqa: E402
from synthetic_boxes import make  # noqa: E402
from synthetic_job import Job  # noqa: E402
from torchwhere.pipeline.report import report_json, report_on  # noqa: E402
from torchwhere.render.page.page import page_html  # noqa: E402

LARGEST_BYTES = 250_000
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark"}


def hang(folder: Path) -> Path:
    """Run the job of `make demo` and return the folder of its run."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    command = [
        Path(sys.executable).with_name("torchrun"),
        "--standalone",
        "--nproc-per-node",
        "4",
        "-m",
        "torchwhere",
        "run",
    ]
    options = [
        "--stall",
        "5",
        "--end-with",
        "SIGTERM",
        "--out",
        "run/demo",
        "examples/train_stuck.py",
    ]
    subprocess.run(
        [*command, *options],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=False,
    )
    return folder / "run" / "demo"


def boxes(folder: Path, ranks: int) -> Path:
    make(Job(ranks, steps=21, records=1024, fault="missing", victim=ranks // 2 + 9), folder)
    return folder


def picture(chromium: Browser, run: Path, names: dict[str, dict[str, Any]]) -> None:
    page = run.with_suffix(".html")
    page.write_text(page_html(report_json(report_on(run))), encoding="utf-8")
    for name, context in names.items():
        with chromium.opened(page, **context) as opened:
            opened.page.screenshot(path=IMAGES / name)
        if shutil.which("pngquant"):
            subprocess.run(
                ["pngquant", "--force", "--ext", ".png", "128", IMAGES / name], check=True
            )
        assert (IMAGES / name).stat().st_size < LARGEST_BYTES, name


def main() -> None:
    with tempfile.TemporaryDirectory() as name, browser() as chromium:
        folder = Path(name)
        picture(
            chromium,
            hang(folder),
            {
                "report-4.png": {"viewport": {"width": 1366, "height": 900}},
                "report-phone.png": PHONE,
            },
        )
        picture(chromium, boxes(folder / "run-64" / "run", 64), {"report-64.png": {}})
        picture(
            chromium,
            boxes(folder / "run-10000" / "run", 9984),
            {"report-10000.png": {"color_scheme": "dark"}},
        )


if __name__ == "__main__":
    main()
