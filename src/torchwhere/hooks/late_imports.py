"""Calls back when the job imports a module, without importing the module itself (dynamo alone takes
seconds)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torchwhere.hooks import _torch
from torchwhere.hooks.error_limiter import ErrorLimiter
from torchwhere.hooks.shown_frames import shown_as


class LateImports:
    """Calls back once when a named module has been imported; at once if it is imported already."""

    def __init__(self, waiting: dict[str, Callable[[], object]]) -> None:
        self._waiting = dict(waiting)
        self.errors = ErrorLimiter("imports", self.remove)

    def install(self) -> None:
        for name in [name for name in self._waiting if name in sys.modules]:
            self._call_back(self._waiting.pop(name))
        if self._waiting:
            sys.meta_path.insert(0, self)  # type: ignore[arg-type]

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)  # type: ignore[arg-type]

    @_torch.unseen
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Part of the import protocol. Finds a module through the other finders, and calls back
        after it is loaded."""
        callback = self._waiting.pop(name, None)
        if callback is None:
            return None
        for finder in [finder for finder in sys.meta_path if finder is not self]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self._wrap(spec.loader, callback)
                return spec
        return None

    def _wrap(self, loader: Any, callback: Callable[[], object]) -> None:
        original = loader.exec_module

        @_torch.stepped_over
        @shown_as(original, calling="_call_with_frames_removed")
        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            original(module)
            self._call_back(callback)

        loader.exec_module = exec_module

    @_torch.unseen
    def _call_back(self, callback: Callable[[], object]) -> None:
        with self.errors:
            callback()
