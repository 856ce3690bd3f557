"""Reports when a graph is compiled, and which graph.

Dynamo's own callbacks report compilations; they are registered once the job has imported dynamo.
The code object of a frame identifies a running graph (`python_stack.py`). A compiled backward has
no such frame, but its autograd node has the id.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchwhere.hooks import _torch
from torchwhere.hooks.compiled_graphs import Ledger
from torchwhere.hooks.error_limiter import ErrorLimiter, log


class CompilationHook:
    """Calls back when a compilation begins and ends, with dynamo's id; `on_begin` also gets the
    facts known by then."""

    def __init__(
        self, *, on_begin: Callable[[str, dict[str, str]], None], on_end: Callable[[str], None]
    ) -> None:
        self._on_begin = on_begin
        self._on_end = on_end
        self._handler: Any = None
        self.ledger = Ledger()
        self.errors = ErrorLimiter("compilation", self.remove)

    def install(self) -> None:
        """Register the callbacks. Call it once dynamo is imported."""
        for sentence in _torch.missing("compilation"):
            log.warning("torchwhere: %s", sentence)
        self._handler = _torch.private("compile_callbacks")
        self.refresh()

    def refresh(self) -> None:
        """Register again if needed: `torch.compiler.reset()` drops all callbacks. Called between
        steps."""
        handler = self._handler
        if handler is not None and self._begin not in handler.start_callbacks:
            handler.register_start_callback(self._begin)
            handler.register_end_callback(self._end)

    def looked_at(self) -> tuple[Any, ...]:
        """Containers: while their sizes do not change, `refresh` has nothing to do."""
        return () if self._handler is None else (self._handler.start_callbacks,)

    def remove(self) -> None:
        handler, self._handler = self._handler, None
        if handler is not None:
            # New lists: removing from a list that dynamo iterates over would skip a callback.
            handler.start_callbacks = [
                callback for callback in handler.start_callbacks if callback != self._begin
            ]
            handler.end_callbacks = [
                callback for callback in handler.end_callbacks if callback != self._end
            ]

    @_torch.unseen
    def _begin(self, args: Any) -> None:
        with self.errors:
            self._on_begin(str(getattr(args, "compile_id", "?")), _facts_at_begin(args))
            self.ledger.collect()

    @_torch.unseen
    def _end(self, args: Any) -> None:
        with self.errors:
            self._on_end(str(getattr(args, "compile_id", "?")))


def _facts_at_begin(args: Any) -> dict[str, str]:
    """Whether dynamo compiles a forward or a backward, and the reason for a recompile."""
    trigger = getattr(getattr(args, "callback_trigger", None), "name", "")
    facts = {"part": "backward" if trigger == "LAZY_BACKWARD" else "forward"}
    context = _torch.private("metrics_context")
    reason = (
        getattr(context(), "_metrics", {}).get("recompile_reason") if context is not None else None
    )
    return facts | ({"because": str(reason).strip()} if reason else {})


def being_compiled() -> str | None:
    """The id of the graph that this thread compiles; None if it compiles none."""
    context = _torch.private("compile_context") if _torch.is_dynamo_loaded() else None
    compile_id = context.current_compile_id() if context is not None else None
    return None if compile_id is None else str(compile_id)
