"""A recorded run for programs and notebooks: `run = torchwhere.read_run("run/")`, with a method for
each question.

The methods return as objects what the commands print: `run.comms()`, `run.phases()`,
`run.layout()`, `run.groups()`, `run.diff()`, and the events. Every result has a `repr`, text, HTML
and `to_dict()`; a table also has `to_pandas()`. Reading needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchwhere.blackbox import run as box_runs
from torchwhere.blackbox.columns import Column, Texts, columns, joined
from torchwhere.core.events import known_kinds
from torchwhere.core.results import pandas
from torchwhere.core.stall import STALL_S

if TYPE_CHECKING:
    from torchwhere.diagnose.comms.tree import Comms
    from torchwhere.diagnose.diff.comparison import Diff
    from torchwhere.diagnose.doctor.verdict import Verdict
    from torchwhere.diagnose.groups import Groups
    from torchwhere.diagnose.layout.layouts import Layouts
    from torchwhere.diagnose.phases import Phases


@dataclass(slots=True, repr=False)
class Run(box_runs.BoxRun):
    """A recorded run: the boxes of one job, and a method for each command.

    Attributes:
        folder: The folder with the boxes.
        boxes: The boxes by rank.
        earlier: The paths of boxes of earlier runs or restarts in the same folder.
        unreadable: Boxes that cannot be read.

    Example:
        run = torchwhere.read_run("run/")
        print(run.comms(ranks=[0]))
        for event in run.events(kinds={"note"}):
            print(event)
    """

    def comms(self, *, ranks: Iterable[int] | None = None) -> Comms:
        """Count the collectives that each module causes.

        Args:
            ranks: The ranks to use. Without it, all of them.

        Raises:
            TorchwhereError: The run has no box of one of the ranks.

        Example:
            run.comms().counts["all_reduce"]
        """
        from torchwhere.diagnose.comms.tree import comms

        return comms(self, ranks=self.checked_ranks(ranks))

    def phases(self, *, ranks: Iterable[int] | None = None) -> Phases:
        """Return where the time of a step goes: count, total, mean, max and share of each phase.

        Args:
            ranks: The ranks to use. Without it, all of them.

        Raises:
            TorchwhereError: The run has no box of one of the ranks.

        Example:
            print(run.phases())
        """
        from torchwhere.diagnose.phases import phases

        return phases(self, ranks=self.checked_ranks(ranks))

    def layout(self, *, ranks: Iterable[int] | None = None) -> Layouts:
        """Return how the model is sharded over the ranks, and which ranks differ.

        Args:
            ranks: The ranks to use. Without it, all of them.

        Raises:
            TorchwhereError: The run has no box of one of the ranks.

        Example:
            print(run.layout())
        """
        from torchwhere.diagnose.layout.layouts import layouts

        return layouts(self, ranks=self.checked_ranks(ranks))

    def groups(self, *, ranks: Iterable[int] | None = None) -> Groups:
        """Return the process groups and their ranks.

        Args:
            ranks: The ranks to use. Without it, all of them.

        Raises:
            TorchwhereError: The run has no box of one of the ranks.

        Example:
            print(run.groups())
        """
        from torchwhere.diagnose.groups import groups

        return groups(self, ranks=self.checked_ranks(ranks))

    def diff(
        self, *, logs: Sequence[str | os.PathLike[str]] = (), ranks: Iterable[int] | None = None
    ) -> Diff:
        """Find where the ranks diverge, in their events and in their log files.

        Args:
            logs: Log files to compare as well, one for each rank.
            ranks: The ranks to use. Without it, all of them.

        Raises:
            TorchwhereError: The run has no box of one of the ranks, or there is nothing to
                compare.

        Example:
            print(run.diff())
        """
        from torchwhere.diagnose.diff.comparison import diff

        return diff(self, logs=[Path(path) for path in logs], ranks=self.checked_ranks(ranks))

    def to_dict(self) -> dict[str, Any]:
        """Return a summary of the run as values for JSON, without the events.

        Example:
            run.to_dict()["missing"]
        """
        return {
            "folder": str(self.folder),
            "world_size": self.world_size,
            "ranks": {
                str(rank): {
                    "path": str(box.path),
                    "events": len(box.records),
                    "overwritten": box.counts.overwritten,
                }
                | box.meta
                for rank, box in self.in_order()
            },
            "missing": self.missing,
            "earlier": [str(path) for path in self.earlier],
            "caveats": self.caveats(),
        }

    def to_pandas(
        self, *, ranks: Iterable[int] | None = None, kinds: Iterable[str] | None = None
    ) -> Any:
        """Return the events as a `pandas.DataFrame`.

        Args:
            ranks: Only these ranks.
            kinds: Only events of these kinds.

        Returns:
            The column `rank`, then the columns of `torchwhere export`. Texts are categories.

        Raises:
            TorchwhereError: pandas is not installed, or the run has no box of one of the ranks.
            ValueError: There is no such kind of event.

        Example:
            run.to_pandas(kinds={"collective"}).groupby("op")["bytes"].sum()
        """
        pd, wanted = pandas(), known_kinds(kinds)
        boxes = [box for _, box in self.in_order(self.checked_ranks(ranks))]
        parts = [columns(box, box.rows(wanted)) for box in boxes]
        rank_column = np.repeat([box.rank for box in boxes], [len(part["kind"]) for part in parts])
        events = {name: _array(pd, column) for name, column in joined(parts).items()}
        return pd.DataFrame({"rank": rank_column} | events)


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Read the newest run in a folder.

    Args:
        folder: The folder with the boxes, or one of its boxes. The job may still be running.

    Returns:
        The run. It reads the boxes of a large job only when they are used.

    Raises:
        TorchwhereError: The folder holds no readable box.

    Example:
        run = torchwhere.read_run("run/")
        print(run)
    """
    return run_of(box_runs.read_run(box_runs.run_folder(folder)))


def run_of(run: box_runs.BoxRun) -> Run:
    """The same run, with a method for each command."""
    return Run(run.folder, run.boxes, run.earlier, run.unreadable, run.unranked)


def doctor(folder: str | os.PathLike[str], *, stall_s: float = STALL_S) -> Verdict:
    """Diagnose the run in a folder: which ranks hang, differ or exited, and why.

    It works while the job runs and after it ended.

    Args:
        folder: The folder with the boxes, or one of its boxes.
        stall_s: A wait of this many seconds is a hang.

    Returns:
        The verdict. `kind` and `culprits` name the problem, `ranks` has a report on each rank, and
        `str()` explains it.

    Raises:
        TorchwhereError: The folder holds no readable box.
        ValueError: `stall_s` is not above 0.

    Example:
        verdict = torchwhere.doctor("run/")
        print(verdict.kind, verdict.culprits)
        print(verdict)
    """
    from torchwhere.pipeline.verdict import diagnose_folder

    if not stall_s > 0:
        raise ValueError(f"stall_s={stall_s!r}: expected a number of seconds above 0")
    return diagnose_folder(box_runs.run_folder(folder), stall_s=stall_s)


def _array(pd: Any, column: Column) -> Any:
    """A column as an array of pandas: texts as categories, numbers as nullable integers."""
    if isinstance(column, Texts):
        categories = pd.Index(column.values, dtype="str")
        return pd.Categorical.from_codes(column.codes, categories=categories)
    make = pd.arrays.BooleanArray if column.values.dtype == bool else pd.arrays.IntegerArray
    return make(column.values, column.missing)
