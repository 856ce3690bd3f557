"""The compiled graphs of a process, as data: the function of each graph, its inputs by parameter
name, and why it was compiled again.

The data are texts and numbers, and keep no object of dynamo alive. `render/graphs.py` prints them.
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
    """One input of a graph. A parameter or buffer has its name in the compiled module; any other
    input is an expression, for example `x` or `batch['ids']`."""

    number: int
    kind: str  # parameter, buffer, input
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def inputs_of(expressions: Sequence[Expression] | None) -> tuple[GraphInput, ...] | None:
    """The inputs of a graph, from the expressions that dynamo's code passes to it."""
    if expressions is None:
        return None
    named = [expression.module_tensor or (INPUT, str(expression)) for expression in expressions]
    return tuple(GraphInput(number, kind, name) for number, (kind, name) in enumerate(named))


@dataclass(frozen=True, slots=True, repr=False)
class CompiledGraph:
    """One compiled graph. A function that is trained has two graphs for each variant: a forward and
    a backward graph."""

    id: str  # from dynamo: frame and variant, `0/0`
    kind: str  # forward, backward, inference
    function: str
    line: str | None  # where the function begins
    model: str  # the name that AOTAutograd has for the model
    backend: str | None
    ops: int | None
    inputs: tuple[GraphInput, ...] | None  # None: unknown, for example for a backward
    recompiled: int  # how often the function had been compiled before
    reason: str | None  # why it was compiled again
    seconds: float | None  # to compile it
    is_live: bool  # whether it can still run; False if dynamo has dropped it

    def describe(self, number: int) -> str:
        """Input `number` as text: `parameter layers.0.up.weight`, `input x`."""
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
        match = next((graph for graph in self._graphs if graph.id == key), None)
        if match is None:
            raise KeyError(f"no compiled graph {key!r}; there are {', '.join(self.ids) or 'none'}")
        return match

    def __contains__(self, key: object) -> bool:
        return key in (self.ids if isinstance(key, str) else self._graphs)

    @property
    def ids(self) -> list[str]:
        return list(dict.fromkeys(graph.id for graph in self._graphs))

    def as_rows(self) -> list[dict[str, Any]]:
        """One dict for each graph. `inputs` is the number of inputs."""
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
