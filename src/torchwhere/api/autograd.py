"""The autograd graph of a tensor and the lines that made it: `backward_graph`, `forward_line`, and
`forward_lines`, which records lines for both.

The module call of a node comes from the running watch. The names of parameters come from the given
model, the watch, or `torchwhere.names`. Lines come from `forward_lines` and from the tracebacks of
anomaly mode. Each line has a `source` and a `certainty` that say how torchwhere knows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import CodeType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.autograd.graph import GradientEdge, Node

from torchwhere.api import names as naming
from torchwhere.api.watch import current
from torchwhere.core.errors import TorchwhereError
from torchwhere.core.place import Certainty
from torchwhere.hooks import line_log, node_places, python_stack
from torchwhere.hooks.compiled_graphs import code_of_node
from torchwhere.hooks.decorate import Function, decorated
from torchwhere.hooks.node_places import node_that_raised
from torchwhere.model.backward_graph import BackwardGraph, Lines, NodeSources, Places, read
from torchwhere.model.graph_walk import is_leaf, walk
from torchwhere.model.module_names import NameTable
from torchwhere.model.module_walk import check_module
from torchwhere.model.module_walk import walk as walk_modules
from torchwhere.model.parameters import flat_names
from torchwhere.model.wrappers import wrapped

_Origin = torch.Tensor | GradientEdge | Node


def backward_graph(
    tensors: _Origin | Sequence[_Origin], *, model: nn.Module | None = None, freed: bool = False
) -> BackwardGraph:
    """Return every autograd node behind one or several tensors.

    A node has its operation, module and call, parameter, shapes and forward line. The modules and
    calls are known during a watch.

    Args:
        tensors: A tensor, an autograd node, a gradient edge, or a list of them.
        model: The model that names the parameters, and the modules of the nodes that use them (as
            `inferred`). During a watch it is not needed.
        freed: Return the graph even if backward has run over it and freed its saved tensors.

    Returns:
        The graph. It does not keep the nodes alive.

    Raises:
        TypeError: `tensors` or `model` has the wrong type.
        ValueError: There is no graph, or backward has freed its saved tensors.

    Example:
        loss = model(batch).sum()
        graph = torchwhere.backward_graph(loss, model=model)
        print(graph)
    """
    check_module(model, "backward_graph(model=)", or_none=True)
    roots = _roots(tensors)
    graph = read(walk(roots), roots, NodeSources(places=_places, names=_Namer(model), lines=_lines))
    if graph.freed and not freed:
        raise ValueError(
            "backward_graph(tensor): backward has run over this graph and freed the saved tensors"
            f" of {graph.freed:,} of its {len(graph):,} nodes. backward_graph(tensor, freed=True)"
            " returns the nodes and edges, which still exist. Otherwise call it before backward(),"
            " or keep the graph with backward(retain_graph=True)."
        )
    return graph


def _roots(tensors: Any) -> list[Any]:
    is_list = isinstance(tensors, (list, tuple)) and not isinstance(tensors, GradientEdge)
    origins = list(tensors) if is_list else [tensors]
    for origin in origins:
        if not isinstance(origin, _Origin):
            raise TypeError(
                "backward_graph(tensor): expected a tensor, an autograd node or a list of them,"
                f" got {type(origin).__name__}"
            )
    roots = [root for root in map(_node, origins) if root is not None]
    if not roots:
        raise ValueError(f"backward_graph(tensor): {_why_no_graph(origins)}")
    return roots


def _node(origin: _Origin) -> Any:
    if isinstance(origin, torch.Tensor):
        return origin.grad_fn
    return origin.node if isinstance(origin, GradientEdge) else origin


def _why_no_graph(origins: Sequence[Any]) -> str:
    if not origins:
        return "an empty list has no graph"
    if len(origins) > 1:
        return f"none of these {len(origins)} tensors has a graph"
    if origins[0].requires_grad:
        return (
            "this tensor is a leaf: no operation made it, so it has no graph. Give a tensor that"
            " was computed from it"
        )
    return (
        "this tensor has no graph: requires_grad is False. It was detached, made under no_grad() or"
        " inference_mode(), or no input of its operation requires a gradient"
    )


# -- names, places and lines of the nodes ----------------------------------------------------------


class _Namer:
    """Gives the names of a parameter: from the given model, the watch, or a model that
    `torchwhere.names` was called with."""

    def __init__(self, model: nn.Module | None) -> None:
        session = current()
        self._tables = [session.recorder.locator.names] if session is not None else []
        self._models = naming.names_of_live_models()
        self._flat: dict[int, list[str]] | None = None
        if model is not None:
            table = NameTable()
            table.add_root(model)
            self._tables.insert(0, table)

    def __call__(self, param: torch.Tensor) -> list[str]:
        for table in self._tables:
            if names := table.param_names(param):
                return names
        for model in self._models:
            if names := model.known_names(param):
                return names
        if self._flat is None:
            self._flat = {}
            for table in self._tables:
                self._flat |= flat_names(table)
        return self._flat.get(id(param), [])


def _places(sequence: NDArray[np.uint64]) -> Places:
    session = current()
    if session is None:
        return Places.unknown(len(sequence))
    return node_places.places(session.recorder.locator, sequence)


def _lines(nodes: Sequence[Any], sequence: NDArray[np.uint64]) -> Lines:
    """The lines of many nodes: recorded lines, and those of anomaly mode if it was on for some of
    the first or last nodes."""
    table: dict[str | None, int] = {None: 0}
    column = np.zeros(len(nodes), np.uint32)
    folder = _folder()
    # The log of the calling thread comes last and wins: most likely this thread made the nodes.
    for log in reversed(line_log.logs()):
        numbers = [
            0 if line is None else table.setdefault(line_log.shortened(line, folder), len(table))
            for line in log.table
        ]
        at = np.searchsorted(np.array(log.seqs, np.uint64), sequence, side="right")
        is_in_log = (at > 0) & (sequence < log.end)
        lines = np.array(numbers, np.uint32)[np.array(log.lines, np.uint32)[at[is_in_log] - 1]]
        column[is_in_log] = np.where(lines, lines, column[is_in_log])
    if _has_traceback(nodes):
        for number, node in enumerate(nodes):
            line = None if is_leaf(node) else _anomaly_line(node)
            if line is not None:
                column[number] = table.setdefault(str(line), len(table))
    return Lines(list(table), column)


def _has_traceback(nodes: Sequence[Any]) -> bool:
    """Whether anomaly mode left a traceback. Checks only a few nodes: reading the metadata of a
    node creates a dictionary, which takes 200 MB for a million nodes."""
    ends = [node for node in (*nodes[:32], *nodes[-32:]) if not is_leaf(node)]
    return any("traceback_" in node.metadata for node in ends)


def _folder() -> str | None:
    session = current()
    return session.recorder.locator.folder if session is not None else None


# -- lines -----------------------------------------------------------------------------------------


class ForwardLine(str):
    """A `file:line` that says how torchwhere knows it.

    Attributes:
        source: `recorded` (by `forward_lines`), `anomaly` (the traceback of `detect_anomaly`),
            `compiled` (the first line of the compiled function), `module` (the first line of the
            forward of your innermost module that made the node), or `traceback` (of the exception).
        certainty: `exact` or `inferred`.

    Example:
        line = torchwhere.forward_line(loss)
        print(line, line.source)
    """

    source: str
    certainty: Certainty

    @classmethod
    def of(
        cls, file: str, line: int, *, source: str, certainty: Certainty = Certainty.EXACT
    ) -> ForwardLine:
        """Make a line with its path relative to the folder of the watch."""
        text = cls(line_log.shortened(line_log.UserLine(file, line, ""), _folder()))
        text.source, text.certainty = source, certainty
        return text


def forward_line(origin: _Origin | BaseException) -> ForwardLine | None:
    """Return the line of the forward that made a tensor or an autograd node.

    Args:
        origin: A tensor, an autograd node or a gradient edge. Or an exception that backward raised:
            then the node that raised it counts. For any other exception, the innermost line of your
            code in its traceback.

    Returns:
        The line, and how torchwhere knows it. None for a leaf, which no forward made. None also if
        no line was recorded (`forward_lines()`), anomaly mode was off, the node is not a compiled
        graph, and none of your modules made it during a watch.

    Raises:
        TypeError: `origin` is something else.
        ValueError: The tensor has no graph.

    Example:
        try:
            loss.backward()
        except RuntimeError as error:
            print("made at", torchwhere.forward_line(error))
    """
    if isinstance(origin, BaseException):
        return _line_of_error(origin)
    if not isinstance(origin, _Origin):
        raise TypeError(
            "forward_line(...): expected a tensor, an autograd node or an exception, got"
            f" {type(origin).__name__}"
        )
    node = _node(origin)
    if node is None:
        raise ValueError(f"forward_line(tensor): {_why_no_graph([origin])}")
    return _line_of_node(node)


def _line_of_node(node: Any) -> ForwardLine | None:
    if is_leaf(node):
        return None
    return _recorded_line(node) or _anomaly_line(node) or _compiled_line(node) or _module_line(node)


def _recorded_line(node: Any) -> ForwardLine | None:
    written, is_certain = line_log.find(node._sequence_nr())
    if written is None:
        return None
    certainty = Certainty.EXACT if is_certain else Certainty.INFERRED
    return ForwardLine.of(written.file, written.line, source="recorded", certainty=certainty)


def _anomaly_line(node: Any) -> ForwardLine | None:
    line = python_stack.user_line_of(node.metadata.get("traceback_") or ())
    return ForwardLine.of(*line, source="anomaly") if line is not None else None


def _compiled_line(node: Any) -> ForwardLine | None:
    code = code_of_node(node)
    return _first_line(code, source="compiled") if code is not None else None


def _first_line(code: CodeType, *, source: str) -> ForwardLine:
    return ForwardLine.of(
        code.co_filename, code.co_firstlineno, source=source, certainty=Certainty.INFERRED
    )


def _module_line(node: Any) -> ForwardLine | None:
    """The first line of the forward of the innermost module whose code is the user's."""
    session = current()
    sequence = np.array([node._sequence_nr()], np.uint64)
    places = _places(sequence)
    module = places.modules[places.module[0]]
    if session is None or module is None:
        return None
    for name in _with_parents(module):
        forward = getattr(_module_named(session.recorder.locator.names, name), "forward", None)
        code = getattr(forward, "__code__", None)
        if code is not None and python_stack.is_users(code.co_filename):
            return _first_line(code, source="module")
    return None


def _with_parents(module: str) -> Iterable[str]:
    while module:
        yield module
        module = module.rpartition(".")[0]
    yield ""


def _module_named(names: NameTable, name: str) -> nn.Module | None:
    for prefix, root in names.roots():
        for module_name, module in walk_modules(root, prefix=prefix):
            if module_name == name and wrapped(module) is None:
                return module
    return None


def _line_of_error(error: BaseException) -> ForwardLine | None:
    """For an error of a backward, the line that made the node. For any other error, the innermost
    line of the user's code in its traceback."""
    node, is_certain = node_that_raised(error)
    if node is not None:
        line = _line_of_node(node)
        if line is not None and not is_certain:
            line.certainty = Certainty.INFERRED
        return line
    raised_at = python_stack.read_traceback(error.__traceback__)
    if raised_at.file is None:
        return None
    return ForwardLine.of(raised_at.file, raised_at.line, source="traceback")


class forward_lines:  # noqa: N801 - called like a function: `with forward_lines():`
    """Record which line makes which autograd node, on this thread: a context manager and a
    decorator.

    `backward_graph` and `forward_line` then know exact lines, also after the block. It costs up to
    a microsecond for each line of your own code that runs, and nothing for an op. It does not
    change compiled code.

    Raises:
        TorchwhereError: A debugger or a coverage tool already traces this thread.

    Example:
        with torchwhere.forward_lines():
            loss = model(batch).sum()
        print(torchwhere.forward_line(loss))
    """

    def __enter__(self) -> Self:
        if not line_log.begin(python_stack.caller(0)):
            raise TorchwhereError(
                "forward_lines(): a debugger or a coverage tool already traces this thread, and"
                " Python allows only one trace function. Switch it off, or use"
                " torch.autograd.detect_anomaly(): forward_line() also reads its tracebacks."
            )
        return self

    def __exit__(self, *_error: object) -> None:
        line_log.end()

    def __call__(self, function: Function) -> Function:
        return decorated(self, function)
