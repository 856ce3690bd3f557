"""The lines to type on the other hosts of a job, to look at the ranks that are not on this host."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from torchwhere.core.rank_text import ranks_phrase

_FOLDER = "run/"


def other_hosts_lines(unseen: Sequence[int], *, job: str, out: str | None) -> list[str]:
    """What to type if ranks run on other hosts; empty if all ranks were seen.

    Args:
        unseen: The ranks that were not seen.
        job: SLURM's number of the job, if it has one.
        out: The folder that this look was written to, if there is one.
    """
    if not unseen:
        return []
    given = out or _FOLDER
    shared = shlex.quote(os.path.abspath(given))
    look = f"torchwhere attach --all --out {shared}"
    lines = [
        (
            f"{ranks_phrase(unseen).capitalize()} may be on other hosts. Type one of these lines,"
            " with a folder that all hosts share:"
        ),
        f"  ssh HOST {look}",
        f"  srun --overlap --jobid {job or 'JOB'} --nodes N --ntasks-per-node 1 {look}",
        (
            "  kubectl exec POD -- torchwhere attach --all --out /tmp/run"
            f" && kubectl cp POD:/tmp/run {shared}"
        ),
    ]
    if out is None:
        lines += [
            f"For this host, repeat the command with --out {given}.",
            "Then diagnose all hosts together:",
        ]
    else:
        lines.append("Then diagnose all hosts together:")
    return [*lines, f"  torchwhere attach --read {shared}"]
