"""Installs the native kernel on `all_reduce`: it records known buckets of DDP without Python.

It sends all other calls to our own op `torchwhere::allreduce_`, which has the schema of torch's op
and an ordinary Python kernel. That op and its kernel stay registered: a thread may be about to call
them when a watch ends. They then only redispatch the call. This changes nothing in torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from torchwhere.blackbox.writer import BoxWriter
from torchwhere.hooks import _torch
from torchwhere.hooks.error_limiter import ErrorLimiter

ALL_REDUCE = "allreduce_"

Issue = Callable[[tuple[Any, ...]], bool]
Launched = Callable[[], None]

_library: Any = None  # of our own op
_receiver: tuple[Issue, Launched, ErrorLimiter] | None = None  # gets the calls of our own op


class NativeAllReduce:
    """The kernel of one watch."""

    def __init__(self, box: BoxWriter, *, turns: Any) -> None:
        assert box.native is not None
        assert box.native_box is not None
        self.native = box.native
        self._native_box = box.native_box
        self._turns = turns

    def install(self, issue: Issue, on_launched: Launched, errors: ErrorLimiter) -> None:
        """Register the native kernel. `issue` gets all calls except known buckets of DDP."""
        global _receiver
        _receiver = issue, on_launched, errors
        _define()
        engine = inspect.unwrap(_torch.private("run_backward") or _define)
        self.native.begin(self._native_box, engine.__code__, self._turns)

    def switch_off(self) -> None:
        global _receiver
        _receiver = None
        self.native.pause()

    def abandon(self) -> None:
        """In a forked child: as `switch_off`, without touching the box."""
        global _receiver
        _receiver = None
        self.native.abandon()


def _define() -> None:
    """Define our own op, once per process."""
    global _library
    if _library is not None:
        return
    overload = getattr(torch.ops.c10d, ALL_REDUCE).default
    below = _torch.private("keyset_after")(_torch.private("dispatch_key").BackendSelect)
    redispatch = overload._handle.redispatch_boxed

    @_torch.stepped_over
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        receiver, is_mark_due = _receiver, False
        if receiver is not None:
            try:
                is_mark_due = receiver[0](args)
            except Exception as error:
                receiver[2](error)
        launched = redispatch(keyset & below, *args, **kwargs)
        if receiver is not None and is_mark_due:
            receiver[1]()
        return launched

    library: Any = torch.library.Library("torchwhere", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(str(overload._schema).removeprefix("c10d::"))
    library.impl(ALL_REDUCE, kernel, "BackendSelect", with_keyset=True)
    _library = library
