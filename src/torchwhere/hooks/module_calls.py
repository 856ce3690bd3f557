"""The two wrappers of `nn.Module.__call__`: one in Python, one whose hot path is in C++.

This file is the hot path: a wrapper runs for every module call and allocates nothing that the
garbage collector tracks. The one in Python costs about 1 us. The other one costs less than the
frame of torch that it replaces. It is a Python function all the same: dynamo can skip its frame,
and code that inspects `nn.Module.__call__` finds a method.

A wrapper does the work of torch's `_wrapped_call_impl` in its own frame: one frame less, 0.2 us,
and a stack has as many frames as in an unwatched job. If another library has wrapped
`nn.Module.__call__` too, the wrapper calls that one.

A wrapper keeps the fast path of a module without hooks and unwinds on exceptions. It ends after the
module's own forward hooks: the all-reduce of a row-parallel linear, issued in such a hook, belongs
to that linear.

Dynamo traces through a wrapper as if it were not there. Under `is_dynamo_compiling()`, which dynamo
folds to a constant, the wrapper calls the original and touches nothing else, so no guard depends on
it. Dynamo skips its frame.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from torchwhere.blackbox.file_format import CALL_MASK, CURSOR_TIME
from torchwhere.core.events import Kind
from torchwhere.hooks import _torch
from torchwhere.hooks.error_limiter import ErrorLimiter
from torchwhere.hooks.shown_frames import shown_as
from torchwhere.hooks.threads import (
    FIRST_MODULE_PLACE,
    INHERITED,
    LOG_MASK,
    RECOMPUTE_BIT,
    Threads,
    Track,
)

ENTER, EXIT = int(Kind.MODULE_ENTER), int(Kind.MODULE_EXIT)


class SlowPath(NamedTuple):
    """What a wrapper needs only sometimes. One object: at every call Python copies each closure
    variable of a function."""

    original: Any
    enter: Callable[..., int]
    on_error: Callable[[BaseException, Track], None]
    here: Callable[[], Track]
    errors: ErrorLimiter
    moves: Callable[[int, int, int], None]  # times the parts of a step


class Wrapper(NamedTuple):
    """A function for `nn.Module.__call__`, and what changes it while it is installed."""

    function: Any
    call_through: Callable[[Any], None]  # call modules through this function; None: directly
    retire: Callable[[], None]  # only call the original from now on


def runs_directly(original: Any) -> bool:
    """Whether a wrapper can do the work of the original in its own frame: it is torch's own."""
    return original is _torch.private("wrapped_call") and _torch.private("call") is not None


def make_python_wrapper(
    rare: SlowPath,
    *,
    threads: Threads,
    bases: dict[int, int],
    calls: dict[int, int],
    words: Any,
    emit: Callable[[int, int, int, int, int], None] | None,
) -> Wrapper:
    """Makes the wrapper that is all Python.

    Args:
        rare: What it needs only sometimes.
        threads: The tracks of all threads.
        bases: The packed place of each module without a call, by the id of the module.
        calls: How often each module was called in this step, by its packed place.
        words: The 64-bit words of the box.
        emit: Writes a record that has only a place; None without module events.
    """
    local, base_of, calls_of = threads.local, bases.get, calls.get
    sequence_nr = _torch.getter("sequence_nr", 0)
    now, compiling = time.monotonic_ns, torch.compiler.is_dynamo_compiling
    plain = inner = None if runs_directly(rare.original) else rare.original
    # `shown_as` takes the globals of this module away
    first_module, recompute, inherited = FIRST_MODULE_PLACE, RECOMPUTE_BIT, INHERITED
    log_mask, call_mask, cursor_time = LOG_MASK, CALL_MASK, CURSOR_TIME
    enter_kind, exit_kind = ENTER, EXIT

    def call_through(function: Any) -> None:
        nonlocal inner
        inner = function or plain

    def retire() -> None:
        nonlocal compiling
        compiling = _always

    @_torch.stepped_over
    @shown_as(_torch.private("wrapped_call"), calling="_call_impl")
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - the hot path
        if compiling():
            return rare.original(self, *args, **kwargs)
        try:
            try:
                track = local.track
            except AttributeError:
                track = rare.here()
            below = track.top
            base = base_of(id(self), -1)
            if base <= 0 or below < first_module:
                packed = rare.enter(self, track, below)
            elif below & recompute:
                packed = base | below & inherited
            else:
                call = calls_of(base, 0)
                calls[base] = call + 1
                packed = base | call
            at = track.count & log_mask
            track.seqs[at] = sequence_nr()
            track.marks[at] = packed
            track.count += 1
            track.top = packed
            cursor = track.cursor
            words[cursor] = packed
            words[cursor + cursor_time] = t_ns = now()
            if below < first_module:
                rare.moves(cursor, packed, t_ns)
            if emit is not None and packed != below:
                number = packed & call_mask if not packed & recompute else track.call_of(packed)
                emit(enter_kind, t_ns, packed, number, track.number)
        except Exception as error:
            rare.errors(error)
            return rare.original(self, *args, **kwargs)
        try:
            if inner is None:
                if self._compiled_call_impl is None:
                    return self._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
                return self._compiled_call_impl(*args, **kwargs)
            return inner(self, *args, **kwargs)
        except BaseException as error:
            rare.on_error(error, track)
            raise
        finally:
            try:
                t_ns = now()
                # a wrapper module and the module inside it are one call
                if emit is not None and packed != below:
                    number = packed & call_mask if not packed & recompute else track.call_of(packed)
                    emit(exit_kind, t_ns, packed, number, track.number)
                track.top = below
                at = track.count & log_mask
                track.seqs[at] = sequence_nr()
                track.marks[at] = below
                track.count += 1
                words[cursor] = below
                words[cursor + cursor_time] = t_ns
                if below < first_module:
                    rare.moves(cursor, below, t_ns)
            except Exception as error:
                rare.errors(error)

    return Wrapper(__call__, call_through, retire)


def make_native_wrapper(calls: Any, rare: SlowPath) -> Wrapper:
    """Makes the wrapper whose hot path is in C++: `calls` is the `Calls` object of the native
    extension."""
    enter, leave, compiling = calls.enter, calls.leave, torch.compiler.is_dynamo_compiling
    plain = inner = None if runs_directly(rare.original) else rare.original

    def call_through(function: Any) -> None:
        nonlocal inner
        inner = function or plain

    def retire() -> None:
        nonlocal compiling
        compiling = _always

    @_torch.stepped_over
    @shown_as(_torch.private("wrapped_call"), calling="_call_impl")
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - a method's name
        if compiling():
            return rare.original(self, *args, **kwargs)
        try:
            below = enter(self)
            if below is None:  # an unknown module, or an unusual call from outside all modules
                below = rare.enter(self)
        except Exception as error:
            rare.errors(error)
            return rare.original(self, *args, **kwargs)
        try:
            if inner is None:
                if self._compiled_call_impl is None:
                    return self._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
                return self._compiled_call_impl(*args, **kwargs)
            return inner(self, *args, **kwargs)
        except BaseException as error:
            rare.on_error(error, rare.here())
            raise
        finally:
            try:
                leave(below)
            except Exception as error:
                rare.errors(error)

    return Wrapper(__call__, call_through, retire)


@_torch.unseen
def _always() -> bool:
    """Replaces `is_dynamo_compiling` in a retired wrapper, which then only calls the original."""
    return True
