"""Reads what dynamo has compiled in this process. It changes nothing and imports nothing.

Live graphs come from dynamo's caches, one entry for each variant of a function. Dynamo's metrics
have the facts about a compilation (number of ops, reason for a recompile). Dynamo keeps the last
64; a watch collects them before they are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torchwhere.hooks import _torch
from torchwhere.model.bytecode import graph_name
from torchwhere.model.wrappers import enclosed

_MOST_LOOKED_AT = 500  # objects around a compiled function
_UNKNOWN = "?"


@dataclass(frozen=True, slots=True)
class LiveGraph:
    """A graph that can run: an entry of dynamo's cache."""

    id: str
    code: CodeType  # of the original function
    compiled: CodeType  # the code that dynamo made of it
    backend: str
    is_aot: bool  # compiled through AOTAutograd
    parts: tuple[Any, ...]  # the autograd functions that AOTAutograd made; empty for inference


def live_graphs() -> list[LiveGraph]:
    """All graphs in dynamo's caches, in the order of their compilation."""
    originals, entries = _torch.private("original_code"), _torch.private("cache_entries")
    if originals is None or entries is None:
        return []
    # `values` is a dictionary of this object, not a method
    codes = {id(code): code for code in list(getattr(originals, "values", {}).values())}
    graphs = [
        _live(code, entry)
        for code in codes.values()
        for entry in entries(code)
        if graph_name(entry.code)
    ]
    return sorted(graphs, key=lambda graph: order_of(graph.id))


def _live(code: CodeType, entry: Any) -> LiveGraph:
    scope = getattr(entry.guard_manager, "global_scope", None) or {}
    function = scope.get("G", scope).get(graph_name(entry.code))
    around = list(_around(function))
    return LiveGraph(
        id=str(getattr(entry, "compile_id", _UNKNOWN)),
        code=code,
        compiled=entry.code,
        backend=_backend(getattr(entry, "backend", None)),
        is_aot=any(getattr(thing, "__module__", "") == _torch.AOT_RUNTIME for thing in around),
        parts=tuple({id(thing): thing for thing in around if hasattr(thing, "_aot_id")}.values()),
    )


def _backend(backend: Any) -> str:
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", None)
    return str(name) if name else type(backend).__name__


def _around(function: Any) -> Iterator[Any]:
    """A function and all callables that it refers to, directly or indirectly: the runtime wrappers
    of a graph."""
    pending, visited = [function], set[int]()
    while pending and len(visited) < _MOST_LOOKED_AT:
        thing = pending.pop()
        if thing is None or id(thing) in visited:
            continue
        visited.add(id(thing))
        yield thing
        held = list(enclosed(thing))
        held += [
            getattr(thing, name, None)
            for name in ("__wrapped__", "__self__", "compiled_fn", "_boxed_call")
        ]
        pending += [value for value in held if callable(value)]


def order_of(compile_id: str) -> tuple[int, ...]:
    """Sort key: `2/10` comes after `2/9`; ids of compiled autograd (`!1/2/3`) come last."""
    numbers = [
        int(part) if part.isdigit() else 1 << 30 for part in compile_id.replace("!", "").split("/")
    ]
    return (compile_id.startswith("!"), *numbers)


def backward_graph(node: Any) -> str | None:
    """The id of the graph whose compiled backward an autograd node runs; None for other nodes."""
    compiled = getattr(node, "_forward_cls", None)
    if compiled is None or not hasattr(compiled, "_aot_id"):
        return None
    context = getattr(getattr(compiled, "_lazy_backward_info", None), "saved_compile_context", None)
    compile_id = getattr(getattr(compiled, "metadata", None), "compile_id_str", None) or getattr(
        context, "compile_id", None
    )
    return str(compile_id) if compile_id is not None else f"aot {compiled._aot_id}"


def code_of_node(node: Any) -> CodeType | None:
    """The code of the function whose compiled backward an autograd node runs."""
    wanted = backward_graph(node) if _torch.is_dynamo_loaded() else None
    part = getattr(node, "_forward_cls", None)
    if wanted is None:
        return None
    return next((graph.code for graph in live_graphs() if part in graph.parts), None)


def model_name() -> str:
    """AOTAutograd's name of the model: set by `set_model_name`, `model` otherwise."""
    return str(getattr(_torch.private("aot_naming"), "model_name", "model"))


# -- how it was compiled ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compilation:
    """One compilation, from dynamo's metrics."""

    id: str
    is_backward: bool
    ops: int | None
    reason: str | None  # of a recompile
    seconds: float | None
    failed: str | None
    function: str | None
    file: str | None
    line: int | None
    model: str  # AOTAutograd's name of the model at that time


class Ledger:
    """All compilations that were read before dynamo dropped them."""

    def __init__(self) -> None:
        self._compilations: dict[tuple[int, str, bool], Compilation] = {}

    def collect(self) -> None:
        """Add new compilations. Called before and after each compilation, and on request."""
        read_metrics: Callable[[], list[Any]] | None = _torch.private("compile_metrics")
        if read_metrics is None:
            return
        for metrics in read_metrics():
            compile_id = getattr(metrics, "compile_id", None)
            key = (
                getattr(metrics, "start_time_us", None) or 0,
                str(compile_id),
                getattr(metrics, "is_forward", None) is False,
            )
            if key not in self._compilations and compile_id is not None:
                self._compilations[key] = _compilation(metrics)

    def latest(self) -> dict[tuple[str, bool], Compilation]:
        """The latest compilation for each id and direction. Ids start again at `0/0` after
        `torch.compiler.reset()`."""
        return {
            (compilation.id, compilation.is_backward): compilation
            for _, compilation in sorted(self._compilations.items(), key=lambda item: item[0])
        }


def _compilation(metrics: Any) -> Compilation:
    """A compilation from its metrics. Older torch has fewer of them."""

    def metric(name: str) -> Any:
        return getattr(metrics, name, None)

    took, reason = metric("duration_us"), metric("recompile_reason")
    return Compilation(
        id=str(metrics.compile_id),
        is_backward=metric("is_forward") is False,
        ops=metric("graph_op_count"),
        reason=reason.strip() if reason else None,
        seconds=took / 1e6 if took is not None else None,
        failed=metric("fail_type"),
        function=metric("co_name"),
        file=metric("co_filename"),
        line=metric("co_firstlineno"),
        model=model_name(),
    )
