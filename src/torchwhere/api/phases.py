"""`torchwhere.phases`: where the time of a step goes, in this process or in a recorded run. Reading
a run needs no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from torchwhere.blackbox.run import BoxRun, read_run
from torchwhere.diagnose import phases as diagnosis
from torchwhere.diagnose.phases import Phases

_NOBODY = "nobody has watched this process yet: with torchwhere.watch(): ..."


def phases(
    run: BoxRun | str | os.PathLike[str] | None = None, *, ranks: Iterable[int] | None = None
) -> Phases:
    """Where the time of a step goes: count, total, mean, max and share of every phase.

    Without a run: of this process, in the watch that is running or ran last. With a run, or the
    name of its folder: of all its ranks, or of those in `ranks`.
    """
    if run is None:
        return _of_this_process()
    read = _read(run)
    return diagnosis.phases(read, ranks=read.checked_ranks(ranks))


def _of_this_process() -> Phases:
    # not there: nothing was watched, and torch need not be there either
    watching = sys.modules.get("torchwhere.hooks.phases")
    latest = watching.latest() if watching is not None else None
    return (
        diagnosis.table({latest.rank: latest.sums()})
        if latest is not None
        else Phases((), {}, (_NOBODY,))
    )


def _read(run: object) -> BoxRun:
    if isinstance(run, BoxRun):
        return run
    if isinstance(run, (str, os.PathLike)):
        return read_run(os.fspath(run))
    raise TypeError(f"phases(run): expected a folder, a Run or nothing, got {type(run).__name__}")
