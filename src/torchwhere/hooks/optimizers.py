"""Counts optimizer steps, and derives the training step from them.

A training step ends when an optimizer steps that has already stepped since the last training step.
So one optimizer counts each of its steps, several in a row count once, two that alternate (a GAN)
count once per round, and one optimizer per parameter that steps inside backward counts once per
backward. DeepSpeed runs an inner optimizer once per sub-group: there, `step` of its engine counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.compiler import is_dynamo_compiling

from torchwhere.hooks import _torch
from torchwhere.hooks.error_limiter import ErrorLimiter
from torchwhere.hooks.fast_path import FastPath
from torchwhere.hooks.locate import Locator, is_in_optimizers
from torchwhere.hooks.patches import Patches
from torchwhere.hooks.shown_frames import shown_as
from torchwhere.hooks.threads import OPTIMIZER_PLACE, Track, is_in_backward
from torchwhere.model.wrappers import loaded_class


class OptimizerHook:
    """Calls back when an optimizer step begins and ends, and when a training step has ended."""

    def __init__(
        self,
        locator: Locator,
        fast_path: FastPath,
        steppers: set[int],
        *,
        on_move: Callable[[Track, int], None],
        on_optimizer: Callable[[str], Any],
        on_step_end: Callable[[Any], None],
    ) -> None:
        self._locator = locator
        self._passes = fast_path
        self._on_move = on_move
        self._on_optimizer = on_optimizer
        self._on_step_end = on_step_end
        self._stepped = steppers  # since the last training step; the native extension reads it too
        self._alive: dict[int, weakref.ref[Any]] = {}  # the optimizers in `_stepped`
        self._handles: list[Any] = []
        self._is_in_engine = False  # inside `step` of a DeepSpeed engine
        self._patches = Patches()
        self.errors = ErrorLimiter("optimizers", self.remove)

    def install(self) -> list[str]:
        before, after = _torch.private("step_pre_hook"), _torch.private("step_post_hook")
        if before is not None and after is not None:
            self._handles.append(before(self._make_before()))
            self._handles.append(after(self._make_after()))
        return _torch.missing("optimizers")

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._patches.restore()
        self._alive.clear()

    def _make_before(self) -> Any:
        natively, slowly, errors = self._passes.begin_optimizer, self._begin, self.errors

        @_torch.unseen
        def before(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
            if is_dynamo_compiling():
                return
            try:
                if not natively():
                    slowly()
            except Exception as error:
                errors(error)

        return before

    def _make_after(self) -> Any:
        natively, slowly, errors = self._passes.end_optimizer, self._end, self.errors

        @_torch.unseen
        def after(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            if is_dynamo_compiling():
                return
            try:
                if not natively(optimizer):
                    slowly(optimizer)
            except Exception as error:
                errors(error)

        return after

    def _begin(self) -> None:
        track = self._locator.threads.here()
        track.below_optimizer.append(track.top)
        self._on_move(track, OPTIMIZER_PLACE)

    def _end(self, optimizer: Any) -> None:
        track = self._locator.threads.here()
        recorded = self._on_optimizer(type(optimizer).__name__)
        below = track.below_optimizer.pop() if track.below_optimizer else 0
        # `step` of a subclass calls that of its base class: the outer one counts
        is_nested = bool(track.below_optimizer) and is_in_optimizers(2)
        if track.below_optimizer and not is_nested:  # an earlier step raised: it had no post hook
            below = track.below_optimizer[0]
            track.below_optimizer.clear()
        self._on_move(track, below)
        if not self._is_in_engine and not is_nested:
            self._count(optimizer, recorded, in_backward=is_in_backward(track.top))

    def watch_deepspeed(self) -> None:
        """Wrap `step` of the DeepSpeed engine: it is the optimizer pass, and ends a training step
        if the engine has stepped."""
        engine = loaded_class("deepspeed.runtime.engine", "DeepSpeedEngine")
        self._patches.replace(engine, "step", self._wrap_engine_step)

    def _wrap_engine_step(self, original: Any) -> Any:
        begin, end = self._engine_begins, self._engine_ends

        @_torch.stepped_over
        @shown_as(original)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            steps_before = begin(self)
            try:
                return original(self, *args, **kwargs)
            finally:
                end(self, steps_before)

        return step

    @_torch.unseen
    def _engine_begins(self, engine: Any) -> int | None:
        with self.errors:
            self._begin()
            self._is_in_engine = True
            self._passes.wake()  # the steps of the optimizers inside do not count
            return int(engine.global_steps)
        return None

    @_torch.unseen
    def _engine_ends(self, engine: Any, steps_before: int | None) -> None:
        with self.errors:
            track = self._locator.threads.here()
            self._is_in_engine = False
            self._on_move(track, track.below_optimizer.pop() if track.below_optimizer else 0)
            if steps_before is not None and engine.global_steps > steps_before:
                self._on_step_end(None)

    def _count(self, optimizer: Any, recorded: Any, *, in_backward: bool) -> None:
        """Count a step. `recorded` is the result of `on_optimizer`: a training step that ends here
        ends at that place."""
        is_other = bool(self._stepped) and id(optimizer) not in self._stepped
        if not is_other:
            self._stepped.clear()
            self._alive.clear()
        self._stepped.add(id(optimizer))
        self._alive[id(optimizer)] = weakref.ref(optimizer, partial(self._forget, id(optimizer)))
        if is_other:
            return
        if in_backward:  # the rest of this backward still belongs to the step
            self._passes.ends_after_backward = True
        else:
            self._on_step_end(recorded)

    def _forget(self, stepper: int, _dead: object) -> None:
        """Forget an optimizer that was freed: the next one replaces it, and may get its address."""
        self._stepped.discard(stepper)
        self._alive.pop(stepper, None)

    def backward_ended(self) -> None:
        if self._passes.ends_after_backward:
            self._passes.ends_after_backward = False
            self._on_step_end(None)
