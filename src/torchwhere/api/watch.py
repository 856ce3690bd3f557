"""Starts and stops the watch of this process: `start`, `stop`, and `watch`, which combines them as
a context manager and a decorator.

A process has at most one session. A `watch` inside a watch joins the session that is running. Only
a wrong argument raises: if a watch cannot begin, the job continues without it.

Listeners (`on_module`) outlive watches. Without a watch, a session in memory runs for them; a watch
with an output folder or module events replaces that session.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from torch import nn

from torchwhere.blackbox.writer import DEFAULT_RECORDS
from torchwhere.core.errors import end_reason, failure
from torchwhere.hooks import _torch
from torchwhere.hooks.error_limiter import ErrorLimiter, log
from torchwhere.hooks.listeners import Listener
from torchwhere.model.module_walk import check_module
from torchwhere.recorder.session import Session

_lock = threading.RLock()
_current: Session | None = None
_listeners: list[Listener] = []
_has_reported_start = False


def current() -> Session | None:
    """Return the running session; None without a watch and without listeners."""
    return _current


def start(
    model: nn.Module | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    module_events: bool = False,
    records: int = DEFAULT_RECORDS,
) -> None:
    """Start to watch this process. Inside another watch, join it.

    Use it where a `with` block does not fit, and call `stop()` for each `start()`.

    Args:
        model: The model whose modules are named. Without it, torchwhere finds the root module at
            the first call of a module.
        out: The folder for the black boxes, one file for each rank. Without it nothing is written,
            and `where()` still works.
        module_events: Also record every module call as an event.
        records: The number of events in the ring of each rank; each takes 64 bytes.

    Raises:
        TypeError: `model` is not a `torch.nn.Module`.
        ValueError: `records` is below 16.

    Example:
        torchwhere.start(model, out="run/")
        train(model)
        torchwhere.stop()
    """
    _check(model, records)
    folder = Path(out) if out is not None else None
    with _lock:
        if _current is not None and _current.depth == 0 and (folder is not None or module_events):
            stop_all("stop")
        if _current is None:
            _begin(model, out=folder, module_events=module_events, records=records)
            return
        _current.depth += 1
        if model is not None:
            _current.modules.add_model(model)
        if folder is not None and folder.absolute() != (_current.out and _current.out.absolute()):
            log.warning(
                "torchwhere: a watch is already running and records to %s; %s is not used",
                _current.out or "memory",
                folder,
            )


def stop(reason: str = "stop") -> None:
    """End the innermost watch. The end of the outermost watch removes everything it installed.

    Args:
        reason: The reason that the box records as the end of the watch.

    Example:
        torchwhere.stop()
    """
    with _lock:
        if _current is not None and _current.depth > 0:
            _current.depth -= 1
            if _current.depth == 0 and not (_listeners and _current.out is None):
                stop_all(reason)
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
    try:
        _register_fork_handlers()
        _current = Session(
            model, out=out, module_events=module_events, records=records, on_exit=stop_all
        )
        _current.depth = depth
        for listener in _listeners:
            _current.listeners.add(listener)
    except Exception as error:
        _current = None
        _report_failed_start(error)


def _report_failed_start(error: Exception) -> None:
    """Log the first watch that could not begin."""
    global _has_reported_start
    if not _has_reported_start:
        _has_reported_start = True
        with contextlib.suppress(Exception):  # a logging handler of the job may raise
            log.warning(
                "torchwhere: cannot watch this process (%s: %s); the job continues without a watch",
                type(error).__name__,
                error,
            )


def listen(listener: Listener) -> None:
    """Call a listener for every module call, in this watch and all later ones, until `unlisten`."""
    with _lock:
        _listeners.append(listener)
        if _current is None:
            _begin(depth=0)
        else:
            _current.listeners.add(listener)


def unlisten(listener: Listener) -> None:
    """Remove a listener. Stop the session if it ran only for listeners and none is left."""
    with _lock:
        if listener in _listeners:
            _listeners.remove(listener)
            if _current is not None:
                _current.listeners.remove(listener)
                if _current.depth == 0 and not _listeners:
                    stop_all("stop")


def stop_all(reason: str) -> None:
    """End all watches of this process, because the process ends."""
    global _current
    with _lock:
        session, _current = _current, None
        if session is not None:
            session.close(reason)


def end_with_process(error: BaseException | None) -> None:
    """End all watches of this process, which ends with `error`, or without one."""
    if error is not None:
        record_exception(error)
    stop_all(end_reason(error))


def record_exception(error: BaseException) -> None:
    """Record an exception that is about to end the watch."""
    session = _current
    if session is not None and not isinstance(error, SystemExit):
        with session.errors:
            session.report_exception(error)


def _check(model: object, records: int) -> None:
    check_module(model, "watch(model)", or_none=True)
    if not isinstance(records, int) or records < 16:
        raise ValueError(
            f"records={records!r}: the ring needs at least 16 records (the default is"
            f" {DEFAULT_RECORDS})"
        )


@functools.cache
def _register_fork_handlers() -> None:
    """Register the handlers once: Python cannot unregister them. They do nothing without a
    session."""
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )


def _before_fork() -> None:
    if _current is not None:
        _current.heartbeat.before_fork()


def _after_fork_in_parent() -> None:
    if _current is not None:
        _current.heartbeat.after_fork()


def _after_fork_in_child() -> None:
    global _current, _lock
    _lock = threading.RLock()
    session, _current = _current, None
    _listeners.clear()
    if session is not None:
        session.abandon()


class watch(contextlib.ContextDecorator):  # noqa: N801 - called like a function: `with watch(model):`
    """Watch this process: a context manager and a decorator.

    A watch inside a watch joins it. An exception that ends the block is recorded and propagates
    unchanged.

    Args:
        model: The model whose modules are named. Without it, torchwhere finds the root module at
            the first call of a module.
        out: The folder for the black boxes, one file for each rank. Without it nothing is written,
            and `where()` still works.
        module_events: Also record every module call as an event.
        records: The number of events in the ring of each rank; each takes 64 bytes.

    Raises:
        TypeError: `model` is not a `torch.nn.Module`.
        ValueError: `records` is below 16.

    Example:
        with torchwhere.watch(model, out="run/"):
            train(model)
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
            record_exception(error)
        stop("stop" if error is None else failure(error))


@_torch.unseen
def quietly(function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Call a function of torchwhere. Its errors do not reach the job; the first is logged."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        _errors(error)


_errors = ErrorLimiter("the end of a watch", lambda: None)
