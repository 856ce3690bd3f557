"""The one room where sensing meets the black box: a watch, from its start to its end.

There is at most one session per process. A `watch` inside a watch joins the one that is running. Everything a session
installs is gone when it ends, and nothing it does can fail the job: only a wrong call of `watch` itself raises.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

import torch.distributed as dist
from torch import nn
from torch.compiler import is_dynamo_compiling

from torchwhere import identity
from torchwhere.blackbox.layout import NO_STEP
from torchwhere.blackbox.writer import DEFAULT_RECORDS, BoxWriter, box_name
from torchwhere.errors import TorchwhereError, described
from torchwhere.events import TEXT_FIELD, Kind
from torchwhere.inspect.names import NameTable
from torchwhere.place import Certainty, Place
from torchwhere.recorder import Recorder
from torchwhere.sense import _torch, stack
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
from torchwhere.sense.trouble import Trouble, log

Function = TypeVar("Function", bound=Callable[..., Any])


class Session:
    """One watch of one process: the senses, the recorder and the box."""

    def __init__(self, model: nn.Module | None, *, out: Path | None, module_events: bool, records: int) -> None:
        self.out = out
        self.depth = 1
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
            self._box, self._groups, bucket_of=recorder.reducers.bucket, on_call=recorder.collective
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
        _stop_all("exit" if error is None else f"exception: {described(error)}")


def _open_box(out: Path | None, meta: dict[str, Any], records: int) -> BoxWriter:
    """The box of this rank; one in memory where the disk will not have it."""
    path = out / box_name(meta["rank"]) if out is not None else None
    try:
        return BoxWriter(path, meta=meta, records=records, on_lost=lambda why: log.warning("torchwhere: %s", why))
    except OSError as error:
        log.warning("torchwhere: nothing is recorded, %s cannot be written: %s", path, error.strerror or error)
        return BoxWriter(None, meta=meta, records=records)


# -- the session of this process -----------------------------------------------------------------------------------------

_lock = threading.RLock()
_current: Session | None = None
_minds_forks = False


def current() -> Session | None:
    return _current


def start(
    model: nn.Module | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    module_events: bool = False,
    records: int = DEFAULT_RECORDS,
) -> None:
    """Begin to watch this process. Inside another watch: join it."""
    global _current
    _check(model, records)
    folder = Path(out) if out is not None else None
    with _lock:
        if _current is None:
            _mind_forks()
            _current = Session(model, out=folder, module_events=module_events, records=records)
            return
        _current.depth += 1
        if model is not None:
            _current.modules.add_model(model)
        if folder is not None and folder.absolute() != (_current.out and _current.out.absolute()):
            log.warning("torchwhere: already watching, into %s; %s is not used", _current.out or "memory", folder)


def stop(reason: str = "stop") -> None:
    """End the innermost watch. The last one to end takes everything back."""
    with _lock:
        if _current is not None:
            _current.depth -= 1
            if _current.depth <= 0:
                _stop_all(reason)


def _stop_all(reason: str) -> None:
    global _current
    with _lock:
        session, _current = _current, None
        if session is not None:
            session.close(reason)


def tell(error: BaseException) -> None:
    """An exception is about to end the watch."""
    session = _current
    if session is not None and not isinstance(error, SystemExit):
        _quietly(session.tell, error)


def _check(model: object, records: int) -> None:
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"watch(model): expected a torch.nn.Module or None, got {type(model).__name__}")
    if not isinstance(records, int) or records < 16:
        raise ValueError(f"records={records!r}: the ring needs at least 16 records (the default is {DEFAULT_RECORDS})")


def _mind_forks() -> None:
    """Python has no way to unregister this; it is registered once and does nothing while nobody watches."""
    global _minds_forks
    if not _minds_forks:
        _minds_forks = True
        os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    global _current, _lock
    _lock = threading.RLock()
    session, _current = _current, None
    if session is not None:
        session.abandon()


class watch:  # noqa: N801 - read as a verb: `with watch(model):`
    """Watch this process: a context manager and a decorator.

    `model` names the modules; without it the root is found at the first call. `out` is the folder for the black boxes, one
    file per rank; without it nothing is written, and `where()` works all the same. `module_events` records every module
    call as an event too; `records` is the size of the ring, 64 bytes each.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        out: str | os.PathLike[str] | None = None,
        module_events: bool = False,
        records: int = DEFAULT_RECORDS,
    ) -> None:
        _check(model, records)
        self._start = functools.partial(start, model, out=out, module_events=module_events, records=records)

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            tell(error)
        stop("stop" if error is None else f"exception: {described(error)}")

    def __call__(self, function: Function) -> Function:
        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return watched  # type: ignore[return-value]


@_torch.unseen
def where() -> Place:
    """The place of the calling thread, now. Without a watch: the rank, and that nothing is known."""
    session = _current
    if session is None:
        return Place(rank=identity.rank_and_world()[0], step=None, pass_="outside", certainty=Certainty.UNKNOWN)
    return session.recorder.place(stack.caller(0))


def step(number: int | None = None) -> None:
    """Say that a training step begins: `number`, or the next one (0 at first). Optimizers no longer count steps then."""
    if number is not None and (not isinstance(number, int) or not 0 <= number < NO_STEP):
        raise ValueError(f"step({number!r}): expected a step number of 0 or more, below {NO_STEP}, or nothing for the next one")
    session = _current
    if session is not None and not is_dynamo_compiling():
        recorder = session.recorder
        if number is None:  # the first time, what has been running since the start is the step that begins
            number = recorder.step + recorder.step_is_users
        recorder.step_is_users = True
        if number != recorder.step:
            _quietly(session.next_step, number)


def note(text: str, /, **fields: Any) -> None:
    """Leave a note at this place, with any fields that JSON can hold. Does nothing while nobody watches."""
    session = _current
    if session is not None and not is_dynamo_compiling():
        _quietly(session.recorder.note, str(text), fields, frame=stack.caller(0))


class phase:  # noqa: N801 - read as a noun of the program: `with phase("data"):`
    """A named part of a step, nested as you like, on any thread: a context manager and a decorator."""

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise ValueError(f"phase({name!r}): expected a name")
        self._name = name

    def __enter__(self) -> Self:
        session = _current
        if session is not None and not is_dynamo_compiling():
            _quietly(session.recorder.phase_begins, self._name, frame=stack.caller(0))
        return self

    def __exit__(self, *_error: object) -> None:
        session = _current
        if session is not None and not is_dynamo_compiling():
            _quietly(session.recorder.phase_ends, self._name, frame=stack.caller(0))

    def __call__(self, function: Function) -> Function:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with phase(self._name):
                return function(*args, **kwargs)

        return timed  # type: ignore[return-value]


@_torch.unseen
def _quietly(tell: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Notes and phases are ours, not the job's: what goes wrong in them is said once and goes no further."""
    try:
        tell(*args, **kwargs)
    except Exception as error:
        _notes_trouble(error)


_notes_trouble = Trouble("notes and phases", lambda: None)
