"""Who wants to be told when a module is entered and left, in forward and in backward.

While there is nobody the hot path of `modules.py` is what it always is: listening changes what the
wrapper calls in its middle, not the wrapper. What a listener's own callbacks raise is the user's
and goes where an exception of a hook goes; an error of ours goes nowhere.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import nn

from torchwhere.blackbox.file_format import CALL_MASK, MODULE_SHIFT, NO_CALL
from torchwhere.core.place import Pass, shown
from torchwhere.hooks import _torch
from torchwhere.hooks.call_chain import CallChains, Made
from torchwhere.hooks.error_limiter import ErrorLimiter
from torchwhere.hooks.locate import Locator
from torchwhere.hooks.modules import ModuleHook
from torchwhere.hooks.threads import FIRST_MODULE_WORD, LOG_LENGTH, LOG_MASK, Track, pass_of
from torchwhere.model.wrappers import innermost

Owner = weakref.ref[nn.Module]


class ModuleCall(NamedTuple):
    """One call of a module, as a callback is told: its name, which call of it in this step, the
    pass and the step.

    `call` is None where it is no longer known. Equal for the enter and the exit of one call, so it
    can be a key.
    """

    name: str
    call: int | None
    pass_: str
    step: int

    def __str__(self) -> str:
        return f"{self.pass_} of {shown(self.name)}" + (f" call {self.call}" if self.call else "")

    def to_dict(self) -> dict[str, object]:
        """As JSON knows it; `pass_` is `pass` there, as in an event."""
        return {"name": self.name, "call": self.call, "pass": self.pass_, "step": self.step}


class ModuleEntry(NamedTuple):
    """A module that was entered, as a listener is told."""

    module: nn.Module  # what was called
    own: nn.Module  # the user's own module: what a wrapper wraps
    call: ModuleCall | None  # None inside a wrapper that was told of: the two are one call
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    track: Track


class Listener(Protocol):
    """One who listens. `wants_backward`: to be told of the calls that a backward goes through,
    too."""

    is_active: bool
    wants_backward: bool

    def entered(self, entry: ModuleEntry) -> None:
        """A module was entered."""

    def left(self, entry: ModuleEntry, output: Any) -> None:
        """It was left, by an exception if `output` is None."""

    def backward_entered(self, module: nn.Module | None, call: ModuleCall) -> None:
        """Backward is about to run the first node of a call."""

    def backward_left(self, module: nn.Module | None, call: ModuleCall) -> None:
        """Backward has run the last one."""


class Listeners:
    """All who listen to one session."""

    def __init__(
        self,
        locator: Locator,
        call_chains: CallChains,
        modules: ModuleHook,
        *,
        current_step: Callable[[], int],
    ) -> None:
        self._locator = locator
        self.call_chains = call_chains
        self._modules = modules
        self._current_step = current_step
        self._lock = threading.Lock()
        self._all: tuple[Listener, ...] = ()
        self.of_backward: tuple[Listener, ...] = ()
        self._owners: weakref.WeakKeyDictionary[Track, list[tuple[int, Owner] | None]] = (
            weakref.WeakKeyDictionary()
        )
        self.backwards: dict[int | None, object] = {}  # the engine's runs that are told of
        self.errors = ErrorLimiter("module callbacks", self.clear)

    def add(self, listener: Listener) -> None:
        with self._lock:
            self._set((*self._all, listener))

    def remove(self, listener: Listener) -> None:
        with self._lock:
            self._set(tuple(other for other in self._all if other is not listener))

    def clear(self) -> None:
        """Tell nobody any more. Takes no lock: in a forked child, a thread of the parent may have
        held it."""
        self._set(())

    def _set(self, listeners: tuple[Listener, ...]) -> None:
        self._all = listeners
        self.of_backward = tuple(listener for listener in listeners if listener.wants_backward)
        if not self.of_backward:
            self._owners.clear()
        self._modules.call_through(self._make_tell if listeners else None)

    # -- forward -----------------------------------------------------------------------------------

    def _make_tell(self, original: Any, directly: bool) -> Any:
        tell_entered, tell_left = self._tell_entered, self._tell_left

        @_torch.stepped_over
        def tell(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            told: list[tuple[Listener, ModuleEntry]] = []
            output = None
            try:
                tell_entered(self, args, kwargs, told)
                if directly and self._compiled_call_impl is None:
                    output = self._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
                else:
                    output = original(self, *args, **kwargs)
                return output
            finally:
                if told:
                    tell_left(told, output)

        return tell

    @_torch.unseen
    def _tell_entered(
        self, module: nn.Module, args: Any, kwargs: Any, told: list[tuple[Listener, ModuleEntry]]
    ) -> None:
        try:
            entry = self._entry(module, args, kwargs)
        except Exception as error:
            self.errors(error)
            return
        for listener in self._all:
            if entry is not None and listener.is_active:
                listener.entered(entry)
                told.append((listener, entry))

    @_torch.unseen
    def _tell_left(self, told: list[tuple[Listener, ModuleEntry]], output: Any) -> None:
        """The last to hear of a call is the first to hear of its end; all of them hear of it,
        whatever one raises."""
        while told:
            listener, entry = told.pop()
            try:
                if listener.is_active:
                    listener.left(entry, output)
            except BaseException:
                self._tell_left(told, output)
                raise

    # -- what they are told ------------------------------------------------------------------------

    def _entry(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ModuleEntry | None:
        """The call that began just now; None for a graph of a compiler's, which is nobody's
        module."""
        track = self._locator.threads.here()
        word = track.top
        if word < FIRST_MODULE_WORD or self._modules.is_transparent(module):
            return None
        own = innermost(module) if self._modules.is_wrapper(module) else module
        begin = track.count - 1
        if self.of_backward:
            self._remember(own, track, begin)
        is_one_call = track.marks[(begin - 1) & LOG_MASK] == word
        return ModuleEntry(
            module,
            own,
            None if is_one_call else self._call(word, track, pass_of(word)),
            args,
            kwargs,
            track,
        )

    def _call(self, word: int, track: Track, pass_: int) -> ModuleCall:
        call = track.recomputed_call(word) if pass_of(word) == Pass.RECOMPUTE else word & CALL_MASK
        name = self._locator.text_of(word >> MODULE_SHIFT) or ""
        return ModuleCall(
            name, None if call == NO_CALL else call, Pass(pass_).label, self._current_step()
        )

    # -- backward ----------------------------------------------------------------------------------

    def _remember(self, own: nn.Module, track: Track, begin: int) -> None:
        """Whose call it is that began just now: the log holds numbers, a callback in backward is
        given the module."""
        owners = self._owners.get(track)
        if owners is None:
            owners = self._owners[track] = [None] * LOG_LENGTH
        owners[begin & LOG_MASK] = begin, weakref.ref(own)

    def owner(self, made: Made) -> tuple[Owner, ModuleCall] | None:
        """The module of a call, and the call as backward tells it; None if nobody listened when it
        was made."""
        owners = self._owners.get(made.track)
        found = owners[made.begin & LOG_MASK] if owners is not None else None
        if found is None or found[0] != made.begin:
            return None
        return found[1], self._call(made.word, made.track, Pass.BACKWARD)
