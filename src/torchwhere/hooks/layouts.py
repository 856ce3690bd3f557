"""Writes the layout of the watched models to the box: after the first step, when all wrappers are
applied, and at the end if it has changed.

Each time costs one walk through the models (about 15 us a module). Other steps cost nothing, and a
watch without a file never does it.
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
    """Writes the layouts of the models of a session."""

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
        """Whether nothing is left to do at the end of a step."""
        return bool(self._count) or self._is_off

    def step_ended(self) -> None:
        if not self.is_settled:
            self._take()

    def finish(self) -> None:
        """Write the last layout at the end of the watch. If the process groups are destroyed
        already, the layout of the first step says more."""
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
            # it would fail again: log it once, and do not try in every step
            self._is_off = True
            self.errors(error)

    def _models(self) -> list[tuple[str, nn.Module, object]]:
        """The models with parameters: prefix, the outermost wrapper that was called, and the
        pipeline stage around it."""
        around = {id(wrapped(wrapper)): wrapper for wrapper in self._modules.wrappers()}
        models = []
        for prefix, root in self._names.roots():
            stage = stage_around(root)
            while id(root) in around:
                root = around[id(root)]
                stage = stage or stage_around(root)
            if any(True for _ in root.parameters()):
                models.append((prefix, root, stage))
        return models
