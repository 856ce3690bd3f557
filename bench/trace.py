"""Measures how long a timeline takes: 64 ranks on 8 hosts with 10,000 events each, compressed, for
Perfetto.

    python -m bench.trace [RANKS]

The command runs in its own process, as on a command line. `tests/synthetic_boxes.py` makes the
boxes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MAKER = Path(__file__).parent.parent / "tests" / "synthetic_boxes.py"
RANKS = 64
EVENTS = 10_000
STEPS = 250  # enough to fill the ring
ROUNDS = 3

Row = tuple[str, float, str]


def rows(ranks: int = RANKS) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="torchwhere-bench-") as folder:
        boxes, out = Path(folder) / "boxes", Path(folder) / "trace.json.gz"
        options = ["--ranks", str(ranks), "--steps", str(STEPS), "--records", str(EVENTS)]
        subprocess.run([sys.executable, str(MAKER), str(boxes), *options], check=True)
        command = [
            sys.executable,
            "-m",
            "torchwhere",
            "trace",
            str(boxes),
            "-o",
            str(out),
            "--json",
        ]
        runs = [_run(command) for _ in range(ROUNDS)]
        summary = json.loads(
            subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
            ).stdout
        )
    assert summary["ranks"] == list(range(ranks)), summary["ranks"]
    name = f"torchwhere trace, {ranks:,} ranks x {EVENTS:,} events"
    return [
        (name, statistics.median(seconds for seconds, _ in runs), "s"),
        (name, max(peak for _, peak in runs) / 1e6, "MB of memory"),
        (name, summary["bytes"] / 1e6, "MB of file"),
        (name, summary["events"] / 1e6, "million events drawn"),
    ]


def _run(command: list[str]) -> tuple[float, int]:
    """Return the seconds that a command takes, and its peak memory."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, code, used = os.wait4(process.pid, 0)
    process.returncode = code
    if code:
        raise RuntimeError(f"{command} failed")
    return time.perf_counter() - begin, used.ru_maxrss * 1024


if __name__ == "__main__":
    for name, figure, unit in rows(*map(int, sys.argv[1:])):
        print(f"{name:48} {figure:10.2f} {unit}")
