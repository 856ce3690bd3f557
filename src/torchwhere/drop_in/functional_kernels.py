"""Reports functional collectives under their own names: a Python kernel on the `BackendSelect` key
of each.

DTensor and compiled graphs issue functional collectives (`_c10d_functional::all_reduce`). Each ends
in a `c10d::` op, which `hooks/collectives.py` records. A listener of this module learns that it was
a functional one, and counts it once. The kernels are registered while there is a listener. All
listeners share them, because two kernels on one key of an op do not work.
"""

from __future__ import annotations

import os
import threading
from _thread import get_ident
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from torchwhere.hooks import _torch
from torchwhere.hooks.compilation import being_compiled
from torchwhere.hooks.error_limiter import ErrorLimiter
from torchwhere.hooks.kernels import Kernels, are_alive, below_backend_select

# By namespace: the ops that issue a collective. Messages (isend, irecv) and waits do not.
OPS = {
    "_c10d_functional": (
        "all_reduce",
        "all_reduce_",
        "all_reduce_coalesced",
        "all_reduce_coalesced_",
        "broadcast",
        "broadcast_",
        "all_gather_into_tensor",
        "all_gather_into_tensor_out",
        "all_gather_into_tensor_coalesced",
        "all_to_all_single",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_out",
        "reduce_scatter_tensor_coalesced",
    ),
    "_dtensor": ("shard_dim_alltoall",),
}
OnFunctional = Callable[[str], None]  # called with namespace::name, before the op runs


class _Depth(threading.local):
    depth = 0


_inside = _Depth()
_lock = threading.RLock()
_listeners: tuple[OnFunctional, ...] = ()
_kernels: FunctionalKernels | None = None


def is_inside() -> bool:
    """Whether this thread is in a functional collective, which then issues the `c10d::` op that
    runs now."""
    return _inside.depth > 0


def listen(listener: OnFunctional) -> None:
    """Call `listener` for each functional collective, before it runs, until `stop_listening`."""
    global _listeners, _kernels
    with _lock:
        _reset_in_forks()
        _listeners = (*_listeners, listener)
        if _kernels is None and all(
            _torch.private(key) is not None for key in ("dispatch_key", "keyset_after")
        ):
            _kernels = FunctionalKernels.take_left() or FunctionalKernels()
        if _kernels is not None:
            _kernels.report_to(_call_listeners)


def stop_listening(listener: OnFunctional) -> None:
    """End `listen`. Without a listener the kernels only redispatch calls, until `remove_unused`
    removes them."""
    global _listeners
    with _lock:
        _listeners = tuple(other for other in _listeners if other != listener)
        if not _listeners and _kernels is not None:
            _kernels.silence()


def remove_unused() -> None:
    """Remove the kernels if there is no listener. If another thread calls them, leave them for the
    next listener."""
    global _kernels
    with _lock:
        if not _listeners and _kernels is not None:
            _kernels.remove(are_others=are_alive(_kernels.callers))
            _kernels = None


class FunctionalKernels(Kernels):
    """A Python kernel on every functional collective that this torch has."""

    receiver: OnFunctional | None

    def __init__(self) -> None:
        super().__init__()
        self.callers: set[int] = set()  # ids of the threads that called one
        for namespace, names in OPS.items():
            for name in names:
                if hasattr(getattr(torch.ops, namespace), name):  # newer torch has more of them
                    self._register(
                        f"{namespace}::{name}", partial(self._make_kernel, f"{namespace}::{name}")
                    )

    def _make_kernel(self, name: str, redispatch: Callable[..., Any]) -> Any:
        below = below_backend_select()

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            receiver = self.receiver
            self.callers.add(get_ident())
            if receiver is None:
                self._unreported += 1
                return redispatch(keyset & below, *args, **kwargs)
            _inside.depth += 1
            try:
                if _inside.depth == 1:
                    receiver(name)
                return redispatch(keyset & below, *args, **kwargs)
            finally:
                _inside.depth -= 1

        return kernel


@_torch.unseen
def _call_listeners(name: str) -> None:
    """Call the listeners, except while a graph is compiled: its ops then run on tensors without
    data."""
    try:
        if being_compiled() is None:
            for listener in _listeners:
                listener(name)
    except Exception as error:
        _errors(error)


def _forget_listeners() -> None:
    global _listeners
    _listeners = ()


_errors = ErrorLimiter("functional collectives", _forget_listeners)


@cache
def _reset_in_forks() -> None:
    """Register `_forked` once: Python has no way to unregister it."""
    os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    """Reset the state in a forked child: another thread of the parent may have held the lock, and
    the listeners belong to the parent."""
    global _lock, _listeners, _kernels
    _lock, _listeners = threading.RLock(), ()
    if _kernels is not None:
        _kernels.leave()
        _kernels = None
