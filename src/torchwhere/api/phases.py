"""`torchwhere.phases`: how long each phase of a step takes, in this process or in a recorded run.

Reading a run needs no torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from torchwhere.blackbox.run import BoxRun, read_run
from torchwhere.diagnose import phases as diagnosis
from torchwhere.diagnose.phases import Phases

_NO_WATCH = "this process has not been watched yet; use: with torchwhere.watch(): ..."


def phases(
    run: BoxRun | str | os.PathLike[str] | None = None, *, ranks: Iterable[int] | None = None
) -> Phases:
    """Return where the time of a step goes: count, total, mean, max and share of each phase.

    Args:
        run: A run, or the name of its folder. Without it, the phases of this process, in the
            running watch or else the last one.
        ranks: The ranks of the run. Without it, all of them.

    Returns:
        A table with one row for each phase.

    Raises:
        TorchwhereError: The folder holds no run, or the run has no box of one of the ranks.
        TypeError: `run` is something else.

    Example:
        print(torchwhere.phases("run/", ranks=[0, 1]))
    """
    if run is None:
        return _of_this_process()
    if isinstance(run, (str, os.PathLike)):
        run = read_run(os.fspath(run))
    if not isinstance(run, BoxRun):
        raise TypeError(
            f"phases(run): expected a folder, a Run or nothing, got {type(run).__name__}"
        )
    return diagnosis.phases(run, ranks=run.checked_ranks(ranks))


def _of_this_process() -> Phases:
    # Not imported here: before the first watch this module is not loaded, and torch may be missing.
    hook = sys.modules.get("torchwhere.hooks.phases")
    latest = hook.latest() if hook is not None else None
    if latest is None:
        return Phases((), {}, (_NO_WATCH,))
    return diagnosis.table({latest.rank: latest.sums()})
