"""What stands in for `nn.Module.__call__` where the native part is used: the wrapper of
`modules.py`, its hot path in C++.

Still a Python function and not one in C: dynamo steps over it, and whoever looks at
`nn.Module.__call__` finds a method. It costs less than the frame of torch's own that it takes the
place of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from torchwhere.hooks import _torch
from torchwhere.hooks.error_limiter import ErrorLimiter
from torchwhere.hooks.threads import Track


class _SlowPath(NamedTuple):
    """What the wrapper needs now and then. In one object: at every call Python touches all that a
    function has around it."""

    original: Any
    slowly: Callable[[nn.Module], int]
    on_error: Callable[[BaseException, Track], None]
    here: Callable[[], Track]
    errors: ErrorLimiter


def make_wrapper(
    calls: Any,
    original: Any,
    *,
    slowly: Callable[[nn.Module], int],
    on_error: Callable[[BaseException, Track], None],
    here: Callable[[], Track],
    errors: ErrorLimiter,
    runs_directly: bool,
) -> tuple[Any, Callable[[Any], None], Callable[[], None]]:
    """The wrapper, `call_through` and `retire`, as `ModuleHook._make_wrapper` returns them."""
    enter, leave, rarely = (
        calls.enter,
        calls.leave,
        _SlowPath(original, slowly, on_error, here, errors),
    )
    compiling = torch.compiler.is_dynamo_compiling
    plain = inner = None if runs_directly else original

    def call_through(telling: Any) -> None:
        nonlocal inner
        inner = telling or plain

    def retire() -> None:
        nonlocal compiling
        compiling = always

    @_torch.stepped_over
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - shown in tracebacks
        if compiling():
            return rarely.original(self, *args, **kwargs)
        try:
            below = enter(self)
            if below is None:  # unknown, or called from outside in a way that is not the usual one
                below = rarely.slowly(self)
        except Exception as error:
            rarely.errors(error)
            return rarely.original(self, *args, **kwargs)
        try:
            if inner is None:
                if self._compiled_call_impl is None:
                    return self._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
                return rarely.original(self, *args, **kwargs)
            return inner(self, *args, **kwargs)
        except BaseException as error:
            rarely.on_error(error, rarely.here())
            raise
        finally:
            try:
                leave(below)
            except Exception as error:
                rarely.errors(error)

    return __call__, call_through, retire


@_torch.unseen
def always() -> bool:
    """What a wrapper that is left behind takes for `is_dynamo_compiling`: it then does nothing."""
    return True
