"""Lists the compiled graphs of this process: `torchwhere.graphs()`.

Reads the caches and metrics of dynamo, and the records of the running watch for graphs that dynamo
has dropped since. It compiles nothing, changes nothing and does not import dynamo: if nothing was
compiled, the table is empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

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
    """Return all graphs that dynamo compiled in this process.

    Graphs that dynamo has dropped since (after a reset, or with a deleted model) are listed during
    a watch, or if they are among the last 64 compilations.

    Returns:
        A table with the id, function, kind, backend and inputs of each graph, and the reason for a
        recompilation.

    Example:
        compiled = torch.compile(model)
        compiled(batch)
        print(torchwhere.graphs())
    """
    session = current()
    ledger = session.compilations if session is not None else Ledger()
    ledger.collect()
    compilations, live = ledger.latest(), {graph.id: graph for graph in live_graphs()}
    rows = [row for graph in live.values() for row in _rows(graph, compilations)]
    rows += [
        _dropped(compilation, compilations[compilation.id, False])
        for compilation in compilations.values()
        if _made_graph(compilation, compilations) and compilation.id not in live
    ]
    return CompiledGraphs(sorted(rows, key=lambda row: (order_of(row.id), row.kind == BACKWARD)))


def _rows(
    graph: LiveGraph, compilations: dict[tuple[str, bool], Compilation]
) -> Iterator[CompiledGraph]:
    """The forward or inference of a graph, and its backward if that was compiled."""
    compilation = compilations.get((graph.id, False))
    forward = CompiledGraph(
        id=graph.id,
        kind=INFERENCE if graph.is_aot and not graph.parts else FORWARD,
        function=graph.code.co_qualname,
        line=_line(graph.code.co_filename, graph.code.co_firstlineno),
        model=compilation.model if compilation is not None else model_name(),
        backend=graph.backend,
        ops=compilation.ops if compilation is not None else None,
        inputs=inputs_of(graph_inputs(graph.compiled)),
        recompiled=_recompilations(graph.id),
        reason=compilation.reason if compilation is not None else None,
        seconds=compilation.seconds if compilation is not None else None,
        is_live=True,
    )
    yield forward
    if any(part.compiled_bw is not None for part in graph.parts):
        yield _backward(forward, graph, compilations.get((graph.id, True)))


def _backward(
    forward: CompiledGraph, graph: LiveGraph, compilation: Compilation | None
) -> CompiledGraph:
    modules = [
        getattr(getattr(part, "_lazy_backward_info", None), "bw_module", None)
        for part in graph.parts
    ]
    counts = [
        sum(node.op.startswith("call") for node in module.graph.nodes)
        for module in modules
        if module is not None
    ]
    return replace(
        forward,
        kind=BACKWARD,
        ops=sum(counts) if counts and len(counts) == len(modules) else None,
        inputs=None,
        reason=None,
        seconds=compilation.seconds if compilation is not None else None,
    )


def _made_graph(
    compilation: Compilation, compilations: dict[tuple[str, bool], Compilation]
) -> bool:
    forward = compilations.get((compilation.id, False))
    return compilation.failed is None and forward is not None and bool(forward.ops)


def _dropped(compilation: Compilation, forward: Compilation) -> CompiledGraph:
    return CompiledGraph(
        id=compilation.id,
        kind=BACKWARD if compilation.is_backward else FORWARD,
        function=forward.function or "",
        line=_line(forward.file, forward.line) if forward.file is not None else None,
        model=forward.model,
        backend=None,
        ops=compilation.ops,
        inputs=None,
        recompiled=_recompilations(compilation.id),
        reason=compilation.reason,
        seconds=compilation.seconds,
        is_live=False,
    )


def _recompilations(compile_id: str) -> int:
    """The number of earlier compilations of the function: dynamo numbers the variants of a
    frame."""
    variant = compile_id.rpartition("/")[2].partition("_")[0]
    return int(variant) if variant.isdigit() else 0


def _line(file: str, line: int | None) -> str:
    session = current()
    folder = session.recorder.locator.folder if session is not None else current_folder()
    return python_stack.shortened(file, line or 0, folder=folder)
