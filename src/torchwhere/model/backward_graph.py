"""The autograd graph behind tensors, as data: a `BackwardGraph` has flat arrays with one row for
each node.

`read` takes a `Trail` and the sources of names, places and lines. Its result refers to no object of
torch: it has numbers, and each text once. A node takes about 40 bytes. Shapes are the shapes of the
outputs of the operation in forward. `render/graph.py` prints the graph as text and DOT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from numpy.typing import NDArray

from torchwhere.core.grouping import Interner
from torchwhere.core.place import Certainty
from torchwhere.core.results import Tabular
from torchwhere.model.graph_walk import (
    ACCUMULATE_GRAD_SEQ,
    Numbers,
    Trail,
    is_freed,
    is_leaf,
    sources,
)
from torchwhere.model.module_names import owner
from torchwhere.render import graph as views

CERTAINTIES = (Certainty.UNKNOWN, Certainty.INFERRED, Certainty.EXACT)
Shape = tuple[int | str, ...]  # a symbolic size is a text


class Places(NamedTuple):
    """Where nodes were made. For each node: an index into `modules` (0: the module is unknown), the
    call of that module, and the certainty of both."""

    modules: list[str | None]
    module: Numbers
    call: NDArray[np.int64]  # -1: unknown
    certainty: NDArray[np.uint8]  # index into CERTAINTIES

    @classmethod
    def unknown(cls, count: int) -> Places:
        return cls([None], _numbers(count), np.full(count, -1, np.int64), np.zeros(count, np.uint8))


class Lines(NamedTuple):
    """Which line of the forward made each node: an index into `lines`, 0 if the line is unknown."""

    lines: list[str | None]
    line: Numbers

    @classmethod
    def unknown(cls, count: int) -> Lines:
        return cls([None], _numbers(count))


@dataclass(frozen=True, slots=True)
class NodeSources:
    """Functions that know more about the nodes of a graph. `places` and `lines` are called once,
    for all nodes; `names` once for each leaf."""

    places: Callable[[NDArray[np.uint64]], Places]  # from sequence numbers
    names: Callable[[torch.Tensor], Sequence[str]]  # all names of a parameter
    lines: Callable[[Sequence[Any], NDArray[np.uint64]], Lines]  # from nodes and sequence numbers


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One node. `following` has the numbers of the nodes that its gradients go to, and `names` all
    names of the parameter, if the node is the leaf of one."""

    number: int
    op: str
    module: str | None
    call: int | None
    certainty: Certainty
    shapes: tuple[Shape, ...]
    dtype: str | None
    line: str | None
    names: tuple[str, ...]
    is_leaf: bool
    following: tuple[int, ...]
    sequence_nr: int | None

    @property
    def param(self) -> str | None:
        """The first name of the parameter whose gradient this node accumulates."""
        return self.names[0] if self.names else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"certainty": str(self.certainty), "param": self.param}

    def __str__(self) -> str:
        return views.node_text(self)


class Nodes(Sequence[GraphNode]):
    """The nodes of a graph. A `GraphNode` is created on access."""

    def __init__(self, graph: BackwardGraph, numbers: Sequence[int]) -> None:
        self._graph = graph
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, at: int) -> GraphNode: ...
    @overload
    def __getitem__(self, at: slice) -> Nodes: ...
    def __getitem__(self, at: int | slice) -> GraphNode | Nodes:
        if isinstance(at, slice):
            return Nodes(self._graph, self._numbers[at])
        return self._graph._node(int(self._numbers[at]))

    def __repr__(self) -> str:
        return f"<{len(self)} nodes>"


@dataclass(frozen=True, slots=True, eq=False)
class BackwardGraph(Tabular):
    """Every autograd node behind some tensors, once. Node 0 made the first tensor, and a node comes
    before the nodes that its gradients go to.

    Columns have one number for each node: an index into the tables `ops`, `outputs` and `lines`.
    """

    roots: tuple[int, ...]
    starts: Numbers  # node i leads to targets[starts[i]:starts[i + 1]]
    targets: Numbers
    ops: list[str]
    op: Numbers
    sequence: NDArray[np.uint64]
    outputs: list[tuple[tuple[Shape, ...], str | None]]  # shapes and dtype
    output: Numbers
    places: Places
    lines: list[str | None]
    line: Numbers
    # by the number of a leaf: the names of its parameter, () if it has no known name
    leaves_named: dict[int, tuple[str, ...]]
    freed: int  # nodes whose saved tensors are freed: backward has run

    def __len__(self) -> int:
        return len(self.op)

    def __iter__(self) -> Iterator[GraphNode]:
        return map(self._node, range(len(self)))

    def __getitem__(self, number: int) -> GraphNode:
        return self.nodes[number]

    @property
    def nodes(self) -> Nodes:
        return Nodes(self, range(len(self)))

    @property
    def leaves(self) -> Nodes:
        """The leaves: parameters, and inputs that require a gradient."""
        return Nodes(self, list(self.leaves_named))

    @property
    def parameters(self) -> list[str]:
        """The first name of each parameter behind the tensors."""
        return [names[0] for names in self.leaves_named.values() if names]

    @property
    def edges(self) -> NDArray[np.uint32]:
        """One row for each edge: the number of a node, and of a node that its gradients go to."""
        return np.stack([sources(self.starts), self.targets], axis=1)

    def _node(self, number: int) -> GraphNode:
        places, sequence = self.places, int(self.sequence[number])
        call = int(places.call[number])
        shapes, dtype = self.outputs[self.output[number]]
        return GraphNode(
            number=number,
            op=self.ops[self.op[number]],
            module=places.modules[places.module[number]],
            call=None if call < 0 else call,
            certainty=CERTAINTIES[places.certainty[number]],
            shapes=shapes,
            dtype=dtype,
            line=self.lines[self.line[number]],
            names=self.leaves_named.get(number, ()),
            is_leaf=number in self.leaves_named,
            following=tuple(map(int, self.targets[self.starts[number] : self.starts[number + 1]])),
            sequence_nr=None if sequence == ACCUMULATE_GRAD_SEQ else sequence,
        )

    def __repr__(self) -> str:
        return f"<BackwardGraph: {views.summary(self)}>"

    def __str__(self) -> str:
        return self.text()

    def text(self, *, lines: int | None = 500) -> str:
        """One line for each node, from the tensors to the leaves. Repeated parts are folded, and
        the text has at most `lines` lines."""
        return views.text(self, lines=lines)

    def dot(self) -> str:
        """The whole graph in the DOT language of Graphviz: `dot -Tsvg`."""
        return views.dot(self)

    def as_rows(self) -> list[dict[str, Any]]:
        """One dict for each node."""
        return [node.to_dict() for node in self]

    def to_dict(self) -> dict[str, Any]:
        """The whole graph as a dict that JSON can store."""
        return {
            "roots": list(self.roots),
            "nodes": self.as_rows(),
            "edges": self.edges.tolist(),
            "parameters": self.parameters,
            "freed": self.freed,
        }

    def _repr_html_(self) -> str:
        return views.html(self)


# -- from the live nodes ---------------------------------------------------------------------------


def read(trail: Trail, roots: Sequence[Any], about: NodeSources) -> BackwardGraph:
    """Read all nodes of a trail into a graph that refers to no object of torch."""
    nodes, count = trail.nodes, len(trail.nodes)
    ops, outputs = Interner[str]([""]), Interner[Any]([((), None)])
    sequence = np.fromiter((node._sequence_nr() for node in nodes), np.uint64, count)
    leaves = {
        number: tuple(about.names(node.variable))
        for number, node in enumerate(nodes)
        if is_leaf(node)
    }
    root_set, lines = set(roots), about.lines(nodes, sequence)
    return BackwardGraph(
        roots=tuple(number for number, node in enumerate(nodes) if node in root_set),
        starts=trail.starts,
        targets=trail.targets,
        op=_column((ops.id_of(_op(node)) for node in nodes), count),
        output=_column((outputs.id_of(_output(node)) for node in nodes), count),
        ops=list(ops),
        outputs=[(shapes, _dtype(dtype)) for shapes, dtype in outputs],
        lines=lines.lines,
        line=lines.line,
        sequence=sequence,
        places=_with_owners(about.places(sequence), trail, leaves),
        leaves_named=leaves,
        freed=sum(map(is_freed, nodes)),
    )


def _column(values: Iterator[int], count: int) -> Numbers:
    return np.fromiter(values, np.uint32, count)


def _numbers(count: int) -> Numbers:
    return np.zeros(count, np.uint32)


def _op(node: Any) -> str:
    name = type(node).__name__
    return str(node.name()) if name in ("CppFunction", "Node") else name


def _output(node: Any) -> Any:
    """Shapes and dtype of the outputs of a node in forward. Its inputs in backward, the gradients
    of these outputs, have the same."""
    try:
        gradients = node._input_metadata
        if len(gradients) == 1:  # most nodes
            return (_shape(gradients[0].shape),), gradients[0].dtype
        dtype = gradients[0].dtype if gradients else None
        return tuple(_shape(gradient.shape) for gradient in gradients), dtype
    except (AttributeError, RuntimeError):
        return (), None


def _shape(sizes: Any) -> Shape:
    """The sizes as numbers, and symbolic sizes as text: a symbolic size would keep its whole shape
    environment alive."""
    for size in sizes:
        if type(size) is not int:
            return tuple(size if type(size) is int else str(size) for size in sizes)
    return tuple(sizes)


def _dtype(dtype: Any) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _with_owners(places: Places, trail: Trail, leaves: dict[int, tuple[str, ...]]) -> Places:
    """Find the modules of the leaves from the names of their parameters, and the module of a node
    that no watch recorded from the parameters that it uses."""
    modules = Interner(places.modules)
    owned = {leaf: modules.id_of(owner(names[0])) for leaf, names in leaves.items() if names}
    exact, inferred = CERTAINTIES.index(Certainty.EXACT), CERTAINTIES.index(Certainty.INFERRED)
    for leaf, module in owned.items():
        places.module[leaf], places.certainty[leaf] = module, exact
    if not owned:
        return places
    users = sources(trail.starts)
    is_unknown_user = np.isin(trail.targets, list(owned)) & (places.certainty[users] == 0)
    for edge in np.flatnonzero(is_unknown_user):
        source = users[edge]
        places.module[source], places.certainty[source] = owned[int(trail.targets[edge])], inferred
    return places._replace(modules=list(modules))
