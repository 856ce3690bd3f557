"""Which module runs: wraps `nn.Module.__call__` while watching.

This file is the hot path: `__call__` below runs for every module call and costs about 1 us. It
allocates nothing the garbage collector tracks. The wrapper keeps a module's no-hook fast path,
unwinds on exceptions, and ends after the module's own forward hooks: the all-reduce of a
row-parallel linear, issued in such a hook, lands on that linear.

Dynamo traces through it as if it were not there: under `is_dynamo_compiling()`, which it folds to a
constant, the original is called and nothing else is touched, so no guard depends on us. Its own
frame is marked for dynamo to step over.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchwhere.blackbox.file_format import (
    CALL_MASK,
    CURSOR_TIME,
    MODULE_SHIFT,
    NO_CALL,
    PASS_SHIFT,
)
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.events import Kind
from torchwhere.core.place import Pass
from torchwhere.hooks import _torch, native_calls
from torchwhere.hooks.error_limiter import ErrorLimiter
from torchwhere.hooks.foreign_modules import OUTSIDE
from torchwhere.hooks.leftover_wrappers import retire, unwrap
from torchwhere.hooks.locate import Locator
from torchwhere.hooks.module_naming import ModuleNamer
from torchwhere.hooks.shape_inference import PIPELINING, infers_shapes
from torchwhere.hooks.threads import (
    FIRST_MODULE_WORD,
    INHERITED,
    LOG_MASK,
    RECOMPUTE_BIT,
    SHAPE_INFERENCE_BITS,
    Track,
    pass_of,
)
from torchwhere.model.module_names import NameTable
from torchwhere.model.wrappers import wrapped

FORWARD_BITS = Pass.FORWARD << PASS_SHIFT
ENTER, EXIT = int(Kind.MODULE_ENTER), int(Kind.MODULE_EXIT)
_TRANSPARENT = 0  # a compiler's graph, called as a module: not one of the user's

OnError = Callable[[BaseException, Track], None]


class ModuleHook:
    """Keeps every thread's track and cursor on the module it is in."""

    def __init__(
        self,
        box: BoxWriter,
        locator: Locator,
        *,
        on_error: OnError,
        on_first_call: Callable[[nn.Module], None],
        current_step: Callable[[], int],
        events: bool,
    ) -> None:
        self._box = box
        self._locator = locator
        self._on_error = on_error
        self._on_first_call = on_first_call
        self._current_step = current_step
        self._events = events
        # The id of a module to its word without a call; negative for a wrapper.
        self._bases: dict[int, int] = {} if box.native is None else box.native.Words()
        self._refs: dict[int, weakref.ref[nn.Module]] = {}
        self._regions = 0
        self._namer = ModuleNamer(
            locator.names,
            text_of=locator.text_of,
            current_step=current_step,
            forget=self._forget,
        )
        # of each module in this step
        self.calls: dict[int, int] = {} if box.native is None else box.native.Counts()
        self.errors = ErrorLimiter("modules", self.remove)
        self._original: Any = None
        self._wrapper: Any = None
        self._is_aside = False
        self._call_through: Callable[[Any], None] = lambda _inner: None
        self._retire: Callable[[], None] = lambda: None

    def install(self, model: nn.Module | None) -> list[str]:
        if model is not None:
            self.add_model(model)
        self._original = unwrap(nn.Module.__call__)
        make = self._make_wrapper if self._box.native is None else self._make_native_wrapper
        self._wrapper, self._call_through, self._retire = make()
        nn.Module.__call__ = self._wrapper  # type: ignore[method-assign]
        return _torch.missing("modules")

    def remove(self) -> None:
        """Somebody else may have wrapped our wrapper by now: then it stays, does nothing, and the
        next watch takes it off.

        A model that was compiled meanwhile keeps it for good: `torch.compile` takes the `__call__`
        that it finds.
        """
        self._is_aside = False
        self._retire()
        if not self._take_off() and self._wrapper is not None:
            retire(self._wrapper, self._original)

    def _take_off(self) -> bool:
        is_on = self._wrapper is not None and nn.Module.__call__ is self._wrapper
        if is_on:
            nn.Module.__call__ = self._original  # type: ignore[method-assign]
        return is_on

    def pause(self) -> None:
        """While a graph is compiled: dynamo would guard on the wrapper, and compile once more when
        the watch is over."""
        self._is_aside = self._take_off() or self._is_aside

    def resume(self) -> None:
        if self._is_aside and nn.Module.__call__ is self._original:
            nn.Module.__call__ = self._wrapper  # type: ignore[method-assign]
        self._is_aside = False

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
        """The name of a module that was called, or belongs to a model that was."""
        base = self._bases.get(id(module))
        if base:
            return self._locator.text_of(abs(base) >> MODULE_SHIFT)
        return next(iter(self._locator.names.known_names(module)), None)

    def is_wrapper(self, module: nn.Module) -> bool:
        """Whether a module that was called is a wrapper around another one."""
        return self._bases.get(id(module), 0) < 0

    def wrappers(self) -> list[nn.Module]:
        """The wrappers that were called and are alive."""
        called = (ref() for key, ref in list(self._refs.items()) if self._bases.get(key, 0) < 0)
        return [module for module in called if module is not None]

    def is_transparent(self, module: nn.Module) -> bool:
        """Whether it is a compiler's graph, called as a module."""
        return self._bases.get(id(module)) == _TRANSPARENT

    def call_through(self, make_inner: Callable[[Any, bool], Any] | None) -> None:
        """From now on, call every module, once its call is noted, through what `make_inner` makes;
        None: as ever.

        It is given what this sense wraps, and whether that is torch's own `__call__`.
        """
        self._call_through(
            None if make_inner is None else make_inner(self._original, self._runs_directly())
        )

    def _runs_directly(self) -> bool:
        return (
            self._original is _torch.private("wrapped_call") and _torch.private("call") is not None
        )

    def forget_calls(self) -> None:
        """A step has begun: calls are counted from 0 again."""
        self.calls.clear()

    # -- the hot path ------------------------------------------------------------------------------

    def _make_wrapper(self) -> tuple[Any, Callable[[Any], None], Callable[[], None]]:
        original, slowly, on_error, errors = (
            self._original,
            self._enter_slowly,
            self._on_error,
            self.errors,
        )
        local, here = self._locator.threads.local, self._locator.threads.here
        base_of, calls, calls_of = self._bases.get, self.calls, self.calls.get
        sequence_nr = _torch.private("sequence_nr") or (lambda: 0)
        words, now = self._box.words, time.monotonic_ns
        compiling = torch.compiler.is_dynamo_compiling
        emit = (
            _torch.unseen(self._box.make_place_record(self._current_step)) if self._events else None
        )
        # None: what torch's own __call__ does, done here: one frame less, 0.2 us. Not if somebody
        # else has wrapped it too.
        plain = inner = None if self._runs_directly() else original

        def call_through(telling: Any) -> None:
            nonlocal inner
            inner = telling or plain

        def retire() -> None:
            nonlocal compiling
            compiling = native_calls.always

        @_torch.stepped_over
        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - shown in tracebacks
            if compiling():
                return original(self, *args, **kwargs)
            try:
                try:
                    track = local.track
                except AttributeError:
                    track = here()
                below = track.top
                base = base_of(id(self), -1)
                if base <= 0 or below < FIRST_MODULE_WORD:
                    word = slowly(self, track, below)
                elif below & RECOMPUTE_BIT:
                    word = base | below & INHERITED
                else:
                    call = calls_of(base, 0)
                    calls[base] = call + 1
                    word = base | call
                at = track.count & LOG_MASK
                track.seqs[at] = sequence_nr()
                track.marks[at] = word
                track.count += 1
                track.top = word
                cursor = track.cursor
                words[cursor] = word
                words[cursor + CURSOR_TIME] = t_ns = now()
                if emit is not None and word != below:
                    number = word & CALL_MASK if not word & RECOMPUTE_BIT else track.call_of(word)
                    emit(ENTER, t_ns, word, number, track.number)
            except Exception as error:
                errors(error)
                return original(self, *args, **kwargs)
            try:
                if inner is None:
                    if self._compiled_call_impl is None:
                        return self._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
                    return original(self, *args, **kwargs)
                return inner(self, *args, **kwargs)
            except BaseException as error:
                on_error(error, track)
                raise
            finally:
                try:
                    t_ns = now()
                    # a wrapper and what it wraps are one call
                    if emit is not None and word != below:
                        number = (
                            word & CALL_MASK if not word & RECOMPUTE_BIT else track.call_of(word)
                        )
                        emit(EXIT, t_ns, word, number, track.number)
                    track.top = below
                    at = track.count & LOG_MASK
                    track.seqs[at] = sequence_nr()
                    track.marks[at] = below
                    track.count += 1
                    words[cursor] = below
                    words[cursor + CURSOR_TIME] = t_ns
                except Exception as error:
                    errors(error)

        return __call__, call_through, retire

    def _make_native_wrapper(self) -> tuple[Any, Callable[[Any], None], Callable[[], None]]:
        kinds = (ENTER, EXIT) if self._events else (0, 0)
        calls = self._box.native.Calls(
            *(
                self._box.native_box,
                self._bases,
                self.calls,
                RECOMPUTE_BIT,
                INHERITED,
                int(Pass.BACKWARD),
                PIPELINING,
                *kinds,
            )
        )
        here, entered = self._locator.threads.here, calls.entered

        @_torch.unseen
        def slowly(module: nn.Module) -> int:
            track = here()
            below = track.top
            return int(entered(self._enter_slowly(module, track, below), below))

        return native_calls.make_wrapper(
            *(calls, self._original),
            slowly=slowly,
            on_error=self._on_error,
            here=here,
            errors=self.errors,
            runs_directly=self._runs_directly(),
        )

    # -- the first time, and the outermost call ----------------------------------------------------

    @_torch.unseen
    def _enter_slowly(self, module: nn.Module, track: Track, below: int) -> int:
        """The word for a module that is unknown, a wrapper, or called outside any other."""
        track.ready()
        base = self._bases.get(id(module))
        if base is None:
            base = self._first_call(module, below)
        if base == _TRANSPARENT:
            return below
        is_wrapper, base = base < 0, abs(base)
        if below >= FIRST_MODULE_WORD:
            if below & RECOMPUTE_BIT:
                return base | below & INHERITED
        elif self._in_backward(below):
            return base | RECOMPUTE_BIT | self._new_region(track)
        elif infers_shapes():
            return base | SHAPE_INFERENCE_BITS | NO_CALL
        call = self.calls.get(base, 0)
        if not is_wrapper:  # a wrapper's call is that of the module inside it
            self.calls[base] = call + 1
        return base | call

    def _first_call(self, module: nn.Module, below: int) -> int:
        """Name a module. Returns its word without a call."""
        within = below >> MODULE_SHIFT if below >= FIRST_MODULE_WORD else OUTSIDE
        name = self._namer.name(module, within)
        base = _TRANSPARENT
        ref = weakref.ref(module, self._forgetter(id(module)))
        if name is not None:
            self._on_first_call(module)
            name_id = self._locator.module_id(name)
            self._namer.note_called(name_id, ref)
            word = name_id << MODULE_SHIFT | FORWARD_BITS
            base = word if wrapped(module) is None else -word
        self._bases[id(module)], self._refs[id(module)] = base, ref
        return base

    def _in_backward(self, below: int) -> bool:
        task_id = _torch.private("graph_task_id")
        return pass_of(below) == Pass.BACKWARD or (task_id is not None and task_id() != -1)

    def _new_region(self, track: Track) -> int:
        current_node = _torch.private("current_node")
        node = current_node() if current_node is not None else None
        self._regions = (self._regions + 1) & (CALL_MASK >> 1)
        if node is not None:
            seq, reentrant = node._sequence_nr(), "CheckpointFunction" in node.name()
            maker, _ = self._locator.threads.maker(seq, track)
            track.add_region(self._regions, seq, maker, reentrant=reentrant)
        return self._regions

    def _forgetter(self, key: int) -> Callable[[object], None]:
        return lambda _dead: self._forget(key)

    def _forget(self, key: int) -> None:
        self._bases.pop(key, None)
        self._refs.pop(key, None)
