"""How long a timeline takes: 64 ranks of 8 hosts with 10,000 events each, compressed, for Perfetto.

    python -m bench.trace [RANKS]

The command is a process of its own, as on a command line. Boxes are made by
`tests/synthetic_boxes.py`.
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
STEPS = 250  # enough of them to fill the ring
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
        said = json.loads(
            subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
            ).stdout
        )
    assert said["ranks"] == list(range(ranks)), said["ranks"]
    name = f"torchwhere trace, {ranks:,} ranks x {EVENTS:,} events"
    return [
        (name, statistics.median(seconds for seconds, _ in runs), "s"),
        (name, max(held for _, held in runs) / 1e6, "MB of memory"),
        (name, said["bytes"] / 1e6, "MB of file"),
        (name, said["events"] / 1e6, "million events drawn"),
    ]


def _run(command: list[str]) -> tuple[float, int]:
    """Seconds, and the most memory that it held."""
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
