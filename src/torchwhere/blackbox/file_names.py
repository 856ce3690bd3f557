"""Names of the files that a rank writes into the folder of its run."""

from __future__ import annotations

import os
from pathlib import Path

STALL_MARK = "torchwhere: stalled, "  # starts a stall file; the wall clock in ns follows


def run_folder(path: str | os.PathLike[str]) -> str:
    """The folder of a run, from its own path or from the path of one of its boxes.

    Example:
        run_folder("run/rank0.box")  # "run"
    """
    text = os.fspath(path)
    is_box = text.endswith(".box") and os.path.isfile(text)
    return os.path.dirname(text) or "." if is_box else text


def box_name(rank: int) -> str:
    return f"rank{rank}.box"


def fault_file(box: Path) -> Path:
    """Where a rank writes its stack when it crashes in C or when it gets a signal to do so."""
    return box.with_suffix(".fault")


def stall_file(box: Path) -> Path:
    """Where a rank writes its stack when it stalls."""
    return box.with_suffix(".stall")
