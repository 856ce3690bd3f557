"""The contenders: no watch, torchwhere, and the tools that torch itself has for the same questions.

A tool of torch is imported when it is entered. If a torch version does not have it, its cells in
the table say so, and the run continues.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

from torchwhere.core.errors import TorchwhereError
from torchwhere.native.load import SWITCH

UNWATCHED = "unwatched"
AGAIN = "unwatched, again"  # shows the noise of the run, and what other tools left behind
TORCHWHERE = "torchwhere"
MODULE_EVENTS = "torchwhere, module events"
NO_DEVICE = "torchwhere, no device progress"  # the collectives are recorded, no marks are set
# without the native extension, as on a machine without a compiler
PYTHON = "torchwhere, Python only"
PYTHON_EVENTS = "torchwhere, Python only, module events"
MOD_TRACKER = "ModTracker"
COMM_DEBUG = "CommDebugMode"
COMM_DEBUG_ANEW = "CommDebugMode, entered again each step"

_LACKING = "this torch has no"  # in a warning about an older torch, which is not a failure


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to watch. `enter` returns a new context manager for the model, or for no model."""

    name: str
    enter: Callable[[nn.Module | None], AbstractContextManager[Any]]
    # entered again for every step, untimed: it fails in a second step
    anew_each_step: bool = False


class _Warnings(logging.Handler):
    """Collects the warnings of torchwhere: a hook that switched itself off would look cheap."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if _LACKING not in record.getMessage():
            self.messages.append(record.getMessage())


@contextmanager
def _watched(
    model: nn.Module | None,
    *,
    module_events: bool = False,
    native: bool = True,
    device: bool = True,
) -> Iterator[None]:
    import torchwhere
    from torchwhere.hooks.device import DeviceHook

    warnings = _Warnings()
    without_device = mock.patch.object(DeviceHook, "install", return_value=[])
    logging.getLogger("torchwhere").addHandler(warnings)
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = str(int(native))
    try:
        with (
            nullcontext() if device else without_device,
            tempfile.TemporaryDirectory() as folder,
            torchwhere.watch(model, out=folder, module_events=module_events),
        ):
            yield
    finally:
        os.environ.pop(SWITCH)
        if before is not None:
            os.environ[SWITCH] = before
        logging.getLogger("torchwhere").removeHandler(warnings)
    if warnings.messages:
        raise RuntimeError(warnings.messages[0])


def build_native_extension() -> None:
    """Build the native extension, like `torchwhere run` before a job. If that fails, print why:
    torchwhere then runs in Python only."""
    from torchwhere.native.build import build

    try:
        build()
    except TorchwhereError as error:
        print(f"bench: torchwhere has no native extension here: {error}", file=sys.stderr)


def _mod_tracker(_model: nn.Module | None) -> AbstractContextManager[Any]:
    from torch.distributed._tools.mod_tracker import ModTracker

    return ModTracker()  # type: ignore[no-untyped-call]


def _comm_debug(_model: nn.Module | None) -> AbstractContextManager[Any]:
    from torch.distributed.tensor.debug import CommDebugMode

    return CommDebugMode()  # type: ignore[no-untyped-call]


def _debug_mode(_model: nn.Module | None) -> AbstractContextManager[Any]:
    from torch.utils._debug_mode import DebugMode

    return DebugMode(record_nn_module=True)


def _flop_counter(_model: nn.Module | None) -> AbstractContextManager[Any]:
    from torch.utils.flop_counter import FlopCounterMode

    return FlopCounterMode(display=False)


def _profiler(_model: nn.Module | None) -> AbstractContextManager[Any]:
    from torch.profiler import ProfilerActivity, profile

    return profile(
        activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    )


CONTENDERS = (
    Contender(UNWATCHED, lambda _model: nullcontext()),
    Contender(TORCHWHERE, _watched),
    Contender(MODULE_EVENTS, partial(_watched, module_events=True)),
    Contender(NO_DEVICE, partial(_watched, device=False)),
    Contender(PYTHON, partial(_watched, native=False)),
    Contender(PYTHON_EVENTS, partial(_watched, native=False, module_events=True)),
    Contender(MOD_TRACKER, _mod_tracker),
    Contender(COMM_DEBUG, _comm_debug),
    Contender(COMM_DEBUG_ANEW, _comm_debug, anew_each_step=True),
    Contender("DebugMode(record_nn_module=True)", _debug_mode),
    Contender("FlopCounterMode", _flop_counter),
    Contender("torch.profiler", _profiler),
    Contender(AGAIN, lambda _model: nullcontext()),
)
