"""Functional collectives by their own names: a Python kernel on the `BackendSelect` key of each of them.

A functional collective (`_c10d_functional::all_reduce`, what DTensor and compiled graphs issue) ends in a `c10d::` op, which
`collectives.py` records. Who wants to know that it was a functional one, and count it once, listens here. The kernels are there
while somebody listens; two of them on one op do not work, so they are those of the process, not of a listener.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from torchwhere.sense import _torch
from torchwhere.sense.compilation import being_compiled
from torchwhere.sense.trouble import Trouble

# By namespace: the ops that issue a collective. Messages (isend, irecv) and waiting are none.
OPS = {
    "_c10d_functional": (
        *("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_", "broadcast", "broadcast_"),
        *("all_gather_into_tensor", "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced", "all_to_all_single"),
        *("reduce_scatter_tensor", "reduce_scatter_tensor_out", "reduce_scatter_tensor_coalesced"),
    ),
    "_dtensor": ("shard_dim_alltoall",),
}
OnFunctional = Callable[[str], None]  # told the name with its namespace, before the op runs


class _Depth(threading.local):
    depth = 0


_inside = _Depth()
_lock = threading.RLock()
_listeners: tuple[OnFunctional, ...] = ()
_libraries: list[Any] = []


def is_inside() -> bool:
    """Whether this thread is in a functional collective: the `c10d::` op that it issues now is that one."""
    return _inside.depth > 0


def listen(listener: OnFunctional) -> None:
    global _listeners
    with _lock:
        if not _listeners:
            _install()
        _listeners = (*_listeners, listener)


def stop_listening(listener: OnFunctional) -> None:
    global _listeners
    with _lock:
        _listeners = tuple(other for other in _listeners if other != listener)
        if not _listeners:
            while _libraries:
                _libraries.pop()._destroy()


def _install() -> None:
    if any(_torch.private(key) is None for key in ("dispatch_key", "keyset_after")):
        return
    for namespace, names in OPS.items():
        library: Any = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
        _libraries.append(library)
        for name in names:
            packet = getattr(getattr(torch.ops, namespace), name, None)
            if packet is not None:  # newer than this torch
                library.impl(name, _make_kernel(f"{namespace}::{name}", packet.default), "BackendSelect", with_keyset=True)


def _make_kernel(name: str, overload: Any) -> Any:
    below = _torch.private("keyset_after")(_torch.private("dispatch_key").BackendSelect)
    redispatch = overload._handle.redispatch_boxed

    @_torch.stepped_over
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        _inside.depth += 1
        try:
            if _inside.depth == 1:
                _tell(name)
            return redispatch(keyset & below, *args, **kwargs)
        finally:
            _inside.depth -= 1

    return kernel


@_torch.unseen
def _tell(name: str) -> None:
    """While a graph is compiled its ops run too, on tensors without data: those are no collectives."""
    try:
        if being_compiled() is None:
            for listener in _listeners:
                listener(name)
    except Exception as error:
        _trouble(error)


def _silence() -> None:
    global _listeners
    _listeners = ()


_trouble = Trouble("functional collectives", _silence)
