"""A recorded run as programs and notebooks hold it: `run = torchwhere.read_run("run/")`, and a
method for each question.

What the commands print, as objects: `run.comms()`, `run.phases()`, `run.layout()`, `run.groups()`,
`run.diff()`, and the events themselves. Every answer shows itself, has `to_dict()`, and where it is
a table `to_pandas()`. Reading needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchwhere.blackbox import run as boxes
from torchwhere.blackbox.columns import Column, Texts, columns, joined, rows_of
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
class Run(boxes.BoxRun):
    """One job: `boxes` by rank, `missing` ranks, `caveats()`, `events(...)`, and the answers of the
    commands.

    `ranks` is everywhere the ranks to look at; all of them without it.
    """

    def comms(self, *, ranks: Iterable[int] | None = None) -> Comms:
        """Which collectives each module causes."""
        from torchwhere.diagnose.comms.tree import comms

        return comms(self, ranks=self.checked_ranks(ranks))

    def phases(self, *, ranks: Iterable[int] | None = None) -> Phases:
        """Where the time of a step goes."""
        from torchwhere.diagnose.phases import phases

        return phases(self, ranks=self.checked_ranks(ranks))

    def layout(self, *, ranks: Iterable[int] | None = None) -> Layouts:
        """How the model lies over the ranks, and which ranks differ."""
        from torchwhere.diagnose.layout.layouts import layouts

        return layouts(self, ranks=self.checked_ranks(ranks))

    def groups(self, *, ranks: Iterable[int] | None = None) -> Groups:
        """The process groups."""
        from torchwhere.diagnose.groups import groups

        return groups(self, ranks=self.checked_ranks(ranks))

    def diff(
        self, *, logs: Sequence[str | os.PathLike[str]] = (), ranks: Iterable[int] | None = None
    ) -> Diff:
        """Where the ranks part, in their events and in their logs."""
        from torchwhere.diagnose.diff.comparison import diff

        return diff(self, logs=[Path(one) for one in logs], ranks=self.checked_ranks(ranks))

    def to_dict(self) -> dict[str, Any]:
        """What there is, without the events."""
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
        """The events as a `pandas.DataFrame`: `rank`, then the columns of `torchwhere export`;
        texts are categories."""
        found, known, wanted = pandas(), self.checked_ranks(ranks), known_kinds(kinds)
        chosen = [box for rank, box in self.in_order() if known is None or rank in known]
        parts = [columns(box, rows_of(box, kinds=wanted)) for box in chosen]
        of_rank = np.repeat([box.rank for box in chosen], [len(part["kind"]) for part in parts])
        return found.DataFrame(
            {"rank": of_rank}
            | {name: _array(found, column) for name, column in joined(parts).items()}
        )


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Read the newest run in a folder. Raises `TorchwhereError` when there is nothing there to
    read."""
    found = boxes.read_run(os.fspath(folder))
    return Run(found.folder, found.boxes, found.earlier, found.unreadable)


def doctor(folder: str | os.PathLike[str], *, stall_s: float = STALL_S) -> Verdict:
    """Who hangs, who differs, who died, and why: one verdict on the run in a folder, at any time.

    A wait of `stall_s` seconds is a hang. `verdict.kind`, `verdict.culprits`, `verdict.ranks`;
    printed it says why.
    """
    from torchwhere.pipeline.verdict import diagnose_folder

    return diagnose_folder(os.fspath(folder), stall_s=stall_s)


def _array(found: Any, column: Column) -> Any:
    """A column as pandas keeps it: texts as categories, numbers that may be missing."""
    if isinstance(column, Texts):
        return found.Categorical.from_codes(
            column.codes, categories=found.Index(column.values, dtype="str")
        )
    make = found.arrays.BooleanArray if column.values.dtype == bool else found.arrays.IntegerArray
    return make(column.values, column.missing)
