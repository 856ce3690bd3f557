"""The watch of this process: `start`, `stop`, and `watch`, which is both as a context manager and a
decorator.

There is at most one session per process. A `watch` inside a watch joins the one that is running.
Only a wrong call raises.

Listeners (`on_module`) outlive watches. While one is there and nobody watches, a session in memory
runs for it; a watch that wants a file takes its place.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

from torch import nn

from torchwhere.blackbox.writer import DEFAULT_RECORDS
from torchwhere.core.errors import failure
from torchwhere.hooks import _torch
from torchwhere.hooks.error_limiter import ErrorLimiter, log
from torchwhere.hooks.listeners import Listener
from torchwhere.recorder.session import Session

Function = TypeVar("Function", bound=Callable[..., Any])

_lock = threading.RLock()
_current: Session | None = None
_listeners: list[Listener] = []
_minds_forks = False


def current() -> Session | None:
    """The watch that is running."""
    return _current


def start(
    model: nn.Module | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    module_events: bool = False,
    records: int = DEFAULT_RECORDS,
) -> None:
    """Begin to watch this process. Inside another watch: join it."""
    _check(model, records)
    folder = Path(out) if out is not None else None
    with _lock:
        if _current is not None and _current.depth == 0 and (folder is not None or module_events):
            _stop_all("stop")
        if _current is None:
            _begin(model, out=folder, module_events=module_events, records=records)
            return
        _current.depth += 1
        if model is not None:
            _current.modules.add_model(model)
        if folder is not None and folder.absolute() != (_current.out and _current.out.absolute()):
            log.warning(
                "torchwhere: already watching, into %s; %s is not used",
                _current.out or "memory",
                folder,
            )


def stop(reason: str = "stop") -> None:
    """End the innermost watch. The last one to end takes everything back."""
    with _lock:
        if _current is not None and _current.depth > 0:
            _current.depth -= 1
            if _current.depth == 0 and not (_listeners and _current.out is None):
                _stop_all(reason)
                if _listeners:
                    _begin(depth=0)


def _begin(
    model: nn.Module | None = None,
    *,
    out: Path | None = None,
    module_events: bool = False,
    records: int = DEFAULT_RECORDS,
    depth: int = 1,
) -> None:
    global _current
    _mind_forks()
    _current = Session(
        model, out=out, module_events=module_events, records=records, on_exit=_stop_all
    )
    _current.depth = depth
    for listener in _listeners:
        _current.listeners.add(listener)


def listen(listener: Listener) -> None:
    """Have a listener told of modules, by this watch and all that come, until `unlisten`."""
    with _lock:
        _listeners.append(listener)
        if _current is None:
            _begin(depth=0)
        else:
            _current.listeners.add(listener)


def unlisten(listener: Listener) -> None:
    """The end of `listen`. The last to go ends a session that ran for listeners alone."""
    with _lock:
        if listener in _listeners:
            _listeners.remove(listener)
            if _current is not None:
                _current.listeners.remove(listener)
                if _current.depth == 0 and not _listeners:
                    _stop_all("stop")


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
        quietly(session.report_exception, error)


def _check(model: object, records: int) -> None:
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"watch(model): expected a torch.nn.Module or None, got {type(model).__name__}"
        )
    if not isinstance(records, int) or records < 16:
        raise ValueError(
            f"records={records!r}: the ring needs at least 16 records (the default is"
            f" {DEFAULT_RECORDS})"
        )


def _mind_forks() -> None:
    """Python has no way to unregister this; it is registered once and does nothing while nobody
    watches."""
    global _minds_forks
    if not _minds_forks:
        _minds_forks = True
        os.register_at_fork(
            before=_before_fork, after_in_parent=_after_fork, after_in_child=_forked
        )


def _before_fork() -> None:
    if _current is not None:
        _current.heartbeat.before_fork()


def _after_fork() -> None:
    if _current is not None:
        _current.heartbeat.after_fork()


def _forked() -> None:
    global _current, _lock
    _lock = threading.RLock()
    session, _current = _current, None
    _listeners.clear()
    if session is not None:
        session.abandon()


class watch:  # noqa: N801 - read as a verb: `with watch(model):`
    """Watch this process: a context manager and a decorator.

    `model` names the modules; without it the root is found at the first call. `out` is the folder
    for the black boxes, one file per rank; without it nothing is written, and `where()` works all
    the same. `module_events` records every module call as an event too; `records` is the size of
    the ring, 64 bytes each.
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
        self._start = functools.partial(
            start, model, out=out, module_events=module_events, records=records
        )

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            tell(error)
        stop("stop" if error is None else failure(error))

    def __call__(self, function: Function) -> Function:
        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return watched  # type: ignore[return-value]


@_torch.unseen
def quietly(tell: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Notes and phases are ours, not the job's: what goes wrong in them is said once and goes no
    further."""
    try:
        tell(*args, **kwargs)
    except Exception as error:
        _notes_trouble(error)


_notes_trouble = ErrorLimiter("notes and phases", lambda: None)
