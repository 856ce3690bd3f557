"""Records the progress of the accelerator: sets marks on its streams, which the native extension
reads.

On a GPU a collective does not block the CPU. The CPU issues all work and blocks later, so the place
of the CPU is not the place of the job. A mark is an event on the current stream just before a
collective: when the event completes, the device has reached the collective. If the collective runs
on the current stream, a second mark after it shows when it was done. The end of an asynchronous
collective shows when the job waits for it: marks before and after `Work.wait` (`device_waits.h`).
A collective may also block a stream of its own, as in FSDP: then the job waits for an event on that
stream, with marks before and after `Event.wait` (`stream_waits.h`). The native extension sets
further marks by itself: at steps and at places, and at the waits of DDP and of functional
collectives.

The marks need the native extension. Without it, the progress of the device is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.device_errors import is_final
from torchwhere.hooks import _torch
from torchwhere.hooks.error_limiter import log
from torchwhere.hooks.patches import Patches
from torchwhere.native.load import NativeExtension

REACHED, DONE = range(2)  # `Point` in device_progress.h
# Where a mark shows the end of a collective: after the launch, if it blocks the current stream; at
# the wait for it; nowhere. `End` in device_progress.h.
AT_LAUNCH, AT_WAIT, UNMARKED = range(3)
# The methods in which a job waits for collectives, or issues several of them together: their names
# in the native extension.
_WORK_METHODS = ("Work.wait",)
_GROUP_METHODS = ("_start_coalescing", "_end_coalescing")
_EVENT_METHODS = ("Event.record", "Event.wait")


class ReplayMark(NamedTuple):
    """A mark before and after the replay of a CUDA graph, for one stream of its collectives."""

    device_index: int
    record: int  # of the replay; -1: it has no collectives
    counter: int  # -1: the stream has no counter
    total: int  # number of collectives issued in the stream, including those of the replay
    place: int
    step: int
    t_ns: int


def may_have_device() -> bool:
    """Whether this torch was built for an accelerator. Calls neither the device nor its driver."""
    return _accelerator_type() is not None


class DeviceHook:
    """Marks the collectives and steps of one watch on their devices."""

    def __init__(self, box: BoxWriter) -> None:
        self._box = box
        self._native = box.native
        self._has_context: Callable[[], bool] | None = None  # None: nothing to wait for
        self._has_logged = False
        self.is_on = False
        self._patches = Patches()
        self._unbox_work = getattr(_torch.private("work"), "unbox", None)
        # The function of the extension, without a Python frame in between: this is a hot path.
        self.reach: Callable[[int, int, int, int, int, int, int, int], None] = _no_mark
        if box.native is not None:
            self.reach = box.native.device_reach

    def install(self) -> list[str]:
        self._begin()
        return _torch.missing("device marks")

    def _begin(self) -> None:
        geometry, device_type = self._box.geometry, _accelerator_type()
        native, native_box = self._native, self._box.native_box
        if native is None or native_box is None or device_type is None or not geometry.lanes:
            return
        self.is_on = native.device_begin(
            native_box,
            device_type,
            geometry.lanes_at >> 3,
            geometry.times_at >> 3,
            (geometry.progress_at - geometry.counters_at) >> 3,
        )
        module = getattr(torch, device_type, None)
        self._has_context = getattr(module, "is_initialized", None) if self.is_on else None
        if self.is_on:
            self._replace(native, _torch.private("work"), _WORK_METHODS)
            self._replace(native, _torch.private("process_group"), _GROUP_METHODS)
            self._replace(native, getattr(module, "Event", None), _EVENT_METHODS)

    def _replace(self, native: NativeExtension, owner: Any, names: Sequence[str]) -> None:
        """Replace those methods that a class defines itself."""
        for name in names:
            method = name.rpartition(".")[2]
            if isinstance(owner, type) and method in vars(owner):
                self._patches.replace(owner, method, partial(_method, native, name))

    def remove(self) -> None:
        self._patches.restore()
        if self.is_on and self._native is not None:
            self.is_on = False
            self._native.device_end()

    def abandon(self) -> None:
        """Stop marking in a forked child, which must not touch the device."""
        self._patches.restore()
        if self.is_on and self._native is not None:
            self.is_on = False
            self._native.device_abandon()

    def fail(self, text: str) -> None:
        """Leave the device alone if an error, given as text, has made it unusable."""
        if self.is_on and self._native is not None and is_final(text):
            self._native.device_fail(text)

    def look_for_context(self) -> None:
        """Let marks begin once the job has initialized the device."""
        has_context = self._has_context
        if has_context is not None and self.is_on and has_context():
            self._has_context = None
            if self._native is not None:
                self._native.device_ready()

    def launched(self, work: Any, tensors: Sequence[torch.Tensor]) -> None:
        """A collective was launched: `work` is the boxed `Work` that it returned, or None. If this
        thread has marked it, mark its end; if it is asynchronous, remember it and its tensors until
        the job waits for it."""
        if self.is_on and self._native is not None:
            unboxed = None if work is None or self._unbox_work is None else self._unbox_work(work)
            addresses = [t.untyped_storage()._cdata for t in tensors if t.layout is torch.strided]
            self._native.device_launched(unboxed, *addresses)

    def mark_replay(self, mark: ReplayMark, point: int) -> None:
        """Mark a replay that is about to be launched (`REACHED`), or its end (`DONE`)."""
        if self._native is not None:
            self._native.device_mark(*mark, point)

    def step(self, place: int, record: int) -> None:
        """Mark the start of a step. `record` is the number of its record."""
        self.look_for_context()
        if self.is_on and self._native is not None and self._box.native_box is not None:
            self._native.device_step(self._box.native_box, place, record)
            self._log_problem(self._native)

    def _log_problem(self, native: NativeExtension) -> None:
        """Log once why nothing is marked any more, if the device had an error."""
        problem = native.device_status()["problem"] if not self._has_logged else ""
        if problem:
            self._has_logged = True
            log.warning(
                "torchwhere: an error of the device ended the record of its progress (%s)", problem
            )


def _no_mark(*_: int) -> None:
    """There is no native extension."""


def _method(native: NativeExtension, name: str, original: Any) -> Any:
    """The replacement of a method."""
    return native.device_method(name, getattr(original, "__func__", original))


def _accelerator_type() -> str | None:
    accelerator = torch.accelerator.current_accelerator(check_available=False)
    return None if accelerator is None else accelerator.type
