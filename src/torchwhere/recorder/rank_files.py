"""The files of this rank: the box, and the files for stacks of a crash and of a stall.

All three are named after the rank, so they are renamed together once the real rank is known. A box
in memory has no files beside it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from torchwhere.blackbox.file_names import box_name, fault_file, stall_file
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.errors import TorchwhereError
from torchwhere.hooks.device import may_have_device
from torchwhere.hooks.error_limiter import log
from torchwhere.hooks.stack_files import Faults, StallStackFile
from torchwhere.native.load import native
from torchwhere.recorder.installation import InstallablePart, do_nothing


class RankFiles:
    """Opens the box of this rank in the folder `out`, or in memory if there is no folder."""

    def __init__(self, out: Path | None, *, meta: dict[str, Any], records: int) -> None:
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
                abandon=faults.abandon,
            ),
        ]

    def write_stall_stack(self) -> None:
        """Write the stacks of all threads, for readers of a job that hangs."""
        if self._stall_file is not None:
            self._stall_file.write()

    def rename_to(self, rank: int) -> None:
        """Name the files after another rank. The old names stay if another process uses the new
        names."""
        if self.box.path is None:
            return
        path = self.box.path.with_name(box_name(rank))
        try:
            self.box.rename(path)
            if self._faults is not None:
                self._faults.rename(fault_file(path))
            if self._stall_file is not None:
                self._stall_file.rename(stall_file(path))
        except (TorchwhereError, OSError) as error:
            log.warning(
                "torchwhere: this process is %s, but its box keeps the name %s: %s",
                path.stem,
                self.box.path,
                error,
            )

    def _install_faults(self) -> None:
        assert self._faults is not None
        # Without a free file descriptor there are no stacks; everything else works.
        with contextlib.suppress(OSError):
            self._faults.install()
        self.box.meta = self.box.meta | {"stack_signal": self._faults.signal}
        self.box.write_meta()


def _open_box(out: Path | None, meta: dict[str, Any], records: int) -> BoxWriter:
    """Return the box of this rank: in memory if the file cannot be written."""
    path = out / box_name(meta["rank"]) if out is not None else None
    extension = native()
    try:
        return BoxWriter(
            path,
            meta=meta,
            records=records,
            on_lost=lambda why: log.warning("torchwhere: %s", why),
            native=extension,
            has_device=extension is not None and may_have_device(),
        )
    except OSError as error:
        log.warning(
            "torchwhere: nothing is recorded, %s cannot be written: %s",
            path,
            error.strerror or error,
        )
        return BoxWriter(None, meta=meta, records=records, native=extension)
