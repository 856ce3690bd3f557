"""Reports when a backward begins and ends: wraps the one function through which every backward()
and grad() calls the engine.

No hook is on a tensor or a node, with two exceptions. A backward that builds a graph itself
(`create_graph=True`) makes nodes whose numbers say nothing about modules: while it runs, each node
of its graph has a hook that logs its module. And while a listener follows modules in backward, each
node has a hook (`backward_spans.py`). These hooks are removed when the backward returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from torchwhere.blackbox.file_format import (
    CALL_MASK,
    CURSOR_LINE,
    CURSOR_TIME,
    MODULE_SHIFT,
    NO_CALL,
)
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.hooks import _torch, python_stack
from torchwhere.hooks.backward_spans import BackwardSpans, spans_of
from torchwhere.hooks.error_limiter import ErrorLimiter
from torchwhere.hooks.fast_path import FastPath
from torchwhere.hooks.listeners import Listeners
from torchwhere.hooks.locate import Locator
from torchwhere.hooks.patches import Patches
from torchwhere.hooks.shown_frames import shown_as
from torchwhere.hooks.threads import BACKWARD_PLACE, Track
from torchwhere.model.graph_walk import ACCUMULATE_GRAD_SEQ, nodes_of, roots_of

OnBackwardError = Callable[[BaseException, Track, Any], None]


class _RunningBackward(NamedTuple):
    """A backward that runs, and what to remove and close at its end."""

    track: Track
    below: int  # the packed place of the track before it
    handles: list[Any]
    spans: BackwardSpans | None


class BackwardHook:
    """Marks a thread as being in backward while it is in the engine."""

    def __init__(
        self,
        box: BoxWriter,
        locator: Locator,
        listeners: Listeners,
        fast_path: FastPath,
        *,
        on_error: OnBackwardError,
        on_begin: Callable[[], bool],
        on_end: Callable[[], None],
    ) -> None:
        self._box = box
        self._locator = locator
        self._listeners = listeners
        self._passes = fast_path
        self._on_error = on_error
        # returns whether it knows everything, and need not be called again before something is new
        self._on_begin = on_begin
        self._on_end = on_end
        self.errors = ErrorLimiter("backward", self.remove)
        self._sequence_nr: Callable[[], int] = _torch.getter("sequence_nr", 0)
        self._patches = Patches()
        self._is_installed = False

    def install(self) -> list[str]:
        """Wrap the function in both modules that have it. Another library may have wrapped it in
        one of them, or in both."""
        if _torch.private("run_backward") is not None:
            self._is_installed = True
            for module in (torch.autograd, torch.autograd.graph):
                self._patches.replace(module, "_engine_run_backward", self._make_wrapper)
        return _torch.missing("backward")

    def remove(self) -> None:
        self._is_installed = False
        self._patches.restore()

    def _make_wrapper(self, original: Any) -> Any:
        enter, leave, errors = self._enter, self._leave, self.errors
        listeners, here = self._listeners, self._locator.threads.here
        begin, end, on_end = self._passes.begin_backward, self._passes.end_backward, self._on_end

        @_torch.stepped_over
        @shown_as(original, calling="run_backward")
        def _engine_run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_installed:
                return original(t_outputs, *args, **kwargs)
            try:
                below = None if listeners.of_backward else begin(args)
                running = enter(t_outputs, args, kwargs) if below is None else None
            except Exception as error:
                errors(error)
                return original(t_outputs, *args, **kwargs)
            try:
                try:
                    return original(t_outputs, *args, **kwargs)
                finally:
                    if running is not None and running.spans is not None:
                        running.spans.close()
            except BaseException as error:
                self._on_error(error, here(), t_outputs)
                raise
            finally:
                try:
                    if running is not None:
                        leave(running)
                    elif below is not None and end(below):
                        on_end()
                except Exception as error:
                    errors(error)

        return _engine_run_backward

    @_torch.unseen
    def _enter(
        self, outputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _RunningBackward:
        track = self._locator.threads.here()
        track.may_issue = True
        below = track.top
        create_graph = len(args) > 2 and bool(args[2])
        handles = self._announce(outputs, track) if create_graph else []
        frame = python_stack.caller(1)
        looked = python_stack.read(frame)
        line = self._locator.line_id(looked)
        if below != BACKWARD_PLACE:
            # cleared first: another thread may find something new meanwhile
            self._passes.is_paused = False
            self._passes.is_paused = not self._on_begin() or self._passes.is_paused
        self._move(track, BACKWARD_PLACE, line=line)
        if self._box.native is not None:
            self._passes.learn_line(frame, line)
        spans = spans_of(self._listeners, track, outputs, args, kwargs)
        return _RunningBackward(track, below, handles, spans)

    @_torch.unseen
    def _leave(self, running: _RunningBackward) -> None:
        for handle in running.handles:
            handle.remove()
        self._move(running.track, running.below, line=0)
        if running.below != BACKWARD_PLACE:
            self._on_end()

    def _move(self, track: Track, packed: int, *, line: int) -> None:
        if self._box.native_box is not None and track.move(self._box.native_box, packed, line):
            return
        track.top = packed
        track.log(self._sequence_nr(), packed)
        words, cursor = self._box.words, track.cursor
        words[cursor] = packed
        words[cursor + CURSOR_LINE] = line
        words[cursor + CURSOR_TIME] = now = time.monotonic_ns()
        self._box.clock.move_clock(cursor, packed, now)

    def _announce(self, outputs: Any, track: Track) -> list[Any]:
        """Make every node of this graph log its module when it runs, for the nodes that it
        makes."""
        handles = []
        for node in nodes_of(roots_of(outputs)):
            if node._sequence_nr() != ACCUMULATE_GRAD_SEQ:
                place_ids = self._locator.place_ids_of_node(node, track)
                call = place_ids.call if place_ids.call != NO_CALL else 0
                # Not the packed place of a forward: no module is called here.
                packed = (
                    place_ids.module << MODULE_SHIFT | BACKWARD_PLACE | call & CALL_MASK
                    if place_ids.module
                    else BACKWARD_PLACE
                )
                handles.append(node.register_prehook(partial(self._announced, packed)))
        return handles

    @_torch.unseen
    def _announced(self, packed: int, _gradients: Any) -> None:
        try:
            self._locator.threads.here().log(self._sequence_nr(), packed)
        except Exception as error:
            self.errors(error)
