"""Follows CUDA graphs: which collectives a capture contains, and when a graph is replayed.

A collective that is called during a capture does not run. It becomes part of the graph and runs in
each replay, where no code calls it. So `CudaGraphs` lists the collectives of each graph while it is
captured, and `CudaGraphHook` reports each replay.

The hook wraps methods of `torch.cuda.CUDAGraph`. `torch.cuda.graph`, `make_graphed_callables` and
`torch.compile(mode="reduce-overhead")` all call these methods. It does not see graphs that C++ code
captures or launches by itself.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from _thread import get_ident
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, NamedTuple

import torch

from torchwhere.hooks import _torch
from torchwhere.hooks.device import ReplayMark
from torchwhere.hooks.error_limiter import ErrorLimiter
from torchwhere.hooks.groups import StreamCounter
from torchwhere.hooks.patches import Patches
from torchwhere.hooks.shown_frames import shown_as


class CapturedCollective(NamedTuple):
    """One collective of a graph: all fields of its record that are the same in each replay."""

    call: Any  # a `CollectiveCall` without its stack, which holds objects of the job
    stream: StreamCounter
    pass_: int
    flags: int
    others: tuple[int, ...]  # the fields of the record from `module` to `param`


@dataclass(slots=True, eq=False)
class CapturedGraph:
    """One CUDA graph: the collectives that were captured, and where the capture began."""

    number: int  # among the captures of this process
    thread: int  # the thread that captures it
    device_index: int = -1  # -1: unknown
    entry: int = 0  # id in the table
    captured_at: str | None = None
    collectives: list[CapturedCollective] = field(default_factory=list)


def is_capturing(device_index: int) -> bool:
    """Whether work on this device, issued now on this thread, becomes part of a CUDA graph."""
    return device_index >= 0 and torch.cuda.is_current_stream_capturing()


class CudaGraphs:
    """The graphs captured during this watch, by their ids, while they live."""

    def __init__(self) -> None:
        self.active: list[CapturedGraph] = []  # the captures that run now, the last one last
        self.is_capturing = is_capturing
        self._numbers = itertools.count()
        self._graphs: dict[int, CapturedGraph] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        # Reentrant: a graph may die, and be dropped, while its thread begins another capture.
        self._lock = threading.RLock()

    def capture_of(self, device_index: int) -> CapturedGraph | None:
        """The capture that a collective of this thread becomes part of; None if it runs now.

        The autograd engine issues collectives of a backward on another thread than the one that
        captures it.
        """
        active, thread = self.active, get_ident()
        if not active or not self.is_capturing(device_index):
            return None
        own = (graph for graph in reversed(active) if graph.thread == thread)
        return next(own, active[-1])

    def begin(self, graph: Any) -> CapturedGraph:
        """A capture has begun."""
        self.forget(graph)
        key = id(graph)
        captured = CapturedGraph(next(self._numbers), get_ident())
        with self._lock:
            self._alive[key] = weakref.ref(graph, partial(self._drop, key))
            self._graphs[key] = captured
            self.active = [*self.active, captured]
        return captured

    def end(self, graph: Any, *, has_failed: bool) -> CapturedGraph | None:
        """A capture has ended; None if it began before the watch."""
        captured = self._graphs.get(id(graph))
        self._deactivate(captured)
        if has_failed:
            self.forget(graph)
        return captured

    def contents(self, graph: Any) -> CapturedGraph | None:
        """A graph; None if it was captured before the watch."""
        return self._graphs.get(id(graph))

    def forget(self, graph: Any) -> None:
        """Forget a graph that was reset, or whose capture failed."""
        self._drop(id(graph))

    def _drop(self, key: int, _dead: object = None) -> None:
        self._alive.pop(key, None)
        self._deactivate(self._graphs.pop(key, None))

    def _deactivate(self, captured: CapturedGraph | None) -> None:
        with self._lock:
            self.active = [graph for graph in self.active if graph is not captured]


class CudaGraphHook:
    """Reports captures and replays of CUDA graphs.

    Args:
        graphs: Gets the captures.
        on_begin: Called when a capture has begun.
        on_end: Called when a capture has ended, with its error if it failed.
        on_replay: Called before a replay, with None for a graph that was captured before the watch.
            Returns marks for `on_replayed`.
        on_replayed: Called after a replay was launched.
    """

    def __init__(
        self,
        graphs: CudaGraphs,
        *,
        on_begin: Callable[[CapturedGraph], None],
        on_end: Callable[[CapturedGraph, BaseException | None], None],
        on_replay: Callable[[CapturedGraph | None], list[ReplayMark]],
        on_replayed: Callable[[list[ReplayMark]], None],
    ) -> None:
        self.graphs = graphs
        self._on_begin = on_begin
        self._on_end = on_end
        self._on_replay = on_replay
        self._on_replayed = on_replayed
        self._is_on = False
        self._patches = Patches()
        self.errors = ErrorLimiter("CUDA graphs", self.switch_off)

    def install(self) -> None:
        self._is_on = True
        wrappers = {
            "capture_begin": self._begin_wrapper,
            "capture_end": self._end_wrapper,
            "replay": self._replay_wrapper,
            "reset": self._reset_wrapper,
        }
        for name, wrap in wrappers.items():
            self._patches.replace(torch.cuda.CUDAGraph, name, wrap)

    def switch_off(self) -> None:
        """Stop reporting. Collectives that are called during a capture then count as issued."""
        self._is_on = False
        self.graphs.active = []

    def remove(self) -> None:
        """Restore the methods, unless another library has wrapped them since: a wrapper that stays
        only calls the original."""
        self.switch_off()
        self._patches.restore()

    # -- wrappers ----------------------------------------------------------------------------------

    def _begin_wrapper(self, original: Any) -> Any:
        begins = self.begins

        @wraps(original)
        @shown_as(original, calling="capture_begin")
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(graph, *args, **kwargs)
            begins(graph)
            return result

        return capture_begin

    def _end_wrapper(self, original: Any) -> Any:
        ends = self.ends

        @wraps(original)
        @shown_as(original, calling="capture_end")
        def capture_end(graph: Any) -> Any:
            try:
                result = original(graph)
            except BaseException as error:
                ends(graph, error)
                raise
            ends(graph)
            return result

        return capture_end

    def _replay_wrapper(self, original: Any) -> Any:
        replays, replayed = self.replays, self.replayed

        @wraps(original)
        @shown_as(original, calling="replay")
        def replay(graph: Any) -> Any:
            marks = replays(graph)
            result = original(graph)
            if marks:
                replayed(marks)
            return result

        return replay

    def _reset_wrapper(self, original: Any) -> Any:
        forget = self.graphs.forget

        @wraps(original)
        @shown_as(original, calling="reset")
        def reset(graph: Any) -> Any:
            forget(graph)
            return original(graph)

        return reset

    # -- reports -----------------------------------------------------------------------------------

    @_torch.unseen
    def begins(self, graph: Any) -> None:
        """A capture has begun on the current stream."""
        if self._is_on:
            with self.errors:
                self._on_begin(self.graphs.begin(graph))

    @_torch.unseen
    def ends(self, graph: Any, failure: BaseException | None = None) -> None:
        """A capture has ended, or failed."""
        if self._is_on:
            with self.errors:
                captured = self.graphs.end(graph, has_failed=failure is not None)
                if captured is not None:
                    self._on_end(captured, failure)

    @_torch.unseen
    def replays(self, graph: Any) -> list[ReplayMark] | None:
        """A graph is about to be replayed."""
        if self._is_on:
            with self.errors:
                return self._on_replay(self.graphs.contents(graph))
        return None

    @_torch.unseen
    def replayed(self, marks: list[ReplayMark]) -> None:
        """The replay was launched."""
        with self.errors:
            self._on_replayed(marks)
