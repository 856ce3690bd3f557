"""Reads the times of the parts of each step from a box. `step_clock.py` writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from torchwhere.blackbox.box import Box
from torchwhere.blackbox.file_format import NO_STEP
from torchwhere.blackbox.step_clock import StepPart
from torchwhere.core.events import SideKind

Times = npt.NDArray[np.int64]
# The fields of a record that hold the parts from the second one on, in microseconds.
_FIELDS = ("module", "call", "line", "graph", "subject", "beneficiary")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The steps of one rank that have ended, oldest first."""

    steps: Times  # numbers; a step that ran twice is there twice
    end_ns: Times  # by the clock of the records
    threads: Times  # numbers of the threads that ended the steps
    total_ns: Times
    parts_ns: (
        Times  # a row for each `StepPart`, a column for each step; the rows add up to `total_ns`
    )

    def __len__(self) -> int:
        return len(self.steps)

    def last(self, count: int) -> StepTimes:
        """The last steps."""
        since = max(0, len(self) - count)
        return StepTimes(
            self.steps[since:],
            self.end_ns[since:],
            self.threads[since:],
            self.total_ns[since:],
            self.parts_ns[:, since:],
        )


def step_times(box: Box) -> StepTimes:
    """The times of all steps that the ring of a box still has."""
    rows = box.side_records[box.side_records["kind"] == int(SideKind.STEP_TIMES)]
    rows = rows[rows["step"] != NO_STEP]
    total_ns = _signed(rows["extra"])
    parts_ns = np.zeros((len(StepPart), len(rows)), np.int64)
    left_ns = total_ns.copy()
    for part, name in enumerate(_FIELDS, start=1):
        # A damaged record must not make a part longer than the step.
        parts_ns[part] = np.minimum(rows[name].astype(np.int64) * 1000, left_ns)
        left_ns -= parts_ns[part]
    parts_ns[StepPart.OTHER] = left_ns
    steps, threads = rows["step"].astype(np.int64), rows["thread"].astype(np.int64)
    return StepTimes(steps, _signed(rows["t_ns"]), threads, total_ns, parts_ns)


def _signed(times: npt.NDArray[Any]) -> Times:
    limited: Times = np.minimum(times, np.uint64(1 << 61)).astype(np.int64)
    return limited
