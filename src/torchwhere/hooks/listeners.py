"""Calls listeners when a module is entered and left, in forward and in backward.

Without listeners the hot path of `module_calls.py` is unchanged: a listener changes the function
that the wrapper calls, not the wrapper. An exception of a listener's own callback belongs to the
user and propagates like one of a module hook. An error of torchwhere never propagates.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

from torch import nn

from torchwhere.blackbox.file_format import CALL_MASK, MODULE_SHIFT, NO_CALL
from torchwhere.core.place import Pass, shown
from torchwhere.hooks import _torch
from torchwhere.hooks.call_chain import CallChains, Made
from torchwhere.hooks.error_limiter import ErrorLimiter
from torchwhere.hooks.locate import Locator
from torchwhere.hooks.modules import ModuleHook
from torchwhere.hooks.shown_frames import shown_as
from torchwhere.hooks.threads import FIRST_MODULE_PLACE, LOG_LENGTH, LOG_MASK, Track, pass_of
from torchwhere.model.wrappers import innermost

Owner = weakref.ref[nn.Module]


class ModuleCall(NamedTuple):
    """One call of a module, as callbacks get it.

    Enter and exit of a call get equal objects, so it can be the key of a dictionary.

    Attributes:
        name: The name of the module, as in `state_dict`; "" is the root module.
        call: The number of the call within the step, from 0; None if it is no longer known.
        pass_: `forward`, `backward` or `recompute`.
        step: The number of the step.

    Example:
        torchwhere.on_module(enter=lambda module, call: print(call.step, call.name))
    """

    name: str
    call: int | None
    pass_: str
    step: int

    def __str__(self) -> str:
        return f"{self.pass_} of {shown(self.name)}" + (f" call {self.call}" if self.call else "")

    def to_dict(self) -> dict[str, object]:
        """As a dict for JSON; `pass_` is `pass` there, as in an event."""
        return {"name": self.name, "call": self.call, "pass": self.pass_, "step": self.step}


class ModuleEntry(NamedTuple):
    """A module call that began, as listeners get it."""

    module: nn.Module  # the module that was called
    own: nn.Module  # the user's own module: inside all wrappers
    call: ModuleCall | None  # None directly inside a wrapper: the two are one call
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    track: Track


class Listener:
    """A listener, whose methods do nothing. `wants_backward`: it also wants the module calls that a
    backward goes through."""

    is_active: bool = False
    wants_backward: bool = False

    def entered(self, entry: ModuleEntry) -> None:
        """A module was entered."""

    def left(self, entry: ModuleEntry, output: Any) -> None:
        """A module was left, by an exception if `output` is None."""

    def backward_entered(self, module: nn.Module | None, call: ModuleCall) -> None:
        """Backward is about to run the first node of a call."""

    def backward_left(self, module: nn.Module | None, call: ModuleCall) -> None:
        """Backward has run the last node of a call."""


class Listeners:
    """All listeners of one session."""

    def __init__(
        self,
        locator: Locator,
        call_chains: CallChains,
        modules: ModuleHook,
    ) -> None:
        self._locator = locator
        self.call_chains = call_chains
        self._modules = modules
        self._lock = threading.Lock()
        self._all: tuple[Listener, ...] = ()
        self.of_backward: tuple[Listener, ...] = ()
        self._owners: weakref.WeakKeyDictionary[Track, list[tuple[int, Owner] | None]] = (
            weakref.WeakKeyDictionary()
        )
        self.backwards: dict[int | None, object] = {}  # runs of the engine that listeners follow
        self.errors = ErrorLimiter("module callbacks", self.clear)

    def add(self, listener: Listener) -> None:
        with self._lock:
            self._set((*self._all, listener))

    def remove(self, listener: Listener) -> None:
        with self._lock:
            self._set(tuple(other for other in self._all if other is not listener))

    def clear(self) -> None:
        """Remove all listeners. Takes no lock: in a forked child, a thread of the parent may have
        held it."""
        self._set(())

    def _set(self, listeners: tuple[Listener, ...]) -> None:
        self._all = listeners
        self.of_backward = tuple(listener for listener in listeners if listener.wants_backward)
        if not self.of_backward:
            self._owners.clear()
        self._modules.call_through(self._make_call if listeners else None)

    # -- forward -----------------------------------------------------------------------------------

    def _make_call(self, original: Any, directly: bool) -> Any:
        tell_entered, tell_left = self._tell_entered, self._tell_left

        @_torch.stepped_over
        @shown_as(_torch.private("wrapped_call"), calling="_call_impl")
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            entered: list[tuple[Listener, ModuleEntry]] = []
            output = None
            try:
                tell_entered(self, args, kwargs, entered)
                if directly and self._compiled_call_impl is None:
                    output = self._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
                else:
                    output = original(self, *args, **kwargs)
                return output
            finally:
                if entered:
                    tell_left(entered, output)

        return call

    @_torch.unseen
    def _tell_entered(
        self, module: nn.Module, args: Any, kwargs: Any, entered: list[tuple[Listener, ModuleEntry]]
    ) -> None:
        try:
            entry = self._entry(module, args, kwargs)
        except Exception as error:
            self.errors(error)
            return
        for listener in self._all:
            if entry is not None and listener.is_active:
                listener.entered(entry)
                entered.append((listener, entry))

    @_torch.unseen
    def _tell_left(self, entered: list[tuple[Listener, ModuleEntry]], output: Any) -> None:
        """Call the listeners in reverse order. All of them are called, also if one raises."""
        while entered:
            listener, entry = entered.pop()
            try:
                if listener.is_active:
                    listener.left(entry, output)
            except BaseException:
                self._tell_left(entered, output)
                raise

    # -- what listeners get ------------------------------------------------------------------------

    def _entry(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ModuleEntry | None:
        """The call that began just now; None for the graph of a compiler, which is not a module of
        the user."""
        track = self._locator.threads.here()
        packed = track.top
        if packed < FIRST_MODULE_PLACE or self._modules.is_transparent(module):
            return None
        own = innermost(module) if self._modules.is_wrapper(module) else module
        begin = track.count - 1
        if self.of_backward:
            self._remember(own, track, begin)
        is_one_call = track.marks[(begin - 1) & LOG_MASK] == packed
        return ModuleEntry(
            module,
            own,
            None if is_one_call else self._call(packed, track, pass_of(packed)),
            args,
            kwargs,
            track,
        )

    def _call(self, packed: int, track: Track, pass_: int) -> ModuleCall:
        call = (
            track.recomputed_call(packed)
            if pass_of(packed) == Pass.RECOMPUTE
            else packed & CALL_MASK
        )
        name = self._locator.text_of(packed >> MODULE_SHIFT) or ""
        return ModuleCall(
            name, None if call == NO_CALL else call, Pass(pass_).label, self._locator.counter.step
        )

    # -- backward ----------------------------------------------------------------------------------

    def _remember(self, own: nn.Module, track: Track, begin: int) -> None:
        """Remember the module of the call that began just now: the log holds numbers, but a
        callback in backward gets the module."""
        owners = self._owners.get(track)
        if owners is None:
            owners = self._owners[track] = [None] * LOG_LENGTH
        owners[begin & LOG_MASK] = begin, weakref.ref(own)

    def owner(self, made: Made) -> tuple[Owner, ModuleCall] | None:
        """The module of a call, and the call as listeners in backward get it; None if there was no
        listener when the call began."""
        owners = self._owners.get(made.track)
        remembered = owners[made.begin & LOG_MASK] if owners is not None else None
        if remembered is None or remembered[0] != made.begin:
            return None
        return remembered[1], self._call(made.packed, made.track, Pass.BACKWARD)
