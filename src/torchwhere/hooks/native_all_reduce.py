"""The native kernel on `all_reduce`, where the native part is used: it records DDP's buckets by
itself.

What it does not know it sends to an op of our own, `torchwhere::allreduce_`, which has the schema
of torch's and the ordinary Python kernel on it. That op and its kernel stay once they are there: a
thread may be on its way to them when a watch ends. It then only sends the call on. Nothing of
torch's is touched by that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from torchwhere.blackbox.writer import BoxWriter
from torchwhere.hooks import _torch
from torchwhere.hooks.device import DeviceMark
from torchwhere.hooks.error_limiter import ErrorLimiter

REDUCED = "allreduce_"

Issue = Callable[[tuple[Any, ...]], DeviceMark | None]
Launched = Callable[[DeviceMark], None]

_ours: Any = None  # the library of our own op
_told: tuple[Issue, Launched, ErrorLimiter] | None = (
    None  # who is told of the calls that come there
)


class NativeAllReduce:
    """The kernel of one watch."""

    def __init__(self, box: BoxWriter, *, turns: Any) -> None:
        self._box = box
        self.native = box.native
        self._turns = turns

    def install(self, issue: Issue, on_launched: Launched, errors: ErrorLimiter) -> None:
        """Put the native kernel on the op. `issue` is told of all that is not one of DDP's buckets,
        or a new one."""
        global _told
        _told = issue, on_launched, errors
        _define()
        engine = inspect.unwrap(_torch.private("run_backward") or _define)
        self.native.begin(self._box.native_box, engine.__code__, self._turns)

    def switch_off(self) -> None:
        global _told
        _told = None
        self.native.pause()

    def abandon(self) -> None:
        """In a forked child."""
        global _told
        _told = None
        self.native.abandon()


def _define() -> None:
    """Our own op, once."""
    global _ours
    if _ours is not None:
        return
    overload = getattr(torch.ops.c10d, REDUCED).default
    below = _torch.private("keyset_after")(_torch.private("dispatch_key").BackendSelect)
    redispatch = overload._handle.redispatch_boxed

    @_torch.stepped_over
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        told, mark = _told, None
        if told is not None:
            try:
                mark = told[0](args)
            except Exception as error:
                told[2](error)
        launched = redispatch(keyset & below, *args, **kwargs)
        if told is not None and mark is not None:
            told[1](mark)
        return launched

    library: Any = torch.library.Library("torchwhere", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(str(overload._schema).removeprefix("c10d::"))
    library.impl(REDUCED, kernel, "BackendSelect", with_keyset=True)
    _ours = library
