"""Measures how long a verdict takes, for a job that hangs because of one rank: boxes of up to
16,384 ranks with 2,000 events each.

    python -m bench.doctor [RANKS ...]

`torchfrtrace` gets the same job as dumps of PyTorch's flight recorder, with 256 and 1,024 ranks. It
takes minutes, so it runs once. Each run is a separate process, as on a command line. Memory is the
peak of the process and its children together. `tests/synthetic_boxes.py` makes the boxes; the
folder for temporary files needs 6 GB.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MAKER = Path(__file__).parent.parent / "tests" / "synthetic_boxes.py"
RANKS = (256, 1024, 4096, 16_384)
TORCHFRTRACE_RANKS = (256, 1024)
ROUNDS = 3
MAKERS = 2
NEEDED_BYTES = 6 << 30
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_WRITE_DUMPS = """
import sys
from torchwhere.blackbox.run import read_run
from torchwhere.flight_recorder.write import write_dumps
write_dumps(read_run(sys.argv[1]), folder=sys.argv[2])
"""

Row = tuple[str, float, str]


@dataclass(frozen=True, slots=True)
class Run:
    """Time, peak memory and output of one process."""

    seconds: float
    bytes: int
    output: str


def rows(sizes: Sequence[int] = RANKS) -> list[Row]:
    table: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="torchwhere-bench-") as folder:
        if shutil.disk_usage(folder).free < NEEDED_BYTES:
            raise OSError(
                f"{folder} has less than {NEEDED_BYTES >> 30} GB for the boxes; set TMPDIR"
            )
        for ranks in sizes:
            table += _rows_of(ranks, Path(folder) / str(ranks))
            shutil.rmtree(Path(folder) / str(ranks))
    return table


def _rows_of(ranks: int, folder: Path) -> list[Row]:
    victim = ranks * 3 // 5 + 3
    _make(ranks, victim, folder / "boxes")
    doctor = [sys.executable, "-m", "torchwhere", "doctor", str(folder / "boxes"), "--json"]
    runs = [_run(doctor) for _ in range(ROUNDS)]
    verdict = json.loads(runs[0].output)
    assert (verdict["kind"], verdict["culprits"]) == ("missing", [victim]), verdict["text"]
    name = f"torchwhere doctor, {ranks:,} ranks"
    own = [
        (name, statistics.median(run.seconds for run in runs), "s"),
        (name, max(run.bytes for run in runs) / 1e6, "MB of memory"),
        (name, len(runs[0].output) / 1e6, "MB of JSON"),
    ]
    return own + (_rows_of_torchfrtrace(ranks, folder) if ranks in TORCHFRTRACE_RANKS else [])


def _rows_of_torchfrtrace(ranks: int, folder: Path) -> list[Row]:
    subprocess.run(
        [sys.executable, "-c", _WRITE_DUMPS, str(folder / "boxes"), str(folder / "dumps")],
        check=True,
    )
    peer = _run(
        [
            str(Path(sys.executable).with_name("torchfrtrace")),
            str(folder / "dumps"),
            "-p",
            "torchwhere_rank_",
        ]
    )
    own = _run(
        [
            sys.executable,
            "-m",
            "torchwhere",
            "doctor",
            "--flight-recorder",
            str(folder / "dumps"),
            "--json",
        ]
    )
    return [
        (f"torchwhere doctor --flight-recorder, {ranks:,} ranks", own.seconds, "s"),
        (f"torchwhere doctor --flight-recorder, {ranks:,} ranks", own.bytes / 1e6, "MB of memory"),
        (f"torchfrtrace, {ranks:,} ranks", peer.seconds, "s"),
        (f"torchfrtrace, {ranks:,} ranks", peer.bytes / 1e6, "MB of memory"),
    ]


def _make(ranks: int, victim: int, folder: Path) -> None:
    options = ["--ranks", str(ranks), "--fault", "missing", "--victim", str(victim)]
    makers = [
        subprocess.Popen(
            [sys.executable, str(MAKER), str(folder), *options, "--part", str(part), str(MAKERS)]
        )
        for part in range(MAKERS)
    ]
    codes = [maker.wait() for maker in makers]
    if any(codes):
        raise RuntimeError(f"{MAKER} failed")


def _run(command: list[str]) -> Run:
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    peak, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            peak[0] = max(peak[0], _held_bytes(process.pid))

    watcher = threading.Thread(target=look)
    watcher.start()
    output, _ = process.communicate()
    seconds = time.perf_counter() - begin
    over.set()
    watcher.join()
    return Run(seconds, peak[0], output)


def _held_bytes(pid: int) -> int:
    """Return the memory of a process and its children; shared pages count for each of them."""
    try:
        own = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = {
            int(child) for task in tasks for child in (task / "children").read_text().split()
        }
    except OSError:  # the process has just ended
        return 0
    return own + sum(map(_held_bytes, children))


if __name__ == "__main__":
    for name, figure, unit in rows(tuple(map(int, sys.argv[1:])) or RANKS):
        print(f"{name:34} {figure:10.2f} {unit}")
