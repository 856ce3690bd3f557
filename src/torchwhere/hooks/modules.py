"""Tracks which module runs: wraps `nn.Module.__call__` during a watch.

`module_calls.py` has the wrapper itself, the hot path. This file installs it and does what happens
rarely: it names a module at its first call, and finds the pass and the call number of a call from
outside all modules.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from torchwhere.blackbox.file_format import CALL_MASK, MODULE_SHIFT, NO_CALL, PASS_SHIFT
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.place import Pass
from torchwhere.hooks import _torch, module_calls, python_stack
from torchwhere.hooks.error_limiter import ErrorLimiter
from torchwhere.hooks.foreign_modules import OUTSIDE
from torchwhere.hooks.locate import Locator
from torchwhere.hooks.module_calls import ENTER, EXIT, SlowPath, Wrapper
from torchwhere.hooks.module_naming import ModuleNamer
from torchwhere.hooks.patches import retire, unwrap
from torchwhere.hooks.threads import (
    FIRST_MODULE_PLACE,
    INHERITED,
    RECOMPUTE_BIT,
    SHAPE_INFERENCE_BITS,
    Track,
    is_in_backward,
)
from torchwhere.model.module_names import NameTable
from torchwhere.model.wrappers import wrapped

if TYPE_CHECKING:
    from torchwhere.native.extension import Counts, IntMap


FORWARD_BITS = Pass.FORWARD << PASS_SHIFT
_TRANSPARENT = 0  # the graph of a compiler, called as a module: not a module of the user

OnError = Callable[[BaseException, Track], None]


class ModuleHook:
    """Keeps the track and the cursor of every thread on the module that it runs."""

    def __init__(
        self,
        box: BoxWriter,
        locator: Locator,
        *,
        on_error: OnError,
        on_first_call: Callable[[nn.Module], None],
        events: bool,
    ) -> None:
        self._box = box
        self._locator = locator
        self._on_error = on_error
        self._on_first_call = on_first_call
        self._events = events
        # The packed place of a module without a call, by its id; negative for a wrapper module.
        self._bases: dict[int, int] | IntMap = {} if box.native is None else box.native.IntMap()
        self._refs: dict[int, weakref.ref[nn.Module]] = {}
        self._wrappers: dict[int, weakref.ref[nn.Module]] = {}
        self._regions = 0
        self._namer = ModuleNamer(
            locator,
            forget=self._forget_name,
            forget_all=self._forget_names,
        )
        # how often each module was called in this step; the session clears it at the next step
        self.calls: dict[int, int] | Counts = {} if box.native is None else box.native.Counts()
        self.errors = ErrorLimiter("modules", self.remove)
        self._original: Any = None
        self._wrapper: Wrapper | None = None
        self._is_paused = False

    def install(self, model: nn.Module | None) -> list[str]:
        if model is not None:
            self.add_model(model)
        self._original = unwrap(nn.Module.__call__)
        self._wrapper = self._make_wrapper()
        nn.Module.__call__ = self._wrapper.function  # type: ignore[method-assign]
        return _torch.missing("modules")

    def remove(self) -> None:
        """Restore `nn.Module.__call__`. If another library has wrapped it meanwhile, the wrapper
        stays, does nothing, and the next watch removes it.

        A model that was compiled meanwhile keeps the wrapper for good: `torch.compile` takes the
        `__call__` that it finds.
        """
        self._is_paused = False
        if self._wrapper is not None:
            self._wrapper.retire()
            if not self._restore():
                retire(self._wrapper.function, self._original)

    def _restore(self) -> bool:
        """Restore the original if the wrapper is installed. Returns whether it was."""
        is_installed = self._wrapper is not None and nn.Module.__call__ is self._wrapper.function
        if is_installed:
            nn.Module.__call__ = self._original  # type: ignore[method-assign]
        return is_installed

    def pause(self) -> None:
        """Remove the wrapper while a graph is compiled: dynamo would guard on it, and compile again
        after the watch."""
        self._is_paused = self._restore() or self._is_paused

    def resume(self) -> None:
        if self._is_paused and self._wrapper is not None and nn.Module.__call__ is self._original:
            nn.Module.__call__ = self._wrapper.function  # type: ignore[method-assign]
        self._is_paused = False

    def add_model(self, model: nn.Module) -> None:
        """Name a model that the user passed."""
        self._namer.add_model(model)

    @property
    def root_class(self) -> str:
        """The class of the model whose names have no prefix."""
        return self._namer.root_class

    @property
    def names(self) -> NameTable:
        return self._locator.names

    def name_of(self, module: nn.Module) -> str | None:
        """The name of a module that was called, or that belongs to a model that was called."""
        base = self._bases.get(id(module))
        if base:
            return self._locator.text_of(abs(base) >> MODULE_SHIFT)
        return next(iter(self._locator.names.known_names(module)), None)

    def is_wrapper(self, module: nn.Module) -> bool:
        """Whether a module that was called is a wrapper around another module."""
        return self._bases.get(id(module), 0) < 0

    def wrappers(self) -> list[nn.Module]:
        """The wrapper modules that were called and are alive."""
        called = (ref() for ref in list(self._wrappers.values()))
        return [module for module in called if module is not None]

    def is_transparent(self, module: nn.Module) -> bool:
        """Whether a module is the graph of a compiler, called as a module."""
        return self._bases.get(id(module)) == _TRANSPARENT

    def call_through(self, make_inner: Callable[[Any, bool], Any] | None) -> None:
        """Call every module, once its call is recorded, through the function that `make_inner`
        makes; None: directly again.

        `make_inner` gets the function that this hook wraps, and whether it is torch's own
        `__call__`.
        """
        if self._wrapper is not None:
            self._wrapper.call_through(
                None
                if make_inner is None
                else make_inner(self._original, module_calls.runs_directly(self._original))
            )

    # -- the wrapper -------------------------------------------------------------------------------

    def _make_wrapper(self) -> Wrapper:
        threads, box = self._locator.threads, self._box
        rare = SlowPath(
            self._original,
            self._enter_slowly,
            self._on_error,
            threads.here,
            self.errors,
            _torch.unseen(box.clock.move_clock),
        )
        if box.native is not None:
            return self._make_native_wrapper(rare)
        counter = box.counter
        record = box.make_place_record(lambda: counter.step) if self._events else None
        return module_calls.make_python_wrapper(
            rare,
            threads=threads,
            bases=cast("dict[int, int]", self._bases),
            calls=cast("dict[int, int]", self.calls),
            words=box.words,
            emit=None if record is None else _torch.unseen(record),
        )

    def _make_native_wrapper(self, rare: SlowPath) -> Wrapper:
        enter_kind, exit_kind = (ENTER, EXIT) if self._events else (0, 0)
        native, native_box = self._box.native, self._box.native_box
        assert native is not None
        assert native_box is not None
        calls = native.Calls(
            native_box,
            cast("IntMap", self._bases),
            cast("Counts", self.calls),
            RECOMPUTE_BIT,
            INHERITED,
            int(Pass.BACKWARD),
            PIPELINING,
            enter_kind,
            exit_kind,
        )
        here, entered = rare.here, calls.entered

        @_torch.unseen
        def enter_slowly(module: nn.Module) -> int:
            track = here()
            below = track.top
            return int(entered(self._enter_slowly(module, track, below), below))

        return module_calls.make_native_wrapper(calls, rare._replace(enter=enter_slowly))

    # -- the first call of a module, and calls from outside all modules ----------------------------

    @_torch.unseen
    def _enter_slowly(self, module: nn.Module, track: Track, below: int) -> int:
        """The packed place of a call of a module that is unknown, a wrapper, or called outside all
        modules."""
        track.ready()
        base = self._bases.get(id(module))
        if base is None:
            base = self._first_call(module, below)
        if base == _TRANSPARENT:
            return below
        is_wrapper, base = base < 0, abs(base)
        if below < FIRST_MODULE_PLACE:
            self._box.clock.set_evaluation(track.cursor, _evaluates(module))
        if below >= FIRST_MODULE_PLACE:
            if below & RECOMPUTE_BIT:
                return base | below & INHERITED
        elif is_in_backward(below):
            return base | RECOMPUTE_BIT | self._new_region(track)
        elif infers_shapes():
            return base | SHAPE_INFERENCE_BITS | NO_CALL
        call = self.calls.get(base, 0)
        if not is_wrapper:  # a wrapper and the module inside it are one call
            self.calls[base] = call + 1
        return base | call

    def _first_call(self, module: nn.Module, below: int) -> int:
        """Name a module. Returns its packed place without a call."""
        within = below >> MODULE_SHIFT if below >= FIRST_MODULE_PLACE else OUTSIDE
        name = self._namer.name(module, within)
        base = _TRANSPARENT
        ref = weakref.ref(module, partial(self._forget, id(module)))
        if name is not None:
            self._on_first_call(module)
            name_id = self._locator.module_id(name)
            self._namer.note_called(name_id, ref)
            packed = name_id << MODULE_SHIFT | FORWARD_BITS
            base = packed
            if wrapped(module) is not None:
                base, self._wrappers[id(module)] = -packed, ref
        self._bases[id(module)], self._refs[id(module)] = base, ref
        return base

    def _new_region(self, track: Track) -> int:
        node = _torch.getter("current_node")()
        self._regions = (self._regions + 1) & (CALL_MASK >> 1)
        if node is not None:
            seq, reentrant = node._sequence_nr(), "CheckpointFunction" in node.name()
            maker, _ = self._locator.threads.maker(seq, track)
            track.add_region(self._regions, seq, maker, reentrant=reentrant)
        return self._regions

    def _forget_names(self) -> None:
        """Forget the names of all modules."""
        self._bases.clear()
        self._forget_calls()

    def _forget_name(self, key: int) -> None:
        """Forget the name of a living module, which gets another one."""
        self._forget(key)
        self._forget_calls()

    def _forget_calls(self) -> None:
        """Forget the collectives that the native extension knows: they may serve a renamed
        module."""
        if self._box.native is not None:
            self._box.native.forget_calls()

    def _forget(self, key: int, _dead: object = None) -> None:
        self._bases.pop(key, None)
        self._refs.pop(key, None)
        self._wrappers.pop(key, None)


def _evaluates(module: nn.Module) -> bool:
    """Whether a module is in evaluation mode, and computes no gradients."""
    return not torch.is_grad_enabled() and getattr(module, "training", True) is False


PIPELINING = "torch.distributed.pipelining.stage"
# methods of a pipeline stage: since torch 2.13, and before
_SHAPE_INFERENCE = ("_forward_metadata_inference", "_shape_inference")


def infers_shapes() -> bool:
    """Whether the running module call only infers shapes."""
    fake_mode, modes = _torch.private("fake_mode"), _torch.private("dispatch_modes")
    if fake_mode is not None and (modes is None or modes()) and fake_mode() is not None:
        return True
    if PIPELINING not in sys.modules:
        return False
    frames = islice(python_stack.outwards(python_stack.caller(2)), 6)
    return any(frame.f_code.co_name in _SHAPE_INFERENCE for frame in frames)
