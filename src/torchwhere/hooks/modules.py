"""Tells which module runs: wraps `nn.Module.__call__` during a watch.

`module_calls.py` has the wrapper itself, the hot path. This file installs it and does what happens
rarely: it names a module at its first call, and finds the pass and the call number of a call from
outside all modules.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from torchwhere.blackbox.file_format import CALL_MASK, MODULE_SHIFT, NO_CALL, PASS_SHIFT
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.core.place import Pass
from torchwhere.hooks import _torch, module_calls, python_stack
from torchwhere.hooks.error_limiter import ErrorLimiter
from torchwhere.hooks.foreign_modules import OUTSIDE, ForeignModules
from torchwhere.hooks.leftover_wrappers import retire, unwrap
from torchwhere.hooks.locate import Locator
from torchwhere.hooks.module_calls import ENTER, EXIT, SlowPath, Wrapper
from torchwhere.hooks.shape_inference import PIPELINING, infers_shapes
from torchwhere.hooks.threads import (
    FIRST_MODULE_PLACE,
    INHERITED,
    RECOMPUTE_BIT,
    SHAPE_INFERENCE_BITS,
    Track,
    pass_of,
)
from torchwhere.model.module_names import NameTable, innermost, wrapped

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
        current_step: Callable[[], int],
        events: bool,
    ) -> None:
        self._box = box
        self._locator = locator
        self._on_error = on_error
        self._on_first_call = on_first_call
        self._current_step = current_step
        self._events = events
        # The packed place of a module without a call, by its id; negative for a wrapper module.
        self._bases: dict[int, int] | IntMap = {} if box.native is None else box.native.IntMap()
        self._refs: dict[int, weakref.ref[nn.Module]] = {}
        self._regions = 0
        self._root: weakref.ref[nn.Module] | None = None
        self._naming = threading.RLock()
        self._root_is_given = False
        self._strangers = ForeignModules(locator.names)
        # how often each module was called in this step
        self.calls: dict[int, int] | Counts = {} if box.native is None else box.native.Counts()
        self.errors = ErrorLimiter("modules", self.remove)
        self.root_class = ""  # of the model whose names have no prefix
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
        """Name a model that the user passed. The first one is the root; the names of a later one
        begin with its class."""
        if not self._locator.names.modules.get(id(model)):
            self._locator.names.add_root(
                model, prefix=self._strangers.prefix(model) if self._root is not None else ""
            )
        if self._root is None:
            self._set_root(model)
            self._root_is_given = True

    def _set_root(self, root: nn.Module) -> None:
        self._root, self.root_class = weakref.ref(root), type(innermost(root)).__name__

    @property
    def names(self) -> NameTable:
        return self._locator.names

    def name_of(self, module: nn.Module) -> str | None:
        """The name of a module that was called, or that belongs to a model that was called."""
        base = self._bases.get(id(module))
        if base:
            return self._locator.text_of(abs(base) >> MODULE_SHIFT)
        names = self._locator.names.modules.get(id(module))
        return names[0] if names else None

    def is_wrapper(self, module: nn.Module) -> bool:
        """Whether a module that was called is a wrapper around another module."""
        return self._bases.get(id(module), 0) < 0

    def wrappers(self) -> list[nn.Module]:
        """The wrapper modules that were called and are alive."""
        called = (ref() for key, ref in list(self._refs.items()) if self._bases.get(key, 0) < 0)
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

    def forget_calls(self) -> None:
        """Count calls from 0 again: a step has begun."""
        self.calls.clear()

    # -- the wrapper -------------------------------------------------------------------------------

    def _make_wrapper(self) -> Wrapper:
        threads, box = self._locator.threads, self._box
        rare = SlowPath(
            self._original, self._enter_slowly, self._on_error, threads.here, self.errors
        )
        if box.native is not None:
            return self._make_native_wrapper(rare)
        record = box.make_place_record(self._current_step) if self._events else None
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
            base = self._bases[id(module)] = self._name(module, below)
            self._refs[id(module)] = weakref.ref(module, self._forgetter(id(module)))
        if base == _TRANSPARENT:
            return below
        is_wrapper, base = base < 0, abs(base)
        if below >= FIRST_MODULE_PLACE:
            if below & RECOMPUTE_BIT:
                return base | below & INHERITED
        elif self._in_backward(below):
            return base | RECOMPUTE_BIT | self._new_region(track)
        elif infers_shapes():
            return base | SHAPE_INFERENCE_BITS | NO_CALL
        call = self.calls.get(base, 0)
        if not is_wrapper:  # a wrapper and the module inside it are one call
            self.calls[base] = call + 1
        return base | call

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

    # -- names -------------------------------------------------------------------------------------

    def _name(self, module: nn.Module, below: int) -> int:
        within = below >> MODULE_SHIFT if below >= FIRST_MODULE_PLACE else OUTSIDE
        looks_again = within != OUTSIDE and not self._strangers.is_one(module, within)
        name = self._known_name(module, looks_again=looks_again)
        if name is None and _is_graph(module):
            return _TRANSPARENT
        if name is None:
            name = self._foreign_name(module, within)
        self._on_first_call(module)
        packed = self._locator.module_id(name) << MODULE_SHIFT | FORWARD_BITS
        return -packed if wrapped(module) is not None else packed

    def _known_name(self, module: nn.Module, *, looks_again: bool = False) -> str | None:
        """The name of a module of a known model, or of the module inside it.

        With `looks_again`, also of a module that was added to a known model later: that takes a
        walk over all known models.
        """
        inner: nn.Module | None = module
        while inner is not None:
            names = (
                self._locator.names.module_names(inner)
                if looks_again
                else self._locator.names.modules.get(id(inner))
            )
            if names:
                return names[0]
            inner = wrapped(inner)
        return None

    def _may_be_root(self, root: nn.Module) -> bool:
        """Whether a new model gets the names without a prefix.

        The first model does, and the next one after the first is freed. In the first step a model
        that contains the first one does too: a script may call a part before it builds the model.
        In a later step that is, for example, a wrapper for evaluation, perhaps on one rank only.
        """
        if self._root is None or self._root_is_given:
            return self._root is None
        current = self._root()
        if current is None:
            return True
        if self._current_step() or all(part is not current for part in root.modules()):
            return False
        for part in current.modules():
            self._forget(id(part))
        self._locator.names.drop_root(current)
        return True

    def _take_in_parts(self, root: nn.Module) -> None:
        """In the first step, rename the parts of a new model that were called before the model."""
        parts = {id(part) for prefix, part in self._locator.names.roots() if prefix}
        if not parts or self._current_step():
            return
        for module in list(root.modules()):
            if id(module) in parts:
                for part in module.modules():
                    self._forget(id(part))
                self._locator.names.drop_root(module)

    def _foreign_name(self, module: nn.Module, within: int) -> str:
        """A name for a module that belongs to no model known so far."""
        if within != OUTSIDE:
            return self._strangers.inside(module, within, self._locator.text_of(within))
        with self._naming:  # two threads may call two models at the same time: one is the root
            root = self._strangers.root_of(module, python_stack.caller(3))
            # the module was added to a known model after the last walk
            if id(root) in self._locator.names.modules:
                self._locator.names.refresh()
            name = self._known_name(module)
            if name is not None:
                return name
            self._take_in_parts(root)
            is_model = self._may_be_root(root) and any(p.requires_grad for p in root.parameters())
            if is_model:
                self._set_root(root)
            self._locator.names.add_root(
                root, prefix="" if is_model else self._strangers.prefix(root)
            )
            name = self._known_name(module)
        return f"<{type(module).__name__}>" if name is None else name


def _is_graph(module: nn.Module) -> bool:
    """Whether a module is the graph of a compiler, whose parameters are inputs. A traced model has
    parameters of its own."""
    return isinstance(module, torch.fx.GraphModule) and next(module.parameters(), None) is None
