"""Be called when a module is entered and left, in forward and in backward: `on_module`.

Takes any number of callbacks; each is given the module and a `ModuleCall`. What a callback raises
is the user's: it propagates into the forward or backward that it was called from, as an exception
of a hook does. Inside a compiled graph no module is called, and none is told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Self

from torch import nn

from torchwhere.api import watch
from torchwhere.hooks.decorate import Function, decorated
from torchwhere.hooks.listeners import ModuleCall, ModuleEntry

__all__ = ["ModuleCall", "on_module"]

OnForward = Callable[[nn.Module, ModuleCall], object]
# None: the module is gone, only its graph is left
OnBackward = Callable[[nn.Module | None, ModuleCall], object]


class on_module:  # noqa: N801 - read as a verb: `with on_module(enter=...):`
    """Call back when a module is entered and left, on every thread, from now until `remove()`.

    `enter` and `exit`: in forward, and again when activation checkpointing repeats it (`call.pass_`
    is `recompute` then). `backward_enter` and `backward_exit`: before the first and after the last
    autograd node that the call made, for calls made while this was registered; the gradients of its
    parameters are there at the exit. An outer module is entered before an inner one and left after
    it, each once, also if an exception cuts it short.

    The handle is a context manager too, which removes it at the end, and a decorator: then it is
    there while the function runs. Needs no watch, and outlives the watch it was made in.
    """

    is_active = False

    def __init__(
        self,
        *,
        enter: OnForward | None = None,
        exit: OnForward | None = None,  # noqa: A002 - the pair of `enter`
        backward_enter: OnBackward | None = None,
        backward_exit: OnBackward | None = None,
    ) -> None:
        callbacks = {
            "enter": enter,
            "exit": exit,
            "backward_enter": backward_enter,
            "backward_exit": backward_exit,
        }
        for name, callback in callbacks.items():
            if callback is not None and not callable(callback):
                raise TypeError(
                    f"on_module({name}=): expected a function, got {type(callback).__name__}"
                )
        if not any(callbacks.values()):
            raise ValueError(
                f"on_module(): nothing to call; give one or more of {', '.join(callbacks)}"
            )
        self._enter, self._exit = enter, exit
        self._backward_enter, self._backward_exit = backward_enter, backward_exit
        self.wants_backward = backward_enter is not None or backward_exit is not None
        self._lock = threading.Lock()
        self._inside = 0  # blocks and decorated functions that run
        self._add()

    def _add(self) -> None:
        if not self.is_active:
            self.is_active = True
            watch.listen(self)

    def remove(self) -> None:
        """Call nothing any more, not even the exit of what was entered. Fine to do twice, and
        inside a callback."""
        if self.is_active:
            self.is_active = False
            watch.unlisten(self)

    def __enter__(self) -> Self:
        with self._lock:
            self._inside += 1
            self._add()
        return self

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self.remove()

    def __call__(self, function: Function) -> Function:
        self.remove()
        return decorated(self, function)

    # -- what the engine tells ---------------------------------------------------------------------

    def entered(self, entry: ModuleEntry) -> None:
        if self._enter is not None and entry.call is not None:
            self._enter(entry.own, entry.call)

    def left(self, entry: ModuleEntry, _output: Any) -> None:
        if self._exit is not None and entry.call is not None:
            self._exit(entry.own, entry.call)

    def backward_entered(self, module: nn.Module | None, call: ModuleCall) -> None:
        if self._backward_enter is not None:
            self._backward_enter(module, call)

    def backward_left(self, module: nn.Module | None, call: ModuleCall) -> None:
        if self._backward_exit is not None:
            self._backward_exit(module, call)
