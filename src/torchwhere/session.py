"""The one room where sensing meets the black box: a watch, from its start to its end.

Everything a session installs is gone when it ends, and nothing it does can fail the job. `process.py` keeps the one session of
this process and has the verbs that begin and end it.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from torchwhere import identity
from torchwhere.blackbox.writer import BoxWriter, box_name
from torchwhere.errors import TorchwhereError, described
from torchwhere.events import TEXT_FIELD, Kind
from torchwhere.inspect.names import NameTable
from torchwhere.recorder import Recorder
from torchwhere.sense import stack
from torchwhere.sense.backward import BackwardSense
from torchwhere.sense.collectives import CollectiveSense
from torchwhere.sense.compilation import CompilationSense
from torchwhere.sense.exceptions import ExceptionSense
from torchwhere.sense.groups import Groups
from torchwhere.sense.imports import Imports
from torchwhere.sense.locate import Locator
from torchwhere.sense.modules import ModuleSense
from torchwhere.sense.optimizers import OptimizerSense
from torchwhere.sense.tracks import Threads, Track
from torchwhere.sense.trouble import log


class Session:
    """One watch of one process: the senses, the recorder and the box."""

    def __init__(
        self, model: nn.Module | None, *, out: Path | None, module_events: bool, records: int, on_exit: Callable[[str], None]
    ) -> None:
        self.out = out
        self.depth = 1
        self._on_exit = on_exit
        meta = identity.describe()
        self._box = _open_box(out, meta, records)
        self._threads = Threads(self._meet_thread)
        locator = Locator(self._box, NameTable(), self._threads, folder=str(meta["folder"]))
        self.recorder = Recorder(self._box, locator, rank=meta["rank"])
        self._make_senses(locator, module_events)
        self._install(model)

    def _make_senses(self, locator: Locator, module_events: bool) -> None:
        recorder = self.recorder
        self._exceptions = ExceptionSense(locator, report=recorder.exception)
        self.modules = ModuleSense(
            self._box,
            locator,
            on_error=self._exceptions.in_module,
            on_ddp=recorder.reducers.add,
            current_step=lambda: recorder.step,
            events=module_events,
        )
        self._optimizers = OptimizerSense(
            locator, on_move=recorder.move, on_optimizer=recorder.optimizer_stepped, on_step_end=self._step_ended
        )
        self._backward = BackwardSense(
            self._box,
            locator,
            on_error=self._exceptions.in_backward,
            on_begin=recorder.reducers.look,
            on_end=self._optimizers.backward_ended,
        )
        self._groups = Groups(self._box, on_new=self._settle_rank)
        self._collectives = CollectiveSense(
            self._box,
            self._groups,
            bucket_of=recorder.reducers.bucket,
            on_call=recorder.collective,
            on_bucket=recorder.bucket,
        )
        self._compilation = CompilationSense(on_begin=recorder.compile_begins, on_end=recorder.compile_ends)
        self._imports = Imports(
            {
                "torch._dynamo": self._compilation.install,
                "deepspeed.runtime.engine": self._optimizers.watch_deepspeed,
            }
        )

    def _install(self, model: nn.Module | None) -> None:
        lacking = self.modules.install(model)
        try:
            lacking += self._backward.install() + self._optimizers.install() + self._collectives.install()
            self._imports.install()
            atexit.register(self._at_exit)
            self._groups.refresh()
            self.recorder.event(Kind.START, text={TEXT_FIELD[Kind.START]: " ".join(sys.argv)})
            self.recorder.begin_step()
        except BaseException:
            self._remove()
            raise
        for sentence in lacking:
            log.warning("torchwhere: %s", sentence)

    def _remove(self) -> None:
        """Take everything back, in the reverse order."""
        for sense in (self.modules, self._backward, self._optimizers, self._exceptions, self._collectives):
            sense.trouble.is_over = True
        atexit.unregister(self._at_exit)
        self._imports.remove()
        self._compilation.remove()
        self._collectives.remove()
        self._optimizers.remove()
        self._backward.remove()
        self.modules.remove()
        self._exceptions.remove()
        stack.forget()
        self._threads.close()
        self._box.close()

    def close(self, reason: str) -> None:
        """End the watch. `reason` says how: `stop`, `exit`, or an exception."""
        try:
            self._groups.finish()
            self.recorder.event(Kind.END, text={TEXT_FIELD[Kind.END]: reason})
        except Exception as error:
            log.warning("torchwhere: the end of the watch could not be recorded: %s", error)
        finally:
            self._remove()

    def abandon(self) -> None:
        """In a forked child: leave the parent's box alone. Kernels stay, switched off: removing them takes locks that a
        thread of the parent may have held at the fork."""
        self._collectives.switch_off()
        self._imports.remove()
        self._compilation.remove()
        self._optimizers.remove()
        self._backward.remove()
        self.modules.remove()
        self._exceptions.remove()
        atexit.unregister(self._at_exit)
        self._box.abandon()

    def tell(self, error: BaseException) -> None:
        """Note and event for an exception that leaves the watch; one that came through a module has both already."""
        self._exceptions.in_module(error, self._threads.here())

    # -- what the senses tell ----------------------------------------------------------------------------------------

    def _meet_thread(self, track: Track) -> None:
        self.recorder.meet_thread(track)

    def _step_ended(self) -> None:
        if not self.recorder.step_is_users:
            self.next_step(self.recorder.step + 1)

    def next_step(self, step: int) -> None:
        self.recorder.set_step(step)
        self.modules.forget_calls()
        self._groups.refresh()
        self._compilation.refresh()

    def _settle_rank(self) -> None:
        """A process group exists now: the rank that was assumed may not be the real one."""
        if not dist.is_initialized():
            return
        rank, world = dist.get_rank(), dist.get_world_size()
        meta = self._box.meta
        if (rank, world) != (meta["rank"], meta["world_size"]):
            if rank != meta["rank"] and self._box.path is not None:
                self._rename(self._box.path.with_name(box_name(rank)))
            self._box.meta = meta | {"rank": rank, "world_size": world, "run_id": identity.run_id()}
            self._box.write_meta()
            self.recorder.rank = rank

    def _rename(self, path: Path) -> None:
        try:
            self._box.rename(path)
        except (TorchwhereError, OSError) as error:
            log.warning("torchwhere: this is %s now, but its box stays %s: %s", path.stem, self._box.path, error)

    def _at_exit(self) -> None:
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        self._on_exit("exit" if error is None else f"exception: {described(error)}")


def _open_box(out: Path | None, meta: dict[str, Any], records: int) -> BoxWriter:
    """The box of this rank; one in memory where the disk will not have it."""
    path = out / box_name(meta["rank"]) if out is not None else None
    try:
        return BoxWriter(path, meta=meta, records=records, on_lost=lambda why: log.warning("torchwhere: %s", why))
    except OSError as error:
        log.warning("torchwhere: nothing is recorded, %s cannot be written: %s", path, error.strerror or error)
        return BoxWriter(None, meta=meta, records=records)
