"""The names that AOTAutograd gives to models and graphs, read and set where it stores them.

So torch's own logging and the drop-in always see the same name. If this torch stores them at no
known place, they are stored here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from torchwhere.hooks import _torch


class Naming:
    """The name of the model, the graphs being compiled, and the count of compiled graphs."""

    def __init__(self) -> None:
        own = {"model_name": "model", "graph_being_compiled": [], "nth_graph": 0}
        torchs = _torch.imported("aot_naming")
        is_usable = all(hasattr(torchs, name) for name in own)
        self._home: Any = torchs if is_usable else SimpleNamespace(**own)

    @property
    def model(self) -> str:
        return str(self._home.model_name)

    @model.setter
    def model(self, name: str) -> None:
        self._home.model_name = name

    @property
    def graphs(self) -> list[str]:
        return list(self._home.graph_being_compiled)

    @property
    def count(self) -> int:
        return int(self._home.nth_graph)

    @contextmanager
    def compiling(self, graph: str) -> Iterator[None]:
        """Set the graph being compiled while the block runs. The end of the block counts it, also
        after an exception."""
        home, outer = self._home, self._home.graph_being_compiled
        home.graph_being_compiled = [graph]
        context = self._context()
        before = getattr(context, "aot_graph_name", None)
        if context is not None:
            context.aot_graph_name = home.graph_being_compiled
        try:
            yield
        finally:
            home.nth_graph += 1
            home.graph_being_compiled = outer
            if context is not None and self._context() is not None:
                self._context().aot_graph_name = before

    def _context(self) -> Any:
        """Return the object where dynamo looks for the name; None while dynamo traces nothing."""
        tracing = _torch.private("tracing_context")
        return tracing.try_get() if tracing is not None else None
