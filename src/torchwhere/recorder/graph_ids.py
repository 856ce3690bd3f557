"""Ids of compiled graphs: which graph an event belongs to, as a number in the box."""

from __future__ import annotations

from torchwhere.blackbox.file_format import EntryType
from torchwhere.blackbox.writer import BoxWriter
from torchwhere.hooks.compilation import being_compiled


class GraphIds:
    """Interns the names of graphs in the string table of a box.

    `compiling` counts the compilations that are running. While it is 0, an event outside of any
    graph has the id 0, and the hot path asks nothing more.
    """

    def __init__(self, box: BoxWriter) -> None:
        self._box = box
        self.compiling = 0

    def id_of(self, graph: str | None) -> int:
        """Return the id of `graph`; without one, of the graph that this thread compiles, or 0."""
        graph = graph or being_compiled()
        return self._box.intern(EntryType.GRAPH, graph) if graph else 0
