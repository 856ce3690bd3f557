"""One watch of this process: installs the hooks, owns recorder and box, removes all at the end.

`_parts` lists everything that a session installs. No error of torchwhere itself reaches the job
during the watch. `api/watch.py` has the one session of this process, and the functions that begin
and end it.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from torchwhere.core.errors import FAILED, failure
from torchwhere.core.events import TEXT_FIELD, Kind
from torchwhere.hooks import _torch, python_stack
from torchwhere.hooks.backward import BackwardHook
from torchwhere.hooks.call_chain import CallChains
from torchwhere.hooks.collectives import CollectiveHook
from torchwhere.hooks.compilation import CompilationHook
from torchwhere.hooks.compiled_graphs import Ledger
from torchwhere.hooks.cuda_graphs import CudaGraphHook, CudaGraphs
from torchwhere.hooks.ddp import Reducers
from torchwhere.hooks.device import DeviceHook
from torchwhere.hooks.error_limiter import ErrorLimiter, log
from torchwhere.hooks.exceptions import ExceptionHook
from torchwhere.hooks.fast_path import make_fast_path
from torchwhere.hooks.group_creation import GroupCreationHook
from torchwhere.hooks.groups import WatchedGroups
from torchwhere.hooks.late_imports import LateImports
from torchwhere.hooks.layouts import LayoutHook
from torchwhere.hooks.listeners import Listeners
from torchwhere.hooks.locate import Locator, PlaceIds
from torchwhere.hooks.memory import MemoryHook
from torchwhere.hooks.modules import ModuleHook
from torchwhere.hooks.optimizers import OptimizerHook
from torchwhere.hooks.parts import PartHook
from torchwhere.hooks.phases import PhaseRecorder
from torchwhere.hooks.threads import Threads, Track
from torchwhere.model import watched
from torchwhere.model.module_names import NameTable
from torchwhere.recorder import identity
from torchwhere.recorder.collectives import CollectiveRecorder
from torchwhere.recorder.cuda_graphs import CudaGraphRecorder
from torchwhere.recorder.heartbeat import Heartbeat
from torchwhere.recorder.installation import InstallablePart, Installation, do_nothing, hook_part
from torchwhere.recorder.rank_files import RankFiles
from torchwhere.recorder.recorder import EXIT, LineAndGraph, Recorder
from torchwhere.recorder.stack_samples import sample_taker

if TYPE_CHECKING:
    from torchwhere.snapshots.on_stall import StallSnapshot


class Session:
    """One watch of one process: the hooks, the recorders and the box."""

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
        self._files = RankFiles(out, meta=meta, records=records, on_rank=self._rank_changed)
        self._box = self._files.box
        # A lambda: `self.recorder` does not exist yet.
        self._threads = Threads(
            lambda track: self.recorder.register_thread(track), self._box.native
        )
        locator = Locator(self._box, NameTable(), self._threads, folder=str(meta["folder"]))
        self._device = DeviceHook(self._box)
        self._memory = MemoryHook(self._box)
        self._cuda_graphs = CudaGraphs()
        self.collectives = CollectiveRecorder(self._box, locator, self._device, self._cuda_graphs)
        self.recorder = Recorder(
            self._box,
            locator,
            rank=meta["rank"],
            last_collectives=self.collectives.last,
            on_step=self._device.step,
            on_device_error=self._device.fail,
        )
        self.phases = PhaseRecorder(self._box, locator, rank=meta["rank"])
        self.errors = ErrorLimiter("notes and phases", do_nothing)
        self.heartbeat = Heartbeat(
            self._box, on_stall=self._on_stall, take_sample=sample_taker(self._box, locator)
        )
        self._make_module_hooks(locator, module_events)
        self._make_collective_hooks(locator)
        self._installation = Installation()
        self._begin(model)

    def _make_module_hooks(self, locator: Locator, module_events: bool) -> None:
        recorder = self.recorder
        self._reducers = Reducers(locator.names, self._box.native)
        self._exceptions = ExceptionHook(locator, report=self._on_exception)
        self.modules = ModuleHook(
            self._box,
            locator,
            on_error=self._exceptions.in_module,
            on_first_call=self._on_first_call,
            events=module_events,
        )
        self.listeners = Listeners(locator, CallChains(locator), self.modules)
        steppers: set[int] = set()
        self._fast_path = recorder.fast_path = make_fast_path(
            self._box, calls=self.modules.calls, steps=self.phases.steps, steppers=steppers
        )
        self._optimizers = OptimizerHook(
            locator,
            self._fast_path,
            steppers,
            on_move=recorder.move,
            on_optimizer=recorder.optimizer_stepped,
            on_step_end=self._step_ended,
        )
        self._backward = BackwardHook(
            self._box,
            locator,
            self.listeners,
            self._fast_path,
            on_error=self._exceptions.in_backward,
            on_begin=self._reducers.look,
            on_end=self._optimizers.backward_ended,
        )

    def _make_collective_hooks(self, locator: Locator) -> None:
        self._groups = WatchedGroups(self._box, on_new=self._settle_rank)
        self._layouts = LayoutHook(self._box, locator.names, self.modules)
        self._collective_hook = CollectiveHook(
            self._box,
            self._groups,
            self._reducers,
            self._device,
            on_call=self.collectives.collective,
            on_bucket=self.collectives.bucket,
        )
        cuda_graphs = CudaGraphRecorder(
            self.recorder, self.collectives, self._cuda_graphs, self._device
        )
        self.cuda_graph_hook = CudaGraphHook(
            self._cuda_graphs,
            on_begin=cuda_graphs.capture_begins,
            on_end=cuda_graphs.capture_ends,
            on_replay=cuda_graphs.replays,
            on_replayed=cuda_graphs.replayed,
        )
        self._group_creation = GroupCreationHook(
            on_init=self._files.announce_rank,
            on_begin=self._group_begins,
            on_end=self.recorder.group_ends,
        )
        self._compilation = CompilationHook(
            on_begin=self._compile_begins, on_end=self._compile_ends
        )
        self._part_hook = PartHook(self._box, self._threads)
        self._imports = LateImports(
            {
                _torch.DYNAMO: self._compilation.install,
                **self._part_hook.late_imports(),
                "deepspeed.runtime.engine": self._optimizers.watch_deepspeed,
            }
        )

    def _parts(self, model: nn.Module | None) -> list[InstallablePart]:
        """List everything that this watch installs, in this order.

        The reverse order removes it: first what calls the hooks, last the box that they write to.
        """
        part = InstallablePart
        modules, collectives = self.modules, self._collective_hook
        return [
            *self._files.parts(),
            part("the logs of the threads", remove=self._threads.close, abandon=do_nothing),
            part("the phases", remove=self.phases.close, abandon=self.phases.abandon),
            part("the known code objects", remove=python_stack.forget, abandon=do_nothing),
            part("the fast path", remove=self._fast_path.wake),
            hook_part("the exception hook", hook=self._exceptions),
            part("the module hook", install=lambda: modules.install(model), remove=modules.remove),
            part("the listeners", remove=self.listeners.clear),
            hook_part("the backward hook", hook=self._backward),
            hook_part("the optimizer hook", hook=self._optimizers),
            part(
                "the marks on devices",
                install=self._device.install,
                remove=self._device.remove,
                abandon=self._device.abandon,
            ),
            hook_part("the memory of the device", hook=self._memory),
            part(
                "the collective hook",
                install=collectives.install,
                remove=lambda: collectives.remove(are_others=self._threads.others_may_issue()),
                abandon=collectives.abandon,
            ),
            hook_part("the CUDA graph hook", hook=self.cuda_graph_hook),
            hook_part("the group creation hook", hook=self._group_creation),
            hook_part("the hook for data and checkpoints", hook=self._part_hook),
            # the import hook installs the compilation hook once dynamo is imported
            part("the compilation hook", remove=self._compilation.remove),
            hook_part("the import hook", hook=self._imports),
            part("the names of objects", install=self._publish_names, remove=watched.end),
            part(
                "the exit handler",
                install=self._register_at_exit,
                remove=lambda: atexit.unregister(self._at_exit),
            ),
            part("the error reports", remove=self._silence_errors),
            part("the heartbeat", remove=self.heartbeat.stop, abandon=self.heartbeat.abandon),
        ]

    def _begin(self, model: nn.Module | None) -> None:
        sentences = self._installation.install(self._parts(model))
        try:
            self._groups.refresh()
            self._threads.here().ready()  # now, not at the first call of a module
            self.recorder.event(Kind.START, text={TEXT_FIELD[Kind.START]: " ".join(sys.argv)})
            self.recorder.begin_step()
            self.phases.step_begins()
        except BaseException:
            self._installation.remove()
            raise
        for sentence in sentences:
            log.warning("torchwhere: %s", sentence)

    def _publish_names(self) -> None:
        """Let functions that describe live objects use the names and places of this watch."""
        recorder = self.recorder
        watched.begin(watched.Watched(recorder.locator.names, recorder.place_of_node))

    def _register_at_exit(self) -> None:
        atexit.register(self._at_exit)

    def _silence_errors(self) -> None:
        """Stop reports: a thread that is still inside a hook finds a closed box, which is not an
        error."""
        for hook in (
            self.modules,
            self.listeners,
            self._backward,
            self._optimizers,
            self._exceptions,
            self._collective_hook,
            self.cuda_graph_hook,
            self._group_creation,
            self._memory,
            self._part_hook,
            self.phases,
            self,
        ):
            hook.errors.is_over = True

    def close(self, reason: str) -> None:
        """End the watch. `reason` says how: `stop`, `exit`, or an exception."""
        try:
            self._layouts.finish()
            # This looks at all objects of the process. A box in memory has no reader: skip it.
            if self._box.path is not None:
                self._groups.finish()
            self.recorder.end(reason)
            self.heartbeat.stop(failed=reason.startswith(FAILED))
        except Exception as error:
            log.warning("torchwhere: could not record the end of the watch: %s", error)
        finally:
            self._installation.remove()

    def abandon(self) -> None:
        """Remove the watch from a forked child, and leave the parent's box alone."""
        self._installation.abandon()

    @property
    def is_recorded(self) -> bool:
        """Whether this watch writes a file. Without a folder, or if it cannot be written, the box
        is in memory."""
        return self._box.path is not None

    @property
    def compilations(self) -> Ledger:
        """The graphs that were compiled since the watch began."""
        return self._compilation.ledger

    def report_exception(self, error: BaseException) -> None:
        """Add note and event to an exception that leaves the watch, unless a module did so."""
        self._exceptions.in_module(error, self._threads.here())

    # -- reports of the hooks ----------------------------------------------------------------------

    def _compile_begins(self, compile_id: str, fields: dict[str, str]) -> None:
        self.modules.pause()
        self.recorder.compile_begins(compile_id, fields)
        self.collectives.choose_kernel()

    def _compile_ends(self, compile_id: str) -> None:
        self.modules.resume()
        self.recorder.compile_ends(compile_id)
        self.collectives.choose_kernel()

    def _group_begins(self, op: str, number: int, ranks: list[int] | None) -> None:
        self._start_heartbeat(self._box.meta["world_size"])
        self.recorder.group_begins(op, number, ranks)

    def _start_heartbeat(self, world: int) -> None:
        """Start the heartbeat, if this rank is one of several.

        Called when a process group is created: from then on the process has other threads in any
        case. A job that forks before that has no thread of torchwhere.
        """
        if world > 1 and self._box.path is not None:
            self.heartbeat.start()

    def _on_stall(self) -> None:
        """Save this rank's stack, and a snapshot of the other ranks, whose boxes may get lost.

        Runs in the heartbeat thread when nothing is recorded any more, or when this rank fails.
        """
        if self._box.path is None:
            return
        _, thread = self._threads.training(self._box.clock.clock_cursor)
        self._files.write_stall_stack(thread)
        if self._stall_snapshot is None or self._stall_snapshot.box != self._box.path:
            # This imports the reader of boxes, which a job that never stalls does not need.
            from torchwhere.snapshots.on_stall import StallSnapshot

            self._stall_snapshot = StallSnapshot(self._box.path, rank=self.recorder.rank)
        self._stall_snapshot.take()

    def _on_first_call(self, module: nn.Module) -> None:
        self._reducers.meet(module)
        self._device.look_for_context()
        self._fast_path.is_paused = True
        self._memory.begin()

    def _on_exception(
        self, error: BaseException, track: Track, place_ids: PlaceIds, line: str | None
    ) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            self._memory.record(track)
        self.recorder.exception(error, track, place_ids, line)

    def _step_ended(self, called_at: LineAndGraph | None) -> None:
        if not self.recorder.step_is_users:
            self.next_step(self.recorder.step + 1, called_at=called_at)

    def next_step(self, step: int, *, called_at: LineAndGraph | None = None) -> None:
        """Go to another training step."""
        if self._box.native is not None and self._fast_path.next_step(step):
            return
        self._memory.record(self._threads.here())
        self.recorder.set_step(step, called_at=called_at)
        self.phases.step_begins()
        self.modules.calls.clear()
        self._layouts.step_ended()
        self._groups.refresh()
        self._compilation.refresh()
        if self._box.native is not None and self._layouts.is_settled:
            self.recorder.rest(self._groups.looked_at() + self._compilation.looked_at())

    def name_groups(self, *, anew: bool) -> None:
        """Find all process groups, and name the mesh dimensions of new groups; with `anew`, of all
        groups, which takes longer."""
        if anew:
            self._groups.finish()
        else:
            self._groups.refresh()

    def _settle_rank(self) -> None:
        """Correct rank and world size once a process group exists: they were assumed before."""
        if dist.is_initialized():
            self._start_heartbeat(dist.get_world_size())
            self._memory.begin()
            self._files.settle_rank()

    def _rank_changed(self, rank: int) -> None:
        self.recorder.rank = self.phases.rank = rank

    def _at_exit(self) -> None:
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        self._on_exit(EXIT if error is None else failure(error))
