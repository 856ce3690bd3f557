"""Keeps the layout of the watched models in the box: once after the first step, when wrapping is
done, and at the end if it has changed since. Costs one walk through the models each time (about 15
us a module), nothing in any other step, and nothing at all without a file.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from torchwhere.blackbox.file_format import EntryType
from torchwhere.blackbox.stored_layouts import pack
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.hooks import _torch
from torchwhere.hooks.error_limiter import ErrorLimiter
from torchwhere.hooks.modules import ModuleHook
from torchwhere.model.module_names import NameTable
from torchwhere.model.read_layout import layout_of
from torchwhere.model.units import stage_around
from torchwhere.model.wrappers import wrapped


class LayoutHook:
    """Takes the layouts of a session's models."""

    def __init__(self, box: BoxWriter, names: NameTable, modules: ModuleHook) -> None:
        self._box = box
        self._names = names
        self._modules = modules
        self._count = 0
        self._last: dict[str, Any] = {}
        self._is_off = box.path is None
        self.errors = ErrorLimiter("layouts", self.remove)

    def remove(self) -> None:
        self._is_off = True

    @property
    def is_settled(self) -> bool:
        """Nothing is left to do at the end of a step."""
        return bool(self._count) or self._is_off

    def step_ended(self) -> None:
        if not self.is_settled:
            self._take()

    def finish(self) -> None:
        """The watch ends. A world that was destroyed before says less than what was written while
        it was there."""
        if not self._is_off and (not self._count or dist.is_initialized()):
            self._take()
        self.remove()

    @_torch.unseen
    def _take(self) -> None:
        try:
            models = self._models()
            if models:
                layout = layout_of(models).to_dict()
                if layout != self._last:
                    self._box.intern_many(EntryType.LAYOUT, pack(self._count, layout))
                    self._last, self._count = layout, self._count + 1
        except Exception as error:
            # what failed once fails again: it is said, and not tried in every step
            self._is_off = True
            self.errors(error)

    def _models(self) -> list[tuple[str, nn.Module, object]]:
        """The models with parameters, each in the outermost wrapper that was called, with the
        pipeline stage around it."""
        around = {id(wrapped(wrapper)): wrapper for wrapper in self._modules.wrappers()}
        found = []
        for prefix, root in self._names.roots():
            stage = stage_around(root)
            while id(root) in around:
                root = around[id(root)]
                stage = stage or stage_around(root)
            if any(True for _ in root.parameters()):
                found.append((prefix, root, stage))
        return found
