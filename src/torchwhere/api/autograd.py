"""What is behind a tensor: `backward_graph`, `forward_line`, and `forward_lines`, which records
lines for both.

They ask whoever knows: the running watch for the module call that made a node, the models whose
names are known for parameters, recorded lines and anomaly mode's tracebacks for lines. Nothing is
guessed silently: a line says how it is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from torchwhere.hooks.failing_node import node_that_raised
from torchwhere.model.backward_graph import BackwardGraph, Lines, NodeSources, Places, read
from torchwhere.model.graph_walk import is_leaf, walk
from torchwhere.model.module_names import NameTable
from torchwhere.model.module_walk import walk as walk_modules
from torchwhere.model.unsharded import unsharded_names
from torchwhere.model.wrappers import wrapped

_Origin = torch.Tensor | GradientEdge | Node


def backward_graph(
    tensors: _Origin | Sequence[_Origin], *, model: nn.Module | None = None, freed: bool = False
) -> BackwardGraph:
    """Every autograd node behind a tensor, or several: with operation, module and call, parameter,
    shapes and forward line.

    Under a watch nodes know the module call that made them, and parameters their names. Without
    one, `model` gives the names. `freed=True` gives the graph also after backward has run over it
    and freed what it had saved.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            "backward_graph(model=): expected a torch.nn.Module or None, got"
            f" {type(model).__name__}"
        )
    roots = _roots(tensors)
    graph = read(walk(roots), roots, NodeSources(places=_places, names=_Namer(model), lines=_lines))
    if graph.freed and not freed:
        raise ValueError(
            "backward_graph(tensor): backward has run over this graph and freed what"
            f" {graph.freed:,} of its {len(graph):,} nodes had saved. Nodes and edges are still"
            " there: backward_graph(tensor, freed=True) gives them. Ask before backward(), or keep"
            " the graph with backward(retain_graph=True)."
        )
    return graph


def _roots(tensors: Any) -> list[Any]:
    listed = (
        list(tensors)
        if isinstance(tensors, (list, tuple)) and not isinstance(tensors, GradientEdge)
        else [tensors]
    )
    for thing in listed:
        if not isinstance(thing, (torch.Tensor, GradientEdge, Node)):
            raise TypeError(
                "backward_graph(tensor): expected a tensor, an autograd node or a list of them,"
                f" got {type(thing).__name__}"
            )
    found = [root for thing in listed if (root := _node(thing)) is not None]
    if not found:
        raise ValueError(f"backward_graph(tensor): {_why_none(listed)}")
    return found


def _node(thing: _Origin) -> Any:
    if isinstance(thing, torch.Tensor):
        return thing.grad_fn
    return thing.node if isinstance(thing, GradientEdge) else thing


def _why_none(listed: Sequence[Any]) -> str:
    if not listed:
        return "an empty list has no graph"
    if len(listed) > 1:
        return f"none of these {len(listed)} tensors has a graph"
    if listed[0].requires_grad:
        return (
            "this tensor is a leaf: no operation made it, there is nothing behind it. Ask for what"
            " was computed from it"
        )
    return (
        "this tensor has no graph: requires_grad is False. It was detached, made under no_grad() or"
        " inference_mode(), or from nothing that requires a gradient"
    )


# -- who knows -------------------------------------------------------------------------------------


class _Namer:
    """The names of a parameter, from the model that was given, the watch, or a model whose names
    were asked for."""

    def __init__(self, model: nn.Module | None) -> None:
        session = current()
        self._tables = [session.recorder.locator.names] if session is not None else []
        self._others = naming.known()
        self._unsharded: dict[int, list[str]] | None = None
        if model is not None:
            given = NameTable()
            given.add_root(model)
            self._tables.insert(0, given)

    def __call__(self, param: torch.Tensor) -> list[str]:
        found = (table.param_names(param) for table in self._tables)
        others = (names.known_names(param) for names in self._others)
        return next(
            (names for source in (found, others) for names in source if names), None
        ) or self._name_unsharded(param)

    def _name_unsharded(self, param: torch.Tensor) -> list[str]:
        """FSDP2 computes with whole parameters that it makes for the time of a forward: named as
        those they are made from."""
        if self._unsharded is None:
            self._unsharded = dict(
                entry for table in self._tables for entry in unsharded_names(table)
            )
        return self._unsharded.get(id(param), [])


def _places(sequence: NDArray[np.uint64]) -> Places:
    session = current()
    if session is None:
        return Places.unknown(len(sequence))
    return node_places.places(session.recorder.locator, sequence)


def _lines(nodes: Sequence[Any], sequence: NDArray[np.uint64]) -> Lines:
    """The lines of many nodes: those that were recorded, and anomaly mode's if it was on for the
    first or the last of them."""
    table: dict[str | None, int] = {None: 0}
    column = np.zeros(len(nodes), np.uint32)
    folder = _folder()
    for log in reversed(line_log.logs()):  # the calling thread's last: it is the likelier
        numbers = [
            0 if line is None else table.setdefault(line_log.shortened(line, folder), len(table))
            for line in log.table
        ]
        at = np.searchsorted(np.array(log.seqs, np.uint64), sequence, side="right")
        has = (at > 0) & (sequence < log.end)
        found = np.array(numbers, np.uint32)[np.array(log.lines, np.uint32)[at[has] - 1]]
        column[has] = np.where(found, found, column[has])
    made = (
        [number for number, node in enumerate(nodes) if not is_leaf(node)]
        if _has_traceback(nodes)
        else ()
    )
    for number in made:
        line = _anomaly_line(nodes[number])
        if line is not None:
            column[number] = table.setdefault(str(line), len(table))
    return Lines(list(table), column)


def _has_traceback(nodes: Sequence[Any]) -> bool:
    """Looked for on a few: asking a node for its metadata makes it a dictionary, for a million
    nodes 200 MB."""
    ends = [node for node in (*nodes[:32], *nodes[-32:]) if not is_leaf(node)]
    return any("traceback_" in node.metadata for node in ends)


def _folder() -> str | None:
    session = current()
    return session.recorder.locator.folder if session is not None else None


# -- lines -----------------------------------------------------------------------------------------


class ForwardLine(str):
    """`file:line`, and how it is known.

    `source` is `recorded` (forward_lines), `anomaly` (detect_anomaly's traceback), `compiled`
    (where the function begins that was compiled), `module` (where the forward begins of the
    innermost module of yours that made the node), or `traceback`.
    """

    source: str
    certainty: Certainty

    @classmethod
    def of(
        cls, file: str, line: int, *, source: str, certainty: Certainty = Certainty.EXACT
    ) -> ForwardLine:
        found = cls(line_log.shortened(line_log.UserLine(file, line, ""), _folder()))
        found.source, found.certainty = source, certainty
        return found


def forward_line(origin: _Origin | BaseException) -> ForwardLine | None:
    """The line of the forward that made a tensor or an autograd node; of an exception from
    backward: the node that raised.

    None for a leaf, which no forward made, and where nobody knows: no lines were recorded
    (`forward_lines()`), anomaly mode was off, it is not a compiled graph, and no module of yours
    made it under a watch.
    """
    if isinstance(origin, BaseException):
        return _line_of_error(origin)
    if not isinstance(origin, (torch.Tensor, GradientEdge, Node)):
        raise TypeError(
            "forward_line(...): expected a tensor, an autograd node or an exception, got"
            f" {type(origin).__name__}"
        )
    node = _node(origin)
    if node is None:
        raise ValueError(f"forward_line(tensor): {_why_none([origin])}")
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
    found = python_stack.user_line_of(node.metadata.get("traceback_") or ())
    return ForwardLine.of(*found, source="anomaly") if found is not None else None


def _compiled_line(node: Any) -> ForwardLine | None:
    code = code_of_node(node)
    if code is None:
        return None
    return ForwardLine.of(
        code.co_filename, code.co_firstlineno, source="compiled", certainty=Certainty.INFERRED
    )


def _module_line(node: Any) -> ForwardLine | None:
    """Where the forward begins of the innermost module that is the user's own."""
    session = current()
    sequence = np.array([node._sequence_nr()], np.uint64)
    places = _places(sequence)
    module = places.modules[places.module[0]]
    if session is None or module is None:
        return None
    for name in _and_those_around(module):
        code = getattr(
            getattr(_module_named(session.recorder.locator.names, name), "forward", None),
            "__code__",
            None,
        )
        if code is not None and python_stack.is_users(code.co_filename):
            return ForwardLine.of(
                code.co_filename, code.co_firstlineno, source="module", certainty=Certainty.INFERRED
            )
    return None


def _and_those_around(module: str) -> Iterable[str]:
    while module:
        yield module
        module = module.rpartition(".")[0]
    yield ""


def _module_named(names: NameTable, name: str) -> nn.Module | None:
    every = (found for prefix, root in names.roots() for found in walk_modules(root, prefix=prefix))
    return next(
        (module for known, module in every if known == name and wrapped(module) is None), None
    )


def _line_of_error(error: BaseException) -> ForwardLine | None:
    """An error of a backward: the line that made the node. Any other: the innermost line of the
    user's it went through."""
    node, is_certain = node_that_raised(error)
    if node is not None:
        line = _line_of_node(node)
        if line is not None and not is_certain:
            line.certainty = Certainty.INFERRED
        return line
    found = python_stack.deepest_user_line(error.__traceback__)
    return ForwardLine.of(*found, source="traceback") if found is not None else None


class forward_lines:  # noqa: N801 - read as what it gives: `with forward_lines():`
    """Remember which line makes which autograd node, on this thread: a context manager and a
    decorator.

    `backward_graph` and `forward_line` know exact lines then, also later. Costs up to a microsecond
    for each line of your own code that runs, nothing for an op; compiled code is left alone.
    """

    def __enter__(self) -> Self:
        if not line_log.begin(python_stack.caller(0)):
            raise TorchwhereError(
                "forward_lines(): something else traces this thread already (a debugger, a coverage"
                " tool), and Python has room for one. Switch it off, or use"
                " torch.autograd.detect_anomaly(): forward_line() reads its tracebacks too."
            )
        return self

    def __exit__(self, *_error: object) -> None:
        line_log.end()

    def __call__(self, function: Function) -> Function:
        return decorated(self, function)
