"""The compiled graphs of a process, as data: what each was made from, its inputs by parameter name,
why it was compiled again.

Holds texts and numbers only; nothing of dynamo's is kept alive. As a table: `render/graphs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, overload

from torchwhere.core.results import Tabular
from torchwhere.model.bytecode import Expression
from torchwhere.render import graphs as views

PARAMETER, BUFFER, INPUT = "parameter", "buffer", "input"


@dataclass(frozen=True, slots=True)
class GraphInput:
    """One input: a parameter or buffer by its name in the module that was compiled, anything else
    as it is reached."""

    number: int
    kind: str  # parameter, buffer, input
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def inputs_of(expressions: Sequence[Expression] | None) -> tuple[GraphInput, ...] | None:
    """What dynamo's code passes to a graph, named."""
    if expressions is None:
        return None
    named = [each.held or (INPUT, str(each)) for each in expressions]
    return tuple(GraphInput(number, kind, name) for number, (kind, name) in enumerate(named))


@dataclass(frozen=True, slots=True, repr=False)
class CompiledGraph:
    """One compiled graph. A function that is trained has two for each variant: its forward and its
    backward."""

    id: str  # dynamo's: frame and variant, `0/0`
    kind: str  # forward, backward, inference
    function: str
    line: str | None  # where the function begins
    model: str  # AOTAutograd's name of the model
    backend: str | None
    ops: int | None
    inputs: tuple[GraphInput, ...] | None  # None: not known, as for a backward
    recompiled: int  # how often the function had been compiled before
    reason: str | None  # why it was compiled again
    seconds: float | None  # to compile it
    is_live: bool  # can still run; False where dynamo has dropped it

    def describe(self, number: int) -> str:
        """Input `number` in words: `parameter layers.0.up.weight`, `input x`."""
        if self.inputs is None:
            raise ValueError(
                f"describe({number}): the inputs of {self.kind} graph {self.id} are not known"
            )
        if not 0 <= number < len(self.inputs):
            raise ValueError(
                f"describe({number}): graph {self.id} has {len(self.inputs)} inputs, 0 to"
                f" {len(self.inputs) - 1}"
            )
        return str(self.inputs[number])

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __repr__(self) -> str:
        return f"<CompiledGraph {self.id}: {self.kind} of {self.function}>"

    def __str__(self) -> str:
        return views.graph_text(self)

    def _repr_html_(self) -> str:
        return views.graph_html(self)


class CompiledGraphs(Sequence[CompiledGraph], Tabular):
    """All compiled graphs, in the order of their ids. `graphs["0/0"]` is the forward (or inference)
    graph with that id."""

    def __init__(self, graphs: Sequence[CompiledGraph]) -> None:
        self._graphs = tuple(graphs)

    def __len__(self) -> int:
        return len(self._graphs)

    @overload
    def __getitem__(self, key: int | str) -> CompiledGraph: ...
    @overload
    def __getitem__(self, key: slice) -> CompiledGraphs: ...
    def __getitem__(self, key: int | str | slice) -> CompiledGraph | CompiledGraphs:
        if isinstance(key, slice):
            return CompiledGraphs(self._graphs[key])
        if not isinstance(key, str):
            return self._graphs[key]
        found = next((graph for graph in self._graphs if graph.id == key), None)
        if found is None:
            raise KeyError(f"no compiled graph {key!r}; there are {', '.join(self.ids) or 'none'}")
        return found

    def __contains__(self, key: object) -> bool:
        return key in (self.ids if isinstance(key, str) else self._graphs)

    @property
    def ids(self) -> list[str]:
        return list(dict.fromkeys(graph.id for graph in self._graphs))

    def as_rows(self) -> list[dict[str, Any]]:
        """The graphs, one a row; of the inputs how many."""
        return [
            graph.to_dict() | {"inputs": None if graph.inputs is None else len(graph.inputs)}
            for graph in self._graphs
        ]

    def to_dict(self) -> dict[str, Any]:
        return {"graphs": [graph.to_dict() for graph in self._graphs]}

    def __repr__(self) -> str:
        return f"<CompiledGraphs: {', '.join(self.ids) or 'none'}>"

    def __str__(self) -> str:
        return views.table_text(self._graphs)

    def _repr_html_(self) -> str:
        return views.table_html(self._graphs)
