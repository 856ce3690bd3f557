"""What dynamo has compiled in this process, as it can be read from it at any time; nothing is
changed, nothing is imported.

Live graphs come from dynamo's caches, one entry for each variant of a function. What they were like
when they were compiled (how many ops, why again) stands in its metrics, of which it keeps the last
64; a watch collects them before they go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torchwhere.hooks import _torch
from torchwhere.model.bytecode import graph_name

_MOST_LOOKED_AT = 500  # objects around a compiled function
_UNTOLD = "?"


@dataclass(frozen=True, slots=True)
class LiveGraph:
    """A graph that can run: an entry of dynamo's cache."""

    id: str
    code: CodeType  # of the function, as it was written
    compiled: CodeType  # what dynamo made of it
    backend: str
    is_aot: bool  # went through AOTAutograd
    parts: tuple[Any, ...]  # the autograd functions that AOTAutograd made of it: none for inference


def live_graphs() -> list[LiveGraph]:
    """All graphs in dynamo's caches, in the order they were compiled."""
    originals, entries = _torch.private("original_code"), _torch.private("cache_entries")
    if originals is None or entries is None:
        return []
    # its own dictionary, not a method
    codes = {id(code): code for code in list(getattr(originals, "values", {}).values())}
    found = [
        _live(code, entry)
        for code in codes.values()
        for entry in entries(code)
        if graph_name(entry.code)
    ]
    return sorted(found, key=lambda graph: order_of(graph.id))


def _live(code: CodeType, entry: Any) -> LiveGraph:
    scope = getattr(entry.guard_manager, "global_scope", None) or {}
    function = scope.get("G", scope).get(graph_name(entry.code))
    around = list(_around(function))
    return LiveGraph(
        id=str(getattr(entry, "compile_id", _UNTOLD)),
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
    """A function, and what it and they hold on to: how a graph's runtime wrappers are put
    together."""
    pending, seen = [function], set[int]()
    while pending and len(seen) < _MOST_LOOKED_AT:
        thing = pending.pop()
        if thing is None or id(thing) in seen:
            continue
        seen.add(id(thing))
        yield thing
        held = [
            cell.cell_contents
            for cell in getattr(thing, "__closure__", None) or ()
            if _is_filled(cell)
        ]
        held += [
            getattr(thing, name, None)
            for name in ("__wrapped__", "__self__", "compiled_fn", "_boxed_call")
        ]
        pending += [one for one in held if callable(one)]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def order_of(compile_id: str) -> tuple[int, ...]:
    """`2/10` comes after `2/9`; compiled autograd's `!1/2/3` after all others of its kind."""
    numbers = [
        int(part) if part.isdigit() else 1 << 30 for part in compile_id.replace("!", "").split("/")
    ]
    return (compile_id.startswith("!"), *numbers)


def backward_graph(node: Any) -> str | None:
    """The id of the graph whose compiled backward an autograd node runs."""
    compiled = getattr(node, "_forward_cls", None)
    if compiled is None or not hasattr(compiled, "_aot_id"):
        return None
    context = getattr(getattr(compiled, "_lazy_backward_info", None), "saved_compile_context", None)
    compile_id = getattr(getattr(compiled, "metadata", None), "compile_id_str", None) or getattr(
        context, "compile_id", None
    )
    return str(compile_id) if compile_id is not None else f"aot {compiled._aot_id}"


def code_of_node(node: Any) -> CodeType | None:
    """The function whose compiled graph an autograd node is the backward of."""
    wanted = backward_graph(node) if _torch.is_dynamo_loaded() else None
    part = getattr(node, "_forward_cls", None)
    if wanted is None:
        return None
    return next((graph.code for graph in live_graphs() if part in graph.parts), None)


def model_name() -> str:
    """AOTAutograd's name of the model: what `set_model_name` said, `model` otherwise."""
    return str(getattr(_torch.private("aot_naming"), "model_name", "model"))


# -- how it was compiled ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compilation:
    """One time that dynamo compiled something, as its metrics tell."""

    id: str
    is_backward: bool
    ops: int | None
    reason: str | None  # why again
    seconds: float | None
    failed: str | None
    function: str | None
    file: str | None
    line: int | None
    model: str  # AOTAutograd's name of the model, as it was then


class Ledger:
    """All compilations, as far as they could be read before dynamo forgot them."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str, bool], Compilation] = {}

    def collect(self) -> None:
        """Take in what is new. Called before and after each compilation, and when somebody asks."""
        metrics: Callable[[], list[Any]] | None = _torch.private("compile_metrics")
        for one in metrics() if metrics is not None else ():
            compile_id = getattr(one, "compile_id", None)
            key = (
                getattr(one, "start_time_us", None) or 0,
                str(compile_id),
                getattr(one, "is_forward", None) is False,
            )
            if key not in self._found and compile_id is not None:
                self._found[key] = _compilation(one)

    def latest(self) -> dict[tuple[str, bool], Compilation]:
        """By id and whether it was the backward; ids begin again at `0/0` after
        `torch.compiler.reset()`."""
        return {
            (one.id, one.is_backward): one
            for _, one in sorted(self._found.items(), key=lambda item: item[0])
        }


def _compilation(metrics: Any) -> Compilation:
    """Older torch has fewer of these."""

    def known(name: str) -> Any:
        return getattr(metrics, name, None)

    took, reason = known("duration_us"), known("recompile_reason")
    return Compilation(
        id=str(metrics.compile_id),
        is_backward=known("is_forward") is False,
        ops=known("graph_op_count"),
        reason=reason.strip() if reason else None,
        seconds=took / 1e6 if took is not None else None,
        failed=known("fail_type"),
        function=known("co_name"),
        file=known("co_filename"),
        line=known("co_firstlineno"),
        model=model_name(),
    )
