"""Registers Python kernels on the `BackendSelect` key of collectives, and removes them while other
threads run.

torch frees a kernel as soon as it is removed, even if a thread is inside it. A thread that has
selected the key but not yet looked up the kernel then finds none, and torch raises an internal
assert ("fallthrough_kernel was executed"). So `Kernels` removes its kernels only when no other
thread calls them, and keeps them alive for a while after that. Otherwise the kernels stay
registered and only redispatch every call, and the next user takes them over.
"""

from __future__ import annotations

import inspect
import sys
import time
from _thread import get_ident
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from types import CodeType, FrameType
from typing import Any, Protocol, Self

import torch

from torchwhere.blackbox.writer import BoxWriter
from torchwhere.hooks import _torch
from torchwhere.hooks.error_limiter import ErrorLimiter
from torchwhere.hooks.python_stack import frame_role, outwards
from torchwhere.hooks.schemas import Op, all_ops

_QUIET_S = 0.1


class Kernels:
    """Kernels on some ops. A subclass registers them, and reports each call to `receiver` or counts
    it as unreported.

    There is at most one set of each subclass in a process: two kernels on one key of an op do not
    work.
    """

    def __init__(self) -> None:
        self.receiver: Any = None
        self._unreported = 0  # calls while `receiver` was None: only a change of it matters
        # the time of `silence`, and the calls until then
        self._silent: tuple[float, object] | None = None
        self._were_left = False
        self._names: list[str] = []
        self._codes: set[CodeType] = set()
        self._libraries: dict[str, Any] = {}

    @classmethod
    def take_left(cls) -> Self | None:
        """The kernels that could not be removed earlier; None if there are none. The caller owns
        them from now on."""
        left: Self | None = _left.pop(cls, None)
        return left

    def report_to(self, receiver: Any) -> None:
        """Report calls to `receiver` from now on."""
        self._silent = None
        self.receiver = receiver

    def silence(self) -> None:
        """Stop reporting calls, and start to look for calls of other threads. `remove` comes
        next."""
        self.receiver = None
        if self._silent is None:
            self._silent = time.monotonic(), self._calls()

    def remove(self, *, are_others: bool = False) -> None:
        """Remove the kernels, unless another thread calls them: then leave them.

        `are_others` says that another thread has issued collectives and is still alive. It then
        takes 0.1 s from `silence` on to find out whether that thread continues.
        """
        self.silence()
        if (are_others or self._may_be_called()) and self._are_called():
            self.leave()
            return
        get_kernel = getattr(torch.library, "get_kernel", None)
        if get_kernel is not None:
            _held[type(self)].append([get_kernel(name, "BackendSelect") for name in self._names])
        self._end()

    def leave(self) -> None:
        """Keep the kernels registered, without reports, for `take_left`."""
        self.receiver, self._silent, self._were_left = None, None, True
        _left[type(self)] = self

    def _register(self, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
        """Register the kernel that `make` returns. `make` gets the function that redispatches a
        call."""
        namespace, _, op = name.partition("::")
        library = self._libraries.get(namespace)
        if library is None:
            library = self._libraries[namespace] = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
        overload = getattr(getattr(torch.ops, namespace), op).default
        kernel = _torch.stepped_over(make(overload._handle.redispatch_boxed))
        self._codes.add(kernel.__code__)
        library.impl(op, kernel, "BackendSelect", with_keyset=True)
        self._names.append(name)

    def _end(self) -> None:
        for library in self._libraries.values():
            library._destroy()

    def _calls(self) -> object:
        """A value that changes with each unreported call."""
        return self._unreported

    def _may_be_called(self) -> bool:
        """Whether another thread called the kernels when they were left, or may be about to call
        one now."""
        stacks = _other_stacks().values()
        names = (
            str(frame.f_globals.get("__name__")) for stack in stacks for frame in outwards(stack)
        )
        return (self._were_left and len(stacks) > 0) or any(
            name.startswith(_torch.COLLECTIVE_CALLERS) for name in names
        )

    def _are_called(self) -> bool:
        """Whether another thread has called a kernel in the last 0.1 s, or is inside one now."""
        assert self._silent is not None
        since, calls = self._silent
        time.sleep(max(0.0, since + _QUIET_S - time.monotonic()))
        is_inside = any(
            frame.f_code in self._codes
            for stack in _other_stacks().values()
            for frame in outwards(stack)
        )
        return is_inside or self._calls() != calls


def below_backend_select() -> Any:
    """The keys that our kernels redispatch a call to."""
    return _torch.private("keyset_after")(_torch.private("dispatch_key").BackendSelect)


# The kernels that were removed last: a thread may still be inside one.
_held: defaultdict[type[Kernels], deque[list[Any]]] = defaultdict(lambda: deque(maxlen=2))
# The kernels that could not be removed: other threads called them, or this is a forked child.
# Removal takes locks that another thread of the parent may have held at the fork. torch 2.11 allows
# no other kernels beside them.
_left: dict[type[Kernels], Any] = {}


def are_alive(threads: Collection[int]) -> bool:
    """Whether one of these threads, except the calling one, still runs Python code."""
    return not _other_stacks().keys().isdisjoint(threads)


def _other_stacks() -> dict[int, FrameType]:
    """The innermost frames of the other threads, by their idents."""
    stacks = sys._current_frames()
    stacks.pop(get_ident(), None)
    return stacks


# -- the native kernel -----------------------------------------------------------------------------
# It records known buckets of DDP, and calls that Python has recorded before, without Python. It
# sends each other call to an op of ours, such as `torchwhere::allreduce_`, which has the schema of
# torch's op and an ordinary Python kernel. These ops and their kernels stay registered: a thread
# may be about to call them when a watch ends. They then only redispatch the call. This changes
# nothing in torch.

ALL_REDUCE = "allreduce_"


class Receiver(Protocol):
    """Gets the calls of collectives: a `CollectiveHook`."""

    errors: ErrorLimiter
    reports_launches: bool

    def issue(self, op: Op, args: tuple[Any, ...]) -> None: ...
    def launched(self, op: Op, args: tuple[Any, ...], result: Any) -> None: ...


_library: Any = None  # of our own ops
_receiver: Receiver | None = None  # gets the calls of our own ops


class NativeKernel:
    """The native kernel of one watch, on all collectives."""

    def __init__(self, box: BoxWriter, *, turns: Any) -> None:
        assert box.native is not None
        assert box.native_box is not None
        self.native = box.native
        self._native_box = box.native_box
        self._turns = turns

    def install(self, receiver: Receiver) -> None:
        """Register the kernel. The receiver gets all calls that it does not know."""
        global _receiver
        _receiver = receiver
        _define()
        engine = inspect.unwrap(_torch.private("run_backward") or _define)
        self.native.begin(
            self._native_box,
            engine.__code__,
            self._turns,
            [_positions(op) for op in all_ops()],
            frame_role,
        )

    def switch_off(self) -> None:
        global _receiver
        _receiver = None
        self.native.pause()

    def abandon(self) -> None:
        """In a forked child: as `switch_off`, without touching the box."""
        global _receiver
        _receiver = None
        self.native.abandon()


def _positions(op: Op) -> tuple[str, int, int, tuple[int, ...]]:
    """The positions of arguments that the native kernel needs: of the group, of the reduce op or
    -1, and of the tensors that the job may wait for."""
    tensors = () if op.is_barrier else op.outputs or op.inputs
    return op.raw, op.group_at, -1 if op.reduce_op_at is None else op.reduce_op_at, tensors


def _define() -> None:
    """Define our own ops, once per process."""
    global _library
    if _library is not None:
        return
    library: Any = torch.library.Library("torchwhere", "FRAGMENT")  # type: ignore[no-untyped-call]
    for op in all_ops():
        overload = getattr(torch.ops.c10d, op.raw).default
        library.define(str(overload._schema).removeprefix("c10d::"))
        kernel = _make_kernel(op, overload._handle.redispatch_boxed)
        library.impl(op.raw, kernel, "BackendSelect", with_keyset=True)
    _library = library


def _make_kernel(op: Op, redispatch: Callable[..., Any]) -> Any:
    """The Python kernel of one of our ops."""
    below = below_backend_select()

    @_torch.stepped_over
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        receiver = _receiver
        if receiver is not None:
            try:
                receiver.issue(op, args)
            except Exception as error:
                receiver.errors(error)
        result = redispatch(keyset & below, *args, **kwargs)
        if receiver is not None and receiver.reports_launches:
            receiver.launched(op, args, result)
        return result

    return kernel
