"""Measures how long `import torchwhere` takes: interpreters that import it alternate with empty
ones.

A remark says whether it imports torch, and how long a watch takes to begin in a process that has
imported torch.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys

from bench.contenders import AGAIN, TORCHWHERE
from bench.figures import Column, Figure

ROUNDS = 21
STARTS = 3
_EMPTY, _IMPORT = "pass", "import torchwhere"
_ASK = "import sys, torchwhere; print('torch' in sys.modules)"
_START = """
import time, torch, torch.distributed, torchwhere
start = time.perf_counter()
with torchwhere.watch(): print(time.perf_counter() - start)
"""


def column() -> Column:
    for program in (_EMPTY, _IMPORT):  # the first runs read the disk and write .pyc files
        _seconds(program)
    rounds = [(_seconds(_EMPTY), _seconds(_IMPORT), _seconds(_EMPTY)) for _ in range(ROUNDS)]
    figures = (
        Figure(TORCHWHERE, tuple((imported - empty) * 1e3 for empty, imported, _ in rounds)),
        Figure(AGAIN, tuple((again - empty) * 1e3 for empty, _, again in rounds)),
    )
    return Column(
        key="import",
        title="import, ms",
        unit="ms",
        unwatched_ms=statistics.median(empty for empty, _, _ in rounds) * 1e3,
        figures=figures,
        rounds=ROUNDS,
        remark=_remark(),
    )


def _remark() -> str:
    brings_torch = _printed(_ASK) == "True"
    begin_ms = statistics.median(float(_printed(_START)) for _ in range(STARTS)) * 1e3
    return (
        f"import torchwhere {'imports' if brings_torch else 'does not import'} torch; a watch"
        f" begins in {begin_ms:.0f} ms"
    )


def _printed(program: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    return run.stdout.strip()


def _seconds(program: str) -> float:
    """Return the CPU time of one interpreter, so that other programs do not count."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
