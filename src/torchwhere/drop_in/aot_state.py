"""The names that AOTAutograd gives to models and graphs, read and set where it keeps them itself.

So there is one truth: torch's own logging and whoever asks here see the same name at the same time.
On a torch that keeps them nowhere we know of, they are kept here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from torchwhere.hooks import _torch


class Naming:
    """`model`, `graphs` (those being compiled) and `count` (of those compiled so far)."""

    def __init__(self) -> None:
        found = _torch.imported("aot_naming")
        is_there = all(
            hasattr(found, name) for name in ("model_name", "graph_being_compiled", "nth_graph")
        )
        self._home: Any = (
            found
            if is_there
            else SimpleNamespace(model_name="model", graph_being_compiled=[], nth_graph=0)
        )

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
        """While inside, `graph` is being compiled; it is counted when it ends, also by an
        exception."""
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
        """Where dynamo looks for the name; None while it traces nothing."""
        tracing = _torch.private("tracing_context")
        return tracing.try_get() if tracing is not None else None
