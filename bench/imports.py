"""How long `import torchwhere` takes: whole interpreters, in turns with empty ones, and whether torch came along."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from bench.contenders import AGAIN, TORCHWHERE
from bench.figures import Column, Figure

ROUNDS = 21
_EMPTY, _IMPORT = "pass", "import torchwhere"
_ASK = "import sys, torchwhere; print('torch' in sys.modules)"


def column() -> Column:
    for program in (_EMPTY, _IMPORT):  # the first ones read the disk and write .pyc files
        _seconds(program)
    rounds = [(_seconds(_EMPTY), _seconds(_IMPORT), _seconds(_EMPTY)) for _ in range(ROUNDS)]
    figures = (
        Figure(TORCHWHERE, tuple((imported - empty) * 1e3 for empty, imported, _ in rounds)),
        Figure(AGAIN, tuple((again - empty) * 1e3 for empty, _, again in rounds)),
    )
    brings_torch = (
        subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, check=True).stdout.strip() == "True"
    )
    return Column(
        key="import",
        title="import, ms",
        unit="ms",
        unwatched_ms=statistics.median(empty for empty, _, _ in rounds) * 1e3,
        figures=figures,
        rounds=ROUNDS,
        remark=f"import torchwhere {'imports torch too' if brings_torch else 'does not import torch'}",
    )


def _seconds(program: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True)
    return time.perf_counter() - start
