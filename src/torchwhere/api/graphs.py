"""Which compiled graphs are there: `torchwhere.graphs()`.

Asks dynamo's caches and metrics, and the running watch for what dynamo has forgotten since.
Compiles nothing, changes nothing, and does not load dynamo: where nothing was compiled, the table
is empty.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchwhere.api.watch import current
from torchwhere.hooks import _torch, python_stack
from torchwhere.hooks.compiled_graphs import (
    Compilation,
    Ledger,
    LiveGraph,
    live_graphs,
    model_name,
    order_of,
)
from torchwhere.hooks.python_stack import current_folder
from torchwhere.model.bytecode import graph_inputs
from torchwhere.model.compiled_graphs import CompiledGraph, CompiledGraphs, inputs_of

FORWARD, BACKWARD, INFERENCE = "forward", "backward", "inference"


@_torch.unseen
def graphs() -> CompiledGraphs:
    """All graphs that dynamo compiled in this process: id, function, kind, backend, inputs by name,
    and why again.

    Those it has dropped since (a reset, a model that is gone) are known under a watch, or while
    they are among its last 64.
    """
    session = current()
    ledger = session.compilations if session is not None else Ledger()
    ledger.collect()
    compilations, live = ledger.latest(), {graph.id: graph for graph in live_graphs()}
    found = [row for graph in live.values() for row in _rows(graph, compilations)]
    found += [
        _dropped(one, compilations[one.id, False])
        for one in compilations.values()
        if _had_a_graph(one, compilations) and one.id not in live
    ]
    return CompiledGraphs(sorted(found, key=lambda row: (order_of(row.id), row.kind == BACKWARD)))


def _rows(
    graph: LiveGraph, compilations: dict[tuple[str, bool], Compilation]
) -> Iterator[CompiledGraph]:
    """The forward of a graph, or its inference, and its backward if that was compiled."""
    how = compilations.get((graph.id, False))
    forward = CompiledGraph(
        id=graph.id,
        kind=INFERENCE if graph.is_aot and not graph.parts else FORWARD,
        function=graph.code.co_qualname,
        line=_line(graph.code.co_filename, graph.code.co_firstlineno),
        model=how.model if how is not None else model_name(),
        backend=graph.backend,
        ops=how.ops if how is not None else None,
        inputs=inputs_of(graph_inputs(graph.compiled)),
        recompiled=_times(graph.id),
        reason=how.reason if how is not None else None,
        seconds=how.seconds if how is not None else None,
        is_live=True,
    )
    yield forward
    if any(part.compiled_bw is not None for part in graph.parts):
        yield _backward(forward, graph, compilations.get((graph.id, True)))


def _backward(forward: CompiledGraph, graph: LiveGraph, how: Compilation | None) -> CompiledGraph:
    modules = [
        getattr(getattr(part, "_lazy_backward_info", None), "bw_module", None)
        for part in graph.parts
    ]
    counts = [
        sum(node.op.startswith("call") for node in module.graph.nodes)
        for module in modules
        if module is not None
    ]
    return CompiledGraph(
        id=forward.id,
        kind=BACKWARD,
        function=forward.function,
        line=forward.line,
        model=forward.model,
        backend=forward.backend,
        ops=sum(counts) if counts and len(counts) == len(modules) else None,
        inputs=None,
        recompiled=forward.recompiled,
        reason=None,
        seconds=how.seconds if how is not None else None,
        is_live=True,
    )


def _had_a_graph(one: Compilation, compilations: dict[tuple[str, bool], Compilation]) -> bool:
    forward = compilations.get((one.id, False))
    return one.failed is None and forward is not None and bool(forward.ops)


def _dropped(one: Compilation, forward: Compilation) -> CompiledGraph:
    return CompiledGraph(
        id=one.id,
        kind=BACKWARD if one.is_backward else FORWARD,
        function=forward.function or "",
        line=_line(forward.file, forward.line) if forward.file is not None else None,
        model=forward.model,
        backend=None,
        ops=one.ops,
        inputs=None,
        recompiled=_times(one.id),
        reason=one.reason,
        seconds=one.seconds,
        is_live=False,
    )


def _times(compile_id: str) -> int:
    """How often the function had been compiled before: dynamo counts the variants of a frame."""
    variant = compile_id.rpartition("/")[2].partition("_")[0]
    return int(variant) if variant.isdigit() else 0


def _line(file: str, line: int | None) -> str:
    session = current()
    folder = session.recorder.locator.folder if session is not None else current_folder()
    return python_stack.shortened(file, line or 0, folder=folder)
