"""Reports to the step clock when the job loads data, saves or evaluates.

Wraps a few functions of torch and of frameworks: `DataLoader`, `torch.save`, the Trainers of
transformers and Lightning. Each call costs about a microsecond. All other loading, saving and
evaluating is unknown, and counts as the part around it. A framework is wrapped once the job has
imported it. Names that it lacks are left out.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from torchwhere.blackbox.step_clock import StepPart
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.hooks import _torch
from torchwhere.hooks.error_limiter import ErrorLimiter
from torchwhere.hooks.patches import Patches
from torchwhere.hooks.shown_frames import shown_as
from torchwhere.hooks.threads import Threads

_CHECKPOINT = "torch.distributed.checkpoint"
_SAVES, _EVALUATES = StepPart.CHECKPOINT, StepPart.EVALUATION
# For the import of each module: the functions to wrap, as module, class or None, name and part.
_LATE: dict[str, tuple[tuple[str, str | None, str, StepPart], ...]] = {
    _CHECKPOINT: tuple(
        (module, None, name, _SAVES)
        for module in (
            _CHECKPOINT,
            f"{_CHECKPOINT}.state_dict_saver",
            f"{_CHECKPOINT}.state_dict_loader",
        )
        for name in ("save", "async_save", "load")
    ),
    # what `save_file` calls: libraries import `save_file` itself by name
    "safetensors.torch": tuple(
        ("safetensors.torch", None, name, _SAVES) for name in ("serialize", "serialize_file")
    ),
    "transformers.trainer": (
        ("transformers.trainer", "Trainer", "evaluate", _EVALUATES),
        ("transformers.trainer", "Trainer", "_save_checkpoint", _SAVES),
    ),
    **{
        f"{package}.{module}": ((f"{package}.{module}", owner, name, part),)
        for package in ("lightning.pytorch", "pytorch_lightning")
        for module, owner, name, part in (
            ("loops.evaluation_loop", "_EvaluationLoop", "run", _EVALUATES),
            ("trainer.trainer", "Trainer", "save_checkpoint", _SAVES),
        )
    },
}


class PartHook:
    """Begins a part of the step when one of the functions is called, and ends it at its return."""

    def __init__(self, box: BoxWriter, threads: Threads) -> None:
        self._clock = box.clock
        self._here = threads.here
        self._patches = Patches()
        self._is_installed = False
        self.errors = ErrorLimiter("parts of a step", self.remove)

    def install(self) -> list[str]:
        self._is_installed = True
        iterator = _torch.private("loader_iterator")
        if iterator is not None:
            self._wrap(iterator, "__next__", StepPart.DATA)
        self._wrap(DataLoader, "__iter__", StepPart.DATA)
        for module in (torch, torch.serialization):
            self._wrap(module, "save", StepPart.CHECKPOINT)
        return _torch.missing("parts of a step")

    def late_imports(self) -> dict[str, Callable[[], object]]:
        """What to call once the job has imported a module, by its name."""
        return {name: functools.partial(self._wrap_all, name) for name in _LATE}

    def _wrap_all(self, imported: str) -> None:
        for module, owner, name, part in _LATE[imported]:
            home = sys.modules.get(module)
            self._wrap(home if owner is None else getattr(home, owner, None), name, part)

    def remove(self) -> None:
        self._is_installed = False
        self._patches.restore()

    def _wrap(self, owner: Any, name: str, part: StepPart) -> None:
        if owner is not None and self._is_installed and vars(owner).get(name) is not None:
            self._patches.replace(owner, name, functools.partial(self._make_wrapper, part))

    def _make_wrapper(self, part: StepPart, original: Any) -> Callable[..., Any]:
        begin, end = functools.partial(self._begin, part), self._end

        # `shown_as` takes the globals of this module away
        @_torch.stepped_over
        @shown_as(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            has_begun = begin()
            try:
                return original(*args, **kwargs)
            finally:
                if has_begun:
                    end()

        return functools.update_wrapper(wrapper, original)

    @_torch.unseen
    def _begin(self, part: StepPart) -> bool:
        if not self._is_installed:
            return False
        try:
            return self._clock.begin_part(self._here().cursor, part)
        except Exception as error:
            self.errors(error)
            return False

    @_torch.unseen
    def _end(self) -> None:
        try:
            self._clock.end_part()
        except Exception as error:
            self.errors(error)
