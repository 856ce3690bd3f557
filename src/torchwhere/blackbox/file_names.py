"""Names of the files that a rank writes into the folder of its run."""

from __future__ import annotations

import re
from pathlib import Path

_SET_ASIDE = re.compile(r"\.\d{8}T\d{6}(\.\d+)?\.box$")
# name of a file in memory, of a forked process; the number of a signal follows
STACK_IN_MEMORY = "torchwhere-stack-"
STALL_MARK = "torchwhere: stalled, "  # starts a stall file; the wall clock in ns follows


def box_name(rank: int) -> str:
    return f"rank{rank}.box"


def provisional_name(host: str, pid: int) -> str:
    """The name of a box whose process does not know its rank yet."""
    return f"process-{host}-{pid}.box"


def is_set_aside(box: Path) -> bool:
    """Whether a new writer has renamed this box: its process has ended."""
    return _SET_ASIDE.search(box.name) is not None


def fault_file(box: Path) -> Path:
    """Where a rank writes its stack when it crashes in C or when it gets a signal to do so."""
    return box.with_suffix(".fault")


def stall_file(box: Path) -> Path:
    """Where a rank writes its stack when it stalls."""
    return box.with_suffix(".stall")
