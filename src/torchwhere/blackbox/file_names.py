"""Names of the files that a rank writes into the folder of its run."""

from __future__ import annotations

from pathlib import Path

STALL_MARK = "torchwhere: stalled, "  # starts a stall file; the wall clock in ns follows


def box_name(rank: int) -> str:
    return f"rank{rank}.box"


def fault_file(box: Path) -> Path:
    """Where a rank writes its stack when it crashes in C or when it gets a signal to do so."""
    return box.with_suffix(".fault")


def stall_file(box: Path) -> Path:
    """Where a rank writes its stack when it stalls."""
    return box.with_suffix(".stall")
