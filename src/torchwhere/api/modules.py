"""Calls the user's functions when a module is entered and left, in forward and in backward:
`on_module`.

A callback gets the module and a `ModuleCall`. An exception of a callback belongs to the user: it
propagates into the forward or backward that called it, like an exception of a module hook. A
compiled graph calls no modules, so it calls no callbacks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Self

from torch import nn

from torchwhere.api import watch
from torchwhere.hooks.decorate import Function, decorated
from torchwhere.hooks.listeners import Listener, ModuleCall, ModuleEntry

__all__ = ["ModuleCall", "on_module"]

OnForward = Callable[[nn.Module, ModuleCall], object]
# None: the module was deleted, only its graph is left
OnBackward = Callable[[nn.Module | None, ModuleCall], object]


class on_module(Listener):  # noqa: N801 - called like a function: `with on_module(enter=...):`
    """Call functions when a module is entered and left, on every thread, from now until `remove()`.

    Each function gets the module and a `ModuleCall`. An outer module is entered before an inner
    module and left after it. Each is entered and left once, also if an exception ends the call.

    The object is also a context manager, which removes the callbacks at the end of the block, and a
    decorator, which keeps them registered while the function runs. It needs no watch, and outlives
    the watch in which it was created.

    Args:
        enter: Called before the forward of a module. Called again when activation checkpointing
            repeats the forward; `call.pass_` is `recompute` then.
        exit: Called after the forward of a module, and again after a repeated forward.
        backward_enter: Called in backward before the first autograd node of a module call. Only for
            calls that were made while this object was registered. The module is None if it was
            deleted and only its graph is left.
        backward_exit: Called in backward after the last autograd node of the call. The gradients of
            the module's parameters are complete then.

    Raises:
        TypeError: A callback is not callable.
        ValueError: No callback is given.

    Example:
        def show(module, call):
            print(call.pass_, call.name)

        with torchwhere.on_module(enter=show, backward_enter=show):
            model(batch).sum().backward()
    """

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
        self._depth = 0  # running blocks and decorated functions
        self._add()

    def _add(self) -> None:
        if not self.is_active:
            self.is_active = True
            watch.listen(self)

    def remove(self) -> None:
        """Remove the callbacks. Modules that were entered no longer get an exit callback.

        It can be called twice, and inside a callback.

        Example:
            handle = torchwhere.on_module(enter=show)
            model(batch)
            handle.remove()
        """
        if self.is_active:
            self.is_active = False
            watch.unlisten(self)

    def __enter__(self) -> Self:
        with self._lock:
            self._depth += 1
            self._add()
        return self

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self.remove()

    def __call__(self, function: Function) -> Function:
        self.remove()
        return decorated(self, function)

    # -- as a listener of the session --------------------------------------------------------------

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
