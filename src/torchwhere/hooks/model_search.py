"""Searches a new model in parts: whether it is trained, and which modules are inside it.

Such a search over 10,000 modules takes 4 ms, and the first call of a module must not wait for it.
So a search visits some modules at the first call of the model, and some at each later first call.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import islice

from torch import nn

from torchwhere.model.module_walk import ModuleWalk, children_of

_MOST_PARAMS = 64  # parameters of one module


class ModelSearch:
    """Visits all modules of a model. Refers to the model weakly."""

    __slots__ = ("_model", "_walk", "is_trained")

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._walk = ModuleWalk(model)
        self.is_trained = False  # whether a visited module has a parameter that requires a gradient

    @property
    def model(self) -> nn.Module | None:
        return self._model()

    @property
    def is_over(self) -> bool:
        return self._walk.is_over

    def last(self, most: int) -> Iterator[nn.Module]:
        """Visit the last modules of the model, the last one first. A model with many frozen modules
        often has a trained head."""
        model = self._model()
        pending = [model] if model is not None else []
        while pending and most > 0:
            module = pending.pop()
            most -= 1
            yield self._visited(module)
            children = list(islice(reversed(children_of(module).values()), most))
            pending += [child for child in reversed(children) if child is not None]

    def next(self, most: int) -> Iterator[nn.Module]:
        """Visit at most this many further modules. Exhaust the iterator before the next part."""
        for _, module in self._walk.next(most):
            yield self._visited(module)

    def _visited(self, module: nn.Module) -> nn.Module:
        if not self.is_trained and module._parameters:
            self.is_trained = _has_trained_parameter(module)
        return module


def _has_trained_parameter(module: nn.Module) -> bool:
    params = islice(module._parameters.values(), _MOST_PARAMS)
    return any(param is not None and param.requires_grad for param in params)
