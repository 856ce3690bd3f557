"""The files of this rank: the box, and the files for stacks of a crash and of a stall.

All three are named after the rank, so they are renamed together once the real rank is known. A
launcher gives the rank before the watch begins. Without one (`mp.spawn`, Lightning, a script that
starts its own processes) the rank is assumed to be 0 until the process calls `init_process_group`.
If another process already uses the files of rank 0, they have a provisional name with host and
process id. A box in memory has no files beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchwhere.blackbox.file_names import (
    box_name,
    fault_file,
    provisional_name,
    stall_file,
)
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.errors import TorchwhereError
from torchwhere.hooks.device import may_have_device
from torchwhere.hooks.error_limiter import log
from torchwhere.hooks.stack_files import Faults, StallStackFile
from torchwhere.native.load import native
from torchwhere.processes.launcher import launch
from torchwhere.recorder import identity
from torchwhere.recorder.installation import InstallablePart, do_nothing


class RankFiles:
    """Opens the box of this rank in the folder `out`, or in memory if there is no folder.

    Keeps rank and world size in its header up to date, and calls `on_rank` with a new rank.
    """

    def __init__(
        self,
        out: Path | None,
        *,
        meta: dict[str, Any],
        records: int,
        on_rank: Callable[[int], None],
    ) -> None:
        self._on_rank = on_rank
        self._has_warned = False
        self.box = _open_box(out, meta, records)
        path = self.box.path
        self._faults = (
            Faults(fault_file(path), native=self.box.native) if path is not None else None
        )
        self._stall_file = StallStackFile(stall_file(path)) if path is not None else None

    def parts(self) -> list[InstallablePart]:
        """List what a watch installs and removes; the box comes first, so it is closed last."""
        box = InstallablePart("the box", remove=self.box.close, abandon=self.box.abandon)
        faults, stall = self._faults, self._stall_file
        if faults is None or stall is None:
            return [box]
        return [
            box,
            # a forked child must not delete the file of its parent
            InstallablePart("the stall file", remove=stall.remove, abandon=do_nothing),
            InstallablePart(
                "the fault handler",
                install=self._install_faults,
                remove=faults.remove,
                abandon=faults.abandon_in_fork,
            ),
        ]

    def write_stall_stack(self, thread: int) -> None:
        """Write the stack of the thread with this ident, for readers of a job that hangs."""
        if self._stall_file is not None:
            self._stall_file.write(thread)

    # -- the rank ----------------------------------------------------------------------------------

    def announce_rank(self, rank: int | None, world_size: int | None) -> None:
        """Take rank and world size from the arguments of `init_process_group`, or from the
        variables that the script has set by then.

        The function may wait for other ranks forever, so readers need the rank before it returns.
        """
        launched = launch()
        rank = launched.rank if rank is None else rank
        world_size = launched.world_size if world_size is None else world_size
        if rank is not None and world_size is not None and 0 <= rank < world_size:
            # A process that still assumes this rank may use the name: `settle_rank` tries again.
            self._set_rank(rank, world_size)

    def settle_rank(self) -> None:
        """Take rank and world size from the process group, which exists now."""
        problem = self._set_rank(dist.get_rank(), dist.get_world_size())
        if problem is not None and not self._has_warned:
            self._has_warned = True
            log.warning("torchwhere: %s", problem)

    def _set_rank(self, rank: int, world_size: int) -> str | None:
        """Write the header and rename the files. Returns why the files keep their names."""
        meta = self.box.meta
        fields = {
            "rank": rank,
            "rank_is_assumed": False,
            "world_size": world_size,
            "run_id": meta["run_id"] or identity.run_id(),
            "store": identity.store(),
        }
        if not fields.items() <= meta.items():
            self.box.write_meta(**fields)
            self._on_rank(rank)
        return self._rename_to(rank)

    def _rename_to(self, rank: int) -> str | None:
        """Name the files after another rank.

        The old names stay if another process uses the new names. Returns the reason then.
        """
        if self.box.path is None:
            return None
        path = self.box.path.with_name(box_name(rank))
        if path == self.box.path:
            return None
        try:
            self.box.rename(path)
            if self._faults is not None:
                self._faults.rename(fault_file(path))
            if self._stall_file is not None:
                self._stall_file.rename(stall_file(path))
        except (TorchwhereError, OSError) as error:
            if _has_assumed_rank(path):  # readers use the header, so the name does not matter
                return None
            return (
                f"this process is rank {rank}, but its box keeps the name {self.box.path}: {error}"
            )
        return None

    def _install_faults(self) -> None:
        assert self._faults is not None
        # Without a free file descriptor there are no stacks; everything else works.
        with contextlib.suppress(OSError):
            self._faults.install()
        self.box.write_meta(stack_signal=self._faults.signal)


def _has_assumed_rank(path: Path) -> bool:
    """Whether the process that writes a box only assumes its rank, for example the parent of
    workers."""
    # This imports the reader of boxes, which most jobs do not need.
    from torchwhere.blackbox.reader import read_header

    return read_header(path).meta.get("rank_is_assumed") is True


def _open_box(out: Path | None, meta: dict[str, Any], records: int) -> BoxWriter:
    """Return the box of this rank: in memory if no file can be written."""
    extension = native()
    open_box = partial(
        BoxWriter,
        meta=meta,
        records=records,
        on_lost=lambda why: log.warning("torchwhere: %s", why),
        native=extension,
    )
    has_device = extension is not None and may_have_device()
    problem = ""
    for path in _possible_paths(out, meta):
        try:
            return open_box(path, has_device=has_device)
        except TorchwhereError as error:  # another process writes it
            problem = str(error)
        except OSError as error:
            problem = f"{path} cannot be written: {error.strerror or error}"
            break
    if problem:
        log.warning("torchwhere: nothing is recorded, %s", problem)
    return open_box(None, has_device=out is None and has_device)


def _possible_paths(out: Path | None, meta: dict[str, Any]) -> list[Path]:
    """The files that this process may write, the preferred one first."""
    if out is None:
        return []
    path = out / box_name(meta["rank"])
    if not meta["rank_is_assumed"]:
        return [path]
    return [path, out / provisional_name(meta["host"], meta["pid"])]
