"""The one room where sensing meets the black box: a watch, from its start to its end.

Everything a session installs is gone when it ends, and nothing it does can fail the job.
`api/watch.py` keeps the one session of this process and has the verbs that begin and end it.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from torchwhere.blackbox.file_names import box_name, fault_file, stall_file
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.errors import FAILED, TorchwhereError, failure
from torchwhere.core.events import TEXT_FIELD, Kind
from torchwhere.hooks import python_stack
from torchwhere.hooks.backward import BackwardHook
from torchwhere.hooks.call_chain import CallChains
from torchwhere.hooks.collectives import CollectiveHook
from torchwhere.hooks.compilation import CompilationHook
from torchwhere.hooks.compiled_graphs import Ledger
from torchwhere.hooks.device import DeviceHook, may_have_device
from torchwhere.hooks.error_limiter import log
from torchwhere.hooks.exceptions import ExceptionHook
from torchwhere.hooks.fast_path import make_fast_path
from torchwhere.hooks.fault_stack import Faults
from torchwhere.hooks.group_creation import GroupCreationHook
from torchwhere.hooks.groups import WatchedGroups
from torchwhere.hooks.late_imports import LateImports
from torchwhere.hooks.layouts import LayoutHook
from torchwhere.hooks.listeners import Listeners
from torchwhere.hooks.locate import Locator
from torchwhere.hooks.modules import ModuleHook
from torchwhere.hooks.optimizers import OptimizerHook
from torchwhere.hooks.stall_stack import StallStackFile
from torchwhere.hooks.threads import Threads, Track
from torchwhere.model import watched
from torchwhere.model.module_names import NameTable
from torchwhere.native.load import native
from torchwhere.recorder import identity
from torchwhere.recorder.heartbeat import Heartbeat
from torchwhere.recorder.recorder import Recorder, Seen

if TYPE_CHECKING:
    from torchwhere.snapshots.on_stall import StallSnapshot


class Session:
    """One watch of one process: the senses, the recorder and the box."""

    def __init__(
        self,
        model: nn.Module | None,
        *,
        out: Path | None,
        module_events: bool,
        records: int,
        on_exit: Callable[[str], None],
    ) -> None:
        self.out = out
        self.depth = 1
        self._stall_snapshot: StallSnapshot | None = None
        self._on_exit = on_exit
        meta = identity.describe()
        self._box = _open_box(out, meta, records)
        self._threads = Threads(self._meet_thread, self._box.native)
        locator = Locator(self._box, NameTable(), self._threads, folder=str(meta["folder"]))
        self._device = DeviceHook(self._box)
        self.recorder = Recorder(self._box, locator, rank=meta["rank"], device=self._device)
        self._faults = Faults(fault_file(self._box.path)) if self._box.path is not None else None
        self._rest_file = (
            StallStackFile(stall_file(self._box.path)) if self._box.path is not None else None
        )
        self.heartbeat = Heartbeat(self._box, on_stall=self._rest)
        self._make_hooks(locator, module_events)
        self._install(model)

    def _make_hooks(self, locator: Locator, module_events: bool) -> None:
        recorder, counter = self.recorder, self._box.counter
        self._exceptions = ExceptionHook(locator, report=recorder.exception)
        self.modules = ModuleHook(
            self._box,
            locator,
            on_error=self._exceptions.in_module,
            on_first_call=self._meet_module,
            current_step=lambda: counter.step,
            events=module_events,
        )
        self.listeners = Listeners(
            locator, CallChains(locator), self.modules, current_step=lambda: counter.step
        )
        steppers: set[int] = set()
        self._passes = make_fast_path(
            self._box, calls=self.modules.calls, steps=recorder.phases.steps, steppers=steppers
        )
        recorder.fast_path = self._passes
        self._optimizers = OptimizerHook(
            *(locator, self._passes, steppers),
            on_move=recorder.move,
            on_optimizer=recorder.optimizer_stepped,
            on_step_end=self._step_ended,
        )
        self._backward = BackwardHook(
            *(self._box, locator, self.listeners, self._passes),
            on_error=self._exceptions.in_backward,
            on_begin=recorder.reducers.look,
            on_end=self._optimizers.backward_ended,
        )
        self._groups = WatchedGroups(self._box, on_new=self._settle_rank)
        self._layouts = LayoutHook(self._box, locator.names, self.modules)
        self._collectives = CollectiveHook(
            self._box,
            self._groups,
            bucket_of=recorder.reducers.bucket,
            on_call=recorder.collective,
            on_bucket=recorder.bucket,
            on_launched=self._device.finish,
            turns=recorder.reducers.turns,
        )
        self._gathering = GroupCreationHook(on_begin=self._group_begins, on_end=recorder.group_ends)
        self._compilation = CompilationHook(
            on_begin=self._compile_begins, on_end=self._compile_ends
        )
        self._imports = LateImports(
            {
                "torch._dynamo": self._compilation.install,
                "deepspeed.runtime.engine": self._optimizers.watch_deepspeed,
            }
        )

    def _install(self, model: nn.Module | None) -> None:
        lacking = self.modules.install(model)
        try:
            lacking += (
                self._backward.install() + self._optimizers.install() + self._collectives.install()
            )
            lacking += self._gathering.install()
            self._device.install()
            self._exceptions.install()
            self._imports.install()
            self._install_faults()
            atexit.register(self._at_exit)
            self._groups.refresh()
            self.recorder.event(Kind.START, text={TEXT_FIELD[Kind.START]: " ".join(sys.argv)})
            self.recorder.begin_step()
        except BaseException:
            self._remove()
            raise
        watched.begin(watched.Watched(self.recorder.locator.names, self.recorder.place_of_node))
        for sentence in lacking:
            log.warning("torchwhere: %s", sentence)

    def _install_faults(self) -> None:
        if self._faults is not None:
            # no room for one more file: no stacks, all else works
            with contextlib.suppress(OSError):
                self._faults.install()
            self._box.meta = self._box.meta | {"stack_signal": self._faults.signal}
            self._box.write_meta()

    def _remove(self) -> None:
        """Take everything back, in the reverse order."""
        self.heartbeat.stop()
        hooks = (
            self.modules,
            self.listeners,
            self._backward,
            self._optimizers,
            self._exceptions,
            self._collectives,
        )
        for sense in (*hooks, self._gathering):
            sense.errors.is_over = True
        atexit.unregister(self._at_exit)
        watched.end()
        self._imports.remove()
        self._compilation.remove()
        self._gathering.remove()
        self._collectives.remove(are_others=self._threads.others_may_issue())
        self._device.remove()
        self._optimizers.remove()
        self._backward.remove()
        self.listeners.clear()
        self.modules.remove()
        self._exceptions.remove()
        self._passes.wake()
        python_stack.forget()
        for file in (self._faults, self._rest_file):
            if file is not None:
                file.remove()
        self.recorder.phases.close()
        self._threads.close()
        self._box.close()

    def close(self, reason: str) -> None:
        """End the watch. `reason` says how: `stop`, `exit`, or an exception."""
        try:
            self._layouts.finish()
            # looks at all objects there are; nobody reads a box in memory
            if self._box.path is not None:
                self._groups.finish()
            self.recorder.event(Kind.END, text={TEXT_FIELD[Kind.END]: reason})
            self.heartbeat.stop(looks=reason.startswith(FAILED))
        except Exception as error:
            log.warning("torchwhere: the end of the watch could not be recorded: %s", error)
        finally:
            self._remove()

    def abandon(self) -> None:
        """In a forked child: leave the parent's box alone."""
        self.heartbeat.abandon()
        self._collectives.abandon()
        self._device.abandon()
        self._gathering.remove()
        watched.end()
        self._imports.remove()
        self._compilation.remove()
        self._optimizers.remove()
        self._backward.remove()
        self.listeners.clear()
        self.modules.remove()
        self._exceptions.remove()
        self._passes.wake()
        atexit.unregister(self._at_exit)
        if self._faults is not None:
            self._faults.abandon()
        self.recorder.phases.abandon()
        self._box.abandon()

    @property
    def compilations(self) -> Ledger:
        """What was compiled since the watch began."""
        return self._compilation.ledger

    def tell(self, error: BaseException) -> None:
        """Note and event for an exception that leaves the watch; one that came through a module has
        both already."""
        self._exceptions.in_module(error, self._threads.here())

    # -- what the senses tell ----------------------------------------------------------------------

    def _compile_begins(self, compile_id: str, known: dict[str, str]) -> None:
        self.modules.pause()
        self.recorder.compile_begins(compile_id, known)

    def _compile_ends(self, compile_id: str) -> None:
        self.modules.resume()
        self.recorder.compile_ends(compile_id)

    def _group_begins(self, op: str, number: int, ranks: list[int] | None) -> None:
        self._beat_if_of(self._box.meta["world_size"])
        self.recorder.group_begins(op, number, ranks)

    def _beat_if_of(self, world: int) -> None:
        """Only a rank among several has a heart, and only once there is a group, or about to be:
        from then on there are threads in its process anyway. A job that forks finds nothing new."""
        if world > 1 and self._box.path is not None:
            self.heartbeat.start()

    def _rest(self) -> None:
        """In the thread of the heart: nothing moves, or this rank has failed. Leave where it
        stands, and what it sees of those around it, whose boxes may be lost."""
        if self._rest_file is None or self._box.path is None:
            return
        self._rest_file.write()
        if self._stall_snapshot is None:
            # reads boxes: a job that never rests needs nothing of that
            from torchwhere.snapshots.on_stall import StallSnapshot

            self._stall_snapshot = StallSnapshot(self._box.path, rank=self.recorder.rank)
        self._stall_snapshot.take()

    def _meet_module(self, module: nn.Module) -> None:
        self.recorder.reducers.meet(module)
        self._passes.is_paused = True

    def _meet_thread(self, track: Track) -> None:
        self.recorder.meet_thread(track)

    def _step_ended(self, seen: Seen | None) -> None:
        if not self.recorder.step_is_users:
            self.next_step(self.recorder.step + 1, seen=seen)

    def next_step(self, step: int, *, seen: Seen | None = None) -> None:
        if self._box.native is not None and self._passes.next_step(step):
            return
        self.recorder.set_step(step, seen=seen)
        self.modules.forget_calls()
        self._layouts.step_ended()
        self._groups.refresh()
        self._compilation.refresh()
        if self._box.native is not None and self._layouts.is_settled:
            self.recorder.rest((*self._groups.looked_at(), *self._compilation.looked_at()))

    def name_groups(self, *, anew: bool) -> None:
        """Meet all groups there are now, and name the mesh dimensions of the new ones; of all,
        `anew`, which takes longer."""
        if anew:
            self._groups.finish()
        else:
            self._groups.refresh()

    def _settle_rank(self) -> None:
        """A process group exists now: the rank that was assumed may not be the real one."""
        if not dist.is_initialized():
            return
        rank, world = dist.get_rank(), dist.get_world_size()
        self._beat_if_of(world)
        meta = self._box.meta
        told = {
            "rank": rank,
            "world_size": world,
            "run_id": meta["run_id"] or identity.run_id(),
            "store": identity.store(),
        }
        if told.items() <= meta.items():
            return
        if rank != meta["rank"] and self._box.path is not None:
            self._rename(self._box.path.with_name(box_name(rank)))
        self._box.meta = meta | told
        self._box.write_meta()
        self.recorder.rank = self.recorder.phases.rank = rank

    def _rename(self, path: Path) -> None:
        try:
            self._box.rename(path)
            if self._faults is not None:
                self._faults.rename(fault_file(path))
            if self._rest_file is not None:
                self._rest_file.rename(stall_file(path))
        except (TorchwhereError, OSError) as error:
            log.warning(
                "torchwhere: this is %s now, but its box stays %s: %s",
                path.stem,
                self._box.path,
                error,
            )

    def _at_exit(self) -> None:
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        self._on_exit("exit" if error is None else failure(error))


def _open_box(out: Path | None, meta: dict[str, Any], records: int) -> BoxWriter:
    """The box of this rank; one in memory where the disk will not have it."""
    path = out / box_name(meta["rank"]) if out is not None else None
    part = native()
    try:
        return BoxWriter(
            path,
            meta=meta,
            records=records,
            on_lost=lambda why: log.warning("torchwhere: %s", why),
            native=part,
            has_device=part is not None and may_have_device(),
        )
    except OSError as error:
        log.warning(
            "torchwhere: nothing is recorded, %s cannot be written: %s",
            path,
            error.strerror or error,
        )
        return BoxWriter(None, meta=meta, records=records, native=part)
