"""Adds to an exception of the user a note with the place and the last collectives, and records an
event in the box.

The exception propagates unchanged. The innermost module call, or the backward, that it passes
through adds the note; outer calls see the note and add nothing. An exception may pass through none
of them, such as an error of the device that surfaces in `loss.item()`. If it ends the process or a
thread, `sys.excepthook` or `threading.excepthook` records it.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from traceback import walk_tb
from types import TracebackType
from typing import Any

import torch
from torch import nn

from torchwhere.blackbox.file_format import FLAG_INFERRED
from torchwhere.core.errors import described
from torchwhere.core.place import Pass
from torchwhere.hooks import _torch, python_stack
from torchwhere.hooks.error_limiter import ErrorLimiter
from torchwhere.hooks.locate import Locator, PlaceIds
from torchwhere.hooks.node_places import frontier
from torchwhere.hooks.patches import Patches
from torchwhere.hooks.threads import Track

NOTE_START = "torchwhere: "

_CONTROL_FLOW = (GeneratorExit, StopIteration)

_DEVICE_ERROR_TYPE = "AcceleratorError"  # `torch.AcceleratorError` exists since torch 2.8
# "CUDA error: device-side assert triggered", "CUDA error: an illegal memory access was encountered"
_DEVICE_ERRORS = ("CUDA error: ", "HIP error: ", "XPU error: ", "device-side assert triggered")

# Adds note and event. Takes the exception, the track of the thread, the place, the user's line.
Report = Callable[[BaseException, Track, PlaceIds, str | None], None]


class ExceptionHook:
    """Reports exceptions that leave a module call, a backward, a thread or the process."""

    def __init__(self, locator: Locator, *, report: Report) -> None:
        self._locator = locator
        self._report = report
        self.active = True
        self.errors = ErrorLimiter("exceptions", self.remove)
        self._patches = Patches()

    def install(self) -> None:
        self._patches.replace(threading, "excepthook", self._make_thread_hook)
        self._patches.replace(sys, "excepthook", self._make_process_hook)

    def _make_thread_hook(self, below: Any) -> Any:
        def thread_ends(args: threading.ExceptHookArgs) -> None:
            if args.exc_value is not None:
                self._ends(args.exc_value)
            below(args)

        return thread_ends

    def _make_process_hook(self, below: Any) -> Any:
        # `init_process_group` wraps this function for good: it must not keep the watch alive.
        reference = weakref.ref(self)

        def process_ends(
            kind: type[BaseException], error: BaseException, traceback: TracebackType | None
        ) -> None:
            hook = reference()
            if hook is not None and error is not None:
                hook._ends(error)
            below(kind, error, traceback)

        return process_ends

    @_torch.unseen
    def _ends(self, error: BaseException) -> None:
        """`error` ends a thread or the process. After the watch a thread has no track."""
        if self.active:
            with self.errors:
                self.in_module(error, self._locator.threads.here())

    def remove(self) -> None:
        self.active = False
        self._patches.restore()

    @_torch.unseen
    def in_module(self, error: BaseException, track: Track) -> None:
        """`error` is leaving a module call; `track` still points at that call."""
        if self.active and _is_new(error):
            with self.errors:
                self._tell(error, track, self._locator.place_ids(track))

    @_torch.unseen
    def in_backward(self, error: BaseException, track: Track, outputs: Any) -> None:
        """`error` is leaving the autograd engine: the node that raised it is no longer running."""
        if self.active and _is_new(error):
            with self.errors:
                place_ids = self._place_ids_of_frames(error.__traceback__, track)
                if place_ids is None:
                    place_ids = self._place_ids_of_frontier(outputs, track)
                self._tell(error, track, place_ids)

    def _tell(self, error: BaseException, track: Track, place_ids: PlaceIds) -> None:
        raised_at = python_stack.read_traceback(error.__traceback__)
        # raised in a library: the exception has not reached the user's frame yet
        if raised_at.file is None:
            framework = raised_at.framework
            raised_at = python_stack.read(python_stack.caller(1))
            raised_at.framework = framework or raised_at.framework
        self._report(error, track, place_ids, raised_at.stored_line(folder=self._locator.folder))

    def _place_ids_of_frames(
        self, traceback: TracebackType | None, track: Track
    ) -> PlaceIds | None:
        """The place, from the variables of the Python code that raised: a node (`ctx`), the hook of
        a module, a parameter.

        Skips the first frame, our own wrapper: before Python 3.13 a frame keeps the variables that
        were read, and that frame holds the exception. The graph would live until the next garbage
        collection.
        """
        place_ids = None
        for frame, _ in walk_tb(traceback and traceback.tb_next):
            for value in list(frame.f_locals.values()):
                place_ids = self._place_ids_of_value(value, track) or place_ids
        return place_ids

    def _place_ids_of_value(self, value: Any, track: Track) -> PlaceIds | None:
        if isinstance(value, torch.autograd.graph.Node):
            return self._locator.place_ids_of_node(value, track)
        table = self._locator.names
        if isinstance(value, nn.Parameter) and (names := table.known_param_names(value)):
            return self._locator.place_ids_of_param_name(names[0], Pass.BACKWARD)
        module = getattr(value, "module", None) if type(value).__name__ == "BackwardHook" else None
        if module is not None and (names := table.module_names(module)):
            return PlaceIds(Pass.BACKWARD, self._locator.module_id(names[0]), flags=FLAG_INFERRED)
        return None

    def _place_ids_of_frontier(self, outputs: Any, track: Track) -> PlaceIds:
        node = frontier(outputs)
        if node is None:
            return PlaceIds(Pass.BACKWARD)
        return self._locator.place_ids_of_node(node, track)._replace(flags=FLAG_INFERRED)


def is_of_device(error: BaseException) -> bool:
    """Whether the device reports an error: it may surface later than the kernel that failed."""
    text = described(error)
    return text.startswith(_DEVICE_ERROR_TYPE) or any(map(text.__contains__, _DEVICE_ERRORS))


def _is_new(error: BaseException) -> bool:
    module = type(error).__module__
    if isinstance(error, _CONTROL_FLOW) or module.startswith(_torch.CONTROL_FLOW_MODULES):
        return False
    return not any(note.startswith(NOTE_START) for note in getattr(error, "__notes__", ()))
