"""Keeps the rank of this process up to date: in the header of its box, and in its file names.

A launcher gives the rank before the watch begins. Without one (`mp.spawn`, Lightning, a script that
starts its own processes) the rank is assumed to be 0 until the process calls `init_process_group`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from torchwhere.hooks.error_limiter import log
from torchwhere.processes.launcher import launch
from torchwhere.recorder import identity
from torchwhere.recorder.rank_files import RankFiles


class OwnRank:
    """Corrects rank and world size. Calls `on_change` with a new rank."""

    def __init__(self, files: RankFiles, *, on_change: Callable[[int], None]) -> None:
        self._files = files
        self._on_change = on_change
        self._has_warned = False

    def announce(self, rank: int | None, world_size: int | None) -> None:
        """Take rank and world size from the arguments of `init_process_group`, or from the
        variables that the script has set by then.

        The function may wait for other ranks forever, so readers need the rank before it returns.
        """
        launched = launch()
        rank = launched.rank if rank is None else rank
        world_size = launched.world_size if world_size is None else world_size
        if rank is not None and world_size is not None and 0 <= rank < world_size:
            # A process that still assumes this rank may use the file name: `settle` tries again.
            self._update(rank, world_size)

    def settle(self) -> None:
        """Take rank and world size from the process group, which exists now."""
        problem = self._update(dist.get_rank(), dist.get_world_size())
        if problem is not None and not self._has_warned:
            self._has_warned = True
            log.warning("torchwhere: %s", problem)

    def _update(self, rank: int, world_size: int) -> str | None:
        """Write the header and rename the files. Returns why the files keep their names."""
        box = self._files.box
        meta = box.meta
        fields = {
            "rank": rank,
            "rank_is_assumed": False,
            "world_size": world_size,
            "run_id": meta["run_id"] or identity.run_id(),
            "store": identity.store(),
        }
        if not fields.items() <= meta.items():
            box.meta = meta | fields
            box.write_meta()
            self._on_change(rank)
        return self._files.rename_to(rank)
