"""Our kernels on the ops of c10d: how they come and go, with other threads at work.

torch frees a kernel as soon as it is removed, whoever is in it, and whoever is on the way to it then finds none, which is an
assertion of torch's. So kernels are removed only when no other thread calls them. Otherwise they stay and send every call on,
and the next watch has them.
"""

from __future__ import annotations

import sys
import time
from _thread import get_ident
from collections import deque
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType
from typing import Any, Protocol

import torch

from torchwhere.sense import _torch
from torchwhere.sense.reductions import REDUCED
from torchwhere.sense.schemas import Op
from torchwhere.sense.trouble import Trouble

_QUIET_S = 0.1


class Told(Protocol):
    """Is told of every call before it is sent on."""

    trouble: Trouble

    def issue(self, op: Op, args: tuple[Any, ...]) -> None: ...


class Kernels:
    """A Python kernel on every op, but on the one that the native part has taken, if it has."""

    def __init__(self, ops: Sequence[Op], *, native: Any = None) -> None:
        self.told: Told | None = None
        self.native = native
        self._untold = 0  # calls of which nobody was told: it is only seen whether it changes
        self._names = [f"c10d::{op.raw}" for op in ops]
        self._codes: set[CodeType] = set()
        library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        self._library = library
        for op in ops:
            if native is None or op.raw != REDUCED:
                library.impl(op.raw, self._make_kernel(op), "BackendSelect", with_keyset=True)

    def remove(self, *, are_others: bool = False) -> None:
        """Take them off; if there are other threads and they go on calling them, leave them."""
        self.told = None
        if are_others and self._are_called():
            self.leave()
            return
        get_kernel = getattr(torch.library, "get_kernel", None)
        _held.append([get_kernel(name, "BackendSelect") for name in self._names] if get_kernel is not None else [])
        self._library._destroy()
        if self.native is not None:
            self.native.end()

    def leave(self) -> None:
        self.told = None
        _left.append(self)

    def _are_called(self) -> bool:
        """Whether another thread calls one again and again, or is in one now; takes a moment."""
        before = self._calls_untold()
        time.sleep(_QUIET_S)
        own = get_ident()
        stacks = [frame for thread, frame in sys._current_frames().items() if thread != own]
        is_in_one = any(frame.f_code in self._codes for stack in stacks for frame in _outwards(stack))
        return is_in_one or self._calls_untold() != before

    def _calls_untold(self) -> tuple[int, int]:
        return self._untold, self.native.passed() if self.native is not None else 0

    def _make_kernel(self, op: Op) -> Any:
        overload = getattr(torch.ops.c10d, op.raw).default
        below = _torch.private("keyset_after")(_torch.private("dispatch_key").BackendSelect)
        redispatch = overload._handle.redispatch_boxed

        @_torch.stepped_over
        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            told = self.told
            if told is not None:
                try:
                    told.issue(op, args)
                except Exception as error:
                    told.trouble(error)
            else:
                self._untold += 1
            return redispatch(keyset & below, *args, **kwargs)

        self._codes.add(kernel.__code__)
        return kernel


# Those that were removed last: a call may still be in one.
_held: deque[list[Any]] = deque(maxlen=2)
# Those that could not be removed: while other threads called them, and, in a child, those of its parent, since that takes locks
# which another thread may have held at the fork. torch 2.11 lets no others stand beside them.
_left: list[Kernels] = []


def kernels(ops: Sequence[Op], *, native: Any = None) -> Kernels:
    """Those that were left, or new ones."""
    left = _left.pop() if _left else None
    if left is not None and left.native is not native:
        left.remove()
        left = None
    return left if left is not None else Kernels(ops, native=native)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
